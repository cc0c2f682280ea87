"""Trees, by enumeration of everything that can be drawn and everything that can be decided.

Draft tokens are drawn without replacement, in fixed shapes and by the growth that the drafters use,
which looks at what it has drawn. In fp64 the first two tokens must be distributed as the target's
own to 1e-12. Faults are planted and must be seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from localspec.core import Growth, Proposal, Verdict
from localspec.drafters.tree_growth import ROOT, Drawn, Ranked, TreeGrowth
from localspec.engine import distributions as rows_module
from localspec.engine import verify as module
from localspec.engine.distributions import SampledRows
from localspec.engine.verify import verify
from tests.engine.enumeration import Rows, Text, courses, largest_error, path_of, target_of

Draft = Callable[[], Proposal]

SHAPES = {
    "two siblings": (-1, -1),
    "three siblings": (-1, -1, -1),
    "two and two below the first": (-1, -1, 0, 0),
    "two below each of two": (-1, -1, 0, 1, 0, 1),
    "three and two below the second": (-1, -1, -1, 1, 1),
    "a sibling drawn last": (-1, 0, -1, 0),
}
GROWTHS = {
    "cheap": (Growth(lambda c: c, (0.0,) * 4, 0.0), 4),
    "dear steps": (Growth(lambda c: c, (0.05,) * 4, 0.3), 4),
    "a jump": (Growth(lambda c: c, (0.05,) * 4, 0.05, 0.7), 4),
    "dear places": (Growth(lambda c: c, (0.1, 0.2, 0.25, 0.25), 0.05), 4),
}


def random_row(rng: torch.Generator, vocab_size: int) -> torch.Tensor:
    """In fp64, often with a zero, sometimes all on one token, as after top-k 1."""
    weights = torch.rand(vocab_size, generator=rng, dtype=torch.float64) ** 2 + 0.01
    kind = float(torch.rand((), generator=rng))
    if kind < 0.15:
        weights = torch.nn.functional.one_hot(weights.argmax(), vocab_size).double()
    elif kind < 0.5:
        weights[int(torch.randint(vocab_size, (), generator=rng))] = 0.0
    return weights / weights.sum()


def random_rows(seed: int, vocab_size: int) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    texts = (t for size in range(3) for t in itertools.product(range(vocab_size), repeat=size))
    return {text: random_row(rng, vocab_size) for text in texts}


# -- every draft there can be -------------------------------------------------------------------


def rounds(
    make: Draft, target: Rows, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, Proposal, Verdict, torch.Tensor]]:
    """(probability, proposal, verdict, row of the next token) of every course of a round."""

    def run() -> tuple[Proposal, Verdict]:
        proposal = make()
        rows = SampledRows(target_of(proposal, target))
        return proposal, module.verify(proposal, rows, torch.Generator())

    for weight, (proposal, verdict), last in courses(run, monkeypatch):
        yield weight, proposal, verdict, last


def shaped(draft: Rows, parents: Sequence[int]) -> Draft:
    """A tree of this shape, its siblings drawn without replacement; a node whose parent has
    nothing left to draw is left out with all below it."""

    def make() -> Proposal:
        supply = {ROOT: Drawn(draft[()], torch.Generator())}
        texts, places = dict[int, Text]({ROOT: ()}), dict[int, int]({ROOT: ROOT})
        tokens, found, rows = list[int](), list[int](), list[torch.Tensor]()
        for node, parent in enumerate(parents):
            if parent not in places or supply[parent].confidence == 0.0:
                continue
            token, row = supply[parent].take()
            assert row is not None
            places[node], texts[node] = len(tokens), (*texts[parent], token)
            supply[node] = Drawn(draft[texts[node]], torch.Generator())
            tokens.append(token)
            found.append(places[parent])
            rows.append(row)
        return Proposal(tuple(tokens), tuple(found), torch.stack(rows))

    return make


def grown(draft: Rows, growth: Growth, size: int, is_drawn: bool = True) -> Draft:
    """The growth that drafters use, no deeper than two tokens."""

    def children(tree: TreeGrowth, node: int) -> Drawn | Ranked:
        text = tuple(tree.nodes[i].token for i in tree.path(node))
        if len(text) == 2:
            return Ranked((), ())
        if is_drawn:
            return Drawn(draft[text], torch.Generator())
        best = draft[text].topk(2)
        return Ranked(best.indices.tolist(), best.values.tolist())

    def make() -> Proposal:
        tree, wanted = TreeGrowth(growth, size), [ROOT]
        while wanted:
            for node in wanted:
                tree.open(node, children(tree, node))
            tree.grow()
            wanted = tree.wanted()
        return tree.proposal(1)

    return make


def error_of(make: Draft, target: Rows, monkeypatch: pytest.MonkeyPatch) -> float:
    """How far the first two tokens are from the target's own, at the worst pair."""
    found = (
        (weight, path_of(proposal, verdict), last)
        for weight, proposal, verdict, last in rounds(make, target, monkeypatch)
    )
    return largest_error(found, lambda text: target[text])


# -- exactness --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("vocab_size", [3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_siblings_drawn_without_replacement_are_exact(
    shape: str, vocab_size: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vocab_size == 4 and len(SHAPES[shape]) > 5:
        vocab_size = 3  # thousands of trees
    target, draft = random_rows(seed, vocab_size), random_rows(1000 + seed, vocab_size)
    assert error_of(shaped(draft, SHAPES[shape]), target, monkeypatch) < 1e-12


@pytest.mark.parametrize("shape", list(SHAPES))
def test_siblings_of_a_draft_that_equals_its_target_are_exact(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_rows(7, 3)
    assert error_of(shaped(target, SHAPES[shape]), target, monkeypatch) < 1e-12


@pytest.mark.parametrize("prices", list(GROWTHS))
@pytest.mark.parametrize("seed", range(4))
def test_trees_that_grow_by_what_they_drew_are_exact(
    prices: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_rows(seed, 3), random_rows(2000 + seed, 3)
    make = grown(draft, *GROWTHS[prices])
    assert error_of(make, target, monkeypatch) < 1e-12


@pytest.mark.parametrize("prices", list(GROWTHS))
@pytest.mark.parametrize("seed", range(4))
def test_trees_of_the_likeliest_tokens_are_exact(
    prices: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_rows(seed, 4), random_rows(2000 + seed, 4)
    make = grown(draft, *GROWTHS[prices], is_drawn=False)
    assert error_of(make, target, monkeypatch) < 1e-12


def test_growth_makes_chains_and_trees_of_one_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would say nothing about shapes that hang on what was drawn."""
    make = grown(random_rows(2001, 3), *GROWTHS["dear steps"])
    shapes = {found[1].parents for found in rounds(make, random_rows(1, 3), monkeypatch)}
    assert len(shapes) > 1


def test_a_second_sibling_is_accepted_as_often_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exactness alone could be had by accepting less. Of two siblings without replacement at
    least the overlap of one is taken, and all when there are as many siblings as tokens."""
    target, draft = random_rows(3, 3), {text: torch.full((3,), 1 / 3).double() for text in [()]}
    draft |= {(a,): draft[()] for a in range(3)}
    taken = [
        sum(
            weight
            for weight, _, verdict, _ in rounds(shaped(draft, shape), target, monkeypatch)
            if verdict.accepted_length == 1
        )
        for shape in ((-1,), (-1, -1), (-1, -1, -1))
    ]
    assert taken[0] == pytest.approx(float(torch.minimum(target[()], draft[()]).sum()))
    assert taken[0] < taken[1] < taken[2]
    assert taken[2] == pytest.approx(1.0)


# -- planted faults ---------------------------------------------------------------------------


def worst(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Rows], Draft], vocab_size: int = 3
) -> float:
    """The largest error over a few pairs of target and draft."""
    return max(
        error_of(make(random_rows(2000 + s, vocab_size)), random_rows(s, vocab_size), monkeypatch)
        for s in range(4)
    )


def test_fault_a_tree_without_branches_judged_as_a_block_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rule is exact by itself; choosing between them by what was drawn is not."""

    def by_shape(proposal: Proposal, rows: SampledRows, rng: torch.Generator) -> Verdict:
        return verify(replace(proposal, cannot_branch=proposal.is_chain), rows, rng)

    monkeypatch.setattr(module, "verify", by_shape)
    error = max(
        worst(monkeypatch, lambda draft, prices=prices: grown(draft, *GROWTHS[prices]))
        for prices in GROWTHS
    )
    assert error > 1e-3


def test_fault_a_sibling_with_the_row_of_the_first_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def claiming(draft: Rows) -> Draft:
        def make() -> Proposal:
            whole = shaped(draft, (-1, -1, -1))()
            return replace(whole, probs=draft[()].repeat(len(whole.tokens), 1))

        return make

    assert worst(monkeypatch, claiming, vocab_size=4) > 1e-3


def test_fault_siblings_tried_in_another_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    children = module.children

    def backwards(parents: Sequence[int]) -> dict[int, list[int]]:
        return {node: found[::-1] for node, found in children(parents).items()}

    monkeypatch.setattr(module, "children", backwards)
    assert worst(monkeypatch, lambda draft: shaped(draft, (-1, -1, 0, 0))) > 1e-3


def test_fault_no_residual_between_siblings_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module.DenseRow, "without", lambda row, token, drawn_from: row)
    assert worst(monkeypatch, lambda draft: shaped(draft, (-1, -1, 0, 0))) > 1e-3


def test_fault_a_drawn_sibling_left_out_as_unlikely_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trimmed(draft: Rows) -> Draft:
        def make() -> Proposal:
            whole = shaped(draft, (-1, -1))()
            assert whole.probs is not None
            if len(whole.tokens) == 2 and float(draft[()][whole.tokens[1]]) < 0.3:
                return Proposal(whole.tokens[:1], whole.parents[:1], whole.probs[:1])
            return whole

        return make

    assert worst(monkeypatch, trimmed, vocab_size=4) > 1e-3
