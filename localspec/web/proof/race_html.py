"""The race and the distribution test as HTML. Every text of a model is escaped.

Contract: pure; a view of chat.race or chat.distribution in, HTML out. Unknown is a dash.
"""

from __future__ import annotations

import html

from localspec.chat import distribution
from localspec.chat.audit import describe
from localspec.chat.distribution import TrialView
from localspec.chat.race import Lane, RacePhase, RaceView
from localspec.core import OFF
from localspec.drafters.registry import label_of
from localspec.web.live import DASH, ENDED, number

LANES = {"plain": "Without drafting", "speculative": "With drafting"}
PHASES = {"waiting": "waiting", "reading": "reading the prompt", "writing": "writing"}
IDLE = (
    '<p class="ls-empty">The same prompt is answered twice, one after the other: once without '
    "drafting, once with it. Neither is logged.</p>"
)


def race_html(view: RaceView) -> str:
    """Both lanes, the one that runs first at the left, and the verdict."""
    lanes = sorted((view.plain, view.speculative), key=lambda lane: lane.place)
    boxes = "".join(_lane(lane, view.phase) for lane in lanes)
    return f'<div class="ls-lanes">{boxes}</div>{_verdict(view)}'


def _lane(lane: Lane, race_phase: RacePhase) -> str:
    stats = lane.stats
    is_cut = lane.phase != "done" and race_phase in ("failed", "cancelled")
    phase = PHASES.get(lane.phase) or ENDED.get(lane.finish_reason or "", "")
    if is_cut:
        phase = "did not run" if lane.phase == "waiting" else "stopped"
    name = LANES[lane.name]
    if lane.name == "speculative" and stats is not None and stats.num_steps:
        is_off = stats.drafter == OFF
        name = f"{name} (nothing drafted)" if is_off else f"Drafted by {label_of(stats.drafter)}"
    order = "first" if lane.place == 1 else "second"
    verb = "runs" if lane.phase == "waiting" else "ran"
    figures = (
        ("Clock", number(lane.seconds, " s", 2)),
        ("Tokens", DASH if stats is None else str(stats.num_output_tokens)),
        ("Tokens / s", number(None if stats is None else stats.tokens_per_second)),
        ("First token", number(None if stats is None else stats.ttft_ms, " ms", 0)),
        ("Checks", DASH if stats is None else str(stats.num_steps)),
        ("Decoding", number(None if stats is None else stats.decode_ms or None, " ms", 0)),
        ("Energy", number(None if stats is None else stats.energy_joules, " J")),
    )
    cells = "".join(
        f'<div class="ls-cell"><dt>{label}</dt><dd>{value}</dd></div>' for label, value in figures
    )
    return (
        f'<section class="ls-lane" data-lane="{lane.name}" '
        f'data-phase="{"cut" if is_cut else lane.phase}" '
        f'aria-label="{html.escape(name)}">'
        f'<h3>{html.escape(name)} <span class="ls-order">{verb} {order}</span>'
        f'<span class="ls-lane-phase">{phase}</span></h3>'
        f'<dl class="ls-cells">{cells}</dl>'
        f'<div class="ls-lane-text" tabindex="0" role="group" aria-label="Text of {name}">'
        f"{html.escape(lane.text)}</div></section>"
    )


def _verdict(view: RaceView) -> str:
    if view.phase == "failed":
        return _failure(view.error)
    words = {
        "waiting": "Waiting for the model.",
        "warming": "Reading the prompt, for both.",
        "running": "Running.",
        "cancelled": "Stopped.",
    }
    if view.phase in words:
        return f'<p class="ls-verdict">{words[view.phase]}</p>'
    parts = []
    if view.gain is not None:
        verb = "as fast as" if view.gain >= 1 else "the speed of"
        parts.append(
            f"With drafting, decoding was {view.gain:.2f} times {verb} decoding without "
            "drafting here; the clocks also count reading the prompt."
        )
    parts.append(_sameness(view))
    is_harmless = view.difference is None or view.difference.is_tie
    band = "good" if view.is_same else "none" if is_harmless else "low"
    return (
        f'<p class="ls-verdict" data-band="{band}" role="status" id="ls-race-verdict">'
        f"{html.escape(' '.join(parts))}</p>"
    )


def _failure(error: str | None) -> str:
    return f'<p class="ls-verdict" data-band="low">{html.escape(error or "It failed.")}</p>'


def _sameness(view: RaceView) -> str:
    if view.is_same:
        return "The texts are identical, token by token."
    if view.difference is not None:
        return describe(view.difference, "The text without drafting", "the one with drafting")
    return (
        "The texts differ, as two draws may: at this temperature each is one sample. Set it to 0 "
        "to compare them, or run the distribution test below."
    )


def trial_html(view: TrialView) -> str:
    """The distribution test: how far it is, then what it found."""
    if view.phase == "failed":
        return _failure(view.error)
    if view.phase in ("waiting", "running"):
        share = min(1.0, view.seconds / view.limit_s) if view.limit_s else 0.0
        return (
            f'<progress class="ls-progress" max="1" value="{share:.3f}" '
            'aria-label="Time used"></progress>'
            f'<p class="ls-formula">{view.num_replies} replies each, {view.seconds:.0f} of '
            f"{view.limit_s:.0f} s</p>"
        )
    band = "low" if view.is_suspicious else "good" if view.is_telling else "none"
    words = html.escape(distribution.sentence(view))
    return (
        f'<p class="ls-verdict" data-band="{band}" role="status" id="ls-trial-verdict">{words}</p>'
        f"{_table(view)}"
    )


def _table(view: TrialView) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(distribution.PROMPTS[one.prompt])}</td><td>{one.place + 1}</td>"
        f"<td>{one.num_classes}</td><td>{one.num_pooled}</td><td>{one.statistic:.1f}</td>"
        f"<td>{number(one.p_value, digits=3)}</td><td>{number(one.holm, digits=3)}</td></tr>"
        for one in view.comparisons
    )
    names = ("Prompt", "Token", "Classes", "Pooled", "χ²", "p", "p, corrected")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        '<details class="ls-trial"><summary>Every comparison</summary>'
        '<div class="ls-scroll" tabindex="0" role="region" aria-label="Every comparison">'
        f'<table class="ls-table"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></details>"
    )
