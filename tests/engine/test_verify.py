"""The acceptance rule, by enumeration of everything that chance can do in the real `verify`.

In fp64 the distribution of the first two tokens must equal the target's to 1e-12.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from localspec.core import Proposal, Verdict, chain
from localspec.engine import distributions as rows_module
from localspec.engine import verify as module
from localspec.engine.distributions import SampledRows
from localspec.engine.verify import verify
from tests.engine.enumeration import Rows, courses, largest_error, path_of, target_of

V = 3
SEEDS = range(12)
Weighted = Iterator[tuple[float, Proposal]]


def outcomes(
    proposal: Proposal, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, Verdict, torch.Tensor]]:
    """(probability, verdict, row the last token is drawn from) of every course of events."""
    target, rng = SampledRows(rows), torch.Generator()
    return courses(lambda: verify(proposal, target, rng), monkeypatch)


def error_of(proposals: Weighted, target: Rows, monkeypatch: pytest.MonkeyPatch) -> float:
    """How far the first two tokens are from the target's own, at the worst pair."""
    rounds = (
        (drawn * weight, path_of(proposal, verdict), last)
        for drawn, proposal in proposals
        for weight, verdict, last in outcomes(proposal, target_of(proposal, target), monkeypatch)
    )
    return largest_error(rounds, lambda text: target[text])


def random_row(rng: torch.Generator, peaked: bool = False) -> torch.Tensor:
    """A distribution over V tokens in fp64, sometimes with a zero, like after top-k."""
    weights = torch.rand(V, generator=rng, dtype=torch.float64) + 0.02
    if peaked:
        weights = torch.nn.functional.one_hot(weights.argmax(), V).double()
    elif torch.rand((), generator=rng) < 0.3:
        weights[int(torch.randint(V, (), generator=rng))] = 0.0
    return weights / weights.sum()


def random_rows(seed: int, peaked: bool = False) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    texts = [text for size in range(3) for text in itertools.product(range(V), repeat=size)]
    return {text: random_row(rng, peaked) for text in texts}


# -- ways to propose, each with its probability ---------------------------------------------


def sampled_chain(draft: Rows) -> Weighted:
    for a, b in itertools.product(range(V), repeat=2):
        weight = float(draft[()][a] * draft[a,][b])
        if weight:
            yield weight, chain((a, b), torch.stack([draft[()], draft[a,]]))


def stopping_chain(draft: Rows) -> Weighted:
    """Ends after the first token where that token was likely: a rule that saw only its prefix."""
    for a in range(V):
        if float(draft[()][a]) > 0.4:
            yield float(draft[()][a]), chain((a,), draft[()][None])
    for weight, proposal in sampled_chain(draft):
        if float(draft[()][proposal.tokens[0]]) <= 0.4:
            yield weight, proposal


def lookup_chain(draft: Rows) -> Weighted:
    first = int(draft[()].argmax())
    yield 1.0, chain((first, int(draft[first,].argmax())))


def independent_siblings(draft: Rows) -> Weighted:
    """Two children of the root drawn independently, and one child of the first."""
    for a, b, c in itertools.product(range(V), repeat=3):
        weight = float(draft[()][a] * draft[()][b] * draft[a,][c])
        if weight:
            rows = torch.stack([draft[()], draft[()], draft[a,]])
            yield weight, Proposal((a, b, c), (-1, -1, 0), rows)


def siblings_without_replacement(draft: Rows) -> Weighted:
    """The second child is drawn from what is left of q, and that is its row."""
    for a, b, c in itertools.product(range(V), repeat=3):
        left = draft[()].clone()
        left[a] = 0.0
        if a == b or float(left.sum()) == 0.0:
            continue
        left = left / left.sum()
        weight = float(draft[()][a] * left[b] * draft[b,][c])
        if weight:
            yield (
                weight,
                Proposal((a, b, c), (-1, -1, 1), torch.stack([draft[()], left, draft[b,]])),
            )


def deterministic_tree(draft: Rows) -> Weighted:
    """All branches fixed, of different depth, one token twice."""
    order = draft[()].argsort(descending=True).tolist()
    yield 1.0, Proposal((order[0], order[1], order[2], order[0], order[0]), (-1, -1, 0, 1, -1))


def mixed_tree(draft: Rows) -> Weighted:
    """A sampled child beside a fixed one, whose q is certainty, and a sampled grandchild."""
    fixed = int(draft[()].argmin())
    certain = torch.nn.functional.one_hot(torch.tensor(fixed), V).double()
    for a, c in itertools.product(range(V), repeat=2):
        weight = float(draft[()][a] * draft[fixed,][c])
        if weight:
            rows = torch.stack([draft[()], certain, draft[fixed,]])
            yield weight, Proposal((a, fixed, c), (-1, -1, 1), rows)


WAYS: tuple[Callable[[Rows], Weighted], ...] = (
    sampled_chain,
    stopping_chain,
    lookup_chain,
    independent_siblings,
    siblings_without_replacement,
    deterministic_tree,
    mixed_tree,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_output_is_distributed_exactly_as_the_target(
    way: Callable[[Rows], Weighted], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_rows(seed), random_rows(1000 + seed)
    assert error_of(way(draft), target, monkeypatch) < 1e-12


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_numbers_behind_a_token_that_cannot_be_change_nothing(
    way: Callable[[Rows], Weighted], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token at which the target overflows, and which the target itself would never choose."""
    target, draft = random_rows(seed), random_rows(1000 + seed)
    root = target[()] * torch.tensor([1.0, 1.0, 0.0])
    damaged = {text: row * float("nan") for text, row in target.items() if text[:1] == (2,)}
    target = {**target, **damaged, (): root / root.sum()}
    assert error_of(way(draft), target, monkeypatch) < 1e-12


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_the_one_hot_case(
    way: Callable[[Rows], Weighted], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_rows(seed, peaked=True), random_rows(1000 + seed)
    assert error_of(way(draft), target, monkeypatch) < 1e-12


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_draft_equal_to_the_target_is_exact(
    way: Callable[[Rows], Weighted], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_rows(7)
    assert error_of(way(target), target, monkeypatch) < 1e-12


def mean_kept(
    proposals: Weighted, target: Rows, monkeypatch: pytest.MonkeyPatch, at_most: int = 2
) -> float:
    """Accepted tokens, of which the first `at_most` count."""
    return sum(
        drawn * weight * min(at_most, verdict.accepted_length)
        for drawn, proposal in proposals
        for weight, verdict, _ in outcomes(proposal, target_of(proposal, target), monkeypatch)
    )


def token_by_token(proposals: Weighted) -> Weighted:
    """Drawn chains that are not judged as a block."""
    for weight, proposal in proposals:
        yield weight, replace(proposal, cannot_branch=False)


def test_sampled_chain_accepts_as_much_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactness alone could be had by accepting less: the sum of min(p, q) is the most."""
    target, draft = random_rows(3), random_rows(1003)
    accepted = mean_kept(sampled_chain(draft), target, monkeypatch, at_most=1)
    assert accepted == pytest.approx(float(torch.minimum(target[()], draft[()]).sum()), abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_keeps_at_least_as_much_as_token_by_token(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_rows(seed), random_rows(seed + 1000)
    block = mean_kept(sampled_chain(draft), target, monkeypatch)
    single = mean_kept(token_by_token(sampled_chain(draft)), target, monkeypatch)
    assert block >= single - 1e-12


def test_fault_the_block_rule_without_its_offer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offering a prefix with its weight alone forgets that longer ones were offered first."""
    target, draft = random_rows(4), random_rows(1004)
    monkeypatch.setattr(module, "_block_chance", lambda length, weights, masses: weights[length])
    assert error_of(sampled_chain(draft), target, monkeypatch) > 0.01


def test_residual_of_equal_rows_falls_back_to_the_target() -> None:
    """p and q agree to rounding, so a rejection leaves no mass: p itself is drawn from."""
    row = torch.tensor([0.25, 0.5, 0.25])
    left = rows_module.DenseRow(row).without(1, row.clone())
    assert torch.equal(left.weights, row)


def test_rejected_draft_with_nothing_left_still_draws_a_likely_token() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[1.0, 0.0, 0.0]])
    verdict = verify(chain((0,), q), SampledRows(p), torch.Generator().manual_seed(0))
    assert verdict == Verdict((), 1)


def test_without_a_draft_the_token_comes_from_the_target_alone() -> None:
    row = torch.tensor([[0.0, 0.0, 1.0]])
    assert verify(Proposal(), SampledRows(row), torch.Generator().manual_seed(0)) == Verdict((), 2)


# -- planted faults: the enumeration must see each of them ----------------------------------


def test_fault_argmax_draft_with_its_softmax_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = random_rows(4), random_rows(1004)

    def wrong(draft: Rows) -> Weighted:
        for weight, proposal in lookup_chain(draft):
            first = proposal.tokens[0]
            yield weight, chain(proposal.tokens, torch.stack([draft[()], draft[first,]]))

    assert error_of(wrong(draft), target, monkeypatch) > 0.01


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_fault_no_residual_is_seen(
    way: Callable[[Rows], Weighted], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_rows(4), random_rows(1004)
    monkeypatch.setattr(rows_module.DenseRow, "without", lambda row, token, drawn_from: row)
    assert error_of(token_by_token(way(draft)), target, monkeypatch) > 0.01


def test_fault_trimming_a_sampled_tail_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping a drawn token because its own probability is low changes the distribution."""
    target, draft = random_rows(5), random_rows(1005)

    def trimmed(draft: Rows) -> Weighted:
        for weight, proposal in sampled_chain(draft):
            assert proposal.probs is not None
            unlikely = float(proposal.probs[0][proposal.tokens[0]]) < 0.4
            kept = 0 if unlikely else 2
            yield weight, chain(proposal.tokens[:kept], proposal.probs[:kept])

    assert error_of(trimmed(draft), target, monkeypatch) > 0.01


def test_fault_wrong_row_of_the_second_sibling_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings drawn without replacement, the second handed over with the row of the first."""
    target, draft = random_rows(6), random_rows(1006)

    def swapped(draft: Rows) -> Weighted:
        for weight, proposal in siblings_without_replacement(draft):
            rows = torch.stack([draft[()], draft[()], draft[proposal.tokens[1],]])
            yield weight, replace(proposal, probs=rows)

    assert error_of(swapped(draft), target, monkeypatch) > 0.005
