"""A parents list says who sees whom."""

from __future__ import annotations

import random

import pytest
import torch

from localspec.forward.tree import additive_mask, children, depths, tree_mask, visible_mask
from tests.kit.tiny import CPU


def ancestors(parents: list[int], node: int) -> set[int]:
    found = {node}
    while parents[node] >= 0:
        node = parents[node]
        found.add(node)
    return found


def random_parents(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(-1, node) for node in range(size)]


def test_each_token_sees_the_cache_itself_and_its_ancestors() -> None:
    rng = random.Random(1)
    for _ in range(50):
        parents, start = random_parents(rng, rng.randrange(1, 9)), rng.randrange(5)
        mask = tree_mask(parents, start, CPU)
        assert mask.shape == (1, 1, len(parents), start + len(parents))
        for node in range(len(parents)):
            seen = {int(i) for i in mask[0, 0, node].nonzero()}
            wanted = set(range(start)) | {start + a for a in ancestors(parents, node)}
            assert seen == wanted


def test_depth_is_the_number_of_ancestors() -> None:
    rng = random.Random(2)
    parents = random_parents(rng, 12)
    assert depths(parents) == [len(ancestors(parents, node)) - 1 for node in range(12)]


def test_mask_of_a_chain_is_the_causal_one() -> None:
    for size, start in ((2, 3), (5, 1), (4, 7)):
        causal = visible_mask(size, None, start, CPU)
        assert torch.equal(causal, tree_mask(range(-1, size - 1), start, CPU))


@pytest.mark.parametrize("parents", [None, (-1, 0, 0, 1, 2, 2, -1)], ids=["chain", "tree"])
@pytest.mark.parametrize("start", [0, 3, 11])
def test_in_a_window_a_token_sees_no_position_further_back(
    parents: tuple[int, ...] | None, start: int
) -> None:
    size, window = 7, 4
    places = range(size) if parents is None else depths(parents)
    whole = visible_mask(size, parents, start, CPU)[0, 0]
    mask = additive_mask(size, parents, start, torch.float32, CPU, window)
    assert mask is not None
    held = [*range(start), *(start + place for place in places)]
    for node, place in enumerate(places):
        for column, at in enumerate(held):
            is_seen = bool(whole[node, column]) and start + place - at < window
            assert (float(mask[0, 0, node, column]) == 0.0) is is_seen


def test_attention_needs_no_mask_for_one_token_that_sees_all() -> None:
    assert additive_mask(1, None, 9, torch.float32, CPU) is None
    assert additive_mask(1, None, 9, torch.float32, CPU, 10) is None
    assert additive_mask(1, None, 9, torch.float32, CPU, 9) is not None


def test_children_keep_the_order_of_the_proposal() -> None:
    assert children((-1, 0, -1, 0, 2)) == {-1: [0, 2], 0: [1, 3], 2: [4]}
