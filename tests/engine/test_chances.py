"""The chance that a verdict states for a draft token is how often it is really accepted there.

Seeds 0 to N - 1; of N draws a frequency may lie 4.5 standard deviations from its chance, which a
right rule exceeds in less than one of 100,000 comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from localspec.core import Proposal, SamplingParams, Verdict, chain
from localspec.engine.distributions import GreedyRows, SampledRows, target_rows
from localspec.engine.lenient import verify_leniently
from localspec.engine.verify import verify
from localspec.leniency import Factor, Threshold, Typical

N = 3000
V = 5
Judge = Callable[[torch.Generator], Verdict]


def rows(count: int, seed: int) -> torch.Tensor:
    made = torch.rand(count, V, generator=torch.Generator().manual_seed(seed)) ** 2 + 0.02
    return made / made.sum(dim=-1, keepdim=True)


def check(judge: Judge, proposal: Proposal) -> int:
    """Compare frequencies with stated chances; returns how many tokens were ever reached."""
    size = len(proposal.tokens)
    taken, tried, said = [0] * size, [0] * size, [0.0] * size
    for seed in range(N):
        verdict = judge(torch.Generator().manual_seed(seed))
        assert len(verdict.chances) == size
        for node, chance in enumerate(verdict.chances):
            if chance is not None:
                tried[node] += 1
                said[node] += chance
                taken[node] += node in verdict.path
            else:
                assert node not in verdict.path
    for node in range(size):
        if tried[node]:
            mean = said[node] / tried[node]
            spread = math.sqrt(max(mean * (1 - mean), 1e-4) / tried[node])
            assert abs(taken[node] / tried[node] - mean) < 4.5 * spread, (node, mean)
    return sum(bool(count) for count in tried)


TREE = Proposal((0, 1, 2, 3, 4), (-1, -1, 0, 0, 1))


@pytest.mark.parametrize("seed", range(4))
def test_deterministic_chains_and_trees_state_their_chances(seed: int) -> None:
    target = SampledRows(rows(6, seed))
    assert check(lambda rng: verify(TREE, target, rng), TREE) == 5
    straight = chain((0, 1, 2, 3, 4))
    assert check(lambda rng: verify(straight, target, rng), straight) >= 3


@pytest.mark.parametrize("seed", range(4))
def test_a_drawn_chain_states_the_chances_of_the_block_rule(seed: int) -> None:
    proposal = chain((1, 0, 3, 2), rows(4, seed + 50))
    target = SampledRows(rows(5, seed))
    assert check(lambda rng: verify(proposal, target, rng), proposal) == 4


def test_a_drawn_tree_states_what_is_left_for_the_second_sibling() -> None:
    proposal = Proposal((0, 1, 2), (-1, -1, 0), rows(3, 9))
    target = SampledRows(rows(4, 3))
    assert check(lambda rng: verify(proposal, target, rng), proposal) == 3


@pytest.mark.parametrize("rule", [Threshold(0.7, 0.2), Typical(), Factor(2.0)])
def test_lenient_rules_state_their_own_chances(rule: object) -> None:
    proposal = Proposal((0, 1, 2, 3), (-1, 0, 1, 1), None, (0.9, 0.5, 0.1, 0.6))
    target = SampledRows(rows(5, 7))
    assert check(lambda rng: verify_leniently(proposal, target, rng, rule), proposal) >= 2  # type: ignore[arg-type]


def test_greedy_chances_are_one_or_zero_and_none_beyond_the_first_wrong_token() -> None:
    target = GreedyRows([1, 2, 3, 4], V)
    verdict = verify(chain((1, 2, 0)), target, torch.Generator())
    assert verdict.chances == (1.0, 1.0, 0.0)
    verdict = verify(chain((1, 0, 3)), target, torch.Generator())
    assert verdict.chances == (1.0, 0.0, None)


def test_plain_decoding_states_nothing() -> None:
    logits = torch.zeros(1, V)
    found = target_rows(logits, SamplingParams(), [])
    assert verify(Proposal(), found, torch.Generator()).chances == ()
