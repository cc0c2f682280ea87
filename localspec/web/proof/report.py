"""One click: a report of what was measured here, as a zip of Markdown and its plots.

Contract: figures, settings, versions and hardware; no message and no title of a conversation is in
it, so that it can be passed on. Every figure says what it is a ratio of; unknown is a dash. Plots
are SVG files beside report.md, which names them.

Not here: the exports, which hold the texts (record.export).
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from localspec import __version__
from localspec.chat.service import ChatService
from localspec.core.backend import Description
from localspec.core.errors import StoreError
from localspec.core.plots import standalone
from localspec.core.units import DASH, gib, took
from localspec.drafters.registry import label_of
from localspec.record.markdown import heading, in_words, table
from localspec.record.rows import PAGE
from localspec.web.stats import figures as stats
from localspec.web.stats import hindsight
from localspec.web.stats.log_plots import SHARED, Plot, make_plots, summaries
from localspec.web.stats.selection import SCOPES, Selection, rounds_of, selection_of
from localspec.web.words import gain, number, percent

Row = dict[str, Any]
SETTINGS = (
    "model", "draft", "device", "dtype", "context_length", "drafter_requested",
    "num_draft_tokens_requested", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "max_tokens", "workload",
)  # fmt: skip


def report_zip(service: ChatService, query: Mapping[str, str]) -> bytes:
    """The report that an address asks for. Raises StoreError when there is nothing to report."""
    selection = selection_of(query)
    rows = selection.rows(service)
    if not rows:
        raise StoreError("There is no turn to report on yet. Send a message first.")
    rounds = rounds_of(service, rows)
    loaded = service.status().description
    plots = make_plots(rows, rounds, loaded)
    used = {row["session_id"] for row in rows}
    sessions = [one for one in service.session_rows() if one["id"] in used]
    lines = report_lines(selection, rows, rounds, sessions, loaded, plots, service.hindsight(rows))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("report.md", "\n".join(lines) + "\n")
        for plot in plots:
            archive.writestr(f"plots/{plot.name}.svg", standalone(plot.svg))
    return packed.getvalue()


def report_lines(
    selection: Selection,
    rows: Sequence[Row],
    rounds: Sequence[Row],
    sessions: Sequence[Mapping[str, Any]],
    loaded: Description | None,
    plots: Sequence[Plot],
    judged: Sequence[Mapping[str, Any]],
) -> Iterator[str]:
    made = datetime.now(UTC).isoformat(timespec="seconds")
    yield from (f"# localspec {__version__}: what was measured", "")
    yield f"Made {made}, over {SCOPES[selection.scope]}{_filters(selection)}."
    yield from ("No message and no title is in this report.", "")
    yield from _summary(rows, rounds)
    for field, title in SHARED.items():
        yield from _groups(summaries(rows, rounds, field), title)
    yield from _latency(rows, rounds)
    yield from _hindsight(judged, loaded)
    yield from ("## Plots", "")
    for plot in plots:
        yield from (f"![{plot.name}](plots/{plot.name}.svg)", "", plot.note, "")
    yield from _machine(sessions)
    yield from _loaded(loaded)
    yield from _settings(rows)


def _filters(selection: Selection) -> str:
    parts = [] if selection.source == PAGE else [f"of {selection.source}"]
    parts += [f"model {selection.model}"] if selection.model else []
    parts += [f"from {selection.since}"] if selection.since else []
    parts += [f"until {selection.until}"] if selection.until else []
    return f", {', '.join(parts)}" if parts else ""


def _summary(rows: Sequence[Row], rounds: Sequence[Row]) -> Iterator[str]:
    summary = stats.summarise(rows, rounds)
    yield from ("## In short", "")
    yield from table(
        ("figure", "value", "what it is"),
        (
            ("turns", summary.num_turns, ""),
            ("tokens", summary.num_output_tokens, "written"),
            ("tokens per second", number(summary.tokens_per_second), "reading not counted"),
            ("speedup", gain(summary.speedup), "whole replies, than without drafting"),
            ("decode speedup", gain(summary.decode_speedup), "decoding alone"),
            ("time saved", took(stats.saved_ms(rows)), "against no drafting here"),
            ("compared replies", summary.num_compared, "on which the speedup stands"),
            ("checked guesses right", percent(summary.checked_acceptance_rate),
             "one after a wrong guess is not checked"),
            ("acceptance rate", percent(summary.acceptance_rate), "right of all guesses"),
            ("draft share", percent(summary.draft_share), "guessed of the text"),
            ("α", number(summary.alpha, digits=2), "right of the places where a guess was checked"),
            ("mean accepted length", number(summary.mean_accepted_length, digits=2),
             "accepted a draft, and the model's own token"),
            ("mean γ", number(summary.mean_num_draft_tokens), "drafted in a round that drafts"),
            ("lenient turns", summary.num_lenient_turns, "not exact, as asked for"),
        ),
    )  # fmt: skip


def _groups(groups: Mapping[str, stats.Summary], title: str) -> Iterator[str]:
    lines = [
        (
            label,
            one.num_turns,
            one.num_output_tokens,
            number(one.tokens_per_second),
            gain(one.speedup),
            gain(one.decode_speedup),
            percent(one.checked_acceptance_rate),
            number(one.mean_num_draft_tokens),
        )
        for label, one in groups.items()
    ]
    names = (title, "turns", "tokens", "tok/s", "speedup", "decoding", "checked right", "mean γ")
    yield from (f"## By {title}", "")
    yield from table(names, lines)


def _latency(rows: Sequence[Row], rounds: Sequence[Row]) -> Iterator[str]:
    yield from ("## Waits", "")
    yield "Tokens of one round arrive together: the first waits for the round, the others none."
    yield ""
    yield from table(stats.WAIT_COLUMNS, stats.wait_lines(*stats.with_and_without(rows, rounds)))


def _hindsight(judged: Sequence[Mapping[str, Any]], loaded: Description | None) -> Iterator[str]:
    usable = [each.name for each in (loaded.drafters if loaded else ()) if each.is_available]
    if not (lines := hindsight.lines(judged, usable)):
        return
    yield from (f"## {hindsight.TITLE}", "", hindsight.NOTE, "")
    yield from table(hindsight.COLUMNS, lines)


def _machine(sessions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from ("## Machine and versions", "")
    for session in sessions[-3:]:
        yield from (f"Session {session['id']}, begun {session['started_at_utc']}:", "")
        named = [
            (heading(name), in_words(name, value))
            for name, value in session.items()
            if name not in ("id", "started_at_utc")
        ]
        yield from table(("what", "value"), named)


def _loaded(loaded: Description | None) -> Iterator[str]:
    if loaded is None:
        return
    yield from ("## Loaded when this was made", "")
    yield from table(
        ("what", "value"),
        (
            ("target", loaded.target),
            ("draft", loaded.draft),
            ("device and precision", f"{loaded.device}, {loaded.precision or DASH}"),
            ("context", loaded.context_length),
            ("target in memory", gib(loaded.target_bytes)),
        ),
    )
    yield from table(
        ("drafter", "usable", "why"),
        [
            (label_of(one.name), "yes" if one.is_available else "no", one.reason)
            for one in loaded.drafters
        ],
    )


def _settings(rows: Sequence[Row]) -> Iterator[str]:
    """Each combination that was used, and how often."""
    counts = Counter(tuple(in_words(name, row[name]) for name in SETTINGS) for row in rows)
    yield from ("## Settings", "")
    headings = (*map(heading, SETTINGS), "turns")
    yield from table(headings, [(*key, count) for key, count in counts.items()])
