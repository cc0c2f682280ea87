"""Sampled text of every registered drafter is distributed as the target's own.

Every course that chance can take through a round is played (tests.engine.enumeration), so the
distribution of the first two tokens is computed and compared with the target's. With the real
random source a few drafters are compared by chi-squared. Faults are planted and must be seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from statistics import NormalDist

import pytest
import torch

from localspec import core
from localspec.core import DraftPlan, Growth, Proposal, SamplingParams, chain
from localspec.engine import engine as engine_module
from localspec.engine.distributions import DenseRow
from localspec.engine.engine import Engine
from localspec.forward.cache import KVCache, KVShape
from tests.drafters.stages import (
    FAULT,
    NAMES,
    ROUNDING,
    SMALL_PROMPT,
    SMALL_VOCAB,
    WARPS,
    Guesser,
    OnePlan,
    Sampled,
    sampled,
    small_logits,
    small_module,
    small_target,
)
from tests.tiny import (
    CPU,
    Context,
    TableModel,
    with_cache,
)

NUM_TURNS = 1000
SIGNIFICANCE = 1e-5
QUICK_WARPS = ("plain", "all")
OTHER_WARPS = tuple(warp for warp in WARPS if warp not in QUICK_WARPS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "warp", [*QUICK_WARPS, *(pytest.param(w, marks=pytest.mark.slow) for w in OTHER_WARPS)]
)
def test_sampled_text_is_distributed_as_the_targets_own(
    name: str, warp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sampled(name, warp).error(monkeypatch) < ROUNDING


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_that_ends_by_its_confidences_and_prices_is_as_exact(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = Growth(lambda confidence: confidence, (0.05,) * 4, 0.1)
    found = sampled(name, "plain", keep_drafting=lambda index, c: c > 0.5, growth=growth)
    assert found.error(monkeypatch) < ROUNDING


# -- sampled: with the real random source -------------------------------------------------------


def table_of(row_after: Callable[[Context], torch.Tensor]) -> torch.Tensor:
    """Chance of each of the first three tokens together, [V, V, V]."""
    table = torch.zeros(SMALL_VOCAB, SMALL_VOCAB, SMALL_VOCAB, dtype=torch.float64)
    first = row_after(()).double()
    for a, b in product(range(SMALL_VOCAB), repeat=2):
        table[a, b] = first[a] * row_after((a,))[b].double() * row_after((a, b)).double()
    return table


def sampled_counts(found: Sampled, num_turns: int = NUM_TURNS) -> torch.Tensor:
    """How often each of the first three tokens came together; all turns go on with one source."""
    rng, counts = torch.Generator().manual_seed(100), torch.zeros(SMALL_VOCAB**3)
    for _ in range(num_turns):
        sequence = core.Sequence(SMALL_PROMPT, found.sampling, 3, frozenset(), rng)
        found.engine.prefill(sequence, threading.Event())
        for _ in found.engine.decode(sequence, OnePlan(found.plan), threading.Event()):
            pass
        a, b, c = sequence.tokens[len(SMALL_PROMPT) :]
        counts[(a * SMALL_VOCAB + b) * SMALL_VOCAB + c] += 1
    return counts


def chance_of(counts: torch.Tensor, table: torch.Tensor) -> float:
    """p-value of chi-squared; cells expected fewer than 5 times are put together.

    By the Wilson-Hilferty normal approximation, good to some percent from 3 degrees on.
    """
    expected = table.flatten() * counts.sum()
    impossible = expected < 1e-9
    if float(counts[impossible].sum()) > 0:
        return 0.0
    rare = expected < 5.0
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
    filled = wanted > 0.5
    statistic = float(((observed - wanted)[filled] ** 2 / wanted[filled]).sum())
    degrees = int(filled.sum()) - 1
    assert degrees >= 5, "too few kinds of text for a test"
    spread = 2.0 / (9.0 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1.0 - spread)) / spread**0.5
    return 1.0 - NormalDist().cdf(z)


@pytest.mark.parametrize(
    "name",
    ["draft_model", *(pytest.param(n, marks=pytest.mark.slow) for n in ("draft_tree", "ngram"))],
)
def test_turns_drawn_by_the_real_source_are_distributed_as_the_targets_own(name: str) -> None:
    """Seed 100, N = 1000: chi-squared of the first three tokens."""
    found = sampled(name, "plain")
    assert chance_of(sampled_counts(found), table_of(found.row_after)) > SIGNIFICANCE


def test_fault_one_number_for_draft_and_verification_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Enumeration takes them for independent, so the real source has to show it."""
    found = sampled("draft_model", "plain")
    drafter = found.engine.drafters["draft_model"]
    propose = drafter.propose

    def rewinding(sequence: core.Sequence, plan: DraftPlan) -> Proposal:
        state = sequence.rng.get_state()
        proposal = propose(sequence, plan)
        sequence.rng.set_state(state)
        return proposal

    monkeypatch.setattr(drafter, "propose", rewinding)
    assert chance_of(sampled_counts(found), table_of(found.row_after)) < SIGNIFICANCE


# -- planted faults: each check above must be able to fail ------------------------------------


@pytest.mark.parametrize("name", ["ngram", "draft_tree", "eagle"])
def test_fault_no_residual_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseRow, "without", lambda row, token, drawn_from: row)
    assert sampled(name, "plain").error(monkeypatch) > FAULT


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fault_dropping_an_unlikely_drawn_token_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sampled(name, "plain")
    drafter = found.engine.drafters[name]
    propose, num_trimmed = drafter.propose, [0]

    def trimmed(sequence: core.Sequence, plan: DraftPlan) -> Proposal:
        whole = propose(sequence, plan)
        if whole.probs is None or float(whole.probs[-1][whole.tokens[-1]]) > 0.4:
            return whole
        num_trimmed[0] += 1
        tokens, parents, probs = whole.tokens[:-1], whole.parents[:-1], whole.probs[:-1]
        return Proposal(tokens, parents, probs, cannot_branch=whole.cannot_branch)

    monkeypatch.setattr(drafter, "propose", trimmed)
    assert (found.error(monkeypatch) > FAULT) == bool(num_trimmed[0])


def test_fault_argmax_draft_with_a_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = small_logits()[1]

    class Claiming(Guesser):
        def propose(self, sequence: core.Sequence, plan: DraftPlan) -> Proposal:
            row = logits(tuple(sequence.tokens)).softmax(-1)
            return chain((int(row.argmax()),), row[None])

    engine, plan = Engine(small_target(), {"guesser": Claiming()}), DraftPlan("guesser", 1)
    found = Sampled(engine, plan, WARPS["plain"], small_logits()[0])
    assert found.error(monkeypatch) > FAULT


def test_fault_penalty_without_the_drafted_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fresh(Guesser):
        """Drafts a token that is in no history yet, twice, so that its penalty is new."""

        def propose(self, sequence: core.Sequence, plan: DraftPlan) -> Proposal:
            return chain((5, 5)[: plan.num_draft_tokens])

    def insistent(context: Context) -> torch.Tensor:
        return torch.tensor([2.0] * (SMALL_VOCAB - 1) + [4.0])

    target = TableModel(insistent, SMALL_VOCAB, capacity=32)
    engine, plan = Engine(target, {"guesser": Fresh()}), DraftPlan("guesser", 2)
    found = Sampled(engine, plan, SamplingParams(1.0, repetition_penalty=4.0), insistent)
    assert found.error(monkeypatch) < ROUNDING
    monkeypatch.setattr(
        engine_module,
        "_histories",
        lambda sequence, proposal: [sequence.tokens] * (1 + len(proposal.tokens)),
    )
    assert found.error(monkeypatch) > FAULT


def test_remembered_target_equals_the_real_one() -> None:
    """The remembered target gives the very rows of the real one."""
    model = with_cache(small_module(), capacity=32)
    table = TableModel(
        small_logits()[0], SMALL_VOCAB, cache=KVCache(KVShape(1, 1, 1, 32), torch.float32, CPU)
    )
    assert torch.allclose(model.forward(SMALL_PROMPT), table.forward(SMALL_PROMPT), atol=1e-5)
    parents = [-1, 0, 0]
    assert torch.allclose(
        model.forward([3, 4, 5], parents), table.forward([3, 4, 5], parents), atol=1e-5
    )
