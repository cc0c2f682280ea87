"""Trees, by enumeration of everything that can be drawn and everything that can be decided.

Draft tokens are drawn without replacement in a script that goes through every outcome, in fixed
shapes and by the growth that the drafters use, which looks at what it has drawn; then the real
`verify` is enumerated as in test_verify. In fp64 the first two tokens must be distributed as the
target's own to 1e-12. Faults are planted and must be seen.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from localspec.core import Growth, Proposal, Verdict
from localspec.drafters import tree_growth as growing
from localspec.drafters.tree_growth import ROOT, Drawn, Ranked, TreeGrowth
from localspec.engine import distributions as rows_module
from localspec.engine import verify as module
from localspec.engine.distributions import SampledRows
from localspec.engine.verify import verify
from tests.engine import test_verify as enumeration

Text = tuple[int, ...]
Rows = dict[Text, torch.Tensor]
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


def drafts(make: Draft, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[float, Proposal]]:
    """(probability, proposal) of every course that the draws of `make` can take."""
    waiting: list[Text] = [()]
    while waiting:
        script = _Draws(waiting.pop())
        monkeypatch.setattr(growing, "draw", script.draw)
        proposal = make()
        waiting += script.others
        yield script.weight, proposal


class _Draws:
    """Tokens given in advance, then the first that is possible. others: what else could have
    come where nothing was given."""

    def __init__(self, given: Text) -> None:
        self._given = given
        self._drawn = list[int]()
        self.others = list[Text]()
        self.weight = 1.0

    def draw(self, row: torch.Tensor, rng: torch.Generator) -> int:
        place = len(self._drawn)
        possible = [token for token in range(len(row)) if float(row[token]) > 0.0]
        token = self._given[place] if place < len(self._given) else possible[0]
        if place >= len(self._given):
            self.others += [(*self._drawn, other) for other in possible[1:]]
        self._drawn.append(token)
        self.weight *= float(row[token] / row.sum())
        return token


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
    size = len(target[()])
    found: dict[Text, float] = defaultdict(float)
    for weight, proposal in drafts(make, monkeypatch):
        texts = list[Text]()
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            texts.append((*(texts[parent] if parent >= 0 else ()), token))
        rows = torch.stack([target[()], *(target[text] for text in texts)])
        for chance, verdict, last in enumeration.outcomes(proposal, rows, monkeypatch):
            path = tuple(proposal.tokens[node] for node in verdict.path)
            if len(path) == 2:
                found[path] += weight * chance
                continue
            for token in range(size):
                after = weight * chance * float(last[token])
                if path:
                    found[*path, token] += after
                else:
                    for second in range(size):
                        found[token, second] += after * float(target[token,][second])
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    return max(
        abs(found[a, b] - float(target[()][a] * target[a,][b]))
        for a, b in itertools.product(range(size), repeat=2)
    )


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
    draft = random_rows(2001, 3)
    shapes = {p.parents for _, p in drafts(grown(draft, *GROWTHS["dear steps"]), monkeypatch)}
    assert len(shapes) > 1


def test_a_second_sibling_is_accepted_as_often_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exactness alone could be had by accepting less. Of two siblings without replacement at
    least the overlap of one is taken, and all when there are as many siblings as tokens."""
    target, draft = random_rows(3, 3), {text: torch.full((3,), 1 / 3).double() for text in [()]}
    draft |= {(a,): draft[()] for a in range(3)}
    taken = []
    for shape in ((-1,), (-1, -1), (-1, -1, -1)):
        chance = 0.0
        for weight, proposal in drafts(shaped(draft, shape), monkeypatch):
            rows = torch.stack([target[()], *(target[token,] for token in proposal.tokens)])
            for part, verdict, _ in enumeration.outcomes(proposal, rows, monkeypatch):
                chance += weight * part * (verdict.accepted_length == 1)
        taken.append(chance)
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

    monkeypatch.setattr(enumeration, "verify", by_shape)
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
