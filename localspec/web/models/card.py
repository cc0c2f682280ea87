"""One model as a card or a row: pair, licence, download, memory bar, gain, and its buttons.

Contract: pure HTML of a Card; everything that is not ours is escaped.
"""

from __future__ import annotations

import html

from localspec.core import OFF
from localspec.drafters.registry import REGISTRY
from localspec.machine.download_faults import DownloadFault
from localspec.machine.hardware import gib
from localspec.machine.hub_files import gb
from localspec.machine.recommend import Card, ExpectedGain, Part

ANYWAY = (
    "Load it all the same? The computer may become very slow, the system may end the engine or "
    "other programs, and replies may break off. The page and your conversations stay."
)
NO_DRAFTER = "nothing: the model writes without a drafter"
OUTSIDE = 'target="_blank" rel="noopener noreferrer"'


def button(label: str, act: str, model_id: str = "", off: bool = False, **more: str) -> str:
    """A button of the tab. more: further data, for example confirm."""
    data = {"act": act, "id": model_id, "key": f"{act}-{model_id}", **more}
    attributes = "".join(
        f' data-{name}="{html.escape(value)}"' for name, value in data.items() if value
    )
    disabled = " disabled" if off else ""
    return (
        f'<button type="button" class="ls-mbtn"{attributes}{disabled}>{html.escape(label)}</button>'
    )


def precision_words(card: Card) -> str:
    return f"{card.plan.precision}, context {card.plan.context_length:,}"


def card_html(card: Card, title: str, fault: DownloadFault | None) -> str:
    plan = card.plan
    summary = NO_DRAFTER if plan.drafter == OFF else REGISTRY[plan.drafter].summary
    drafter = html.escape(plan.draft_name or summary)
    refusal = f'<p class="ls-mfault">{html.escape(card.refusal)}</p>' if card.refusal else ""
    note = f'<p class="ls-mnote">{html.escape(card.model.note)}</p>' if card.model.note else ""
    return (
        f'<div class="ls-mcard"><h3>{html.escape(title)}</h3><dl>'
        f"<dt>Target</dt><dd><b>{html.escape(card.id)}</b>, {precision_words(card)}</dd>"
        f"<dt>Drafts</dt><dd>{drafter}</dd>"
        f"<dt>Why</dt><dd>{html.escape(plan.reason)}</dd>"
        f"<dt>Licence</dt><dd>{_license_html(card)}</dd>"
        f"<dt>Download</dt><dd>{_download_html(card)}</dd>"
        f"<dt>Gain</dt><dd>{gain_html(card.gain)}</dd></dl>"
        f"{bar_html(card)}{note}{refusal}{fault_html(fault) if fault else ''}"
        f'<p class="ls-mbuttons">{buttons_html(card, is_main=True)}</p></div>'
    )


def row_html(card: Card, kind: str, is_loaded: bool = False) -> str:
    """A model in one line, with what it would need."""
    tag = f'<span class="ls-mtag">{kind}</span> ' if kind else ""
    draft = f" with {html.escape(card.plan.draft_name)}" if card.plan.draft_name else ""
    need = card.plan.bytes.total - card.plan.bytes.margin
    facts = [
        precision_words(card),
        f"needs {gib(need)} of memory",
        _size_words(card),
        _license_html(card),
    ]
    if card.gain is not None and card.refusal is None:
        facts.append(f"gain {_range(card.gain)}{'' if card.gain.is_measured else ' (estimate)'}")
    below = f'<p class="ls-mfault">{html.escape(card.refusal)}</p>' if card.refusal else ""
    below += f'<p class="ls-mfine">{html.escape(card.model.note)}</p>' if card.model.note else ""
    state = '<span class="ls-mtag ls-mon">loaded</span>' if is_loaded else buttons_html(card)
    return (
        f'<li><div class="ls-mline"><span>{tag}<b>{html.escape(card.id)}</b>{draft}<br>'
        f'<span class="ls-mfine">{" · ".join(facts)}</span></span><span>{state}</span></div>'
        f"{below}</li>"
    )


def buttons_html(card: Card, is_main: bool = False) -> str:
    """What can be done with it now."""
    target = card.parts[0]
    if not card.is_here:
        missing = [part for part in card.parts if not part.is_here]
        what = "Download" if len(missing) == len(card.parts) else f"Download {missing[0].id}"
        label = f"{what} ({_about(card)}{gb(card.download_bytes)})"
        made = button(label, "download", card.id, main="1" if is_main else "")
        if is_main and not card.is_exact:
            made += button("Ask for the exact size", "size", card.id)
        return made + (_load_buttons(card) if target.is_here else "")
    return _load_buttons(card)


def _load_buttons(card: Card) -> str:
    if card.refusal is not None:
        return button("Load anyway", "load", card.id, anyway="1", confirm=ANYWAY)
    return button("Load", "load", card.id, main="1")


def fault_html(fault: DownloadFault) -> str:
    text = html.escape(f"{fault.text} {fault.remedy}")
    link = " " + _link(fault.page, "The model's page") if fault.page else ""
    return f'<p class="ls-mfault" role="alert">{text}{link}</p>'


def _link(address: str, words: str) -> str:
    return f'<a href="{html.escape(address)}" {OUTSIDE}>{words}</a>'


def _license_html(card: Card) -> str:
    offer = card.model
    name = html.escape(offer.license) if offer.license else "licence: see its page"
    address = offer.terms or offer.page
    if address:
        name = _link(address, name)
    if offer.gated and offer.page:
        name += ", " + _link(offer.page, "terms to accept on its page first")
    return name


def _about(card: Card) -> str:
    return "" if card.is_exact else "about "


def _size_words(card: Card) -> str:
    if card.is_here:
        held = sum(part.num_bytes for part in card.parts)
        return f"{gb(held)} on disk" if held else "ships with localspec"
    return f"{_about(card)}{gb(card.download_bytes)} to fetch"


def _download_html(card: Card) -> str:
    if card.is_here:
        return f"nothing: {_size_words(card)}"
    basis = "exact, asked of the hub" if card.is_exact else "estimate from its shape"
    parts = "; ".join(_part_words(part) for part in card.parts) if len(card.parts) > 1 else ""
    total = f"<b>{_about(card)}{gb(card.download_bytes)}</b> ({basis})"
    left = card.disk_left_bytes
    if left is None:
        room = "room on the disk unknown"
    elif left < 0:
        room = f"<b>{gb(-left)} more than the disk has free</b>"
    else:
        room = f"{gb(left)} of disk left"
    return f"{total}, {room}" + (f'<br><span class="ls-mfine">{parts}</span>' if parts else "")


def _part_words(part: Part) -> str:
    state = "here" if part.is_here else gb(part.num_bytes)
    return f"{html.escape(part.id)}: {state}"


def gain_html(gain: ExpectedGain | None) -> str:
    if gain is None:
        return "none: nothing drafts"
    if gain.is_measured:
        return f"<b>{gain.low:.1f} times</b> the speed without drafting, {html.escape(gain.basis)}"
    return (
        f"<b>{_range(gain)}</b> the speed without drafting "
        '<span class="ls-mtag">estimate</span><br>'
        f'<span class="ls-mfine">{html.escape(gain.basis[0].upper() + gain.basis[1:])}. Not '
        "measured here: the tune-up says what it really is.</span>"
    )


def _range(gain: ExpectedGain) -> str:
    low, high = f"{gain.low:.1f}", f"{gain.high:.1f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def bar_html(card: Card) -> str:
    """The memory, part by part: told apart by pattern as well as by colour."""
    needed, spare = card.plan.bytes, card.spare_bytes
    named = [
        ("target", "target", needed.target_weights),
        ("draft", "draft", needed.draft_weights),
        ("kv", "conversation (KV)", needed.target_kv + needed.draft_kv),
        ("working", "working room", needed.logits + needed.activations + needed.runtime),
        ("reserve", "reserve", needed.margin),
        ("spare", "spare", spare),
    ]
    shown = [(key, name, num) for key, name, num in named if num > 0]
    pieces = "".join(
        f'<i class="ls-m-{key}" data-grow="{num // 2**20}" title="{name}: {gib(num)}"></i>'
        for key, name, num in shown
    )
    legend = "".join(
        f'<li><i class="ls-m-{key}" aria-hidden="true"></i>{name} <b>{gib(num)}</b></li>'
        for key, name, num in shown
    )
    short = ""
    if spare < 0:
        short = f'<p class="ls-mfine">{gib(-spare)} more than is free.</p>'
    said = ", ".join(f"{name} {gib(num)}" for _, name, num in shown)
    return (
        f'<div class="ls-mbar" role="img" aria-label="Memory: {said}">{pieces}</div>'
        f'<ul class="ls-mlegend">{legend}</ul>{short}'
    )
