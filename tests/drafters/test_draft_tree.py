"""The draft model's trees: which tokens, what shape, and a cache that stays in order."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from localspec.core.decoding import DraftPlan, Growth, Proposal, SamplingParams, Sequence
from localspec.core.errors import ModelError
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.draft_tree import NUM_CHILDREN, DraftTreeDrafter
from localspec.drafters.drafting import chances
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from tests.kit.tiny import (
    Plans,
    TableModel,
    play,
    remembered,
    tiny_llama,
    turn_of,
    with_cache,
    with_plain_cache,
)
from tests.kit.tracing import TracingPool

PROMPT = (5, 9, 12, 30, 7)
INF = math.inf
WIDE = Growth(lambda confidence: confidence**0.3, (0.0,) * 12, 0.0)  # everything pays
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(1.5),
    SamplingParams(1.5, top_k=5, repetition_penalty=1.5),
    SamplingParams(1.8, top_p=0.9, min_p=0.02),
)


def sequence_of(sampling: SamplingParams, *tokens: int) -> Sequence:
    return turn_of(tokens or PROMPT, sampling)


def drafter_of(module: Any = None, is_captured: bool = False, size: int = 64) -> DraftTreeDrafter:
    """is_captured: as on a device where the host would wait for each step."""
    model = with_cache(module or tiny_llama())
    if not is_captured:
        return DraftTreeDrafter(model, size)
    chunks = ChunkedDraft(model, size, TracingPool(), num_children=NUM_CHILDREN)
    return DraftTreeDrafter(model, size, chunks)


def plan_of(growth: Growth | None = None, size: int = 12) -> DraftPlan:
    return DraftPlan("d", size, growth=growth)


def texts_above(proposal: Proposal) -> list[tuple[int, ...]]:
    """The drafted tokens above each node."""
    return [text[:-1] for text in proposal.texts]


# -- which tokens -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_siblings_are_the_best_few_by_the_drafts_logits_and_the_noise(
    sampling: SamplingParams, is_captured: bool
) -> None:
    module = tiny_llama()
    sequence = sequence_of(sampling)
    proposal = drafter_of(module, is_captured).propose(sequence, plan_of(WIDE))
    assert proposal.confidences is not None
    logits, taken = remembered(module), dict[tuple[int, ...], int]()
    for token, above, confidence in zip(
        proposal.tokens, texts_above(proposal), proposal.confidences, strict=True
    ):
        rank = taken.get(above, 0)
        taken[above] = rank + 1
        row = chances(logits((*PROMPT, *above))[None], 64, sequence, [above])[0]
        assert token == int(row.argsort(descending=True)[rank])
        assert confidence == pytest.approx(float(row[token]), abs=1e-4)
    assert len(proposal.tokens) == 12 and max(taken.values()) > 1
    assert max(map(len, texts_above(proposal))) > 1, "the tree is flat"


# -- what shape -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_siblings_do_not_pay_it_is_a_chain_of_single_steps(temperature: float) -> None:
    """A draft that is sure of each token: one step a token, one row a step."""
    widths = list[int]()

    class Counted(TableModel):
        def forward(self, tokens: Any, *rest: Any, **named: Any) -> torch.Tensor:
            widths.append(len(tokens))
            return super().forward(tokens, *rest, **named)

    model = Counted(lambda text: 6.0 * torch.eye(16)[len(text) % 16], 16)
    sequence = turn_of(PROMPT, SamplingParams(temperature), vocab_size=16)
    proposal = DraftTreeDrafter(model, 16).propose(sequence, plan_of(size=6))
    assert proposal.parents == (-1, 0, 1, 2, 3, 4)
    assert proposal.num_draft_steps == 6
    assert widths == [len(PROMPT), 1, 1, 1, 1, 1]


def test_two_likely_tokens_become_two_branches_looked_behind_in_one_step() -> None:
    def logits(text: tuple[int, ...]) -> torch.Tensor:
        row = torch.full((16,), -9.0)
        if len(text) == len(PROMPT):
            row[[2, 3]] = torch.tensor([0.1, 0.0])
        else:
            row[text[-1] + 2] = 3.0
        return row

    model = TableModel(logits, 16)
    growth = Growth(lambda confidence: confidence, (0.1,) * 4, 0.2)
    proposal = DraftTreeDrafter(model, 16).propose(sequence_of(SamplingParams()), plan_of(growth))
    branches = dict(zip(texts_above(proposal), proposal.tokens, strict=True))
    assert set(proposal.tokens) == {2, 3, 4, 5}
    assert branches[2,] == 4 and branches[3,] == 5
    assert proposal.num_draft_steps == model.num_forwards <= 3


def test_prices_end_the_growth() -> None:
    sequence = sequence_of(SamplingParams())
    flat = Growth(lambda confidence: confidence**0.3, (0.0,) * 8, INF)
    proposal = drafter_of().propose(sequence, plan_of(flat))
    assert proposal.parents == (-1,) * NUM_CHILDREN and proposal.num_draft_steps == 1
    dear = Growth(lambda confidence: confidence**0.3, (0.0, 0.0, INF, INF), 0.0)
    assert len(drafter_of().propose(sequence, plan_of(dear)).tokens) == 2
    nothing = Growth(lambda confidence: 0.5, (0.6,) * 4, 0.0)
    assert drafter_of().propose(sequence, plan_of(nothing)).tokens == ()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_never_more_tokens_than_planned(size: int, temperature: float) -> None:
    for growth in (None, WIDE):
        sequence = sequence_of(SamplingParams(temperature))
        assert 0 < len(drafter_of().propose(sequence, plan_of(growth, size)).tokens) <= size


def test_a_row_of_one_token_has_no_second_sibling() -> None:
    sampling = SamplingParams(1.0, top_k=1)
    proposal = drafter_of().propose(sequence_of(sampling), plan_of(WIDE, 6))
    assert proposal.is_chain and len(proposal.tokens) == 6
    assert proposal.confidences == (1.0,) * 6


# -- its cache --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_afterwards_the_cache_holds_one_path_and_serves_the_next_round(
    temperature: float, is_captured: bool
) -> None:
    """Whatever was accepted, the next tree is that of a drafter that never drafted before."""
    drafter, text = drafter_of(None, is_captured), list(PROMPT)
    for accepted in (0, 1, 2, 5):
        sequence = sequence_of(SamplingParams(temperature), *text)
        found = drafter.propose(sequence, plan_of(WIDE))
        again = sequence_of(SamplingParams(temperature), *text)
        fresh = drafter_of(None, is_captured).propose(again, plan_of(WIDE))
        assert (found.tokens, found.parents) == (fresh.tokens, fresh.parents)
        held = drafter.model.cache.tokens[len(text) :]
        paths = {
            (*above, token) for above, token in zip(texts_above(found), found.tokens, strict=True)
        }
        assert drafter.model.cache.tokens[: len(text)] == text
        # Steps that were made unread may hold more than what was proposed of them.
        assert held == [] or tuple(held[: len(max(paths, key=len))]) in paths
        longest = max(paths, key=len)
        text += [*longest[:accepted], 33]


def test_a_damaged_draft_proposes_nothing() -> None:
    module = tiny_llama()
    with torch.no_grad():
        module.lm_head.weight[3] = float("nan")
    for temperature, is_captured in product((0.0, 1.0), (False, True)):
        sequence = sequence_of(SamplingParams(temperature))
        assert drafter_of(module, is_captured).propose(sequence, plan_of(WIDE)).tokens == ()


def test_a_draft_with_a_shorter_context_stays_within_it() -> None:
    drafter = DraftTreeDrafter(with_cache(tiny_llama(), capacity=8), 64)
    assert len(drafter.propose(sequence_of(SamplingParams()), plan_of(WIDE)).tokens) == 3
    full = sequence_of(SamplingParams(), *range(8))
    assert drafter.signal(full) is None
    assert drafter.propose(full, plan_of(WIDE)) == Proposal()


def test_an_id_that_the_target_does_not_know_is_never_named() -> None:
    """Families pad their vocabularies differently."""
    for temperature, is_captured in product((0.0, 1.5), (False, True)):
        drafter = drafter_of(None, is_captured, 20)
        sequence = turn_of(PROMPT, SamplingParams(temperature), vocab_size=20)
        proposal = drafter.propose(sequence, plan_of(WIDE))
        assert proposal.tokens and max(proposal.tokens) < 20


def test_without_a_draft_model_the_reason_is_passed_on() -> None:
    with pytest.raises(ModelError, match="none fits"):
        DraftTreeDrafter.build(Parts(with_cache(tiny_llama()), None, "none fits."))


def test_a_target_on_a_processor_is_sent_a_chain() -> None:
    """Its attention runs once for each leaf; on a device without blocks of keys a tree is sent."""
    for make, is_chain in ((with_cache, True), (with_plain_cache, False)):
        target, draft = make(tiny_llama()), make(tiny_llama(seed=3))
        drafter = DraftTreeDrafter.build(Parts(target, draft))
        policy = Plans(("draft_tree", 12))
        play(Engine(target, {"draft_tree": drafter}), (5, 9, 12, 5, 9), policy, 12)
        shapes = {proposal.is_chain for proposal in policy.proposals if len(proposal.tokens) > 1}
        assert shapes == {True} if is_chain else False in shapes
