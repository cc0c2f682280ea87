"""Makes worlds of a log, from the texts people really had, as far as the logged rounds show.

Contract: the file is opened read-only, so a log in use is not touched. One world for each
combination of models and machine in the log, with its turns in the order of the log, oldest first.
Where a drafter drafted, its accepted tokens are right and the first rejected one is wrong, as
logged. All other positions are drawn: a guess is right at the rate of that drafter's known guesses
nearby in the turn, shrunk towards its rate over the whole log. Costs are those of the stored
calibration where exactly one fits the combination, else medians of the logged rounds.

What a log does not show is assumed, and the result says so: confidences, what a lookup would have
found where another drafter was used (the signal of its nearest round within SIGNAL_REACH tokens,
nothing beyond), and the guesses of a drafter in turns in which it never drafted. A log of `auto`
shows each drafter where it was chosen, which is where it does best, so replay compares policies and
does not predict a rate.

A draft model's confidence in a token is the chance it was drawn with: chances are spread around
the rate by a Beta distribution of CONCENTRATION, which is what the demo draft's confidences follow
on its target's own text (0.9 over 945 greedy tokens, and calibrated within the error).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from localspec.controller.controller import NO_DRAFT
from localspec.controller.costs import WIDTHS, Costs
from localspec.core.decoding import OFF
from localspec.core.errors import StoreError
from localspec.record.log_file import has_column, reading
from localspec.record.rows import json_column
from tools.replay.worlds import Stretch, Track, World

CONCENTRATION = 1.0
FADE = 0.95  # of a known guess's weight with each token of distance
WHOLE_WEIGHT = 3.0  # what the rate over the whole log counts for, in guesses
SIGNAL_REACH = 8
MIN_ROUNDS = 3  # of one width, for its median to count
UNKNOWN_PROMPT = 128  # tokens, where the log does not say
Known = dict[int, bool]  # position in the text -> whether the guess was right
STEPS = """
SELECT step.*, turn.model, turn.draft, turn.device, turn.dtype, turn.temperature, {workload} AS kind
FROM step JOIN turn ON turn.id = step.turn_id
WHERE turn.exact IS NOT 0
ORDER BY step.turn_id, step.n
"""


@dataclass(frozen=True)
class LoggedStep:
    """One round as it was logged; None where the log does not know."""

    drafter: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_output_tokens: int
    draft_ms: float | None
    verify_ms: float | None
    context_length: int | None
    signal: Hashable


@dataclass(frozen=True)
class LoggedTurn:
    """One turn with its rounds in order. workload: "" where it is not known."""

    turn_id: int
    model: str | None
    draft: str | None
    device: str | None
    dtype: str | None
    temperature: float | None
    steps: tuple[LoggedStep, ...]
    workload: str = ""

    @property
    def combination(self) -> tuple[str | None, ...]:
        """What must be the same for rounds to be comparable."""
        return (self.model, self.draft, self.device, self.dtype)


def read_turns(database: Path) -> list[LoggedTurn]:
    """Every turn that has steps; not lenient ones, whose acceptance says nothing of exact ones."""
    with reading(database) as db:
        workload = "turn.workload" if has_column(db, "turn", "workload") else "NULL"
        rows = db.execute(STEPS.format(workload=workload)).fetchall()
    return [_turn(list(group)) for _, group in groupby(rows, key=lambda row: row["turn_id"])]


def _turn(rows: list[Mapping[str, Any]]) -> LoggedTurn:
    of_turn = ("turn_id", "model", "draft", "device", "dtype", "temperature")
    facts: dict[str, Any] = {name: rows[0][name] for name in of_turn}
    steps = tuple(_step(row) for row in rows)
    return LoggedTurn(**facts, steps=steps, workload=rows[0]["kind"] or "")


def _step(row: Mapping[str, Any]) -> LoggedStep:
    signal = json_column(row["signal"])
    is_hashable = isinstance(signal, str | int | float | None)
    facts: dict[str, Any] = {one.name: row[one.name] for one in fields(LoggedStep)}
    return LoggedStep(**{**facts, "signal": signal if is_hashable else json.dumps(signal)})


def worlds_of(
    turns: Iterable[LoggedTurn], states: Mapping[str, Any], seed: int
) -> tuple[list[World], list[str]]:
    """(worlds, sentences about combinations that gave none). Raises StoreError for an empty log."""
    groups = defaultdict[tuple[str | None, ...], list[LoggedTurn]](list)
    for turn in turns:
        groups[turn.combination].append(turn)
    if not groups:
        raise StoreError("The log holds no rounds yet. Chat for a while, then replay it.")
    found, left_out = list[World](), list[str]()
    for combination, its_turns in groups.items():
        name = ", ".join(part for part in combination if part) or "unnamed"
        costs, source = _costs(its_turns, states)
        if costs is None:
            left_out.append(f"{name}: {source}")
            continue
        found.append(_world(name, its_turns, costs, source, seed))
    return found, left_out


def _world(
    name: str, turns: Sequence[LoggedTurn], costs: Mapping[str, Any], source: str, seed: int
) -> World:
    stretches, starts = _stretches(turns)
    tracks = {
        drafter: _track(drafter, turns, starts, Random(f"{seed}/{drafter}"))
        for drafter in sorted({step.drafter for turn in turns for step in turn.steps} - {OFF})
    }
    temperatures = [turn.temperature for turn in turns if turn.temperature is not None]
    steps = [step for turn in turns for step in turn.steps]
    facts = {
        "costs_from": source,
        "num_logged_rounds": len(steps),
        "logged_tokens_per_second": _rate(steps),
        "num_temperatures": len(set(temperatures)),
    }
    temperature = median(temperatures) if temperatures else 0.0
    return World(name, tracks, stretches, costs, None, temperature, facts)


def _rate(steps: Sequence[LoggedStep]) -> float | None:
    timed = [s for s in steps if s.draft_ms is not None and s.verify_ms is not None]
    ms = sum((s.draft_ms or 0.0) + (s.verify_ms or 0.0) for s in timed)
    return 1000.0 * sum(s.num_output_tokens for s in timed) / ms if ms else None


def _stretches(turns: Sequence[LoggedTurn]) -> tuple[tuple[Stretch, ...], list[int]]:
    """Turns of the text one after another, and where each begins."""
    made, starts, start = list[Stretch](), list[int](), 0
    for turn in turns:
        length = _length(turn)
        context = turn.steps[0].context_length
        starts.append(start)
        if length:
            prompt_length = UNKNOWN_PROMPT if context is None else context + 1
            made.append(Stretch(start, length, prompt_length, turn.workload))
        start += length
    return tuple(made), starts


def _length(turn: LoggedTurn) -> int:
    return sum(step.num_output_tokens for step in turn.steps)


def _rounds(drafter: str, turn: LoggedTurn) -> Iterator[tuple[int, LoggedStep]]:
    """The rounds of one drafter, each with its place in the reply."""
    place = 0
    for step in turn.steps:
        if step.drafter == drafter:
            yield place, step
        place += step.num_output_tokens


def _track(
    drafter: str, turns: Sequence[LoggedTurn], starts: Sequence[int], random: Random
) -> Track:
    known = [_known(drafter, turn, start) for turn, start in zip(turns, starts, strict=True)]
    guesses = [right for each in known for right in each.values()]
    whole = (sum(guesses) + 1.0) / (len(guesses) + 2.0)
    signals, is_right, confidences = list[Hashable](), list[bool](), list[float]()
    kinds = {s.signal for turn in turns for s in turn.steps if s.drafter == drafter}
    for turn, start, its_known in zip(turns, starts, known, strict=True):
        length = _length(turn)
        rates = _rates(its_known, start, length, whole)
        for position, rate in enumerate(rates, start):
            right = its_known.get(position, random.random() < rate)
            is_right.append(right)
            confidences.append(_confidence(random, rate, right))
        only = next(iter(kinds)) if len(kinds) == 1 else None
        signals += [only] * length if only is not None else _signals(drafter, turn, length)
    said = tuple(confidences) if drafter.startswith(("draft_model", "self")) else None
    return Track(tuple(signals), tuple(is_right), said)


def _known(drafter: str, turn: LoggedTurn, start: int) -> Known:
    """The guesses of one drafter in one turn that the log decides."""
    known = Known()
    for place, step in _rounds(drafter, turn):
        position, accepted = start + place, step.num_accepted_tokens
        known |= dict.fromkeys(range(position, position + accepted), True)
        # A round cut short by the end of the turn does not show the token after it.
        is_whole = step.num_output_tokens == accepted + 1
        if is_whole and accepted < step.num_draft_tokens:
            known[position + accepted] = False
    return known


def _rates(known: Known, start: int, length: int, whole: float) -> list[float]:
    """At each position the share of right guesses nearby; weights fall with the distance."""
    tried, right = [WHOLE_WEIGHT] * length, [WHOLE_WEIGHT * whole] * length
    for places in (range(length), range(length - 1, -1, -1)):
        weight = weighted = 0.0
        for place in places:
            weight, weighted = weight * FADE, weighted * FADE
            tried[place] += weight  # without this guess: a confidence does not know its outcome
            right[place] += weighted
            if start + place in known:
                weight += 1.0
                weighted += known[start + place]
    return [r / t for r, t in zip(right, tried, strict=True)]


def _confidence(random: Random, rate: float, is_right: bool) -> float:
    """The confidence of a calibrated drafter in a guess with this outcome."""
    low, high = rate * CONCENTRATION + is_right, (1.0 - rate) * CONCENTRATION + (not is_right)
    return random.betavariate(max(low, 1e-3), max(high, 1e-3))


def _signals(drafter: str, turn: LoggedTurn, length: int) -> list[Hashable]:
    """The signal of the nearest round of this drafter, None too far from any."""
    found: list[Hashable] = [None] * length
    distance = [SIGNAL_REACH + 1] * length
    for here, step in _rounds(drafter, turn):
        for place in range(max(0, here - SIGNAL_REACH), min(length, here + SIGNAL_REACH + 1)):
            if abs(place - here) < distance[place]:
                distance[place] = abs(place - here)
                found[place] = step.signal
    return found


def _costs(
    turns: Sequence[LoggedTurn], states: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, str]:
    """(a snapshot of a cost table or None, where it is from or why there is none)."""
    model, draft = turns[0].model, turns[0].draft
    begins = f"{model} | {draft or NO_DRAFT} | "
    fitting = [state for name, state in states.items() if name.startswith(begins)]
    if len(fitting) == 1:
        try:
            costs = Costs.restored(fitting[0]["costs"])
            if costs.is_measured:
                return costs.snapshot(), "stored calibration"
        except (LookupError, ValueError, TypeError, AttributeError):
            pass  # then the logged rounds are the source
    return _costs_of_rounds([step for turn in turns for step in turn.steps])


def _costs_of_rounds(steps: Sequence[LoggedStep]) -> tuple[Mapping[str, Any] | None, str]:
    by_width = defaultdict[int, list[float]](list)
    by_drafter = defaultdict[str, list[float]](list)
    contexts = [step.context_length for step in steps if step.context_length is not None]
    for step in steps:
        if step.verify_ms is not None:
            by_width[step.num_draft_tokens + 1].append(step.verify_ms)
        if step.num_draft_tokens and step.draft_ms is not None:
            by_drafter[step.drafter].append(step.draft_ms / step.num_draft_tokens)
    widths = {w: median(ms) for w, ms in sorted(by_width.items()) if len(ms) >= MIN_ROUNDS}
    if 1 not in widths or len(widths) < 2:
        return None, (
            "its rounds do not say what plain decoding and checking a draft cost. "
            "Chat with drafter 'off' and with 'auto' for a while."
        )
    costs, context = Costs(), int(median(contexts)) if contexts else UNKNOWN_PROMPT
    for width, verify_ms in _up_to_widest(widths).items():
        costs.set_verify(width, context, verify_ms)
    for drafter, step_ms in by_drafter.items():
        costs.set_draft_step(drafter, context, median(step_ms))
    return costs.snapshot(), "medians of the logged rounds"


def _up_to_widest(widths: Mapping[int, float]) -> dict[int, float]:
    """Extended to the widest width by the slope over all, since wider rounds are not free."""
    made, last = dict(widths), max(widths)
    if last < WIDTHS[-1]:
        slope = max(0.0, widths[last] - widths[1]) / (last - 1)
        made[WIDTHS[-1]] = widths[last] + slope * (WIDTHS[-1] - last)
    return made
