"""The drafting model: whose rows it hands over, how it catches up, which ids it may name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from localspec.core import DraftPlan, SamplingParams, Sequence
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.drafting import autoregress
from localspec.drafters.parts import Parts
from localspec.engine.sampling import distributions
from localspec.errors import ModelError
from tests.tiny import TableModel, remembered, tiny_llama, with_cache

PROMPT = (5, 9, 12, 30, 7)


def sequence_of(sampling: SamplingParams, *tokens: int) -> Sequence:
    rng = torch.Generator().manual_seed(2)
    return Sequence(tokens or PROMPT, sampling, 50, frozenset(), rng)


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
    assert proposal.probs is None and proposal.is_chain


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1.0),
        SamplingParams(0.7, top_k=5, repetition_penalty=1.5),
        SamplingParams(1.3, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_rows_are_those_the_tokens_were_drawn_from(sampling: SamplingParams) -> None:
    """Warped like the target's, with the drafted tokens in the penalty's history."""
    module = tiny_llama()
    proposal = drafter_of(module).propose(sequence_of(sampling), DraftPlan("d", 5))
    assert proposal.probs is not None and proposal.confidences is not None
    logits, text = remembered(module), list(PROMPT)
    for token, row, confidence in zip(
        proposal.tokens, proposal.probs, proposal.confidences, strict=True
    ):
        wanted = distributions(logits(tuple(text))[None], sampling, [text])[0]
        assert torch.allclose(row, wanted, atol=1e-5)
        assert confidence == pytest.approx(float(wanted.max()), abs=1e-5)
        assert float(row[token]) > 0.0
        text.append(token)


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
    """Ids beyond the target's are never drafted; rows have the target's width."""

    def logits(context: tuple[int, ...]) -> torch.Tensor:
        row = torch.zeros(draft_size)
        row[-1] = 3.0
        return row

    sampling = SamplingParams(temperature)
    sequence, model = sequence_of(sampling), TableModel(logits, draft_size)
    proposal = autoregress(model, sequence, DraftPlan("d", 20), 64)
    assert max(proposal.tokens) < min(64, draft_size)
    if temperature:
        assert proposal.probs is not None and proposal.probs.shape == (20, 64)
        assert float(proposal.probs[:, draft_size:].sum()) == 0.0


def test_nothing_planned_is_nothing_proposed() -> None:
    proposal = drafter_of().propose(sequence_of(SamplingParams(1.0)), DraftPlan("d", 0))
    assert proposal.tokens == () and proposal.probs is None


def test_without_a_draft_the_reason_is_the_one_given() -> None:
    with pytest.raises(ModelError, match="too large by half"):
        parts = Parts(with_cache(tiny_llama()), None, "too large by half.")
        DraftModelDrafter.build(parts)


def test_memory_is_weights_and_cache() -> None:
    drafter = drafter_of()
    held = sum(p.numel() * 4 for p in tiny_llama().parameters())
    assert drafter.memory_bytes >= held + drafter.model.cache.kv_bytes
