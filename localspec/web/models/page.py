"""The Models tab as HTML, part by part.

Contract: pure; everything that is not ours is escaped. A button carries what it does as data
(`data-act`, `data-id`), static/models.js sends it. Widths are data too (`data-grow`), so that no
style stands in the markup. Unknown is a dash; an estimate says so.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from localspec.backend import Description
from localspec.chat.service import Status
from localspec.chat.tune_up import TEMPERATURES, TuneUp
from localspec.chat.tune_up import in_words as tune_up_words
from localspec.core import OFF
from localspec.drafters.registry import label_of
from localspec.machine.catalogue import CatalogueState
from localspec.machine.download_faults import DownloadFault
from localspec.machine.downloads import Download, FileProgress, in_words, so_far
from localspec.machine.hardware import found_line, gib
from localspec.machine.hub_files import gb
from localspec.machine.recommend import Recommendation
from localspec.options import LoadOptions
from localspec.web.live import DASH, number
from localspec.web.models.card import button, card_html, fault_html, row_html

DEVICES = {"cuda": "this GPU", "mps": "this Mac", "cpu": "this computer"}
BUSY = ("loading", "restarting")


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
    draft = f" with {html.escape(loaded.draft)}" if loaded.draft else ""
    held = loaded.held_bytes
    return (
        f'<p class="ls-mline"><span><b>Loaded:</b> {html.escape(loaded.target)}{draft}, '
        f"{html.escape(loaded.dtype)}, context {loaded.context_length:,}, "
        f"{gib(held)} of memory</span>{button('Unload', 'unload')}</p>"
    )


def first_html(found: Recommendation, device: str, faults: Mapping[str, DownloadFault]) -> str:
    """The recommended pair, or why there is none."""
    card = found.card
    if card is None:
        reasons = "".join(f"<li>{html.escape(each)}</li>" for each in found.reasons)
        return (
            f"<h3>No model of the list fits {DEVICES[device]} now</h3><ul>{reasons}</ul>"
            "<p>The demo pair chats meanwhile.</p>"
        )
    title = "Recommended pair" if card.plan.draft else "Recommended model"
    return card_html(card, f"{title} for {DEVICES[device]}", faults.get(card.id))


def near_html(found: Recommendation) -> str:
    rows = [row_html(card, "smaller") for card in found.smaller]
    rows += [row_html(card, "larger") for card in found.larger]
    return f"<h3>Smaller and larger</h3>{_list(rows)}" if rows else ""


def here_html(found: Recommendation, loaded: Description | None) -> str:
    """What is whole on this machine and needs no network."""
    rows = [row_html(card, "", card.id == (loaded and loaded.target)) for card in found.here]
    return f"<h3>On this machine</h3>{_list(rows) if rows else '<p>No model is here yet.</p>'}"


def others_html(found: Recommendation) -> str:
    if not found.others:
        return ""
    return (
        f'<details data-key="others"><summary>All other models ({len(found.others)})</summary>'
        f"{_list([row_html(card, '') for card in found.others])}</details>"
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


def downloads_html(downloads: Sequence[Download]) -> str:
    """Nothing while there are none."""
    if not downloads:
        return ""
    return f"<h3>Downloads</h3>{_list([_download_html(each) for each in downloads])}"


def _download_html(each: Download) -> str:
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
        f'<li><div class="ls-mline"><span><b>{name}</b> <span class="ls-mfine">'
        f"{html.escape(in_words(each))}</span></span><span>{_download_buttons(each)}</span></div>"
        f"{bar}{fault}{_files_html(each)}</li>"
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


def tune_html(result: TuneUp | None, is_running: bool, error: str | None, is_loaded: bool) -> str:
    """The button, the progress, and the result."""
    head = "<h3>Tune-up</h3>"
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
        f'<table class="ls-mtune"><thead><tr><th></th>{head}</tr></thead><tbody>'
        f"<tr><th>without drafting, tokens per second</th>{plain}</tr>{rows}</tbody></table></div>"
    )


def _gain_cell(gain: float | None) -> str:
    if gain is None:
        return f"<td>{DASH}</td>"
    mark = "win" if gain >= 1.05 else "lose" if gain <= 0.95 else "even"
    return f'<td data-mark="{mark}">{gain:.2f}×</td>'
