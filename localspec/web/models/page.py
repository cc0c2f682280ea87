"""The Models tab as HTML, part by part.

Contract: pure; everything that is not ours is escaped. A button carries what it does as data
(`data-act`, `data-id`), static/models.js sends it. Widths are data too (`data-grow`), so that no
style stands in the markup. Unknown is a dash; an estimate says so.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from localspec.chat.service import Status
from localspec.chat.tune_up import TEMPERATURES, TuneUp
from localspec.chat.tune_up import in_words as tune_up_words
from localspec.core import OFF
from localspec.drafters.registry import label_of
from localspec.machine.catalogue import CatalogueState
from localspec.machine.download_faults import DownloadFault
from localspec.machine.downloads import Download
from localspec.machine.found_line import found_line
from localspec.machine.hardware import gib
from localspec.machine.hub_files import HubModel, gb
from localspec.machine.other_programs import OtherModel
from localspec.machine.recommend import Card, Recommendation
from localspec.options import LoadOptions
from localspec.units import DASH
from localspec.web.models.card import (
    Around,
    button,
    download_html,
    fault_html,
    link,
    load_buttons,
    row_html,
)
from localspec.web.words import number

DEVICES = {"cuda": "this GPU", "mps": "this Mac", "cpu": "this computer"}
BUSY = ("loading", "restarting")
RECOMMENDED = "recommended"
SIZES = {  # as the hub writes a number of parameters, and in words
    "": "Any size", "1B": "Up to 1 B", "4B": "Up to 4 B", "9B": "Up to 9 B", "15B": "Up to 15 B",
    "35B": "Up to 35 B",
}  # fmt: skip


def found_html(state: CatalogueState, contexts: Sequence[int]) -> str:
    """The machine in a line, the disk, and the context to plan for."""
    free = DASH if state.disk_free_bytes is None else gb(state.disk_free_bytes)
    options = "".join(
        f'<option value="{each}"{" selected" if each == state.context_length else ""}>'
        f"{each:,} tokens</option>"
        for each in contexts
    )
    notices = "".join(f'<p class="ls-mnote">{html.escape(each)}</p>' for each in state.notices)
    return (
        f'<p class="ls-mfound">{html.escape(found_line(state.hardware))}</p>{notices}'
        f'<p class="ls-mline"><span>Disk of the models: {free} free</span>'
        f'<label>Plan for a context of <select data-act="context" data-key="context">{options}'
        "</select></label></p>"
    )


def loaded_html(status: Status, options: LoadOptions | None) -> str:
    """What is loaded or is being loaded, its phase, and what can be done about it."""
    phase, loaded = status.phase, status.description
    if phase in BUSY:
        name = html.escape(options.model) if options is not None and options.model else "the model"
        if options is not None and options.remote is not None:
            name = html.escape(options.remote.url)
        verb = "Starting the engine again" if phase == "restarting" else f"Loading {name}"
        return (
            f'<p class="ls-mphase" role="status"><span class="ls-spin" aria-hidden="true"></span>'
            f"<b>{verb}</b>: {html.escape(status.phrase)}, {status.seconds:.0f} s</p>"
        )
    if phase == "failed":
        return (
            f'<p class="ls-mfault" role="alert">{html.escape(status.phrase)}</p>'
            f"<p>{button('Start the engine again', 'retry')}</p>"
        )
    if loaded is None:
        again = button("Load it again", "retry")
        return f"<p><b>Nothing is loaded.</b> {html.escape(status.phrase)} {again}</p>"
    if loaded.server is not None:
        disconnect = button("Disconnect", "unload")
        limits = "".join(f"<li>{html.escape(each)}</li>" for each in loaded.server.limits)
        return (
            f'<p class="ls-mline"><span><b>Connected:</b> {html.escape(loaded.target)} on '
            f"{html.escape(loaded.server.name)} at {html.escape(loaded.server.url)}</span>"
            f'{disconnect}</p><details data-key="limits"><summary>What it cannot do here</summary>'
            f"<ul>{limits}</ul></details>"
        )
    draft = f" with {html.escape(loaded.draft)}" if loaded.draft else ""
    held = loaded.held_bytes
    return (
        f'<p class="ls-mline"><span><b>Loaded:</b> {html.escape(loaded.target)}{draft}, '
        f"{html.escape(str(loaded.precision))}, context {loaded.context_length:,}, "
        f"{gib(held)} of memory</span>{button('Unload', 'unload')}</p>"
    )


def first_html(found: Recommendation, device: str, around: Around) -> str:
    """The recommended model and its neighbours in size that are not here yet, or why there is
    none."""
    card = found.card
    if card is None:
        reasons = "".join(f"<li>{html.escape(each)}</li>" for each in found.reasons)
        return (
            f"<h2>No model of the list fits {DEVICES[device]} now</h2><ul>{reasons}</ul>"
            "<p>The demo pair chats meanwhile.</p>"
        )
    kinds = [(card, RECOMMENDED)]
    kinds += [(each, "smaller") for each in found.smaller]
    kinds += [(each, "larger") for each in found.larger]
    rows = [row_html(each, around, kind) for each, kind in kinds if not each.is_here]
    return f"<h2>Recommended for {DEVICES[device]}</h2>{_list(rows)}" if rows else ""


def here_html(found: Recommendation, around: Around) -> str:
    """What is whole on this machine and needs no network."""
    rows = [row_html(card, around, _kind_of(card, found)) for card in found.here]
    return f"<h2>On this machine</h2>{_list(rows)}" if rows else ""


def _kind_of(card: Card, found: Recommendation) -> str:
    """What is worth knowing of a model that is here: that it fits best, or whose it is."""
    if found.card is not None and card.id == found.card.id:
        return RECOMMENDED
    return card.model.family if card.model.family.startswith("from ") else ""


def others_html(found: Recommendation, around: Around) -> str:
    if not found.others:
        return ""
    rows = [row_html(card, around) for card in found.others]
    return (
        f'<details data-key="others"><summary>All other models ({len(found.others)})</summary>'
        f"{_list(rows)}</details>"
    )


def _list(rows: Sequence[str]) -> str:
    return f'<ul class="ls-mrows">{"".join(rows)}</ul>'


def folder_html(state: CatalogueState) -> str:
    fault = (
        f'<p class="ls-mfault">{html.escape(state.folder_fault)}</p>' if state.folder_fault else ""
    )
    return (
        '<form class="ls-mfolder" data-act="folder"><label for="ls-mfolder">A folder with a model '
        f'(config.json and .safetensors)</label><span><input id="ls-mfolder" data-key="folder" '
        f'name="value" type="text" value="{html.escape(state.folder or "")}" autocomplete="off" '
        f'spellcheck="false"><button type="submit" class="ls-mbtn">Open</button></span></form>'
        f"{fault}"
        f'<p class="ls-mfine">Models are kept in {html.escape(state.cache_folder)}, where other '
        "programs that use the hub find them too.</p>"
    )


def server_html(url: str) -> str:
    """The card of a server. url: of the one connected last; its key is not shown again."""
    key_id, url_id = "ls-mserver-key", "ls-mserver"
    return (
        '<form class="ls-mfolder" data-act="connect"><h2>A server of yours</h2>'
        f'<label for="{url_id}">Address of a running vLLM, SGLang or any server with '
        f'OpenAI\'s interface</label><span><input id="{url_id}" data-key="server" name="value" '
        f'type="text" value="{html.escape(url)}" placeholder="http://127.0.0.1:8000" '
        'autocomplete="off" spellcheck="false"></span>'
        f'<label for="{key_id}">Its key, where it wants one (kept until localspec ends)</label>'
        f'<span><input id="{key_id}" data-key="server-key" name="key" type="password" '
        'autocomplete="off"><button type="submit" class="ls-mbtn">Connect</button></span></form>'
    )


def downloads_html(downloads: Sequence[Download], cards: Sequence[Card]) -> str:
    """Those of models that stand in no other part; each of the others is in its model's line."""
    shown = {part.id for card in cards for part in card.parts}
    apart = [each for each in downloads if each.model_id not in shown]
    if not apart:
        return ""
    return f"<h2>Downloads</h2>{_list([f'<li>{download_html(each)}</li>' for each in apart])}"


def search_html(words: str, most_params: str) -> str:
    """The search of the hub: the only part that asks it for names."""
    sizes = "".join(
        f'<option value="{size}"{" selected" if size == most_params else ""}>{said}</option>'
        for size, said in SIZES.items()
    )
    return (
        '<form class="ls-msearch" data-act="search" role="search"><h2>Find a model on the hub</h2>'
        '<span><input data-key="search" name="value" type="search" aria-label="Name of a model" '
        f'placeholder="Name of a model" value="{html.escape(words)}" autocomplete="off" '
        f'spellcheck="false"><select name="size" aria-label="Size" data-key="size">{sizes}</select>'
        '<button type="submit" class="ls-mbtn">Search</button></span></form>'
    )


def results_html(
    found: Sequence[HubModel] | DownloadFault | None,
    downloads: Sequence[Download],
    here: Sequence[Card],
    free_bytes: int | None,
) -> str:
    """What the search found, most fetched first. here: what can be loaded."""
    if found is None:
        return ""
    if isinstance(found, DownloadFault):
        return fault_html(found)
    if not found:
        return "<p>No model with .safetensors weights has this name and size.</p>"
    by_id, cards = {each.model_id: each for each in downloads}, {card.id: card for card in here}
    lines = [_result_html(one, by_id.get(one.id), cards.get(one.id), free_bytes) for one in found]
    return _list(lines)


def _result_html(
    one: HubModel, download: Download | None, card: Card | None, free_bytes: int | None
) -> str:
    params = DASH if one.num_params is None else f"{one.num_params / 1e9:.1f} B parameters"
    if one.num_params is not None and one.num_params < 1e9:
        params = f"{one.num_params / 1e6:.0f} M parameters"
    size = "size unknown" if one.num_bytes is None else gb(one.num_bytes)
    page = f"https://huggingface.co/{one.id}"
    state = ""
    if not one.is_known:
        state = (
            f'<span class="ls-mfine">of the family {html.escape(str(one.family))}: not yet</span>'
        )
    elif card is not None:
        state = f'<span class="ls-mtag">on this machine</span> {load_buttons(card)}'
    elif download is None:
        state = button("Download", "download", one.id)
    gated = " · terms to accept on its page first" if one.is_gated else ""
    return (
        f'<li><div class="ls-mline"><span class="ls-mname"><b>{link(page, one.id)}</b> '
        f'<span class="ls-mfine">{params} · {size} · {_fit_of(one, free_bytes)}{gated}</span>'
        f"</span><span>{state}</span></div>{download_html(download) if download else ''}</li>"
    )


def _fit_of(one: HubModel, free_bytes: int | None) -> str:
    """By the weights alone, as published: exactly it is known when it is here."""
    if one.num_bytes is None or free_bytes is None:
        return "fit unknown"
    if one.num_bytes < 0.9 * free_bytes:
        return "should fit as published"
    if one.num_bytes < 3.0 * free_bytes:
        return "too large as published, perhaps in 4 bits"
    return "too large for this machine"


def elsewhere_html(others: Sequence[OtherModel]) -> str:
    """What other programs keep here and cannot be loaded, with the reason."""
    if not others:
        return ""
    rows = [
        f'<li><span class="ls-mname"><b>{html.escape(one.name)}</b> <span class="ls-mfine">'
        f"{one.program} · {gb(one.num_bytes)} · {html.escape(one.reason)}</span></span></li>"
        for one in others
    ]
    title = f"Models of other programs that cannot be loaded ({len(others)})"
    return f'<details data-key="elsewhere"><summary>{title}</summary>{_list(rows)}</details>'


def tune_html(result: TuneUp | None, is_running: bool, error: str | None, is_loaded: bool) -> str:
    """The button, the progress, and the result."""
    head = "<h2>Tune-up</h2>"
    if is_running:
        done = 0 if result is None else len(result.runs)
        total = 0 if result is None else result.num_planned
        place = f"{done} of {total} tries" if total else "waiting for its turn"
        start = (
            '<p class="ls-mline"><span role="status"><span class="ls-spin" aria-hidden="true">'
            f"</span>Trying a drafter of each kind: {place}</span>"
            f"{button('Skip the rest', 'skip')}</p>"
        )
    else:
        why = (
            "About ten seconds: short replies to prompts that ship with localspec, without "
            "drafting and with one drafter of each kind. It can be skipped at any time."
        )
        if not is_loaded:
            why = "It measures a model on this machine, and none is loaded. Load one first."
        again = "Start again" if result is not None else "Start the tune-up"
        start = (
            f'<p class="ls-mline"><span>{why}</span>{button(again, "tune", off=not is_loaded)}</p>'
        )
    said = f'<p class="ls-mfault">{html.escape(error)}</p>' if error else ""
    return head + start + said + (result_html(result, is_running) if result is not None else "")


def result_html(result: TuneUp, is_running: bool) -> str:
    """The figures; the conclusion only when it is over, since more runs may change it."""
    if not result.runs:
        return "" if is_running else f"<p>{html.escape(tune_up_words(result))}</p>"
    words = "" if is_running else f'<p class="ls-mverdict">{html.escape(tune_up_words(result))}</p>'
    return words + _table(result)


def _table(result: TuneUp) -> str:
    columns = [(kind, temperature) for kind in result.kinds for temperature in TEMPERATURES]
    head = "".join(f"<th>{html.escape(kind)}, T {t:g}</th>" for kind, t in columns)
    plain = "".join(
        f"<td>{number(result.tokens_per_second(OFF, kind, temperature), digits=0)}</td>"
        for kind, temperature in columns
    )
    rows = "".join(
        f"<tr><th>{html.escape(label_of(drafter))}</th>"
        + "".join(_gain_cell(result.gain(drafter, kind, t)) for kind, t in columns)
        + "</tr>"
        for drafter in result.drafters
    )
    return (
        '<div class="ls-mscroll" tabindex="0" role="region" aria-label="What the tune-up measured">'
        f'<table class="ls-mtune"><thead><tr><td></td>{head}</tr></thead><tbody>'
        f"<tr><th>without drafting, tokens per second</th>{plain}</tr>{rows}</tbody></table></div>"
    )


def _gain_cell(gain: float | None) -> str:
    if gain is None:
        return f"<td>{DASH}</td>"
    mark = "win" if gain >= 1.05 else "lose" if gain <= 0.95 else "even"
    return f'<td data-mark="{mark}">{gain:.2f}×</td>'
