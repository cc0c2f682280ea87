"""Trees grown best-first: what is added, what is looked behind, and when to stop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localspec.core.decoding import Growth
from localspec.drafters.tree_growth import ROOT, Ranked, TreeGrowth

LEVELS = (((10, 11), (0.6, 0.3)), ((12, 13), (0.5, 0.4)))  # below the first child 0.3 and 0.24


def growth_of(*prices: float, step: float = 0.0, fixed: float = 0.0) -> Growth:
    return Growth(lambda confidence: confidence, prices, step, fixed)


class Free(Ranked):
    """Children that are free: two below the root, two below the first of them."""

    def __init__(self, depth: int = 0) -> None:
        super().__init__(*(LEVELS[depth] if depth < len(LEVELS) else ((), ())))
        self._depth = depth

    def below(self, token: int) -> Free:
        return Free(self._depth + 1 if token == LEVELS[self._depth][0][0] else len(LEVELS))


class Bounded(Free):
    """The same where the root's children are known to be worth 0.9 at most, until they are asked
    for."""

    def __init__(self) -> None:
        super().__init__()
        self._closer, self.confidence = self.confidence, 0.9
        self.is_resolved = False

    def take(self) -> int | None:
        if self.is_resolved:
            return super().take()
        self.is_resolved, self.confidence = True, self._closer
        return None


def free(growth: Growth, size: int = 8) -> TreeGrowth:
    tree = TreeGrowth(growth, size, Free())
    tree.grow()
    return tree


def test_the_best_nodes_are_added_parents_before_children() -> None:
    proposal = free(growth_of(0.0, 0.0, 0.0), 3).proposal(2)
    assert proposal.tokens == (10, 11, 12)
    assert proposal.parents == (-1, -1, 0)
    assert proposal.confidences == (0.6, 0.3, 0.5), "a node's own confidence, not its path's"
    assert proposal.num_steps == 2


@pytest.mark.parametrize(
    ("prices", "tokens"),
    [
        ((0.1, 0.1, 0.29, 0.3), (10, 11, 12)),
        ((0.1, 0.35, 0.0, 0.0), (10,)),
        ((0.7, 0.0, 0.0, 0.0), ()),
        ((0.0, 0.0), (10, 11)),
    ],
)
def test_a_node_not_worth_its_place_ends_the_tree(
    prices: tuple[float, ...], tokens: tuple[int, ...]
) -> None:
    assert free(growth_of(*prices)).proposal(1).tokens == tokens


def test_found_tokens_that_cannot_pay_for_a_draft_are_not_proposed() -> None:
    def proposed(fixed_price: float) -> int:
        return len(free(growth_of(*[0.05] * 3, fixed=fixed_price)).proposal(1).tokens)

    assert proposed(0.0) == proposed(1.0) == 3, "0.6 + 0.3 + 0.3 of a token, for 0.15 and the rest"
    assert proposed(1.1) == 0


def test_a_token_is_not_added_twice_below_one_parent() -> None:
    tree = free(growth_of(*[0.0] * 8), 2)
    assert tree.add(0, 12, 0.1) == 2 and tree.add(0, 12, 0.5) == 2
    tree.grow(8)
    tokens = tree.proposal(1).tokens
    assert tokens == (10, 11, 12)


def test_a_path_leads_from_the_roots_child_to_the_node() -> None:
    assert free(growth_of(*[0.0] * 4)).path(3) == [0, 3]


@pytest.mark.parametrize("root", [Free, Bounded])
def test_a_growth_of_chains_never_branches(root: type[Free]) -> None:
    prices = growth_of(*[0.0] * 8)
    for growth, parents in ((prices, {-1, 0}), (replace(prices, is_chain=True), {-1, 0})):
        tree = TreeGrowth(growth, 8, root())
        tree.grow()
        proposal = tree.proposal(1)
        assert proposal.is_chain == growth.is_chain and set(proposal.parents) <= parents
    assert proposal.tokens == (10, 12)


def test_children_stand_in_the_order_of_their_chance() -> None:
    ranked = Ranked((1, 2), (0.7, 0.2), lambda confidence: 1.0 - confidence)
    assert ranked.take() == 2 and ranked.confidence == 0.7


def test_a_bound_is_resolved_once_it_is_the_best_candidate() -> None:
    children = Bounded()
    dear, cheap = (TreeGrowth(growth_of(*[p] * 8), 8, children) for p in (0.95, 0.1))
    dear.grow()
    assert not children.is_resolved and not dear.nodes
    cheap.grow()
    assert cheap.proposal(1) == free(growth_of(*[0.1] * 8)).proposal(1)


def test_a_better_child_that_needs_a_step_comes_before_a_worse_sibling() -> None:
    tree = TreeGrowth(growth_of(0.0, 0.0, 0.0, step=0.1), 3)
    tree.open(-1, Ranked((4, 5), (0.8, 0.2)))
    tree.grow()
    assert [node.token for node in tree.nodes] == [4]
    assert tree.wanted() == [0]
    tree.open(0, Ranked((6, 7), (0.3, 0.1)))
    tree.grow()
    assert [(node.token, node.parent) for node in tree.nodes][1:] == [(6, 0), (5, -1)]


def test_a_sibling_comes_first_where_the_next_step_does_not_pay() -> None:
    tree = TreeGrowth(growth_of(0.0, 0.0, 0.0, step=0.7), 3)
    tree.open(-1, Ranked((4, 5), (0.8, 0.2)))
    tree.grow()
    assert [node.token for node in tree.nodes] == [4, 5] and tree.wanted() == []


def test_no_step_is_taken_beyond_the_width() -> None:
    tree = TreeGrowth(growth_of(*[0.0] * 8), 8, max_opened=2)
    tree.open(ROOT, Ranked((1, 2, 3), (0.5, 0.3, 0.2)))
    tree.grow()
    assert tree.wanted() == [0, 1]
