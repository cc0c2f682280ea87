"""What a comparison runs on, and one engine arm over one prompt.

Contract: every run starts from empty caches, target's and drafters' alike, so no arm inherits
what the one before it read. Decode time is wall time around the whole decode loop: planning,
drafting, verification, learning and bookkeeping, with prefill apart. Nothing is read from the
system between two rounds: memory and energy are asked for before and after.

Not here: transformers' own loop (reference), host time (measures), order and repetition (suite).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from localspec.backend import DrafterStatus, TurnStats
from localspec.bench.gauges import MemoryGauge
from localspec.core import DraftPlan, Policy, Round, SamplingParams
from localspec.core import Sequence as Turn
from localspec.engine.acceptance import Acceptance
from localspec.engine.controller import Controller
from localspec.engine.costs import Costs
from localspec.engine.engine import Engine


def unknown_energy() -> float | None:
    """The reading of a machine without an energy counter."""
    return None


@dataclass(frozen=True)
class Stage:
    """One loaded target with its drafters. render: a person's message to prompt ids.
    controller: costs and whatever was learnt before; arms learn in copies of it.
    target_folder, draft_folder: where the weights lie, for engines that load them themselves.
    joules: energy the GPU has used so far, None where nothing counts it."""

    engine: Engine
    controller: Controller
    render: Callable[[str], Sequence[int]]
    end_ids: frozenset[int]
    statuses: tuple[DrafterStatus, ...]
    context_length: int
    precision: str
    machine: Mapping[str, Any]
    target_folder: Path | None = None
    draft_folder: Path | None = None
    joules: Callable[[], float | None] = unknown_energy


@dataclass(frozen=True)
class Case:
    """One prompt, ready to run. seed: the same for every arm. workload: the kind of text that the
    app would take it for."""

    id: str
    task: str
    prompt: tuple[int, ...]
    seed: int
    workload: str = ""

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=self.seed)


@dataclass(frozen=True)
class Run:
    """One arm over one prompt; what an arm cannot know is None.

    tokens: the output. decided: the same with the end-of-text token where the model wrote one.
    prefill_ms: the prompt, until the first token can be decoded. ttft_ms: from the request to the
    first output token. token_times_ms: arrival of each output token since the start of decoding;
    tokens of one round arrive together. host_ms: host time outside the forwards, over all rounds.
    accepted_lengths: draft tokens accepted, of each round that drafted. draft_ms,
    drafted_verify_ms: what those rounds took for drafting, and for all else.
    """

    tokens: tuple[int, ...]
    decided: tuple[int, ...]
    decode_ms: float | None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prefill_ms: float | None = None
    num_prompt_tokens: int | None = None
    ttft_ms: float | None = None
    token_times_ms: tuple[float, ...] = ()
    host_ms: float | None = None
    num_rounds: int | None = None
    peak_memory_bytes: int | None = None
    energy_joules: float | None = None
    accepted_lengths: tuple[int, ...] = ()
    draft_ms: float | None = None
    drafted_verify_ms: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        if not self.decode_ms or not self.tokens:
            return None
        return 1000.0 * len(self.tokens) / self.decode_ms


def own_controller(stage: Stage) -> Controller:
    """A controller that starts from the stage's state and learns apart from all others."""
    drafters, elsewhere = stage.engine.drafters, stage.controller.elsewhere
    controller = Controller(drafters, Costs(), Acceptance(), Costs(), elsewhere)
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


@dataclass(frozen=True)
class Begun:
    """A turn whose prompt was read, ready to decode."""

    turn: Turn
    policy: Policy
    prefill_ms: float


def begin(
    stage: Stage,
    controller: Controller,
    drafter: str,
    num_draft_tokens: int | None,
    case: Case,
    sampling: SamplingParams,
    max_tokens: int,
) -> Begun:
    """Empty the caches and read the prompt, target and drafters alike."""
    engine = stage.engine
    forget(engine, case.prompt)
    turn = engine.start(case.prompt, sampling, max_tokens, stage.end_ids)
    started = perf_counter()
    never = threading.Event()
    engine.prefill(turn, never)
    policy = controller.policy(sampling, drafter, num_draft_tokens, kind=case.workload)
    engine.prepare(turn, policy, never)
    return Begun(turn, policy, 1000.0 * (perf_counter() - started))


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
    memory = MemoryGauge()
    begun = begin(stage, controller, drafter, num_draft_tokens, case, sampling, max_tokens)
    joules_before = stage.joules()
    rounds, ends_ms = list[Round](), list[float]()
    started = perf_counter()
    for found in stage.engine.decode(begun.turn, begun.policy, threading.Event()):
        ends_ms.append(1000.0 * (perf_counter() - started))
        rounds.append(found)
    decode_ms = 1000.0 * (perf_counter() - started)
    joules = _difference(joules_before, stage.joules())
    stats = TurnStats(num_prompt_tokens=len(case.prompt))
    for found in rounds:
        stats = stats.plus(found.step)
    drafted = [found.step for found in rounds if found.step.num_draft_tokens]
    arrivals = tuple(end for found, end in zip(rounds, ends_ms, strict=True) for _ in found.tokens)
    return Run(
        tokens=tuple(token for found in rounds for token in found.tokens),
        decided=tuple(begun.turn.tokens[begun.turn.prompt_length :]),
        decode_ms=decode_ms,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        prefill_ms=begun.prefill_ms,
        num_prompt_tokens=len(case.prompt),
        ttft_ms=begun.prefill_ms + arrivals[0] if arrivals else None,
        token_times_ms=arrivals,
        num_rounds=len(rounds),
        peak_memory_bytes=memory.peak_bytes(),
        energy_joules=joules,
        accepted_lengths=tuple(step.num_accepted_tokens for step in drafted),
        draft_ms=sum(step.draft_ms for step in drafted),
        drafted_verify_ms=sum(step.verify_ms for step in drafted),
    )


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
