"""The Stats tab's own HTML: the summary and the export links. Figures come from stats."""

from __future__ import annotations

from localspec.leniency import label
from localspec.web import stats
from localspec.web.live import number, percent


def summary_html(summary: stats.Summary) -> str:
    rate, gamma = summary.acceptance_rate, summary.mean_num_draft_tokens
    tiles = (
        ("Turns", str(summary.num_turns)),
        ("Tokens", str(summary.num_output_tokens)),
        ("Speed", number(summary.tokens_per_second, " tok/s")),
        ("Speedup", number(summary.speedup, " ×", 2)),
        ("Accepted", percent(rate)),
        ("Mean γ", number(gamma)),
    )
    cells = "".join(
        f'<div class="ls-tile"><span class="ls-label">{label}</span>'
        f'<span class="ls-value">{value}</span></div>'
        for label, value in tiles
    )
    alpha = summary.alpha
    return (
        f'<div class="ls-tiles">{cells}</div>'
        f'<p class="ls-verdict" data-band="{stats.band(rate)}">{stats.verdict(rate)}</p>'
        f"{_lenient_html(summary)}"
        '<p class="ls-formula">Mean accepted length, the model\'s own token counted: '
        f'<b id="ls-measured-length">{number(summary.mean_accepted_length, digits=2)}</b> '
        f'measured, <b id="ls-expected-length">{number(summary.expected_length, digits=2)}</b> '
        "by the formula (1 − α<sup>γ+1</sup>) / (1 − α) with "
        f"α = {number(alpha, digits=2)} and γ = {number(gamma)}. Here α is the share accepted of "
        "the guesses that were reached (a guess after a wrong one is never looked at), so it "
        "lies above the acceptance rate. The formula takes each guess as independent.</p>"
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


def exports_html(scope: str, handle: int | None) -> str:
    query = f"scope={scope}" + (f"&conversation={handle}" if scope == "conversation" else "")
    labels = {"csv": "CSV", "jsonl": "JSONL", "markdown": "Markdown", "sqlite": "Database"}
    links = "".join(
        f'<a class="ls-button" download href="/export?format={name}&{query}">{label}</a>'
        for name, label in labels.items()
    )
    return f'<div class="ls-exports"><span class="ls-label">Export</span>{links}</div>'
