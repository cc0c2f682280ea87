"""What has been learnt about how often draft tokens are accepted.

Contract: there is a `Record` for each (drafter, signal) at three levels: in one temperature
bucket; there in one kind of text; and in the turn under way. The finer one's estimates shrink to
those of the one before, so that a kind never met starts from all kinds and a turn from its kind;
the first shrink to the position before, the neighbouring temperature, then PRIOR. A second table
maps the drafter's own confidence to the observed acceptance. State is plain data (turns are not in
it), and a restored state counts for at most PRIOR_ROUNDS rounds. What another machine learnt of
the same models stands in where nothing was learnt here, priced anew and for ELSEWHERE_ROUNDS.

Not here: costs, decisions, the counts themselves (records).
Source: partial pooling as in any hierarchical model; the weights were chosen by the log loss of
the next acceptance over three drafters' rounds on 48 prompts at three temperatures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from localspec.engine.acceptance_counts import PRIOR_ROUNDS, Record, number

PRIOR = 0.5
PRIOR_WEIGHT = 3.0  # rounds that a prior counts for: of a temperature,
KIND_WEIGHT = 6.0  # of all kinds of text beside one,
TURN_WEIGHT = 16.0  # and of a kind beside the turn
DISCOUNT = 0.99  # a round's weight after 100 more: 0.37,
TURN_DISCOUNT = 0.98  # and in the turn under way after 50 more of the same drafter: 0.36
ELSEWHERE_ROUNDS = 25.0  # that what was learnt on another machine counts for
LENIENT = 10  # added to a lenient turn's bucket: what it accepts says nothing of an exact one
TEMPERATURE_BUCKETS = (0.0, 0.3, 0.6, 0.9, 1.2)
CONFIDENCE_BINS = 12
ALL_KINDS = ""  # no kind of text was named


# Drafter, temperature bucket, tokens drafted and steps of a round -> ms; None: not measured here.
RoundMs = Callable[[str, int, float, float], float | None]


class Situation(NamedTuple):
    """What is learnt apart: turns of one temperature bucket (lenient ones LENIENT further on), and
    of one kind of text."""

    bucket: int
    kind: str = ALL_KINDS


def temperature_bucket(temperature: float) -> int:
    """Index of the bucket: {0, <=0.3, <=0.6, <=0.9, <=1.2, above}."""
    bounds = enumerate(TEMPERATURE_BUCKETS)
    return next((i for i, bound in bounds if temperature <= bound), len(TEMPERATURE_BUCKETS))


def confidence_bin(confidence: float) -> int:
    """Bins are finer towards 1, where drafting decisions are made."""
    return min(CONFIDENCE_BINS - 1, int((confidence**2) * CONFIDENCE_BINS))


def expected_tokens(rates: list[float], length: int) -> float:
    """E(γ): the bonus token and every draft token's chance to survive."""
    expected, survival = 1.0, 1.0
    for rate in rates[:length]:
        survival *= rate
        expected += survival
    return expected


class _Key(NamedTuple):
    drafter: str
    signal: str
    situation: Situation


class Acceptance:
    """All records of one target."""

    def __init__(self) -> None:
        self._records: dict[_Key, Record] = {}
        self._turn: dict[_Key, Record] = {}
        self._bins: dict[tuple[str, int], list[list[float]]] = {}
        self._clocks: dict[str, int] = defaultdict(int)  # rounds of each kind, and of ALL_KINDS
        self._earlier: dict[str, float] = {}  # rounds of each kind in earlier runs
        self._versions: dict[tuple[str, str], int] = {}
        self.revision = 0  # changes whenever anything is learnt

    def version(self, drafter: str, signal: Hashable) -> int:
        """Changes whenever something new was learnt of these drafts, in whatever situation."""
        return self._versions.get((drafter, str(signal)), 0)

    def _touch(self, drafter: str, signal: str) -> None:
        self.revision += 1
        self._versions[drafter, signal] = self.revision

    def expect(self, elsewhere: Acceptance, round_ms: RoundMs) -> None:
        """Start from what another machine learnt, where nothing was learnt here. The records of
        `elsewhere` become our own. round_ms: what such rounds cost here."""
        for key, record in elsewhere._records.items():
            if key in self._records or record.num_rounds == 0.0:
                continue
            drafted, steps = record.drafted / record.num_rounds, record.steps / record.num_rounds
            cost_ms = round_ms(key.drafter, key.situation.bucket, drafted, steps)
            if cost_ms is not None:
                record.cap(ELSEWHERE_ROUNDS)
                record.ms = record.num_rounds * cost_ms
                self._records[key] = record
                self._touch(key.drafter, key.signal)
        for place, cells in elsewhere._bins.items():
            self._bins.setdefault(place, cells)

    def begin_turn(self) -> None:
        """What comes may be unlike what was."""
        for key in self._turn:
            self._touch(key.drafter, key.signal)
        self._turn.clear()

    def tick(self, kind: str = ALL_KINDS) -> None:
        """One more round was decoded, whoever drafted it."""
        for each in {kind, ALL_KINDS}:
            self._clocks[each] += 1

    def observe(
        self,
        drafter: str,
        signal: Hashable,
        situation: Situation,
        num_drafted: int,
        num_accepted: int,
        round_ms: float,
        num_used: int | None = None,
        num_nodes: int | None = None,
        num_steps: int | None = None,
    ) -> None:
        """num_drafted: the draft's length; of a tree that of the path which was tried. round_ms:
        what such a round costs by the cost table. num_used: how many of the drafted tokens it
        would really have verified, for a guess scored in passing; None: all. num_nodes: tokens
        drafted with all branches, None: num_drafted. num_steps: how often the drafter ran, None:
        once a token."""
        self._touch(drafter, str(signal))
        used = num_drafted if num_used is None else num_used
        nodes = num_drafted if num_nodes is None else num_nodes
        for record, clock in self._to_write(drafter, str(signal), situation):
            record.observe(num_drafted, num_accepted, used, round_ms, clock)
            record.drafted += nodes
            record.steps += nodes if num_steps is None else num_steps

    def _to_write(
        self, drafter: str, signal: str, situation: Situation
    ) -> list[tuple[Record, int]]:
        """The records of all levels, made where there are none, each with its clock."""
        turn = self._turn.setdefault(_Key(drafter, signal, situation), Record(TURN_DISCOUNT))
        found = [(turn, turn.last_round + 1)]  # a turn is short: nothing in it is long ago
        for each in {Situation(situation.bucket), situation}:
            clock = self._clocks[each.kind]
            key = _Key(drafter, signal, each)
            found.append((self._records.setdefault(key, Record(DISCOUNT, last_round=clock)), clock))
        return found

    def observe_confidences(
        self, drafter: str, bucket: int, confidences: Sequence[float], taken: Sequence[bool | None]
    ) -> None:
        """taken: whether each token was accepted, None where its parent was not."""
        bins = self._bins.setdefault((drafter, bucket), _empty_bins())
        for confidence, was_taken in zip(confidences, taken, strict=True):
            if was_taken is None:
                continue
            cell = bins[confidence_bin(confidence)]
            cell[0] = cell[0] * 0.995 + 1.0
            cell[1] = cell[1] * 0.995 + (1.0 if was_taken else 0.0)

    def steps_a_token(self, drafter: str) -> float | None:
        """How often a drafter ran for each token it drafted; None before the first."""
        own = [
            record
            for key, record in self._records.items()
            if key.drafter == drafter and key.situation.kind == ALL_KINDS
        ]
        drafted = sum(record.drafted for record in own)
        return sum(record.steps for record in own) / drafted if drafted > 0.0 else None

    def rate(
        self,
        drafter: str,
        signal: Hashable,
        situation: Situation,
        expected_tokens: float,
        round_ms: float,
    ) -> float:
        """Tokens per ms of its own rounds; where they are few, of what is expected of one."""
        rate = expected_tokens / round_ms
        for record, weight in self._levels(drafter, str(signal), situation):
            if record.num_rounds > 0.0:  # rounds of another level may have been longer
                prior_ms = weight * record.ms / record.num_rounds
                rate = (record.tokens + prior_ms * rate) / (record.ms + prior_ms)
        return rate

    def is_known(self, situation: Situation) -> bool:
        """Whether anything was learnt there."""
        return any(key.situation == situation for key in self._records)

    def num_seen(self, kind: str) -> float:
        """Rounds of this kind of text that were ever decoded on this machine."""
        return self._clocks[kind] + self._earlier.get(kind, 0.0)

    def num_rounds(self, drafter: str, signal: Hashable, situation: Situation) -> float:
        """Rounds that were learnt from in this situation, turns before this one included."""
        record = self._records.get(_Key(drafter, str(signal), situation))
        return 0.0 if record is None else record.num_rounds

    def evidence(self, drafter: str, signal: Hashable, situation: Situation) -> float:
        """Its rounds, worth less and less by those that passed since: what may have changed. What
        is known of all kinds of text counts for KIND_WEIGHT rounds at most."""
        found = self._evidence(drafter, str(signal), situation)
        if situation.kind == ALL_KINDS:
            return found
        base = self._evidence(drafter, str(signal), Situation(situation.bucket))
        return found + KIND_WEIGHT * base / (base + KIND_WEIGHT)

    def _evidence(self, drafter: str, signal: str, situation: Situation) -> float:
        record = self._records.get(_Key(drafter, signal, situation))
        if record is None:
            return 0.0
        age = max(0, self._clocks[situation.kind] - record.last_round)
        return float(record.num_rounds * DISCOUNT**age)

    def rates(self, drafter: str, signal: Hashable, situation: Situation) -> list[float]:
        """Estimated chance of each position, given that the ones before it were accepted."""
        name = str(signal)
        (base, _), *finer = self._levels(drafter, name, situation)
        found, prior = list[float](), self._prior(drafter, name, situation.bucket)
        for tried, accepted in zip(base.tried, base.accepted, strict=True):
            if tried > 0.0:
                prior = (accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)
            found.append(prior)
        for record, weight in finer:
            for place, tried in enumerate(record.tried):
                if tried == 0.0:  # nor was anything behind it
                    break
                above = weight * found[place]
                found[place] = (record.accepted[place] + above) / (tried + weight)
        return found

    def _levels(
        self, drafter: str, signal: str, situation: Situation
    ) -> list[tuple[Record, float]]:
        """What is known at each level, with the weight of what the one before says of it."""
        base = self._records.get(_Key(drafter, signal, Situation(situation.bucket)), UNKNOWN)
        found = [(base, PRIOR_WEIGHT)]
        if situation.kind != ALL_KINDS:
            own = self._records.get(_Key(drafter, signal, situation), UNKNOWN)
            found.append((own, KIND_WEIGHT))
        turn = self._turn.get(_Key(drafter, signal, situation))
        return found if turn is None else [*found, (turn, TURN_WEIGHT)]

    def knows_confidence(self, drafter: str, bucket: int) -> bool:
        """Whether this drafter has ever said how sure it was at this temperature."""
        return (drafter, bucket) in self._bins

    def best_known(self) -> dict[str, list[float]]:
        """For each drafter the rates of its signal and temperature with the most evidence, in
        exact turns of all kinds of text."""
        found: dict[str, _Key] = {}
        for key, record in self._records.items():
            if key.situation.bucket >= LENIENT or key.situation.kind != ALL_KINDS:
                continue
            best = found.get(key.drafter)
            if best is None or record.num_rounds > self._records[best].num_rounds:
                found[key.drafter] = key
        return {name: self.rates(name, key.signal, key.situation) for name, key in found.items()}

    def chance(self, drafter: str, bucket: int, confidence: float) -> float:
        """Estimated acceptance of a token the drafter is this confident of."""
        bins = self._bins.get((drafter, bucket))
        tried, accepted = bins[confidence_bin(confidence)] if bins else (0.0, 0.0)
        return (accepted + PRIOR_WEIGHT * confidence) / (tried + PRIOR_WEIGHT)

    def _prior(self, drafter: str, signal: str, bucket: int) -> float:
        """First-position rate of the nearest temperature that was seen, else PRIOR."""
        for distance in (1, 2):
            for near in (bucket - distance, bucket + distance):
                record = self._records.get(_Key(drafter, signal, Situation(near)))
                if record is not None and record.tried[0] >= 5.0:
                    return record.accepted[0] / record.tried[0]
        return PRIOR

    def snapshot(self) -> dict[str, Any]:
        records = [
            {
                "drafter": key.drafter,
                "signal": key.signal,
                "bucket": key.situation.bucket,
                "kind": key.situation.kind,
                **record.as_row(),
            }
            for key, record in self._records.items()
        ]
        bins = [
            {"drafter": drafter, "bucket": bucket, "cells": cells}
            for (drafter, bucket), cells in self._bins.items()
        ]
        seen = {kind: self.num_seen(kind) for kind in {*self._clocks, *self._earlier}}
        return {"records": records, "confidence": bins, "rounds": seen}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Acceptance:
        """The state of a snapshot as a prior. KeyError, ValueError, TypeError for anything else."""
        found = cls()
        for row in state["records"]:
            situation = Situation(int(row["bucket"]), str(row["kind"]))
            key = _Key(str(row["drafter"]), str(row["signal"]), situation)
            found._records[key] = Record.from_row(DISCOUNT, row)
        for row in state["confidence"]:
            cells = [_capped_cell(number(t), number(a)) for t, a in row["cells"]]
            if len(cells) != CONFIDENCE_BINS:
                raise ValueError("the confidence table has another size")
            found._bins[(str(row["drafter"]), int(row["bucket"]))] = cells
        found._earlier = {str(kind): number(seen) for kind, seen in state.get("rounds", {}).items()}
        return found


UNKNOWN = Record(1.0)  # never written to


def _capped_cell(tried: float, accepted: float) -> list[float]:
    share = min(1.0, PRIOR_ROUNDS / tried) if tried else 1.0
    return [tried * share, accepted * share]


def _empty_bins() -> list[list[float]]:
    return [[0.0, 0.0] for _ in range(CONFIDENCE_BINS)]
