"""The race as HTML. Every text of a model is escaped.

Contract: pure; a view of chat.race in, HTML out. Unknown is a dash.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from localspec.chat.audit import describe
from localspec.chat.compare import Answer
from localspec.chat.race import NUM_RUNS, Gains, Lane, RaceView
from localspec.core.turn_stats import TurnStats
from localspec.core.units import DASH, compared, gain_words, took
from localspec.record.markdown import ENDED
from localspec.web.live import credited
from localspec.web.words import number

LANES = {"plain": "Without drafting", "speculative": "With drafting"}
PHASES = {"waiting": "waiting", "reading": "reading the prompt", "writing": "writing"}
UNDER_WAY = {
    "waiting": "Waiting for the model.",
    "warming": "Reading the prompt, for both.",
    "running": "Running.",
}
IDLE = (
    '<p class="ls-empty">The same prompt is answered without and with drafting, by turns, '
    f"{NUM_RUNS} times each, with one seed. None of it is logged.</p>"
)


def race_html(view: RaceView, is_over: bool = False, error: str | None = None) -> str:
    """Both lanes and the verdict. is_over: it has ended, as it should or not. error: why not."""
    boxes = "".join(_lane(lane, is_over) for lane in (view.plain, view.speculative))
    return f'<div class="ls-lanes">{boxes}</div>{_verdict(view, is_over, error)}'


def _lane(lane: Lane, is_over: bool) -> str:
    answer, runs = lane.answer, lane.runs
    is_cut = is_over and len(runs) < NUM_RUNS
    reason = None if answer is None else answer.finish_reason
    phase = PHASES.get(lane.phase) or ENDED.get(reason or "", "")
    if is_cut:
        phase = "did not run" if lane.phase == "waiting" else "stopped"
    elif len(runs) < NUM_RUNS and lane.phase != "waiting":
        number_of_run = len(runs) + (lane.phase != "done")
        phase = f"{phase}, {number_of_run} of {NUM_RUNS}"
    name = LANES[lane.name]
    figures = (
        ("Clock", _clock(lane)),
        ("Tokens", DASH if answer is None else str(answer.stats.num_output_tokens)),
        ("Tokens / s", _of_runs(runs, lambda stats: stats.tokens_per_second)),
        ("First token", _of_runs(runs, lambda stats: stats.ttft_ms, took)),
        ("Checks", _of_runs(runs, lambda stats: stats.num_steps, lambda num: number(num, "", 0))),
        ("Decoding", _of_runs(runs, lambda stats: stats.decode_ms, took)),
        ("Energy, J", _of_runs(runs, lambda stats: stats.energy_joules)),
        ("Drafter", _drafter(lane)),
    )
    cells = "".join(
        f'<div class="ls-cell"><dt>{label}</dt><dd>{value}</dd></div>'
        for label, value in figures
        if label != "Energy, J" or any(run.stats.energy_joules for run in runs)  # only GPUs tell it
    )
    return (
        f'<section class="ls-lane" data-lane="{lane.name}" '
        f'data-phase="{"cut" if is_cut else lane.phase}" aria-label="{name}">'
        f'<h2>{name} <span class="ls-lane-phase">{phase}</span></h2>'
        f'<dl class="ls-cells">{cells}</dl>'
        f'<div class="ls-lane-text" tabindex="0" role="group" aria-label="Text of {name}">'
        f"{'' if answer is None else html.escape(answer.text)}</div></section>"
    )


def _drafter(lane: Lane) -> str:
    """Of all its runs together; a dash where nothing was drafted."""
    made = Counter[str]()
    for answer in lane.runs or filter(None, [lane.answer]):
        made.update(answer.stats.drafted_by)
    return credited(made) if made else DASH


def _of_runs(
    runs: Sequence[Answer],
    read: Callable[[TurnStats], float | None],
    say: Callable[[float | None], str] = number,
) -> str:
    found = [read(run.stats) for run in runs]
    return _middle([one for one in found if one is not None], say)


def _clock(lane: Lane) -> str:
    """Of the runs that ended, before that of the one under way."""
    under_way = [] if lane.seconds is None else [lane.seconds]
    seconds = [run.seconds for run in lane.runs] or under_way
    return _middle([1000.0 * one for one in seconds], took)


def _middle(values: Sequence[float], say: Callable[[float | None], str]) -> str:
    """The median, and beside it the range where the values differ."""
    if len(set(values)) < 2:
        return say(values[0] if values else None)
    low, high = say(min(values)), say(max(values))
    low = low.removesuffix(f" {high.rpartition(' ')[2]}")  # one unit is said once
    return f"{say(median(values))} <small>{low} to {high}</small>"


def _verdict(view: RaceView, is_over: bool, error: str | None) -> str:
    if error is not None:
        return f'<p class="ls-verdict" data-band="low">{html.escape(error)}</p>'
    if view.phase != "done":
        return f'<p class="ls-verdict">{"Stopped." if is_over else UNDER_WAY[view.phase]}</p>'
    found = view.difference
    is_fault = found is not None and view.is_greedy and not found.is_tie
    band = "good" if found is None else "low" if is_fault else "none"
    return (
        f'<p class="ls-verdict" data-band="{band}" role="status" id="ls-race-verdict">'
        f"{html.escape(' '.join((_sameness(view), *_gains(view))))}</p>"
    )


def _gains(view: RaceView) -> Iterator[str]:
    if not any(run.stats.num_draft_tokens for run in view.speculative.runs):
        yield "Nothing was drafted in either, so what differs in time is chance."
        return
    whole, decoding = view.gains, view.decode_gains
    if whole is not None:
        yield f"The reply came {compared(whole.middle)}{_spread(whole)}."
    if decoding is not None:
        yield f"Decoding alone was {gain_words(decoding.middle)}{_spread(decoding)}."


def _spread(gains: Gains) -> str:
    """Run against run, where that says more than the figures in the middle."""
    low, high = gain_words(gains.lowest), gain_words(gains.highest)
    return f" (in single runs {low} to {high})" if low != high else ""


def _sameness(view: RaceView) -> str:
    if view.difference is None:
        return "Identical: all texts are the same, token by token."
    names = "The text without drafting", "the one with drafting"
    return describe(view.difference, *names, view.is_greedy)
