"""What a comparison runs on, and one engine arm over one prompt.

Contract: every run starts from empty caches, target's and drafters' alike, so no arm inherits
what the one before it read. Decode time is wall time around the whole decode loop: planning,
drafting, verification, learning and bookkeeping, with prefill apart.

Not here: transformers' own loop (reference), order and repetition (suite).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from localspec.backend import DrafterStatus, TurnStats
from localspec.core import DraftPlan, SamplingParams
from localspec.core import Sequence as Turn
from localspec.engine.acceptance import Acceptance
from localspec.engine.controller import Controller
from localspec.engine.costs import Costs
from localspec.engine.engine import Engine


@dataclass(frozen=True)
class Stage:
    """One loaded target with its drafters. render: a person's message to prompt ids.
    controller: costs and whatever was learnt before; arms learn in copies of it."""

    engine: Engine
    controller: Controller
    render: Callable[[str], Sequence[int]]
    end_ids: frozenset[int]
    statuses: tuple[DrafterStatus, ...]
    context_length: int
    precision: str
    machine: Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One prompt, ready to run. seed: the same for every arm."""

    id: str
    task: str
    prompt: tuple[int, ...]
    seed: int

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=self.seed)


@dataclass(frozen=True)
class Run:
    """One arm over one prompt. tokens: the output. decided: the same with the end-of-text token
    where the model wrote one. decode_ms: None where it cannot be known."""

    tokens: tuple[int, ...]
    decided: tuple[int, ...]
    decode_ms: float | None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        if not self.decode_ms or not self.tokens:
            return None
        return 1000.0 * len(self.tokens) / self.decode_ms


def own_controller(stage: Stage) -> Controller:
    """A controller that starts from the stage's state and learns apart from all others."""
    controller = Controller(stage.engine.drafters, Costs(), Acceptance())
    restored = controller.restore(stage.controller.snapshot())
    assert restored, "a controller must be able to take up its own snapshot"
    return controller


def forget(engine: Engine, prompt: Sequence[int]) -> None:
    """Empty the caches of the target and of every drafter.

    Drafters catch up with whatever sequence they are shown; a made-up one that begins otherwise
    makes them drop all they hold. The target is brought to its root first, as in every round.
    """
    engine.target.cache.rollback(0)
    other = (prompt[0] + 1) % engine.target.vocab_size
    rng = torch.Generator().manual_seed(0)
    for name, drafter in engine.drafters.items():
        turn = Turn((other, other), SamplingParams(), 8, frozenset(), rng)
        engine.prefill(turn, threading.Event())
        drafter.propose(turn, DraftPlan(name, 1))
        engine.target.cache.rollback(0)  # a self-draft writes there


def run_engine(
    stage: Stage,
    controller: Controller,
    drafter: str,
    num_draft_tokens: int | None,
    case: Case,
    sampling: SamplingParams,
    max_tokens: int,
) -> Run:
    """One reply by our engine. Raises what the engine raises."""
    engine, cancel = stage.engine, threading.Event()
    forget(engine, case.prompt)
    turn = engine.start(case.prompt, sampling, max_tokens, stage.end_ids)
    engine.prefill(turn, cancel)
    policy = controller.policy(sampling, drafter, num_draft_tokens)
    engine.prepare(turn, policy)
    started = perf_counter()
    rounds = list(engine.decode(turn, policy, cancel))
    decode_ms = 1000.0 * (perf_counter() - started)
    stats = TurnStats(num_prompt_tokens=len(case.prompt))
    for found in rounds:
        stats = stats.plus(found.step)
    return Run(
        tokens=tuple(token for found in rounds for token in found.tokens),
        decided=tuple(turn.tokens[turn.prompt_length :]),
        decode_ms=decode_ms,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
    )
