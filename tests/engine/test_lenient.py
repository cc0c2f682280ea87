"""Lenient rules, by enumeration of everything that chance can do in the real walk, in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from localspec.core import Proposal, SamplingParams, Verdict, chain
from localspec.engine import distributions as rows_module
from localspec.engine.distributions import GreedyRows, SampledRows, target_rows
from localspec.engine.lenient import verify_leniently
from localspec.engine.verify import Walk, verify
from localspec.leniency import Factor, Leniency, Threshold, Typical
from tests.engine.enumeration import Rows, courses, target_of

V = 3
SEEDS = range(8)
Weighted = Iterator[tuple[float, Proposal]]
EXACT = (Threshold(1.0, 0.0), Factor(1.0))
LENIENT = (Threshold(0.0), Threshold(0.5, 0.3), Typical(), Factor(2.0))


def outcomes(
    proposal: Proposal, rows: torch.Tensor, rule: Leniency, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, Verdict, torch.Tensor]]:
    """(probability, verdict, row the last token is drawn from) of every course of events."""
    target, rng = SampledRows(rows), torch.Generator()
    return courses(lambda: verify_leniently(proposal, target, rng, rule), monkeypatch)


def first_token(
    proposals: Weighted, target: Rows, rule: Leniency, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Distribution of the first token: [V]."""
    found = torch.zeros(V, dtype=torch.float64)
    for drawn, proposal in proposals:
        for weight, verdict, last in outcomes(
            proposal, target_of(proposal, target), rule, monkeypatch
        ):
            if verdict.path:
                found[proposal.tokens[verdict.path[0]]] += drawn * weight
            else:
                found += drawn * weight * last
    return found


def random_rows(seed: int) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    texts = [text for size in range(3) for text in itertools.product(range(V), repeat=size)]
    made = {text: torch.rand(V, generator=rng, dtype=torch.float64) + 0.02 for text in texts}
    return {text: row / row.sum() for text, row in made.items()}


# -- ways to propose, each with its probability; confidences as drafters give them --------------


def drawn_chain(draft: Rows) -> Weighted:
    for a, b in itertools.product(range(V), repeat=2):
        sure = (float(draft[()].max()), float(draft[a,].max()))
        yield (
            float(draft[()][a] * draft[a,][b]),
            chain((a, b), torch.stack([draft[()], draft[a,]]), sure),
        )


def argmax_chain(draft: Rows) -> Weighted:
    first = int(draft[()].argmax())
    sure = (float(draft[()].max()), float(draft[first,].max()))
    yield 1.0, chain((first, int(draft[first,].argmax())), None, sure)


def lookup_chain(draft: Rows) -> Weighted:
    """A drafter that does not say how sure it is."""
    for weight, proposal in argmax_chain(draft):
        yield weight, replace(proposal, confidences=None)


def drawn_siblings(draft: Rows) -> Weighted:
    """Without replacement, and a child below the second."""
    for a, b, c in itertools.product(range(V), repeat=3):
        if a == b:
            continue
        left = draft[()].clone()
        left[a] = 0.0
        left = left / left.sum()
        rows = torch.stack([draft[()], left, draft[b,]])
        sure = (float(draft[()][a]), float(draft[()][b]), float(draft[b,][c]))
        weight = float(draft[()][a] * left[b] * draft[b,][c])
        yield weight, Proposal((a, b, c), (-1, -1, 1), rows, sure)


def fixed_tree(draft: Rows) -> Weighted:
    order = draft[()].argsort(descending=True).tolist()
    sure = tuple(float(draft[()][token]) for token in order[:2])
    yield 1.0, Proposal((order[0], order[1], order[2]), (-1, -1, 0), None, (*sure, 0.9))


WAYS: tuple[Callable[[Rows], Weighted], ...] = (
    drawn_chain,
    argmax_chain,
    lookup_chain,
    drawn_siblings,
    fixed_tree,
)
by_name = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@by_name
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", EXACT, ids=str)
def test_a_rule_at_its_strictest_is_the_exact_one(
    way: Callable[[Rows], Weighted], seed: int, rule: Leniency, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_rows(seed), random_rows(1000 + seed)
    assert torch.allclose(
        first_token(way(draft), target, rule, monkeypatch), target[()], rtol=0, atol=1e-12
    )
    for _, proposal in way(draft):
        for _, verdict, _ in outcomes(proposal, target_of(proposal, target), rule, monkeypatch):
            assert len(verdict.lenient) == 0


@by_name
@pytest.mark.parametrize("rule", LENIENT, ids=str)
def test_a_lenient_rule_changes_the_distribution(
    way: Callable[[Rows], Weighted], rule: Leniency, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somewhere among the seeds, by far more than rounding; but a threshold has nothing to go by
    where the drafter says nothing."""
    errors = []
    for seed in SEEDS:
        target, draft = random_rows(seed), random_rows(1000 + seed)
        found = first_token(way(draft), target, rule, monkeypatch)
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-12)
        errors.append(float((found - target[()]).abs().max()))
    is_silent = isinstance(rule, Threshold) and way is lookup_chain
    assert max(errors) < 1e-12 if is_silent else max(errors) > 0.02


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0])
def test_the_count_of_a_drawn_chain_is_what_the_ratios_say(
    seed: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First token: taken with min(q, l p), by the exact rule with min(q, p)."""
    target, draft = random_rows(seed), random_rows(1000 + seed)
    p, q = target[()], draft[()]
    counted = 0.0
    for drawn, proposal in drawn_chain(draft):
        rows = target_of(proposal, target)
        for weight, verdict, _ in outcomes(proposal, rows, Factor(factor), monkeypatch):
            counted += drawn * weight * (0 in verdict.lenient)
    expected = float((torch.minimum(q, factor * p) - torch.minimum(q, p)).sum())
    assert counted == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fixed_token_taken_unchecked_counts_as_often_as_it_is_unlikely(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_rows(seed), random_rows(1000 + seed)
    (_, proposal), counted = next(argmax_chain(draft)), [0.0, 0.0]
    rows = target_of(proposal, target)
    for weight, verdict, _ in outcomes(proposal, rows, Threshold(0.0), monkeypatch):
        assert verdict.path == (0, 1)
        for place in verdict.lenient:
            counted[place] += weight
    for place in (0, 1):
        assert counted[place] == pytest.approx(1.0 - float(rows[place][proposal.tokens[place]]))


@by_name
def test_threshold_0_takes_everything_of_a_drafter_that_says_how_sure_it_is(
    way: Callable[[Rows], Weighted], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_rows(2), random_rows(1002)
    for _, proposal in way(draft):
        rows = target_of(proposal, target)
        lengths = {
            verdict.accepted_length
            for _, verdict, _ in outcomes(proposal, rows, Threshold(0.0), monkeypatch)
        }
        first = proposal.parents.index(-1)
        whole = 1 + proposal.parents.count(first) if not proposal.is_chain else 2
        assert lengths == ({0, 1, 2} if way is lookup_chain else {whole})


def test_below_the_floor_the_token_is_redrawn_from_the_whole_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is taken out of the row: what was not judged by its chance was not refused by it."""
    target = random_rows(3)
    proposal = chain((0, 1), None, (0.1, 0.99))
    rule, rows = Threshold(0.9, 0.2), target_of(proposal, target)
    ((weight, verdict, last),) = outcomes(proposal, rows, rule, monkeypatch)
    assert (weight, verdict.path, len(verdict.lenient)) == (1.0, (), 0)
    assert torch.allclose(last, target[()], rtol=0, atol=1e-12)


def test_a_sure_drafter_that_drew_an_unlikely_token_is_not_trusted() -> None:
    draft = torch.tensor([[0.95, 0.05, 0.0]], dtype=torch.float64)
    target = torch.tensor([[1.0, 0.0, 0.0]] * 2, dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    drawn = chain((1,), draft, (0.95,))
    assert verify_leniently(drawn, SampledRows(target), rng, Threshold(0.5)) == Verdict((), 0)
    fixed = chain((1,), None, (0.95,))
    found = verify_leniently(fixed, SampledRows(target), rng, Threshold(0.5))
    assert (found.path, found.lenient) == ((0,), (0,))


@pytest.mark.parametrize(
    ("row", "taken"),
    [
        ([0.6, 0.25, 0.15], [True, True, True]),  # H = 0.94: the bar is 0.09 / e^H = 0.035
        ([0.97, 0.02, 0.01], [True, False, False]),  # H = 0.15: the bar is 0.077
        ([1.0, 0.0, 0.0], [True, False, False]),
    ],
)
def test_typical_acceptance_asks_more_of_a_sure_target(row: list[float], taken: list[bool]) -> None:
    rows = SampledRows(torch.tensor([row, row], dtype=torch.float64))
    rng = torch.Generator().manual_seed(0)
    found = [verify_leniently(chain((t,)), rows, rng, Typical()).accepted_length for t in range(V)]
    assert found == [int(one) for one in taken]


def random_trees(count: int) -> Iterator[tuple[Proposal, torch.Tensor, int]]:
    """Proposals of all shapes, logits for them, and a seed."""
    rng = torch.Generator().manual_seed(11)
    for seed in range(count):
        size = int(torch.randint(1, 7, (), generator=rng))
        parents = tuple(
            int(torch.randint(-1, i, (), generator=rng)) if i else -1 for i in range(size)
        )
        tokens = tuple(torch.randint(0, 4, (size,), generator=rng).tolist())
        sure = tuple(torch.rand(size, generator=rng).tolist())
        yield Proposal(tokens, parents, None, sure), torch.randn(size + 1, 4, generator=rng), seed


@pytest.mark.parametrize("rule", [*EXACT, *LENIENT], ids=str)
def test_greedy_counts_the_accepted_tokens_that_are_not_the_targets_own(rule: Leniency) -> None:
    num_lenient = 0
    for proposal, logits, seed in random_trees(300):
        rows = target_rows(logits, SamplingParams(), [])
        assert isinstance(rows, GreedyRows)
        rng = torch.Generator().manual_seed(seed)
        verdict = verify_leniently(proposal, rows, rng, rule)
        nodes = [-1, *verdict.path]
        expected = tuple(
            place
            for place, (before, node) in enumerate(itertools.pairwise(nodes))
            if rows.best[before + 1] != proposal.tokens[node]
        )
        assert verdict.lenient == expected
        num_lenient += len(verdict.lenient)
        assert all(proposal.parents[node] == before for before, node in itertools.pairwise(nodes))
        if not expected and isinstance(rule, Threshold) and rule.floor == 0.0:
            assert verdict.next_token == rows.best[nodes[-1] + 1]
    trusts = isinstance(rule, Threshold) and rule.threshold < 1.0
    assert num_lenient > 50 if trusts else num_lenient == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", EXACT, ids=str)
def test_at_its_strictest_a_rule_gives_the_verdicts_of_the_exact_walk(
    rule: Leniency, temperature: float
) -> None:
    """The same numbers in the same order: trees that were not drawn are judged alike."""
    for proposal, logits, seed in random_trees(200):
        rows = target_rows(logits, SamplingParams(temperature), [])
        here, there = (torch.Generator().manual_seed(seed) for _ in range(2))
        assert verify_leniently(proposal, rows, here, rule) == verify(proposal, rows, there)


def test_without_a_draft_the_token_comes_from_the_target_alone() -> None:
    row, rng = torch.tensor([[0.0, 0.0, 1.0]]), torch.Generator().manual_seed(0)
    for rule in LENIENT:
        assert verify_leniently(Proposal(), SampledRows(row), rng, rule) == Verdict((), 2)


# -- planted faults: the enumeration must see each of them ----------------------------------------


def test_fault_counting_by_another_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact rule that accepts nothing with the numbers that it is given counts every token."""
    monkeypatch.setattr(Walk, "exact", lambda walk, token, p: (0.0, True))
    target, draft = random_rows(1), random_rows(1001)
    counts = [
        len(verdict.lenient)
        for _, proposal in drawn_chain(draft)
        for _, verdict, _ in outcomes(
            proposal, target_of(proposal, target), Factor(1.0), monkeypatch
        )
    ]
    assert any(counts)


@by_name
def test_fault_no_residual_after_a_refusal_is_seen(
    way: Callable[[Rows], Weighted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module.DenseRow, "without", lambda row, token, drawn_from: row)
    target, draft = random_rows(4), random_rows(1004)
    found = first_token(way(draft), target, Factor(1.0), monkeypatch)
    assert float((found - target[()]).abs().max()) > 0.01


@pytest.mark.parametrize("way", [drawn_chain, argmax_chain], ids=lambda way: way.__name__)
def test_a_larger_factor_accepts_more(
    way: Callable[[Rows], Weighted], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_rows(5), random_rows(1005)

    def mean_accepted(factor: float) -> float:
        return sum(
            drawn * weight * verdict.accepted_length
            for drawn, proposal in way(draft)
            for weight, verdict, _ in outcomes(
                proposal, target_of(proposal, target), Factor(factor), monkeypatch
            )
        )

    assert mean_accepted(2.0) > mean_accepted(1.0) + 0.05
