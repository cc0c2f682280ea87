"""The Stats tab as HTML: summary, export links, plots and waits. Pure; figures come in."""

from __future__ import annotations

import html
from collections.abc import Sequence

from localspec.leniency import label
from localspec.web.live import number, percent
from localspec.web.stats import figures as stats
from localspec.web.stats.log_plots import Plot
from localspec.web.stats.selection import Selection


def summary_html(summary: stats.Summary, seconds_saved: float | None = None) -> str:
    gamma = summary.mean_num_draft_tokens
    tiles = (
        ("Turns", str(summary.num_turns)),
        ("Tokens", str(summary.num_output_tokens)),
        ("Tokens / s", number(summary.tokens_per_second)),
        ("Speedup", number(summary.speedup, " ×", 2)),
        ("Decoding", number(summary.decode_speedup, " ×", 2)),
        ("Time saved", number(seconds_saved, " s")),
        ("Accepted", percent(summary.acceptance_rate)),
        ("Mean γ", number(gamma)),
    )
    cells = "".join(
        f'<div class="ls-tile"><span class="ls-label">{label}</span>'
        f'<span class="ls-value">{value}</span></div>'
        for label, value in tiles
    )
    band, verdict = stats.verdict(summary.speedup)
    return (
        f'<div class="ls-tiles ls-many">{cells}</div>'
        f'<p class="ls-verdict" data-band="{band}">{verdict}</p>'
        f"{_lenient_html(summary)}"
        '<p class="ls-formula">Mean accepted length, the model\'s own token counted: '
        f'<b id="ls-measured-length">{number(summary.mean_accepted_length, digits=2)}</b> '
        f'measured, <b id="ls-expected-length">{number(summary.expected_length, digits=2)}</b> '
        "by the formula (1 − α<sup>γ+1</sup>) / (1 − α) with "
        f"α = {number(summary.alpha, digits=2)} and γ = {number(gamma)}. Here α is the share "
        "accepted of the guesses that were checked (one after a wrong guess never is), so it lies "
        "above the acceptance rate. The formula takes each guess as independent.</p>"
    )


def _lenient_html(summary: stats.Summary) -> str:
    """What the lenient turns gave up; empty where there are none."""
    if not summary.num_lenient_turns:
        return ""
    turns = "turn was" if summary.num_lenient_turns == 1 else "turns were"
    said = label(summary.num_lenient_tokens, summary.num_lenient_output_tokens)
    return (
        f'<p class="ls-lenient">{summary.num_lenient_turns} {turns} {said} by exact checking. '
        "They are in the figures above, and marked below.</p>"
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
    """Every plot with its note and its buttons; static/stats.js saves them."""
    if not plots:
        return '<p class="ls-empty">Nothing was measured in this selection yet.</p>'
    figures = "".join(
        f'<figure data-name="{plot.name}">{plot.svg}<figcaption>'
        f"<span>{html.escape(plot.note)}</span>{_save_button(plot, 'svg')}"
        f"{_save_button(plot, 'png')}</figcaption></figure>"
        for plot in plots
    )
    return f'<div class="ls-plots">{figures}</div>'


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
        + "".join(f"<td>{number(ms, ' ms')}</td>" for ms in values)
        + f"<td>{count}</td></tr>"
        for name, values, count in lines
    )
    return (
        '<div class="ls-scroll"><table class="ls-table"><thead><tr><th scope="col">Waits</th>'
        f'{head}<th scope="col">tokens</th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def warning_html(text: str) -> str:
    return f'<p class="ls-warning" role="alert">{html.escape(text)}</p>'
