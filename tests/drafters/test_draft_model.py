"""The drafting model: what it chooses, how it catches up, which ids it may name."""

from __future__ import annotations

import tracemalloc
from sys import getsizeof
from typing import Any

import pytest
import torch

from localspec.core.decoding import DraftPlan, SamplingParams, Sequence
from localspec.core.errors import ModelError
from localspec.core.prefix import common_prefix_length
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.drafting import Drafting, autoregress
from localspec.drafters.parts import Parts
from localspec.engine.batch import drafted_alone
from tests.drafters.stages import assert_chosen
from tests.kit.tiny import TableModel, remembered, tiny_llama, turn_of, with_cache

PROMPT = (5, 9, 12, 30, 7)


def sequence_of(sampling: SamplingParams, *tokens: int) -> Sequence:
    return turn_of(tokens or PROMPT, sampling)


def drafter_of(module: Any = None) -> DraftModelDrafter:
    return DraftModelDrafter(with_cache(module or tiny_llama()), 64)


def greedy(module: Any, tokens: list[int], count: int) -> list[int]:
    text = list(tokens)
    for _ in range(count):
        with torch.no_grad():
            text.append(int(module(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(tokens) :]


def test_greedy_drafts_are_the_drafts_own_text() -> None:
    module = tiny_llama()
    proposal = drafter_of(module).propose(sequence_of(SamplingParams()), DraftPlan("d", 6))
    assert list(proposal.tokens) == greedy(module, list(PROMPT), 6)
    assert proposal.is_chain


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1.0),
        SamplingParams(0.7, top_k=5, repetition_penalty=1.5),
        SamplingParams(1.3, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_a_token_is_what_the_target_would_choose_by_the_drafts_logits(
    sampling: SamplingParams,
) -> None:
    """With the same warps, noise and penalty, the drafted tokens in its history."""
    module = tiny_llama()
    sequence = sequence_of(sampling)
    proposal = drafter_of(module).propose(sequence, DraftPlan("d", 5))
    assert_chosen(proposal, sequence, remembered(module))


def test_it_catches_up_with_whatever_was_accepted() -> None:
    module, text = tiny_llama(), list(PROMPT)
    drafter = drafter_of(module)
    for accepted in (0, 1, 3, 0):
        proposal = drafter.propose(sequence_of(SamplingParams(), *text), DraftPlan("d", 4))
        assert list(proposal.tokens) == greedy(module, text, 4)
        text += [*proposal.tokens[:accepted], 33]
    text += list(range(20))  # a long absence is prefilled
    proposal = drafter.propose(sequence_of(SamplingParams(), *text), DraftPlan("d", 4))
    assert list(proposal.tokens) == greedy(module, text, 4)


def test_a_draft_step_runs_only_what_is_new() -> None:
    model = TableModel(lambda context: torch.zeros(64), 64)
    drafter = DraftModelDrafter(model, 64)
    sequence = sequence_of(SamplingParams())
    drafter.propose(sequence, DraftPlan("d", 4))
    assert model.num_forwards == 4 and model.cache.length == len(PROMPT) + 3
    sequence.append([33])
    drafter.propose(sequence, DraftPlan("d", 4))
    assert model.num_forwards == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_size", [60, 64, 70])
def test_vocabularies_of_different_size(draft_size: int, temperature: float) -> None:
    """Ids beyond the target's are never drafted."""

    def logits(context: tuple[int, ...]) -> torch.Tensor:
        row = torch.zeros(draft_size)
        row[-1] = 3.0
        return row

    sampling = SamplingParams(temperature)
    sequence, model = sequence_of(sampling), TableModel(logits, draft_size)
    proposal = drafted_alone(autoregress(model, Drafting(sequence, DraftPlan("d", 20), 64)))
    assert max(proposal.tokens) < min(64, draft_size)


def test_nothing_planned_is_nothing_proposed() -> None:
    proposal = drafter_of().propose(sequence_of(SamplingParams(1.0)), DraftPlan("d", 0))
    assert proposal.tokens == ()


def test_without_a_draft_the_reason_is_the_one_given() -> None:
    with pytest.raises(ModelError, match="too large by half"):
        parts = Parts(with_cache(tiny_llama()), None, "too large by half.")
        DraftModelDrafter.build(parts)


def test_memory_is_weights_and_cache() -> None:
    drafter = drafter_of()
    held = sum(p.numel() * 4 for p in tiny_llama().parameters())
    assert drafter.memory_bytes >= held + drafter.model.cache.kv_bytes


def test_what_a_draft_reads_is_told_without_a_copy_of_the_context() -> None:
    draft = Drafting(turn_of((1,) * 100_000), DraftPlan("draft_model", 4), 64)
    draft.add(7, 0.5)
    held = draft.sequence.tokens[:-1]
    tracemalloc.start()
    try:
        assert draft.pending(99_999) == [1, 7] and draft.pending(100_001) == []
        assert tracemalloc.get_traced_memory()[1] < 10_000
        assert common_prefix_length(held, draft.sequence.tokens) == len(held)
        assert tracemalloc.get_traced_memory()[1] < 1.1 * getsizeof(held), "one copy, not two"
    finally:
        tracemalloc.stop()
