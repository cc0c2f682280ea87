"""What is known of how often draft tokens are accepted.

Contract: there are `Counts` for each drafter and signal at three levels: a temperature bucket, a
kind of text in that bucket, and the turn under way. The estimate of a finer level shrinks to that
of the coarser one; the coarsest shrinks to the position before, to a neighbouring temperature, then
to PRIOR. A second table maps the confidence that a drafter states to the acceptance observed.

A fully accepted draft is censored: positions behind it were not tried and are not counted. The
state is plain data without the turn's counts. Restored counts are worth at most PRIOR_ROUNDS
rounds. Acceptance that ships with the models stands in where nothing was observed here, as a state
that is worth SHIPPED_ROUNDS rounds.

Not here: costs, decisions.
Source: partial pooling, as in any hierarchical model. The weights minimise the log loss of the next
acceptance over the rounds of three drafters on 48 prompts at three temperatures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from localspec.core import decoding
from localspec.core.decoding import SamplingParams

MAX_POSITIONS = 16  # Acceptance is counted for so many positions of a draft.
PRIOR = 0.5  # The acceptance that is believed where nothing was seen.
PRIOR_WEIGHT = 3.0  # The rounds that the prior is worth beside those of a temperature bucket.
KIND_WEIGHT = 6.0  # The rounds that a bucket is worth beside those of one kind of text.
TURN_WEIGHT = 16.0  # The rounds that a kind of text is worth beside those of the turn under way.
OTHER_KINDS = 2.0  # The rounds of evidence that all kinds of text give for one of them, at most.
DISCOUNT = 0.99  # The weight of a round after one more: 0.37 after 100.
TURN_DISCOUNT = 0.98  # The same within a turn, by the rounds of the same drafter: 0.36 after 50.
MOST_FADED = 0.3  # The share of counts that remains after any number of rounds without the drafter.
PRIOR_ROUNDS = 50.0  # Restored counts are worth so many rounds at most.
SHIPPED_ROUNDS = 6.0  # Shipped counts are worth so many: other texts are accepted otherwise.
LENIENT = 10  # The bucket of a lenient turn lies so much further on: exact turns accept less.
TEMPERATURE_BUCKETS = (0.0, 0.3, 0.6, 0.9, 1.2)  # The highest temperature of each bucket.
CONFIDENCE_BINS = 12  # Confidences are counted in so many bins.
BIN_DISCOUNT = 0.995  # The weight of a token in its bin after one more.
ALL_KINDS = ""  # no kind of text was named
THINKING = "thinking"  # the kind of all thoughts, whatever is asked
SUMS = ("num_rounds", "tokens", "drafted", "steps", "silent_steps")  # The sums in Counts.


class Situation(NamedTuple):
    """What acceptance is counted for separately: a temperature bucket (of lenient turns LENIENT
    further on) and a kind of text."""

    bucket: int
    kind: str = ALL_KINDS


def situation_in(sequence: decoding.Sequence, answering: Situation) -> Situation:
    """That of a thought before the answer, else of the answer."""
    return answering._replace(kind=THINKING) if sequence.parts.is_thinking else answering


def temperature_bucket(temperature: float) -> int:
    """Index of the bucket: {0, <=0.3, <=0.6, <=0.9, <=1.2, above}."""
    bounds = enumerate(TEMPERATURE_BUCKETS)
    return next((i for i, bound in bounds if temperature <= bound), len(TEMPERATURE_BUCKETS))


def bucket_of(sampling: SamplingParams) -> int:
    """The bucket of a turn; exact and lenient turns have buckets apart."""
    return temperature_bucket(sampling.temperature) + (LENIENT if sampling.leniency else 0)


def confidence_bin(confidence: float) -> int:
    """Bins are finer towards 1, where drafting decisions are made."""
    return min(CONFIDENCE_BINS - 1, int((confidence**2) * CONFIDENCE_BINS))


def _first_position() -> list[float]:
    return [0.0]


@dataclass(eq=False)
class Counts:
    """Of one drafter, signal and situation, in rounds; each round multiplies what was counted
    before by `discount`.

    tried, accepted: by position, as far as any draft went. tokens: that the rounds gave. drafted,
    steps: tokens drafted and how often the drafter ran for them. silent_steps: how often it ran and
    proposed nothing. last_round: the clock at the last observation."""

    discount: float
    tried: list[float] = field(default_factory=_first_position)
    accepted: list[float] = field(default_factory=_first_position)
    num_rounds: float = 0.0
    tokens: float = 0.0
    drafted: float = 0.0
    steps: float = 0.0
    silent_steps: float = 0.0
    last_round: int = 0

    def observe(
        self, num_tried: int, num_accepted: int, tokens: int, drafted: float, steps: float,
        clock: int,
    ) -> None:  # fmt: skip
        """Count one verified draft: positions up to and including the first rejection were tried.
        Old counts fade by all rounds since, whichever drafter they used, so that a rare try can
        change an estimate."""
        age = clock - self.last_round
        share = self.discount if age <= 1 else self.discount**age
        self._scale(share if share > MOST_FADED else MOST_FADED)
        self.last_round = clock
        self.num_rounds += 1.0
        self.tokens += tokens
        self.drafted += drafted
        if drafted:
            self.steps += steps
        else:
            self.silent_steps += steps
        reached = num_tried if num_tried <= num_accepted else num_accepted + 1
        if reached > MAX_POSITIONS:
            reached = MAX_POSITIONS
        if (missing := reached - len(self.tried)) > 0:
            self.tried += [0.0] * missing
            self.accepted += [0.0] * missing
        for place in range(reached):
            self.tried[place] += 1.0
            if place < num_accepted:
                self.accepted[place] += 1.0

    def cap(self, num_rounds: float) -> None:
        """Scale to at most so many rounds; the rates stay."""
        if self.num_rounds > num_rounds:
            self._scale(num_rounds / self.num_rounds)

    def _scale(self, share: float) -> None:
        self.tried = [value * share for value in self.tried]
        self.accepted = [value * share for value in self.accepted]
        self.num_rounds *= share
        self.tokens *= share
        self.drafted *= share
        self.steps *= share
        self.silent_steps *= share

    def as_row(self) -> dict[str, Any]:
        """Plain data, with every position."""
        rest = [0.0] * (MAX_POSITIONS - len(self.tried))
        positions = {"tried": self.tried + rest, "accepted": self.accepted + rest}
        return {name: getattr(self, name) for name in SUMS} | positions

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Counts:
        """KeyError, ValueError, TypeError for anything but what `as_row` made."""
        tried, accepted = _numbers(row["tried"]), _numbers(row["accepted"])
        if any(a > t for t, a in zip(tried, accepted, strict=True)):
            raise ValueError("more was accepted than tried")
        reached = max(1, [*tried, 0.0].index(0.0))
        found = cls(DISCOUNT, tried[:reached], accepted[:reached])
        for name in SUMS:
            # Version 4 did not count silent steps.
            value = row.get(name, 0.0) if name == "silent_steps" else row[name]
            setattr(found, name, _number(value))
        found.cap(PRIOR_ROUNDS)
        return found


UNKNOWN = Counts(1.0)  # never written to


class Estimate(NamedTuple):
    """Of one drafter's drafts. rates: by position, each given that the ones before were accepted.
    evidence: rounds observed, fewer the longer ago. levels: the counts of each level, the
    coarsest first, and the rounds that the estimate of the coarser one is worth beside them."""

    rates: list[float]
    evidence: float
    levels: list[tuple[Counts, float]]


_Key = tuple[str, str, tuple[int, str]]  # A drafter, a signal, and a situation.


class Acceptance:
    """All counts of one target. discount: the weight of a round after one more; 1 where all rounds
    count alike."""

    def __init__(self, discount: float = DISCOUNT) -> None:
        self._discount = discount
        self._counts: dict[_Key, Counts] = {}
        self._turn: dict[_Key, Counts] = {}
        self._bins: dict[tuple[str, int], list[list[float]]] = {}
        self._clocks: dict[str, int] = defaultdict(int)  # rounds of each kind, and of ALL_KINDS
        self.revisions: dict[str, int] = defaultdict(int)  # drafter -> drafts that were observed

    def expect(self, shipped: Acceptance) -> None:
        """Start from shipped acceptance where nothing was observed here."""
        for key, counts in shipped._counts.items():
            if key not in self._counts and counts.num_rounds > 0.0:
                counts.cap(SHIPPED_ROUNDS)
                self._counts[key] = counts
        for place, cells in shipped._bins.items():
            self._bins.setdefault(place, cells)

    def beside(self) -> Acceptance:
        """The same counts, for a turn that runs beside this one's: those of the turn are apart."""
        found = copy(self)
        found._turn = {}
        return found

    def begin_turn(self) -> None:
        """Reset the counts of the turn."""
        self._turn.clear()

    def tick(self, kind: str = ALL_KINDS, num_rounds: int = 1) -> None:
        """Count rounds of this kind of text, whichever drafter they used."""
        self._clocks[ALL_KINDS] += num_rounds
        if kind != ALL_KINDS:
            self._clocks[kind] += num_rounds

    def observe(
        self,
        drafter: str,
        signal: Hashable,
        situation: Situation,
        num_tried: int,
        num_accepted: int,
        num_nodes: float | None = None,
        num_steps: float | None = None,
    ) -> None:
        """num_tried: the draft's length; of a tree that of the path which was tried. num_nodes:
        tokens drafted with all branches, None: num_tried. num_steps: how often the drafter ran,
        None: once a token."""
        nodes = float(num_tried) if num_nodes is None else num_nodes
        steps = nodes if num_steps is None else num_steps
        tokens = 1 + num_accepted
        self.revisions[drafter] += 1
        name, (bucket, kind) = str(signal), situation
        key: _Key = drafter, name, situation
        turn = self._turn.get(key)
        if turn is None:
            turn = self._turn[key] = Counts(TURN_DISCOUNT)
        # A turn is short: nothing in it is long ago.
        turn.observe(num_tried, num_accepted, tokens, nodes, steps, turn.last_round + 1)
        for level in (ALL_KINDS,) if kind == ALL_KINDS else (ALL_KINDS, kind):
            clock = self._clocks[level]
            key = drafter, name, (bucket, level)
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = Counts(self._discount, last_round=clock)
            counts.observe(num_tried, num_accepted, tokens, nodes, steps, clock)

    def observe_confidences(
        self, drafter: str, bucket: int, confidences: Sequence[float], taken: Sequence[bool | None]
    ) -> None:
        """taken: whether each token was accepted, None where its parent was not."""
        empty = [[0.0, 0.0] for _ in range(CONFIDENCE_BINS)]
        bins = self._bins.setdefault((drafter, bucket), empty)
        for confidence, was_taken in zip(confidences, taken, strict=True):
            if was_taken is not None:
                cell = bins[confidence_bin(confidence)]
                cell[0] = cell[0] * BIN_DISCOUNT + 1.0
                cell[1] = cell[1] * BIN_DISCOUNT + was_taken

    def cap(self, drafter: str, situation: Situation, num_rounds: float) -> None:
        """Let what is known of this drafter there be worth at most so many rounds."""
        for (name, _, place), counts in self._counts.items():
            if name == drafter and place in (situation, (situation.bucket, ALL_KINDS)):
                counts.cap(num_rounds)
        self.revisions[drafter] += 1

    def is_known(self, bucket: int) -> bool:
        """Whether any counts exist for such temperatures."""
        return any(known == bucket for _, _, (known, _) in self._counts)

    def rates(self, drafter: str, signal: Hashable, situation: Situation) -> list[float]:
        """Estimated chance of each position, given that the ones before it were accepted."""
        return self.estimate(drafter, signal, situation).rates

    def estimate(self, drafter: str, signal: Hashable, situation: Situation) -> Estimate:
        """The estimate for such drafts."""
        name, bucket = str(signal), situation.bucket
        base = self._counts.get((drafter, name, (bucket, ALL_KINDS)), UNKNOWN)
        rates, prior = list[float](), PRIOR
        if base.tried[0] < 5.0:
            prior = self._neighbouring_rate(drafter, name, bucket)
        left = self._left_of(base, ALL_KINDS)
        for tried, accepted in zip(base.tried, base.accepted, strict=True):
            prior = (accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)
            rates.append(prior)
        rates += [prior] * (MAX_POSITIONS - len(rates))
        levels, evidence = [(base, PRIOR_WEIGHT)], base.num_rounds * left
        if situation.kind != ALL_KINDS:
            own = self._counts.get((drafter, name, situation), UNKNOWN)
            left = self._left_of(own, situation.kind)
            levels.append((own, KIND_WEIGHT))
            others = OTHER_KINDS * evidence / (evidence + OTHER_KINDS)
            evidence = own.num_rounds * left + others
        turn = self._turn.get((drafter, name, situation))
        if turn is not None:
            levels.append((turn, TURN_WEIGHT))
        for counts, weight in levels[1:]:
            _refine(rates, counts, weight)
        return Estimate(rates, evidence, levels)

    def knows_confidence(self, drafter: str, bucket: int) -> bool:
        """Whether this drafter has stated confidences at this temperature."""
        return (drafter, bucket) in self._bins

    def chance(self, drafter: str, bucket: int, confidence: float) -> float:
        """Estimated acceptance of a token that the drafter states this confidence for."""
        bins = self._bins.get((drafter, bucket))
        tried, accepted = bins[confidence_bin(confidence)] if bins else (0.0, 0.0)
        return (accepted + PRIOR_WEIGHT * confidence) / (tried + PRIOR_WEIGHT)

    def best_known(self) -> dict[str, list[float]]:
        """For each drafter the rates of its signal and temperature with the most evidence, in
        exact turns of all kinds of text."""
        found: dict[str, tuple[float, _Key]] = {}
        for key, counts in self._counts.items():
            drafter, _, (bucket, kind) = key
            is_general = bucket < LENIENT and kind == ALL_KINDS
            if is_general and counts.num_rounds > found.get(drafter, (-1.0, key))[0]:
                found[drafter] = counts.num_rounds, key
        return {
            name: self.rates(name, signal, Situation(*place))
            for name, (_, (_, signal, place)) in found.items()
        }

    def _left_of(self, counts: Counts, kind: str) -> float:
        """The share of these counts that is left after the rounds that passed since."""
        return float(self._discount ** max(0, self._clocks[kind] - counts.last_round))

    def _neighbouring_rate(self, drafter: str, signal: str, bucket: int) -> float:
        """First-position rate of the nearest temperature that was seen, else PRIOR."""
        for near in (bucket - 1, bucket + 1, bucket - 2, bucket + 2):
            counts = self._counts.get((drafter, signal, (near, ALL_KINDS)))
            if counts is not None and counts.tried[0] >= 5.0:
                return counts.accepted[0] / counts.tried[0]
        return PRIOR

    def snapshot(self) -> dict[str, Any]:
        """Plain JSON data."""
        records = [
            {
                "drafter": drafter,
                "signal": signal,
                "bucket": bucket,
                "kind": kind,
                **counts.as_row(),
            }
            for (drafter, signal, (bucket, kind)), counts in self._counts.items()
        ]
        bins = [
            {"drafter": drafter, "bucket": bucket, "cells": cells}
            for (drafter, bucket), cells in self._bins.items()
        ]
        return {"records": records, "confidence": bins}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Acceptance:
        """The state of a snapshot as a prior. KeyError, ValueError, TypeError for anything else."""
        found = cls()
        for row in state["records"]:
            situation = Situation(int(row["bucket"]), str(row["kind"]))
            key = str(row["drafter"]), str(row["signal"]), situation
            found._counts[key] = Counts.from_row(row)
        for row in state["confidence"]:
            cells = [_capped_cell(_number(t), _number(a)) for t, a in row["cells"]]
            if len(cells) != CONFIDENCE_BINS:
                raise ValueError("the confidence table has another size")
            found._bins[(str(row["drafter"]), int(row["bucket"]))] = cells
        return found


def _refine(rates: list[float], counts: Counts, weight: float) -> None:
    """Move the rates, which are worth `weight` rounds, towards the counts of a finer level."""
    for place, tried in enumerate(counts.tried):
        rates[place] = (counts.accepted[place] + weight * rates[place]) / (tried + weight)


def _capped_cell(tried: float, accepted: float) -> list[float]:
    share = min(1.0, PRIOR_ROUNDS / tried) if tried else 1.0
    return [tried * share, accepted * share]


def _numbers(values: Sequence[Any]) -> list[float]:
    if len(values) != MAX_POSITIONS:
        raise ValueError("the acceptance record has another size")
    return [_number(value) for value in values]


def _number(value: Any) -> float:
    found = float(value)
    if not 0.0 <= found < float("inf"):
        raise ValueError(f"{value} is no count")
    return found
