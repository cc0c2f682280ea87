"""The Stats tab as HTML: verdict and plots, export links, and folded the rest.

Pure; figures come in.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from localspec.leniency import label
from localspec.units import DASH, counted, took
from localspec.web.stats import figures as stats
from localspec.web.stats.log_plots import MAIN, Plot
from localspec.web.stats.selection import Selection
from localspec.web.words import number, percent


def verdict_html(
    band: str, sentence: str, summary: stats.Summary, saved_ms: float | None, num_apart: int = 0
) -> str:
    """What drafting brought, in words. num_apart: turns that were asked for by others."""
    apart = f"; {counted(num_apart, 'turn')} of other programs not counted" if num_apart else ""
    return (
        f'<p class="ls-verdict ls-said" data-band="{band}">{html.escape(sentence)} '
        f"<small>{_basis(summary, saved_ms)}{apart}</small></p>{_lenient_html(summary)}"
    )


def _basis(summary: stats.Summary, saved_ms: float | None) -> str:
    """What the sentence stands on."""
    turns = counted(summary.num_turns, "turn")
    if saved_ms is None:
        return turns
    if summary.num_compared < summary.num_turns:
        turns += f", {summary.num_compared:,} of them compared"
    time = took(abs(saved_ms))
    return f"{turns}, {time} {'saved' if saved_ms >= 0 else 'lost'}"


def figures_html(summary: stats.Summary, saved_ms: float | None = None) -> str:
    gamma = summary.mean_num_draft_tokens
    tiles = (
        ("Turns", f"{summary.num_turns:,}"),
        ("Tokens", f"{summary.num_output_tokens:,}"),
        ("Tokens / s", number(summary.tokens_per_second)),
        ("Gain", number(summary.speedup, " ×", 2)),
        ("Decoding", number(summary.decode_speedup, " ×", 2)),
        ("Time saved", took(saved_ms)),
        ("Guesses right", percent(summary.acceptance_rate)),
        ("Mean γ", number(gamma)),
    )
    cells = "".join(
        f'<div class="ls-tile"><span class="ls-label">{label}</span>'
        f'<span class="ls-value">{value}</span></div>'
        for label, value in tiles
    )
    return (
        f'<div class="ls-tiles ls-many">{cells}</div>'
        '<p class="ls-formula">Mean accepted length, the model\'s own token counted: '
        f'<b id="ls-measured-length">{number(summary.mean_accepted_length, digits=2)}</b> '
        f'measured, <b id="ls-expected-length">{number(summary.expected_length, digits=2)}</b> '
        "by the formula (1 − α<sup>γ+1</sup>) / (1 − α) with "
        f"α = {number(summary.alpha, digits=2)} and γ = {number(gamma)}. Here α is the share "
        "accepted of the guesses that were checked (one after a wrong guess never is), so it lies "
        "above the share of right guesses. The formula takes each guess as independent.</p>"
    )


def _lenient_html(summary: stats.Summary) -> str:
    """What the lenient turns gave up; empty where there are none."""
    if not summary.num_lenient_turns:
        return ""
    turns = "turn was" if summary.num_lenient_turns == 1 else "turns were"
    said = label(summary.num_lenient_tokens, summary.num_lenient_output_tokens)
    return (
        f'<p class="ls-lenient">{summary.num_lenient_turns} {turns} {said} by exact checking. '
        "They are in all figures here, and marked in the table of turns.</p>"
    )


def exports_html(selection: Selection) -> str:
    """Links to the exports of a scope, and to the report of a selection."""
    is_stored = selection.conversation is not None and selection.conversation > 0
    query = f"scope={selection.scope}"
    if selection.scope == "conversation" and is_stored:
        query += f"&conversation={selection.conversation}"
    labels = {"csv": "CSV", "jsonl": "JSONL", "markdown": "Markdown", "sqlite": "Database"}
    links = "".join(
        f'<a class="ls-button" download href="/export?format={name}&{query}">{label}</a>'
        for name, label in labels.items()
    )
    report = html.escape(f"/report?{selection.query}")
    return (
        f'<div class="ls-exports"><span class="ls-label">Export</span>{links}'
        f'<a class="ls-button ls-report" download href="{report}">Report</a></div>'
    )


def plots_html(plots: Sequence[Plot]) -> str:
    """The main plots, and the others folded."""
    main = [plot for plot in plots if plot.name in MAIN]
    others = [plot for plot in plots if plot.name not in MAIN]
    return _figures(main) + (folded("More plots", _figures(others)) if others else "")


def _figures(plots: Sequence[Plot]) -> str:
    """Each with its note and its buttons; static/stats.js saves them."""
    figures = "".join(
        f'<figure data-name="{plot.name}">{plot.svg}<figcaption>'
        f"<span>{html.escape(plot.note)}</span>{_save_button(plot, 'svg')}"
        f"{_save_button(plot, 'png')}</figcaption></figure>"
        for plot in plots
    )
    return f'<div class="ls-plots">{figures}</div>' if plots else ""


def folded(title: str, content: str) -> str:
    return f'<details class="ls-fold"><summary>{title}</summary>{content}</details>'


def turns_html(rows: Sequence[stats.Row]) -> str:
    """The table of turns, folded. Words stand left, figures right."""
    lines = stats.turn_table(rows)
    if not lines:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in stats.TURN_COLUMNS)
    body = "".join(f"<tr>{''.join(map(_cell, line))}</tr>" for line in lines)
    newest = f"Newest {len(lines)} of {len(rows):,} turns" if len(lines) < len(rows) else "Turns"
    return folded(
        newest,
        '<div class="ls-scroll" tabindex="0" role="region" aria-label="Turns">'
        f'<table class="ls-table ls-many-columns"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>",
    )


def _cell(value: object) -> str:
    text = str(value)
    side = "" if text[:1].isdigit() or text == DASH else ' class="ls-word"'
    return f"<td{side}>{html.escape(text)}</td>"


def _save_button(plot: Plot, form: str) -> str:
    name = plot.name.replace("-", " ")
    return (
        f'<button type="button" class="ls-save" data-as="{form}" '
        f'aria-label="Save {name} as {form.upper()}">{form.upper()}</button>'
    )


def waits_html(drafted: stats.Waits, without: stats.Waits) -> str:
    """The waits in numbers, with and without drafting."""
    if not drafted.num_tokens and not without.num_tokens:
        return ""
    lines = (
        ("between tokens, with drafting", drafted.between_tokens, drafted.num_tokens),
        ("between tokens, without", without.between_tokens, without.num_tokens),
        ("between updates, with drafting", drafted.between_updates, drafted.num_tokens),
        ("between updates, without", without.between_updates, without.num_tokens),
    )
    head = "".join(f'<th scope="col">P{100 * share:.0f}</th>' for share in stats.SHARES)
    body = "".join(
        f'<tr><th scope="row">{name}</th>'
        + "".join(f"<td>{took(ms)}</td>" for ms in values)
        + f"<td>{count:,}</td></tr>"
        for name, values, count in lines
    )
    return (
        '<div class="ls-scroll"><table class="ls-table"><thead><tr><th scope="col">Waits</th>'
        f'{head}<th scope="col">tokens</th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def warning_html(text: str) -> str:
    return f'<p class="ls-warning" role="alert">{html.escape(text)}</p>'
