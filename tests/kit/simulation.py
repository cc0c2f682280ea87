"""Coins instead of models: drafters of a known acceptance, played in a made-up world."""

from __future__ import annotations

import random
from typing import Any

from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import MAX_DRAFT_TOKENS, WIDTHS, Costs
from localspec.controller.policy import policy_of
from localspec.core.decoding import (
    AUTO,
    DraftPlan,
    Outcome,
    Proposal,
    SamplingParams,
    Sequence,
    Step,
    chain,
)
from tests.worlds.play import RIGHT, WRONG, Game
from tests.worlds.world import World as CostWorld

PLAIN_MS = 10.0
WIDTH_MS = 0.2  # each further token of a round's forward
TURN = 400  # tokens of a turn


def verify_ms(num_draft_tokens: int) -> float:
    return PLAIN_MS + WIDTH_MS * num_draft_tokens


class Simulated:
    """Each draft token is right with chance `rate`, given that those before it were."""

    memory_bytes = 0
    shapes_itself = False
    block_length = None

    def __init__(self, step_ms: float, rate: float) -> None:
        self.name = "simulated"
        self.step_ms = step_ms
        self.rate = rate
        self.is_silent = False
        self.confidence: float | None = None
        self.random = random.Random(0)

    def signal(self, sequence: Sequence) -> str | None:
        return None if self.is_silent else "s"

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        tokens, is_right = list[int](), True
        while len(tokens) < plan.num_draft_tokens:
            is_right = is_right and self.random.random() < self.rate
            tokens.append(RIGHT if is_right else WRONG)
            may_stop = plan.keep_drafting is not None and self.confidence is not None
            if may_stop and not plan.keep_drafting(len(tokens) - 1, self.confidence):  # type: ignore
                break
        said = None if self.confidence is None else (self.confidence,) * len(tokens)
        return chain(tuple(tokens), confidences=said)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        pass


class World:
    """Rounds of simulated drafters under a real controller; their rates may change between runs."""

    def __init__(
        self,
        drafters: dict[str, Simulated],
        seed: int = 1,
        is_measured: bool = True,
        noise: float = 0.0,
    ) -> None:
        self.kind = ""  # of the text of the turns to come
        costs = Costs()
        for width in WIDTHS:
            costs.set_verify(width, 0, verify_ms(width - 1))
        for name, drafter in drafters.items():
            costs.set_draft_step(name, 0, drafter.step_ms)
            drafter.random = random.Random(f"{seed}/{name}")
        named: dict[str, Any] = dict(drafters)
        world = CostWorld("simulated", {}, (), costs.snapshot())
        self.game = Game(world, named, random.Random(seed), jitter=noise)
        self.controller = Controller(named, costs if is_measured else Costs(), Acceptance())

    @property
    def steps(self) -> list[Step]:
        return self.game.steps

    @property
    def reasons(self) -> list[str]:
        return self.game.reasons

    def run(
        self,
        num_rounds: int,
        sampling: SamplingParams,
        requested: str = AUTO,
        length: int | None = None,
    ) -> None:
        left = num_rounds
        while left > 0:
            rng: Any = None
            sequence = Sequence((1, 2), sampling, 10**9, frozenset(), rng)
            policy = policy_of(self.controller, sampling, requested, length, kind=self.kind)
            while left > 0 and len(sequence.tokens) < TURN:
                left -= 1
                self.game.round(sequence, policy)

    def share(self, drafter: str, last: int | None = None) -> float:
        """Share of the rounds (the last ones) that this drafter drafted."""
        steps = self.steps[-last:] if last else self.steps
        return sum(step.drafter == drafter for step in steps) / len(steps)

    def rate(self, since: int = 0) -> float:
        """Tokens per ms from round `since` on."""
        steps = self.steps[since:]
        return sum(s.num_output_tokens for s in steps) / sum(s.round_ms for s in steps)


def best_fixed_rate(drafters: dict[str, Simulated]) -> float:
    """Tokens per ms of the best drafter at its best fixed length, or of plain decoding."""
    rates = [1.0 / PLAIN_MS]
    for drafter in drafters.values():
        for length in range(1, MAX_DRAFT_TOKENS + 1):
            tokens = sum(drafter.rate**i for i in range(length + 1))
            rates.append(tokens / (verify_ms(length) + length * drafter.step_ms))
    return max(rates)
