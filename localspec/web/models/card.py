"""One model in a line: name, precision, size, fit and buttons; its download; its details folded.

Contract: pure HTML of a Card; everything that is not ours is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localspec.core import OFF
from localspec.drafters.registry import REGISTRY
from localspec.machine.download_faults import DownloadFault
from localspec.machine.downloads import Download, FileProgress, in_words, so_far
from localspec.machine.hardware import gib
from localspec.machine.hub_files import gb
from localspec.machine.plans import Plan
from localspec.machine.recommend import Card, CardPart, ExpectedGain
from localspec.record.rows import RecentGain
from localspec.units import capital

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
    return str(card.plan.precision)


@dataclass(frozen=True)
class Around:
    """What the lines of the models stand among. loaded: the target. lately: the gain of the last
    replies, by model."""

    downloads: Sequence[Download] = ()
    faults: Mapping[str, DownloadFault] = field(default_factory=dict)
    loaded: str | None = None
    lately: Mapping[str, RecentGain] = field(default_factory=dict)


def row_html(card: Card, around: Around, kind: str = "") -> str:
    """A model in one line, below it the downloads it needs, and its details folded."""
    tag = f'<span class="ls-mtag">{kind}</span> ' if kind else ""
    fault, is_loaded = around.faults.get(card.id), card.id == around.loaded
    its = [each for each in around.downloads if each.model_id in {part.id for part in card.parts}]
    is_busy = any(each.state != "done" for each in its)
    state = '<span class="ls-mtag ls-mon">loaded</span>' if is_loaded else ""
    state += "" if is_loaded or is_busy else buttons_html(card)
    facts = f"{precision_words(card)} · {_size_words(card)} · {fit_words(card)}"
    name = html.escape(card.name)
    return (
        f'<li><div class="ls-mline"><span class="ls-mname"><b>{name}</b> {tag}'
        f'<span class="ls-mfine">{facts}</span></span><span>{state}</span></div>'
        f"{''.join(map(download_html, its))}{fault_html(fault) if fault else ''}"
        f'<details data-key="about-{name}"><summary aria-label="Details of {name}">Details'
        f"</summary>{details_html(card, around.lately.get(card.id))}</details></li>"
    )


def fit_words(card: Card) -> str:
    """Whether it fits the memory that is free, in words."""
    if card.refusal is not None:
        return f'<span class="ls-mno">too large by {gib(-card.spare_bytes)}</span>'
    return f"fits, {gib(card.spare_bytes)} left"


def details_html(card: Card, lately: RecentGain | None) -> str:
    plan = card.plan
    summary = NO_DRAFTER if plan.drafter == OFF else REGISTRY[plan.drafter].summary
    drafter = html.escape(plan.draft_name or summary)
    refusal = f'<p class="ls-mfault">{html.escape(card.refusal)}</p>' if card.refusal else ""
    note = f'<p class="ls-mnote">{html.escape(card.model.note)}</p>' if card.model.note else ""
    need = plan.bytes.total - plan.bytes.margin
    asking = ""
    if not card.is_here and not card.is_exact:
        asking = f"<p>{button('Ask for the exact size', 'size', card.id)}</p>"
    return (
        f'<div class="ls-mabout">{refusal}<dl>'
        f"<dt>Drafts</dt><dd>{drafter}</dd>"
        f"<dt>Why</dt><dd>{html.escape(plan.reason)}</dd>"
        f"<dt>Memory</dt><dd>{gib(need)} with a context of {plan.context_length:,} tokens"
        f"{_draft_memory(plan)}</dd>"
        f"<dt>Licence</dt><dd>{_license_html(card)}</dd>"
        f"<dt>Download</dt><dd>{_download_html(card)}</dd>"
        f"<dt>Gain</dt><dd>{gain_html(card.gain, lately)}</dd></dl>"
        f"{bar_html(card)}{note}{asking}</div>"
    )


def _draft_memory(plan: Plan) -> str:
    """Of a draft on a device of its own."""
    if plan.draft_bytes is None:
        return ""
    return f", and {gib(plan.draft_bytes.total)} on {plan.draft_device} for the draft"


def download_html(each: Download) -> str:
    """How far a download is, and what can be done with it."""
    share = each.have_bytes / each.num_bytes if each.num_bytes else 0.0
    name = html.escape(each.model_id)
    bar = (
        f'<div class="ls-mprogress" role="progressbar" aria-label="Download of {name}" '
        f'aria-valuemin="0" aria-valuemax="100" aria-valuenow="{100 * share:.0f}">'
        f'<i data-grow="{1000 * share:.0f}" data-state="{each.state}"></i>'
        f'<u data-grow="{1000 * (1 - share):.0f}"></u></div>'
    )
    fault = fault_html(each.fault) if each.fault else ""
    return (
        f'<div class="ls-mdown" data-download="{name}"><div class="ls-mline"><span>{name}: '
        f'<span class="ls-mfine">{html.escape(in_words(each))}</span></span>'
        f"<span>{_download_buttons(each)}</span></div>"
        f"{'' if each.state == 'done' else bar}{fault}{_files_html(each)}</div>"
    )


def buttons_html(card: Card) -> str:
    """What can be done with it now."""
    if card.is_here:
        return load_buttons(card)
    missing = [part for part in card.parts if not part.is_here]
    what = "Download" if len(missing) == len(card.parts) else "Download its draft"
    fetch = button(what, "download", card.id, main="1")
    return fetch + (load_buttons(card) if card.parts[0].is_here else "")


def load_buttons(card: Card) -> str:
    if card.refusal is not None:
        return button("Load anyway", "load", card.id, anyway="1", confirm=ANYWAY)
    return button("Load", "load", card.id, main="1")


def fault_html(fault: DownloadFault) -> str:
    text = html.escape(f"{fault.text} {fault.remedy}")
    more = " " + link(fault.page, "The model's page") if fault.page else ""
    return f'<p class="ls-mfault" role="alert">{text}{more}</p>'


def link(address: str, words: str) -> str:
    return f'<a href="{html.escape(address)}" {OUTSIDE}>{html.escape(words)}</a>'


def _license_html(card: Card) -> str:
    offer = card.model
    name = offer.license or "licence: see its page"
    address = offer.terms or offer.page
    said = link(address, name) if address else html.escape(name)
    if offer.gated and offer.page:
        said += ", " + link(offer.page, "terms to accept on its page first")
    return said


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


def _part_words(part: CardPart) -> str:
    state = "here" if part.is_here else gb(part.num_bytes)
    return f"{html.escape(part.id)}: {state}"


def gain_html(gain: ExpectedGain | None, lately: RecentGain | None = None) -> str:
    """What the last replies gained; only where there are none, what is expected."""
    if lately is not None:
        replies = f"{lately.num_replies} replies" if lately.num_replies > 1 else "reply"
        return f"<b>{lately.gain:.2f} times</b> the speed without drafting, in your last {replies}"
    if gain is None:
        return "none: nothing drafts"
    if gain.is_measured:
        return f"<b>{gain.low:.1f} times</b> the speed without drafting, {html.escape(gain.basis)}"
    return (
        f"<b>{_range(gain)}</b> the speed without drafting "
        '<span class="ls-mtag">estimate</span><br>'
        f'<span class="ls-mfine">{html.escape(capital(gain.basis))}. Not '
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


def _download_buttons(each: Download) -> str:
    if each.is_under_way:
        return button("Pause", "pause", each.model_id) + button("Cancel", "cancel", each.model_id)
    if each.state == "done":
        return button("Clear", "forget", each.model_id)
    label = f"Continue ({so_far(each)})" if each.num_bytes else "Continue"
    return button(label, "resume", each.model_id) + button("Cancel", "cancel", each.model_id)


def _files_html(each: Download) -> str:
    if not each.files:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(file.name)}</td><td>{gb(file.have_bytes)} of "
        f"{gb(file.num_bytes)}</td><td>{_file_state(file)}</td></tr>"
        for file in sorted(each.files, key=lambda one: -one.num_bytes)
    )
    return (
        f'<details data-key="files-{html.escape(each.model_id)}"><summary>{len(each.files)} files'
        f'</summary><table class="ls-mfiles"><tbody>{rows}</tbody></table></details>'
    )


def _file_state(file: FileProgress) -> str:
    if file.is_checked:
        return "checked"
    if file.have_bytes == file.num_bytes:
        return "here"
    return f"{100 * file.have_bytes // file.num_bytes} %"
