"""From measured runs to rows, and from rows to a table for people.

Contract: one row for each arm and temperature over `all` prompts, over those whose plain output
repeats itself little (`all_not_repeating`), and for each task. Rates are ratios of sums;
`ratio_to_off` is the median of ratios paired by prompt. An arm that could not run has one row
with a reason. Unknown is None, a dash in the table. Waits and costs stand in a second table
(latency).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.bench import by_drafter, latency
from localspec.bench.arms import Arm
from localspec.bench.exactness import Difference
from localspec.bench.figures import estimate, repetition
from localspec.bench.stage import Case, Run
from localspec.bench.table import DASH, aligned, shown
from localspec.core import OFF

MIN_TOKENS = 8  # fewer decoded tokens say nothing about a rate
MAX_REPETITION = 0.3
ALL, NOT_REPEATING = "all", "all_not_repeating"


@dataclass(frozen=True)
class Measured:
    """All arms over one prompt at one temperature. differences: of the greedy outputs."""

    case: Case
    temperature: float
    runs: Mapping[str, Run]
    differences: tuple[Difference, ...] = ()

    @property
    def is_repeating(self) -> bool:
        share = repetition([self.runs[OFF].tokens])
        return share is not None and share > MAX_REPETITION


@dataclass
class Found:
    """What a comparison has gathered so far. refused: arms without runs, each with the reason.
    skipped: prompts that do not fit, each with the reason. ending: why it stopped early."""

    arms: tuple[Arm, ...]
    temperatures: tuple[float, ...]
    precision: str
    refused: dict[str, str]
    skipped: list[dict[str, str]] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    ending: str | None = None


def rows(found: Found) -> list[dict[str, Any]]:
    """Every row, temperature by temperature, arm by arm, `all` first."""
    made = list[dict[str, Any]]()
    for temperature in found.temperatures:
        here = [each for each in found.measured if each.temperature == temperature]
        for arm in found.arms:
            if arm.name in found.refused:
                row = _row(arm.name, found.precision, temperature, ALL, [])
                made.append({**row, "reason": found.refused[arm.name]})
                continue
            for task, chosen in _groups(here).items():
                made.append(_row(arm.name, found.precision, temperature, task, chosen))
    return made


def _groups(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    groups = {ALL: list(measured), NOT_REPEATING: [m for m in measured if not m.is_repeating]}
    for task in dict.fromkeys(each.case.task for each in measured):
        groups[task] = [each for each in measured if each.case.task == task]
    return groups


def _row(
    arm: str, precision: str, temperature: float, task: str, measured: Sequence[Measured]
) -> dict[str, Any]:
    runs = [each.runs[arm] for each in measured]
    timed = [(len(run.tokens), run.decode_ms) for run in runs if run.decode_ms is not None]
    drafted = sum(run.num_draft_tokens for run in runs)
    accepted = sum(run.num_accepted_tokens for run in runs)
    drafts = sum(run.num_drafts for run in runs)
    ratio = estimate(list(paired_ratios(arm, measured)))
    return {
        "arm": arm,
        "precision": precision,
        "temperature": temperature,
        "task": task,
        "num_prompts": len(runs),
        "num_tokens": sum(len(run.tokens) for run in runs),
        "tokens_per_second": _quotient(
            1000.0 * sum(count for count, _ in timed), sum(ms for _, ms in timed)
        ),
        "ratio_to_off": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "acceptance_rate": _quotient(accepted, drafted),
        "mean_accepted_length": 1.0 + accepted / drafts if drafts else None,
        "repetition": repetition(run.tokens for run in runs),
        "identical_to_off": _num_real_differences(arm, temperature, measured),
        **latency.columns(runs),
        **by_drafter.columns(runs),
    }


def timed_runs(found: Found) -> by_drafter.Timed:
    """What `by_drafter.cells` compares. An arm that was taken out is not in it."""
    made = dict[tuple[float, str], dict[str, list[tuple[int, float]]]]()
    for temperature in found.temperatures:
        here = [each for each in found.measured if each.temperature == temperature]
        for task, chosen in _groups(here).items():
            made[temperature, task] = {
                arm.name: [
                    (len(m.runs[arm.name].tokens), m.runs[arm.name].decode_ms or 0.0)
                    for m in chosen
                ]
                for arm in found.arms
                if arm.name not in found.refused
            }
    return made


def paired_ratios(arm: str, measured: Iterable[Measured]) -> Iterable[float]:
    """The arm's rate over that of `off` on the same prompt, where both decoded enough."""
    for each in measured:
        run, plain = each.runs[arm], each.runs[OFF]
        if min(len(run.tokens), len(plain.tokens)) < MIN_TOKENS:
            continue
        rate, plain_rate = run.tokens_per_second, plain.tokens_per_second
        if rate is not None and plain_rate is not None:
            yield rate / plain_rate


def _num_real_differences(arm: str, temperature: float, measured: Sequence[Measured]) -> int | None:
    """Greedy outputs that differ from plain decoding beyond a near-tie; None when sampled or
    when nothing was measured."""
    if temperature != 0.0 or not measured:
        return None
    found = [d for each in measured for d in each.differences if d.arm == arm]
    return sum(not difference.is_near_tie for difference in found)


def _quotient(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def differences_json(found: Found, near_ties: bool) -> list[dict[str, Any]]:
    """The greedy differences that are near-ties, or those that are not."""
    return [
        {
            "prompt": each.prompt,
            "arm": each.arm,
            "position": each.position,
            "gap": each.gap,
            "top_two_gap": each.top_two_gap,
        }
        for measured in found.measured
        for each in measured.differences
        if each.is_near_tie == near_ties
    ]


HEADINGS = (
    "arm", "T", "task", "prompts", "tokens/s", "to off", "95 % interval", "accepted", "length",
    "repeats", "differ",
)  # fmt: skip


def render(result: Mapping[str, Any]) -> str:
    """The report for people: what ran where, the table, and everything left out."""
    table = aligned([HEADINGS, *(_cells(row) for row in result["rows"])])
    costs = latency.table(result["rows"], ALL)
    chosen = by_drafter.chosen(result["cells"])
    return "\n".join([*_heading(result), "", *table, *costs, *chosen, *_notes(result)])


def _heading(result: Mapping[str, Any]) -> list[str]:
    machine = result["machine"]
    draft = f" with {machine['draft']}" if machine["draft"] else ""
    return [
        f"{machine['target']}{draft}, {machine['dtype']}, on {machine['device']}",
        f"{machine['num_threads']} threads, torch {machine['torch']}, controller "
        f"{machine['controller']}, at most {machine['max_tokens']} tokens a reply",
    ]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = row["ratio_low"], row["ratio_high"]
    return (
        row["arm"],
        f"{row['temperature']:g}",
        row["task"],
        str(row["num_prompts"]),
        shown(row["tokens_per_second"], ".1f"),
        shown(row["ratio_to_off"], ".2f"),
        DASH if low is None else f"{low:.2f} to {high:.2f}",
        shown(row["acceptance_rate"], ".2f"),
        shown(row["mean_accepted_length"], ".2f"),
        shown(row["repetition"], ".2f"),
        shown(row["identical_to_off"], "d"),
    )


def _notes(result: Mapping[str, Any]) -> list[str]:
    reasons = {row["arm"]: row["reason"] for row in result["rows"] if "reason" in row}
    notes = [f"{arm} did not run: {reason}" for arm, reason in reasons.items()]
    notes += [f"Skipped {skip['prompt']}: {skip['reason']}" for skip in result["skipped"]]
    notes += [_told("Near-tie", each) for each in result["near_ties"]]
    notes += [_told("Differs", each) for each in result["differences"]]
    if result["ending"] is not None:
        notes.append(f"Incomplete: {result['ending']}")
    return ["", *notes] if notes else []


def _told(kind: str, each: Mapping[str, Any]) -> str:
    gap = each["gap"]
    distance = "the output stops there" if gap is None else f"{gap:.2g} below the best"
    return f"{kind}: {each['arm']} on {each['prompt']} at token {each['position']}, {distance}"
