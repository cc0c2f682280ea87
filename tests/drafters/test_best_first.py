"""Draft trees grown best-first: what is taken, what is gone on from, and when to stop."""

from __future__ import annotations

from localspec.core import DraftPlan, Growth
from localspec.drafters.best_first import ROOT, BestFirst


def test_a_tree_that_cannot_pay_for_the_jump_is_not_proposed() -> None:
    def proposed(fixed_price: float) -> int:
        growth = Growth(lambda c: c, (0.05,) * 8, 0.0, fixed_price)
        tree = BestFirst(DraftPlan("test", 8, growth=growth))
        tree.add(-1, (5, 6), (0.6, 0.2))
        tree.add(0, (7,), (0.5,))
        return len(tree.proposal(2).tokens)

    assert proposed(0.0) == proposed(0.9) == 3, "0.6 + 0.2 + 0.3 of a token, for 0.15 and the jump"
    assert proposed(1.0) == 0


def test_no_step_is_taken_where_even_a_chain_of_such_tokens_would_not_pay() -> None:
    def wanted(fixed_price: float) -> list[int]:
        growth = Growth(lambda c: c, (0.05,) * 8, 0.0, fixed_price)
        tree = BestFirst(DraftPlan("test", 8, growth=growth))
        tree.add(-1, (5,), (0.6,))
        return tree.frontier(2)

    assert wanted(1.4) == [0] and wanted(1.5) == []


def plan(limit: int, prices: tuple[float, ...] | None = None, step_price: float = 0.0) -> DraftPlan:
    growth = None if prices is None else Growth(lambda c: c, prices, step_price)
    return DraftPlan("test", limit, growth=growth)


def forked(one: DraftPlan) -> BestFirst:
    """Root with children 0.6 and 0.3, the first with 0.5 and 0.4 below it: 0.3 and 0.24."""
    tree = BestFirst(one)
    tree.add(ROOT, [10, 11], [0.6, 0.3])
    tree.add(0, [12, 13], [0.5, 0.4])
    return tree


def test_the_best_nodes_are_taken_parents_before_children() -> None:
    proposal = forked(plan(3)).proposal(2)
    assert proposal.tokens == (10, 11, 12)
    assert proposal.parents == (-1, -1, 0)
    assert proposal.confidences == (0.6, 0.3, 0.5), "a node's own confidence, not its path's"
    assert proposal.num_steps == 2


def test_a_certain_child_never_stands_before_its_parent() -> None:
    tree = BestFirst(plan(2))
    tree.add(ROOT, [1, 2], [0.5, 0.4])
    tree.add(0, [3], [1.0])
    assert tree.proposal(2).tokens == (1, 3)


def test_chances_are_the_estimated_ones_and_never_above_one() -> None:
    tree = BestFirst(DraftPlan("test", 2, growth=Growth(lambda c: 3.0 * c, (0.0,) * 2, 0.0)))
    tree.add(ROOT, [1], [0.5])
    tree.add(0, [2], [0.9])
    assert tree.proposal(1).tokens == (1, 2)


def test_a_node_not_worth_its_place_ends_the_tree() -> None:
    assert forked(plan(4, (0.1, 0.1, 0.29, 0.3))).proposal(2).tokens == (10, 11, 12)
    assert forked(plan(4, (0.1, 0.35, 0.0, 0.0))).proposal(2).tokens == (10,)
    assert forked(plan(4, (0.7, 0.0, 0.0, 0.0))).proposal(2).tokens == ()


def test_only_nodes_that_would_be_taken_are_gone_on_from() -> None:
    tree = BestFirst(plan(2))
    tree.add(ROOT, [1, 2, 3], [0.5, 0.3, 0.2])
    assert tree.frontier(8) == [0], "node 1 is the worst taken: none of its children could enter"
    tree = BestFirst(plan(8))
    tree.add(ROOT, [1, 2, 3], [0.5, 0.3, 0.2])
    assert tree.frontier(8) == [0, 1, 2]
    assert tree.frontier(2) == [0, 1]


def test_a_step_runs_while_what_it_may_bring_exceeds_its_price() -> None:
    def frontier(step_price: float) -> list[int]:
        tree = BestFirst(plan(8, (0.0,) * 8, step_price))
        tree.add(ROOT, [1], [0.5])  # a step brought 0.5 of 1, the next may bring 0.5 of 0.5
        return tree.frontier(8)

    assert frontier(0.24) == [0]
    assert frontier(0.26) == []


def test_a_path_leads_from_the_roots_child_to_the_node() -> None:
    assert forked(plan(4)).path(3) == [0, 3]
