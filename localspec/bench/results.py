"""From measured replies to the rows and cells of a result, as JSON data.

Contract: `rows` gives one row for each arm and temperature over `all` prompts, over those whose
plain output repeats itself little (`all_not_repeating`), and for each task. Rates are ratios of
sums; `ratio_to_off` is the median of ratios paired by prompt. An arm that could not run has one
row with a reason. `cells` compares the controller's choice with plain decoding and with the best
single way, by temperature and task. Unknown is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from localspec.bench.arms import Arm
from localspec.bench.cases import Case
from localspec.bench.exactness import FirstDifference
from localspec.bench.runs import MeasuredReply
from localspec.bench.statistics import (
    Timed,
    median_of,
    rate,
    rate_ratio,
    repetition,
)
from localspec.core.arithmetic import ratio
from localspec.core.decoding import AUTO, OFF
from localspec.core.speculation import DecodeCounts

MIN_TOKENS = 8  # fewer decoded tokens say nothing about a rate
MAX_REPETITION = 0.3
NUM_POSITIONS = 4  # of a draft, whose acceptance is listed
ALL, NOT_REPEATING = "all", "all_not_repeating"


@dataclass(frozen=True)
class PromptResult:
    """The replies of all arms to one prompt at one temperature. differences: from plain decoding,
    of the arms that are comparable with it."""

    case: Case
    temperature: float
    replies: Mapping[str, MeasuredReply]
    differences: tuple[FirstDifference, ...] = ()

    @property
    def is_repeating(self) -> bool:
        share = repetition([self.replies[OFF].tokens])
        return share is not None and share > MAX_REPETITION


@dataclass(eq=False)
class Results:
    """What a comparison has gathered so far. refused: arms without replies, each with the reason.
    skipped: prompts that do not fit, each with the reason."""

    arms: Sequence[Arm]
    temperatures: tuple[float, ...]
    precision: str
    refused: dict[str, str]
    skipped: list[dict[str, str]] = field(default_factory=list)
    measured: list[PromptResult] = field(default_factory=list)

    def usable(self) -> list[Arm]:
        return [arm for arm in self.arms if arm.name not in self.refused]

    def groups(self, temperature: float) -> dict[str, list[PromptResult]]:
        """The prompts of one temperature by task, ALL and NOT_REPEATING among them."""
        here = [each for each in self.measured if each.temperature == temperature]
        found = {ALL: here, NOT_REPEATING: [each for each in here if not each.is_repeating]}
        for each in here:
            found.setdefault(each.case.task, []).append(each)
        return found


def as_json(results: Results, machine: Mapping[str, Any], ending: str | None) -> dict[str, Any]:
    """The whole result. ending: why it is not complete, None where it is."""
    differences = [each for measured in results.measured for each in measured.differences]
    return {
        "machine": machine,
        "rows": rows(results),
        "cells": cells(results),
        "near_ties": [asdict(each) for each in differences if each.is_near_tie],
        "differences": [asdict(each) for each in differences if not each.is_near_tie],
        "skipped": results.skipped,
        "ending": ending,
    }


def rows(results: Results) -> list[dict[str, Any]]:
    """Every row, temperature by temperature, arm by arm, ALL first."""
    made = list[dict[str, Any]]()
    for temperature in results.temperatures:
        groups = results.groups(temperature)
        for arm in results.arms:
            reason = results.refused.get(arm.name)
            for task, chosen in (groups if reason is None else {ALL: []}).items():
                row = {
                    "arm": arm.name,
                    "precision": results.precision,
                    "temperature": temperature,
                    "task": task,
                    **_figures(arm, temperature, chosen),
                }
                made.append(row if reason is None else {**row, "reason": reason})
    return made


def is_comparable(arm: Arm, temperature: float) -> bool:
    """Whether its replies should be those of plain decoding, token for token."""
    return temperature == 0.0 or not arm.is_other_engine


def _figures(arm: Arm, temperature: float, chosen: Sequence[PromptResult]) -> dict[str, Any]:
    replies = [each.replies[arm.name] for each in chosen]
    drafting = DecodeCounts(
        num_drafts=sum(reply.num_drafts for reply in replies),
        num_draft_tokens=sum(reply.num_draft_tokens for reply in replies),
        num_accepted_tokens=sum(reply.num_accepted_tokens for reply in replies),
    )
    return {
        "num_prompts": len(replies),
        "num_tokens": sum(len(reply.tokens) for reply in replies),
        "tokens_per_second": _per_second(_timed(reply) for reply in replies),
        **median_of(list(paired_ratios(arm.name, chosen))).columns("ratio_to_off", "ratio"),
        "acceptance_rate": drafting.acceptance_rate,
        "mean_accepted_length": drafting.mean_accepted_length,
        "repetition": repetition(reply.tokens for reply in replies),
        "identical_to_off": _num_real_differences(arm, temperature, chosen),
        **cost_columns(replies),
        **drafting_columns(replies),
    }


def _timed(reply: MeasuredReply) -> Timed:
    return (0, 0.0) if reply.decode_ms is None else (len(reply.tokens), reply.decode_ms)


def _per_second(timed: Iterable[Timed]) -> float | None:
    found = rate(list(timed))
    return None if found is None else 1000.0 * found


def paired_ratios(arm: str, measured: Iterable[PromptResult]) -> Iterable[float]:
    """The arm's rate over that of `off` on the same prompt, where both decoded enough."""
    for each in measured:
        reply, plain = each.replies[arm], each.replies[OFF]
        own_rate, plain_rate = reply.tokens_per_second, plain.tokens_per_second
        if own_rate is None or plain_rate is None:
            continue
        if min(len(reply.tokens), len(plain.tokens)) >= MIN_TOKENS:
            yield own_rate / plain_rate


def _num_real_differences(
    arm: Arm, temperature: float, measured: Sequence[PromptResult]
) -> int | None:
    """Replies that differ from plain decoding beyond a near-tie; None where they may, and where
    nothing was measured."""
    if not (measured and is_comparable(arm, temperature)):
        return None
    found = [each for result in measured for each in result.differences if each.arm == arm.name]
    return sum(not difference.is_near_tie for difference in found)


def cost_columns(replies: Sequence[MeasuredReply]) -> dict[str, Any]:
    """Return the highest memory of these replies and the energy of one of their tokens."""
    peaks = [r.peak_memory_bytes for r in replies if r.peak_memory_bytes is not None]
    return {
        "peak_memory_bytes": max(peaks, default=None),
        "energy_joules_per_token": _of_sums(replies, lambda r: (r.energy_joules, len(r.tokens))),
    }


def _of_sums(
    replies: Iterable[MeasuredReply],
    parts: Callable[[MeasuredReply], tuple[float | None, int | None]],
) -> float | None:
    """Sum over sum of the replies that know both parts; None where there are none."""
    known = [(top, below) for top, below in map(parts, replies) if top is not None and below]
    return ratio(sum(top for top, _ in known), sum(below for _, below in known))


def drafting_columns(replies: Sequence[MeasuredReply]) -> dict[str, Any]:
    """Figures of rounds. acceptance_by_position: of the rounds that drafted, the share in
    which at least so many draft tokens were accepted, from one on; of a tree by depth."""
    lengths = [length for reply in replies for length in reply.accepted_lengths]
    by_position = [
        ratio(sum(length > place for length in lengths), len(lengths))
        for place in range(NUM_POSITIONS)
    ]
    return {
        "acceptance_by_position": by_position if lengths else None,
        "num_draft_tokens_per_round": _of_sums(
            replies, lambda r: (r.num_draft_tokens, r.num_drafts)
        ),
        "draft_ms_per_round": _of_sums(replies, lambda r: (r.draft_ms, r.num_drafts)),
        "verify_ms_per_round": _of_sums(replies, lambda r: (r.drafted_verify_ms, r.num_drafts)),
    }


def cells(results: Results) -> list[dict[str, Any]]:
    """The rate of `auto` at each temperature and task, over that of plain decoding (`auto_ratio`)
    and over that of the best single way (`auto_to_best`; plain decoding is one of them). Rates are
    tokens over time of all prompts of the cell: a median over the prompts would hide one on which
    a drafter is far ahead.

    The best of many is partly luck: `auto_to_foreseen` compares with the way that was best on the
    other half of the prompts, half by half.
    """
    names = [arm.name for arm in results.usable()]
    if AUTO not in names:
        return []
    found = list[dict[str, Any]]()
    for temperature in results.temperatures:
        for task, chosen in results.groups(temperature).items():
            timed = {name: [_timed(each.replies[name]) for each in chosen] for name in names}
            best = best_single(timed)
            to_off = rate_ratio(timed[AUTO], timed[OFF])
            if to_off.value is not None and best is not None:
                cell = {
                    "temperature": temperature,
                    "task": task,
                    "best": best,
                    "best_ratio": rate_ratio(timed[best], timed[OFF]).value,
                    **to_off.columns("auto_ratio"),
                    **rate_ratio(timed[AUTO], timed[best]).columns("auto_to_best"),
                    "auto_to_foreseen": _to_foreseen(timed),
                }
                found.append(cell)
    return found


def best_single(timed: Mapping[str, Sequence[Timed]]) -> str | None:
    """The fastest arm but `auto`; None where none has a rate."""
    rates = {name: rate(replies) or 0.0 for name, replies in timed.items() if name != AUTO}
    best = max(rates, key=lambda name: rates[name])
    return best if rates[best] else None


def _to_foreseen(timed: Mapping[str, Sequence[Timed]]) -> float | None:
    """None where a half of the prompts has no rate to choose by."""
    halves = [{name: replies[start::2] for name, replies in timed.items()} for start in (0, 1)]
    ours, theirs = list[Timed](), list[Timed]()
    for here, other in (halves, halves[::-1]):
        best = best_single(other)
        if best is None:
            return None
        ours += here[AUTO]
        theirs += here[best]
    return rate_ratio(ours, theirs).value
