"""What has been learnt about how often draft tokens are accepted.

Contract: a `Record` for each (drafter, signal, temperature bucket) holds discounted counts of
tries and acceptances by position, given that all earlier positions were accepted. A fully
accepted draft is censored: positions beyond it were not tried and are not counted. A second
table maps the drafter's own confidence to the observed acceptance. Estimates shrink to a prior:
the position before, the neighbouring temperature, then PRIOR. State is plain data, and a
restored state counts for at most PRIOR_ROUNDS rounds.

Not here: costs, decisions.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_POSITIONS = 16
DISCOUNT = 0.98  # a round's weight after 50 more rounds: 0.36
PRIOR = 0.5
PRIOR_WEIGHT = 3.0
PRIOR_ROUNDS = 20.0
MAX_FADE = 60  # rounds of absence after which a record fades no further: 0.3 of it is left
LENIENT = 10  # added to a lenient turn's bucket: what it accepts says nothing of an exact one
TEMPERATURE_BUCKETS = (0.0, 0.3, 0.6, 0.9, 1.2)
CONFIDENCE_BINS = 12


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


@dataclass
class Record:
    """Discounted counts of one (drafter, signal, bucket).

    tokens, ms: what its rounds gave, and what they cost by the cost table; as sums, so that
    their ratio is a rate. drafted, steps: tokens it drafted and how often it ran for them.
    last_round: the clock at its last observation.
    """

    tried: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    num_rounds: float = 0.0
    tokens: float = 0.0
    ms: float = 0.0
    drafted: float = 0.0
    steps: float = 0.0
    last_round: int = 0

    def observe(
        self, num_drafted: int, num_accepted: int, num_used: int, round_ms: float, clock: int
    ) -> None:
        """One verified draft: positions up to and including the first rejection were tried.

        What was learnt long ago fades by the rounds that passed since, whoever drafted them, so
        that a rare look at a drafter can change its picture.
        """
        fade = DISCOUNT ** min(MAX_FADE, max(1, clock - self.last_round))
        self.last_round = clock
        self.num_rounds = self.num_rounds * fade + 1.0
        self.tokens = self.tokens * fade + 1.0 + min(num_used, num_accepted)
        self.ms = self.ms * fade + round_ms
        self.drafted *= fade
        self.steps *= fade
        for i in range(MAX_POSITIONS):
            self.tried[i] *= fade
            self.accepted[i] *= fade
        for i in range(min(num_drafted, num_accepted + 1, MAX_POSITIONS)):
            self.tried[i] += 1.0
            self.accepted[i] += 1.0 if i < num_accepted else 0.0

    def capped(self) -> Record:
        """The same rates, worth at most PRIOR_ROUNDS rounds."""
        share = min(1.0, PRIOR_ROUNDS / self.num_rounds) if self.num_rounds else 1.0
        return Record(
            [value * share for value in self.tried],
            [value * share for value in self.accepted],
            self.num_rounds * share,
            self.tokens * share,
            self.ms * share,
            self.drafted * share,
            self.steps * share,
        )


class Acceptance:
    """All records of one target."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str, int], Record] = {}
        self._bins: dict[tuple[str, int], list[list[float]]] = {}
        self._clock = 0
        self._versions: dict[str, int] = {}

    def version(self, drafter: str) -> int:
        """Changes whenever something new was learnt of this drafter, at whatever temperature."""
        return self._versions.get(drafter, 0)

    def tick(self) -> None:
        """One more round was decoded, whoever drafted it."""
        self._clock += 1

    def observe(
        self,
        drafter: str,
        signal: Hashable,
        bucket: int,
        num_drafted: int,
        num_accepted: int,
        round_ms: float,
        num_used: int | None = None,
        num_nodes: int | None = None,
        num_steps: int = 0,
    ) -> None:
        """num_drafted: the draft's length; of a tree that of the path which was tried. round_ms:
        what such a round costs by the cost table. num_used: how many of the drafted tokens it
        would really have verified, for a guess scored in passing; None: all. num_nodes: tokens
        drafted with all branches, None: num_drafted. num_steps: how often the drafter ran."""
        record = self._records.setdefault(
            (drafter, str(signal), bucket), Record(last_round=self._clock)
        )
        used = num_drafted if num_used is None else num_used
        self._versions[drafter] = self.version(drafter) + 1
        record.observe(num_drafted, num_accepted, used, round_ms, self._clock)
        record.drafted += num_drafted if num_nodes is None else num_nodes
        record.steps += num_steps

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
        own = [record for key, record in self._records.items() if key[0] == drafter]
        drafted = sum(record.drafted for record in own)
        return sum(record.steps for record in own) / drafted if drafted > 0.0 else None

    def realised(self, drafter: str, signal: Hashable, bucket: int) -> tuple[float, float]:
        """(tokens, ms) of its own rounds, discounted; 0, 0 before the first."""
        record = self._records.get((drafter, str(signal), bucket))
        return (0.0, 0.0) if record is None else (record.tokens, record.ms)

    def num_rounds(self, drafter: str, signal: Hashable, bucket: int) -> float:
        record = self._records.get((drafter, str(signal), bucket))
        return 0.0 if record is None else record.num_rounds

    def evidence(self, drafter: str, signal: Hashable, bucket: int) -> float:
        """Its rounds, worth less and less by those that passed since: what may have changed."""
        record = self._records.get((drafter, str(signal), bucket))
        if record is None:
            return 0.0
        return float(record.num_rounds * DISCOUNT ** max(0, self._clock - record.last_round))

    def rates(self, drafter: str, signal: Hashable, bucket: int) -> list[float]:
        """Estimated chance of each position, given that the ones before it were accepted."""
        record = self._records.get((drafter, str(signal), bucket))
        found, prior = list[float](), self._prior(drafter, str(signal), bucket)
        for i in range(MAX_POSITIONS):
            tried = record.tried[i] if record else 0.0
            accepted = record.accepted[i] if record else 0.0
            prior = (accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)
            found.append(prior)
        return found

    def knows_confidence(self, drafter: str, bucket: int) -> bool:
        """Whether this drafter has ever said how sure it was at this temperature."""
        return (drafter, bucket) in self._bins

    def best_known(self) -> dict[str, list[float]]:
        """For each drafter the rates of its signal and temperature with the most evidence, in
        exact turns."""
        found: dict[str, tuple[str, str, int]] = {}
        for key, record in self._records.items():
            if key[2] >= LENIENT:
                continue
            best = found.get(key[0])
            if best is None or record.num_rounds > self._records[best].num_rounds:
                found[key[0]] = key
        return {drafter: self.rates(*key) for drafter, key in found.items()}

    def chance(self, drafter: str, bucket: int, confidence: float) -> float:
        """Estimated acceptance of a token the drafter is this confident of."""
        bins = self._bins.get((drafter, bucket))
        tried, accepted = bins[confidence_bin(confidence)] if bins else (0.0, 0.0)
        return (accepted + PRIOR_WEIGHT * confidence) / (tried + PRIOR_WEIGHT)

    def _prior(self, drafter: str, signal: str, bucket: int) -> float:
        """First-position rate of the nearest temperature that was seen, else PRIOR."""
        for distance in (1, 2):
            for near in (bucket - distance, bucket + distance):
                record = self._records.get((drafter, signal, near))
                if record is not None and record.tried[0] >= 5.0:
                    return record.accepted[0] / record.tried[0]
        return PRIOR

    def snapshot(self) -> dict[str, Any]:
        records = [
            {
                "drafter": drafter,
                "signal": signal,
                "bucket": bucket,
                "tried": record.tried,
                "accepted": record.accepted,
                "num_rounds": record.num_rounds,
                "tokens": record.tokens,
                "ms": record.ms,
                "drafted": record.drafted,
                "steps": record.steps,
            }
            for (drafter, signal, bucket), record in self._records.items()
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
            record = Record(
                _numbers(row["tried"]),
                _numbers(row["accepted"]),
                _number(row["num_rounds"]),
                _number(row["tokens"]),
                _number(row["ms"]),
                _number(row["drafted"]),
                _number(row["steps"]),
            )
            if any(a > t for t, a in zip(record.tried, record.accepted, strict=True)):
                raise ValueError("more was accepted than tried")
            key = (str(row["drafter"]), str(row["signal"]), int(row["bucket"]))
            found._records[key] = record.capped()
        for row in state["confidence"]:
            cells = [_capped_cell(_number(t), _number(a)) for t, a in row["cells"]]
            if len(cells) != CONFIDENCE_BINS:
                raise ValueError("the confidence table has another size")
            found._bins[(str(row["drafter"]), int(row["bucket"]))] = cells
        return found


def _numbers(values: Sequence[Any]) -> list[float]:
    if len(values) != MAX_POSITIONS:
        raise ValueError("the acceptance record has another size")
    return [_number(value) for value in values]


def _number(value: Any) -> float:
    found = float(value)
    if not 0.0 <= found < float("inf"):
        raise ValueError(f"{value} is no count")
    return found


def _capped_cell(tried: float, accepted: float) -> list[float]:
    share = min(1.0, PRIOR_ROUNDS / tried) if tried else 1.0
    return [tried * share, accepted * share]


def _empty_bins() -> list[list[float]]:
    return [[0.0, 0.0] for _ in range(CONFIDENCE_BINS)]
