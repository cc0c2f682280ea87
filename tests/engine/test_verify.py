"""The walk down a draft: as far as the target's choices go, in chains and trees."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from localspec.core.decoding import Proposal, Verdict, chain
from localspec.core.errors import NumericsError
from localspec.engine import verify as module
from localspec.engine.verify import verify

V = 3
TREE = Proposal((0, 1, 2, 0, 1), (-1, -1, 0, 1, 1))


def random_trees(count: int) -> Iterator[tuple[Proposal, list[int]]]:
    """Proposals of all shapes, twins among siblings included, and the target's choices."""
    rng = random.Random(11)
    for _ in range(count):
        size = rng.randrange(8)
        parents = tuple(rng.randrange(-1, node) if node else -1 for node in range(size))
        tokens = tuple(rng.randrange(V) for _ in range(size))
        yield Proposal(tokens, parents), [rng.randrange(V) for _ in range(size + 1)]


def test_a_verdict_follows_the_choices_and_ends_where_no_child_is_one() -> None:
    lengths = set()
    for proposal, choices in random_trees(2000):
        verdict = verify(proposal, choices)
        node = -1
        for step in verdict.path:
            assert proposal.parents[step] == node and proposal.tokens[step] == choices[node + 1]
            node = step
        below = [
            token
            for token, parent in zip(proposal.tokens, proposal.parents, strict=True)
            if parent == node
        ]
        assert verdict.next_token == choices[node + 1] not in below
        lengths.add(verdict.accepted_length)
    assert len(lengths) > 3


@pytest.mark.parametrize(
    ("choices", "path", "next_token"),
    [
        ([0, 2, 9, 1, 9, 9], (0, 2), 1),
        ([0, 1, 9, 9, 9, 9], (0,), 1),
        ([1, 9, 1, 9, 9, 2], (1, 4), 2),
        ([2, 9, 9, 9, 9, 9], (), 2),
    ],
)
def test_branches_of_a_tree(choices: list[int], path: tuple[int, ...], next_token: int) -> None:
    assert verify(TREE, choices) == Verdict(path, next_token)


def test_without_a_draft_the_token_is_the_targets() -> None:
    assert verify(Proposal(), [2]) == Verdict((), 2)


def test_a_row_without_numbers_matters_only_where_it_is_reached() -> None:
    """Plain decoding would never have seen it: a wrong guess must not end a turn."""
    for draft in (chain((2, 1)), Proposal((2, 1), (-1, -1))):
        assert verify(draft, [1, None, 0]).next_token in (0, 1)
        assert not verify(draft, [1, None, 0]).is_whole
        with pytest.raises(NumericsError, match="fp32"):
            verify(draft, [None, 1, 1])
    with pytest.raises(NumericsError, match="fp32"):
        verify(chain((2, 1)), [2, None, 0])


def test_what_is_allowed_is_accepted_and_counted_but_the_choice_comes_first() -> None:
    two = Proposal((0, 1, 2), (-1, -1, 1))
    assert verify(two, [1, 9, 2, 7], [True, False, False]) == Verdict((1, 2), 7)
    assert verify(two, [5, 4, 9, 9], [True, True, False]) == Verdict((0,), 4, (0,))
    assert verify(two, [5, 9, 6, 4], [False, True, True]) == Verdict((1, 2), 4, (0, 1))
    assert verify(two, [5, 9, 9, 9], [False] * 3) == Verdict((), 5)


def test_fault_a_walk_that_does_not_compare_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    children = module.children
    monkeypatch.setattr(module, "children", lambda parents: {-1: children(parents).get(-1, [])})
    with pytest.raises(AssertionError):
        test_a_verdict_follows_the_choices_and_ends_where_no_child_is_one()
