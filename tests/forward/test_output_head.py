"""An output head of some tokens: what it says of the others."""

from __future__ import annotations

from dataclasses import replace

import torch

from localspec.forward.output_head import DraftVocabulary, OutputHead
from localspec.weights.dense import dense_linear
from localspec.weights.int8 import RoundedRowsLinear

NUM_TOKENS = 128
ROWS = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))


def whole() -> OutputHead:
    weight = torch.randn(NUM_TOKENS, 64, generator=torch.Generator().manual_seed(0))
    return OutputHead(dense_linear(weight, None), NUM_TOKENS, scale=0.5, cap=3.0)


def test_an_unknown_token_has_no_chance_under_a_cap_either() -> None:
    """A cap bounds what is known; it would lift no chance at all to a small one."""
    ids = torch.arange(0, NUM_TOKENS, 2)
    part = DraftVocabulary(ids.tolist()).narrowed(whole(), ROWS.device)
    assert torch.equal(part(ROWS)[:, ids], whole()(ROWS)[:, ids])
    assert bool(part(ROWS)[:, ids + 1].isneginf().all())
    assert float(part(ROWS)[:, ids].abs().max()) <= 3.0


def test_the_part_that_authors_chose_stays() -> None:
    ids = torch.arange(64)
    published = replace(whole(), layer=whole().layer.of_outputs(ids), ids=ids)
    vocabulary = DraftVocabulary(range(64, 128))
    assert vocabulary.narrowed(published, ROWS.device) is published
    assert vocabulary.note(published) == "chooses among 64 of 128 tokens"


def test_a_smaller_vocabulary_is_given_whole_blocks_of_its_own_tokens() -> None:
    vocabulary = DraftVocabulary((*range(1, 100), 500))
    part = vocabulary.narrowed(whole(), ROWS.device)
    assert part.ids is not None and part.ids.tolist() == list(range(1, 65))


def test_a_layer_that_gives_no_rows_away_stays_whole_and_says_so() -> None:
    weight = torch.randn(NUM_TOKENS, 64, generator=torch.Generator().manual_seed(0))
    head = OutputHead(RoundedRowsLinear(weight, None), NUM_TOKENS)
    vocabulary = DraftVocabulary(range(64))
    assert vocabulary.narrowed(head, ROWS.device) is head
    assert "all tokens: The format of the output head gives no rows" in vocabulary.note(head)
    assert DraftVocabulary().note(head) == ""
