"""The result of a tune-up as HTML: the sentences, and the figures they come from.

Contract: pure; what was not measured is a dash.
"""

from __future__ import annotations

import html

from localspec.chat.tune_up import TEMPERATURES, TuneUp, in_words
from localspec.core import OFF
from localspec.drafters.registry import label_of

DASH = "–"


def result_html(result: TuneUp, is_running: bool) -> str:
    """The words only once it is over: half a measurement would change its mind."""
    if not result.runs:
        return "" if is_running else f"<p>{html.escape(in_words(result))}</p>"
    words = "" if is_running else f'<p class="ls-mverdict">{html.escape(in_words(result))}</p>'
    return words + _table(result)


def _table(result: TuneUp) -> str:
    columns = [(kind, temperature) for kind in result.kinds for temperature in TEMPERATURES]
    head = "".join(f"<th>{html.escape(kind)}, T {t:g}</th>" for kind, t in columns)
    plain = "".join(
        f"<td>{_speed(result.tokens_per_second(OFF, kind, t))}</td>" for kind, t in columns
    )
    rows = "".join(
        f"<tr><th>{html.escape(label_of(drafter))}</th>"
        + "".join(_gain(result.gain(drafter, kind, t)) for kind, t in columns)
        + "</tr>"
        for drafter in result.drafters
    )
    return (
        '<div class="ls-mscroll" tabindex="0" role="region" aria-label="What the tune-up measured">'
        f'<table class="ls-mtune"><thead><tr><th></th>{head}</tr></thead><tbody>'
        f"<tr><th>plain, tokens per second</th>{plain}</tr>{rows}</tbody></table></div>"
    )


def _speed(tokens_per_second: float | None) -> str:
    return DASH if tokens_per_second is None else f"{tokens_per_second:.0f}"


def _gain(gain: float | None) -> str:
    if gain is None:
        return f"<td>{DASH}</td>"
    mark = "win" if gain >= 1.05 else "lose" if gain <= 0.95 else "even"
    return f'<td data-mark="{mark}">{gain:.2f}×</td>'
