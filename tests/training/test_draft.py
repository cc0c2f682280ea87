"""A draft's held-out figure is what a greedy draft would really have had accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localspec.training.draft import DraftRecipe, fresh_draft
from localspec.training.rows import TokenRow
from localspec.training.target import Target
from tests.kit.tiny import tiny_llama


def greedy(module: object, tokens: list[int], count: int) -> list[int]:
    """So many tokens after `tokens`, nothing cached."""
    said = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            said.append(int(module(torch.tensor([said])).logits[0, -1].argmax()))  # type: ignore
    return said[len(tokens) :]


@pytest.mark.slow
def test_acceptance_by_position_is_that_of_drafts_made_one_after_another(
    loaded_target: Target,
) -> None:
    draft = tiny_llama(1, num_layers=1, vocab_size=420)
    draft.model.load_state_dict(loaded_target.module.model.state_dict(), strict=False)
    draft.lm_head.load_state_dict(loaded_target.module.lm_head.state_dict())
    recipe = DraftRecipe(draft, loaded_target)
    prompt = [5, 9, 13, 44, 200]
    text = [*prompt, *greedy(loaded_target.module, prompt, 24)]
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * 24, dtype=np.float32)
    rows = [TokenRow(np.array(text, dtype=np.int32), weights)]
    with torch.no_grad():
        found = recipe.acceptance(loaded_target.teacher(), loaded_target.taught(rows, ()))
    sums = [[0.0, 0.0] for _ in range(8)]
    for start in range(len(prompt), len(text)):
        room = min(8, len(text) - start)
        drafted = greedy(draft, text[:start], room)
        for i in range(room):
            sums[i][1] += 1.0
            if drafted[i] != text[start + i]:
                break
            sums[i][0] += 1.0
    assert 0.2 < sums[0][0] / sums[0][1] < 1.0, "some are accepted and some are not"
    assert found == [pytest.approx(tuple(each)) for each in sums]


def test_where_the_text_leaves_the_target_s_own_way_nothing_later_counts(
    loaded_target: Target,
) -> None:
    recipe = DraftRecipe(tiny_llama(1, num_layers=1, vocab_size=420), loaded_target)
    recipe.module = loaded_target.module  # agrees everywhere
    tokens = torch.randint(4, 400, (1, 30), generator=torch.Generator().manual_seed(2))
    row = TokenRow(tokens[0].numpy().astype(np.int32), np.ones(29, dtype=np.float32))
    with torch.no_grad():
        found = recipe.acceptance(loaded_target.teacher(), loaded_target.taught([row], ()))
    assert found[0] == (29.0, 29.0)
    assert sum(tried for _, tried in found[1:]) < 3.0, "random text is never what both would say"


def test_a_draft_that_is_the_target_has_no_loss_and_is_always_accepted(
    loaded_target: Target,
) -> None:
    draft = fresh_draft(loaded_target, {}, 1)
    recipe = DraftRecipe(draft, loaded_target)
    recipe.module = loaded_target.module
    prompt = [5, 9, 13]
    text = [*prompt, *greedy(loaded_target.module, prompt, 12)]
    row = TokenRow(np.array(text, dtype=np.int32), np.ones(len(text) - 1, dtype=np.float32))
    with torch.no_grad():
        batch = loaded_target.taught([row], ())
        assert float(recipe.loss(loaded_target.teacher(), batch)) == pytest.approx(0.0, abs=1e-5)
        found = recipe.acceptance(loaded_target.teacher(), batch)
    assert all(accepted == tried for accepted, tried in found)


def test_a_fresh_draft_begins_with_the_target_s_embedding_and_head(loaded_target: Target) -> None:
    draft = fresh_draft(loaded_target, {"layers": 2}, 1)
    embedding = loaded_target.module.get_input_embeddings().weight
    head = loaded_target.module.get_output_embeddings().weight
    assert torch.equal(draft.get_input_embeddings().weight, embedding)
    assert torch.equal(draft.get_output_embeddings().weight, head)
    assert draft.config.num_hidden_layers == 2
