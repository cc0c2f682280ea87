"""From measured replies to the rows and cells of a result, as JSON data.

Contract: `rows` gives one row for each arm and temperature over `all` prompts, over those whose
plain output repeats itself little (`all_not_repeating`), and for each task. Rates are ratios of
sums; `ratio_to_off` is the median of ratios paired by prompt. An arm that could not run has one
row with a reason. `cells` compares the controller's choice with plain decoding and with the best
single way, by temperature and task. Unknown is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from localspec.arithmetic import percentile, ratio
from localspec.backend import TurnStats
from localspec.bench.arms import Arm
from localspec.bench.cases import Case
from localspec.bench.exactness import Difference
from localspec.bench.runs import MeasuredReply
from localspec.bench.statistics import (
    Timed,
    inter_token_ms,
    median_ratio,
    rate,
    rate_ratio,
    repetition,
)
from localspec.core import AUTO, OFF

MIN_TOKENS = 8  # fewer decoded tokens say nothing about a rate
MAX_REPETITION = 0.3
NUM_POSITIONS = 4  # of a draft, whose acceptance is listed
ALL, NOT_REPEATING = "all", "all_not_repeating"


@dataclass(frozen=True)
class PromptResult:
    """The replies of all arms to one prompt at one temperature. differences: of greedy outputs."""

    case: Case
    temperature: float
    replies: Mapping[str, MeasuredReply]
    differences: tuple[Difference, ...] = ()

    @property
    def is_repeating(self) -> bool:
        share = repetition([self.replies[OFF].tokens])
        return share is not None and share > MAX_REPETITION


@dataclass
class Results:
    """What a comparison has gathered so far. refused: arms without replies, each with the reason.
    skipped: prompts that do not fit, each with the reason. ending: why it stopped early."""

    arms: Sequence[Arm]
    temperatures: tuple[float, ...]
    precision: str
    refused: dict[str, str]
    skipped: list[dict[str, str]] = field(default_factory=list)
    measured: list[PromptResult] = field(default_factory=list)
    ending: str | None = None

    def groups(self, temperature: float) -> dict[str, list[PromptResult]]:
        """The prompts of one temperature by task, ALL and NOT_REPEATING among them."""
        here = [each for each in self.measured if each.temperature == temperature]
        found = {ALL: here, NOT_REPEATING: [each for each in here if not each.is_repeating]}
        for task in dict.fromkeys(each.case.task for each in here):
            found[task] = [each for each in here if each.case.task == task]
        return found


def rows(results: Results) -> list[dict[str, Any]]:
    """Every row, temperature by temperature, arm by arm, ALL first."""
    made = list[dict[str, Any]]()
    for temperature in results.temperatures:
        groups = results.groups(temperature)
        for arm in results.arms:
            shared = {"arm": arm.name, "precision": results.precision, "temperature": temperature}
            if arm.name in results.refused:
                row = {**shared, "task": ALL, **_figures(arm.name, temperature, [])}
                made.append({**row, "reason": results.refused[arm.name]})
                continue
            for task, chosen in groups.items():
                made.append({**shared, "task": task, **_figures(arm.name, temperature, chosen)})
    return made


def _figures(arm: str, temperature: float, chosen: Sequence[PromptResult]) -> dict[str, Any]:
    replies = [each.replies[arm] for each in chosen]
    decode_rate = rate([_timed(reply) for reply in replies])
    drafting = TurnStats(
        num_prompt_tokens=sum(reply.num_prompt_tokens or 0 for reply in replies),
        num_drafts=sum(reply.num_drafts for reply in replies),
        num_draft_tokens=sum(reply.num_draft_tokens for reply in replies),
        num_accepted_tokens=sum(reply.num_accepted_tokens for reply in replies),
    )
    to_off = median_ratio(list(paired_ratios(arm, chosen)))
    return {
        "num_prompts": len(replies),
        "num_tokens": sum(len(reply.tokens) for reply in replies),
        "tokens_per_second": None if decode_rate is None else 1000.0 * decode_rate,
        "ratio_to_off": to_off.value,
        "ratio_low": to_off.low,
        "ratio_high": to_off.high,
        "acceptance_rate": drafting.acceptance_rate,
        "mean_accepted_length": drafting.mean_accepted_length,
        "repetition": repetition(reply.tokens for reply in replies),
        "identical_to_off": _num_real_differences(arm, temperature, chosen),
        **latency_columns(replies),
        **drafting_columns(replies),
    }


def _timed(reply: MeasuredReply) -> Timed:
    return (0, 0.0) if reply.decode_ms is None else (len(reply.tokens), reply.decode_ms)


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
    arm: str, temperature: float, measured: Sequence[PromptResult]
) -> int | None:
    """Greedy outputs that differ from plain decoding beyond a near-tie; None when sampled or when
    nothing was measured."""
    if temperature != 0.0 or not measured:
        return None
    found = [each for result in measured for each in result.differences if each.arm == arm]
    return sum(not difference.is_near_tie for difference in found)


def latency_columns(replies: Sequence[MeasuredReply]) -> dict[str, Any]:
    """What a reader waits for and what a token costs. Waits are pooled over all replies;
    rate_low, rate_high: half of the prompts lie between these rates. The share of bandwidth is
    measured apart (`with_extras`)."""
    waits = [wait for reply in replies for wait in inter_token_ms(reply.token_times_ms)]
    first = [reply.ttft_ms for reply in replies if reply.ttft_ms is not None]
    peaks = [r.peak_memory_bytes for r in replies if r.peak_memory_bytes is not None]
    rates = [r.tokens_per_second for r in replies if r.tokens_per_second is not None]
    quartiles = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else (None,) * 3
    prompts = [
        (reply.num_prompt_tokens, reply.prefill_ms)
        for reply in replies
        if reply.num_prompt_tokens is not None and reply.prefill_ms
    ]
    prefill_rate = rate(prompts)
    known = [(r.energy_joules, len(r.tokens)) for r in replies if r.energy_joules is not None]
    hosts = [(r.host_ms, r.num_rounds) for r in replies if r.host_ms is not None and r.num_rounds]
    return {
        "rate_low": quartiles[0],
        "rate_high": quartiles[2],
        "ttft_ms": median(first) if first else None,
        "prefill_tokens_per_second": None if prefill_rate is None else 1000.0 * prefill_rate,
        "itl_p50_ms": percentile(waits, 0.50),
        "itl_p95_ms": percentile(waits, 0.95),
        "itl_p99_ms": percentile(waits, 0.99),
        "host_ms_per_round": ratio(sum(ms for ms, _ in hosts), sum(count for _, count in hosts)),
        "peak_memory_bytes": max(peaks, default=None),
        "energy_joules_per_token": ratio(
            sum(joules for joules, _ in known), sum(count for _, count in known)
        ),
        "mean_context_length": _mean_context(replies),
        "bandwidth_share": None,
    }


def _mean_context(replies: Sequence[MeasuredReply]) -> float | None:
    """Tokens before the one that is decoded, in the mean over all decoded tokens."""
    known = [
        (reply.num_prompt_tokens, len(reply.tokens))
        for reply in replies
        if reply.num_prompt_tokens is not None
    ]
    total = sum(count * (prompt + (count - 1) / 2) for prompt, count in known)
    return ratio(total, sum(count for _, count in known))


def drafting_columns(replies: Sequence[MeasuredReply]) -> dict[str, Any]:
    """What only rounds know. acceptance_by_position: of the rounds that drafted, the share in
    which at least so many draft tokens were accepted, from one on; of a tree by depth."""
    lengths = [length for reply in replies for length in reply.accepted_lengths]
    drafted = [reply for reply in replies if reply.num_drafts]
    rounds = sum(reply.num_drafts for reply in drafted)
    draft_ms = [reply.draft_ms for reply in drafted if reply.draft_ms is not None]
    verify_ms = [r.drafted_verify_ms for r in drafted if r.drafted_verify_ms is not None]
    return {
        "acceptance_by_position": [
            sum(length > place for length in lengths) / len(lengths)
            for place in range(NUM_POSITIONS)
        ]
        if lengths
        else None,
        "num_draft_tokens_per_round": ratio(sum(r.num_draft_tokens for r in drafted), rounds),
        "draft_ms_per_round": sum(draft_ms) / rounds if draft_ms else None,
        "verify_ms_per_round": sum(verify_ms) / rounds if verify_ms else None,
    }


def cells(results: Results) -> list[dict[str, Any]]:
    """The controller's choice at each temperature and task: its rate over that of plain decoding
    (`auto_ratio`) and over that of the best single way (`auto_to_best`; none at all is one of
    them), tokens over time of the whole cell, as somebody meets it who asks all of it. (A median
    over the prompts would hide the one on which a drafter is far ahead.)

    The best of many is partly luck, which the controller cannot have: `auto_to_foreseen` is its
    rate over that of the way which was best on the other half of the prompts, half by half.
    """
    names = [arm.name for arm in results.arms if arm.name not in results.refused]
    if AUTO not in names:
        return []
    found = list[dict[str, Any]]()
    for temperature in results.temperatures:
        for task, chosen in results.groups(temperature).items():
            timed = {name: [_timed(each.replies[name]) for each in chosen] for name in names}
            cell = _cell(timed)
            if cell is not None:
                found.append({"temperature": temperature, "task": task, **cell})
    return found


def _cell(timed: Mapping[str, Sequence[Timed]]) -> dict[str, Any] | None:
    """One cell; None where `auto` or plain decoding has no rate."""
    to_off = rate_ratio(timed[AUTO], timed[OFF])
    best = best_single(timed)
    if to_off.value is None or best is None:
        return None
    to_best = rate_ratio(timed[AUTO], timed[best])
    return {
        "best": best,
        "best_ratio": rate_ratio(timed[best], timed[OFF]).value,
        "auto_ratio": to_off.value,
        "auto_ratio_low": to_off.low,
        "auto_ratio_high": to_off.high,
        "auto_to_best": to_best.value,
        "auto_to_best_low": to_best.low,
        "auto_to_best_high": to_best.high,
        "auto_to_foreseen": _to_foreseen(timed),
    }


def best_single(timed: Mapping[str, Sequence[Timed]]) -> str | None:
    """The fastest arm but `auto`; None where none has a rate."""
    rates = {name: rate(replies) for name, replies in timed.items() if name != AUTO}
    known = {name: found for name, found in rates.items() if found is not None}
    return max(known, key=lambda name: known[name]) if known else None


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
    our_rate, their_rate = rate(ours), rate(theirs)
    return None if our_rate is None or their_rate is None else our_rate / their_rate


def with_extras(result: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a comparison with what was measured apart, filled into its rows too."""
    shares = [bandwidth_share(row, extras) if row["arm"] == OFF else None for row in result["rows"]]
    made = [
        {**row, "bandwidth_share": share}
        for row, share in zip(result["rows"], shares, strict=True)
    ]
    return {**result, "rows": made, **extras}


def bandwidth_share(row: Mapping[str, Any], extras: Mapping[str, Any]) -> float | None:
    """Bytes that plain decoding reads a second, over the bytes that can be read a second."""
    read, limit = extras["bytes_per_token"], extras["bandwidth_bytes_per_second"]
    token_rate, context = row["tokens_per_second"], row["mean_context_length"]
    if read is None or limit is None or token_rate is None or context is None:
        return None
    num_bytes = read["weight_bytes"] + read["kv_bytes_per_context_token"] * context
    return float(num_bytes * token_rate / limit)


def differences_json(results: Results, near_ties: bool) -> list[dict[str, Any]]:
    """The greedy differences that are near-ties, or those that are not."""
    return [
        {
            "prompt": each.prompt,
            "arm": each.arm,
            "position": each.position,
            "gap": each.gap,
            "top_two_gap": each.top_two_gap,
        }
        for measured in results.measured
        for each in measured.differences
        if each.is_near_tie == near_ties
    ]
