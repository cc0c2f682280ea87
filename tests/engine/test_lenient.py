"""Lenient rules: what they allow, that it is counted, and that the strictest is exact."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import Proposal, SamplingParams, Verdict, chain
from localspec.core.leniency import Factor, Leniency, Threshold, Typical
from localspec.engine.lenient import allowed
from localspec.engine.noise import GumbelNoise
from localspec.engine.sampling import choices, distributions, scores
from localspec.engine.verify import verify
from tests.kit.tiny import CPU

V = 4
EXACT = (Threshold(1.0), Factor(1.0))
LENIENT = (Threshold(0.0), Threshold(0.5), Typical(), Factor(2.0))


def sequence_of(temperature: float, seed: int = 0) -> decoding.Sequence:
    params = SamplingParams(temperature, seed=seed)
    return decoding.Sequence((1, 2), params, 50, frozenset(), GumbelNoise(seed, V, CPU))


def judged(
    rule: Leniency, proposal: Proposal, logits: torch.Tensor, sequence: decoding.Sequence
) -> tuple[Verdict, Verdict, list[int | None]]:
    """The lenient verdict, the exact one and the target's choices."""
    found = scores(logits, sequence, [(), *proposal.texts])
    may = allowed(rule, proposal, sequence, logits, found)
    own = choices(found)
    return verify(proposal, own, may), verify(proposal, own), own


def random_trees(count: int) -> Iterator[tuple[Proposal, torch.Tensor, int]]:
    """Proposals of all shapes, logits for them, and a seed."""
    rng = random.Random(11)
    for seed in range(count):
        size = rng.randrange(1, 7)
        parents = tuple(rng.randrange(-1, node) if node else -1 for node in range(size))
        tokens = tuple(rng.randrange(V) for _ in range(size))
        sure = tuple(rng.random() for _ in range(size))
        logits = torch.randn(size + 1, V, generator=torch.Generator().manual_seed(seed))
        yield Proposal(tokens, parents, sure), logits, seed


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", EXACT, ids=str)
def test_a_rule_at_its_strictest_is_the_exact_one(rule: Leniency, temperature: float) -> None:
    for proposal, logits, seed in random_trees(200):
        found, exact, _ = judged(rule, proposal, logits, sequence_of(temperature, seed))
        assert found == exact


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", LENIENT, ids=str)
def test_accepted_tokens_that_are_not_the_targets_choice_are_counted(
    rule: Leniency, temperature: float
) -> None:
    num_lenient = 0
    for proposal, logits, seed in random_trees(300):
        verdict, exact, own = judged(rule, proposal, logits, sequence_of(temperature, seed))
        nodes = [-1, *verdict.path]
        assert [proposal.parents[node] for node in verdict.path] == nodes[:-1]
        assert verdict.lenient == tuple(
            place
            for place, node in enumerate(verdict.path)
            if own[nodes[place] + 1] != proposal.tokens[node]
        )
        assert verdict.path[: len(exact.path)] == exact.path, "what is exact is accepted first"
        assert verdict.next_token == own[nodes[-1] + 1]
        num_lenient += len(verdict.lenient)
    is_exact = temperature == 0.0 and isinstance(rule, Factor | Typical)
    assert num_lenient == 0 if is_exact else num_lenient > 30


def test_a_threshold_says_nothing_of_a_drafter_that_gives_no_confidence() -> None:
    for proposal, logits, seed in random_trees(50):
        silent = Proposal(proposal.tokens, proposal.parents)
        found, exact, _ = judged(Threshold(0.0), silent, logits, sequence_of(1.0, seed))
        assert found == exact


@pytest.mark.parametrize(
    ("row", "taken"),
    [
        ([0.6, 0.25, 0.15], [True, True, True]),  # H = 0.94: the bar is 0.09 / e^H = 0.035
        ([0.97, 0.02, 0.01], [True, False, False]),  # H = 0.15: the bar is 0.077
        ([1.0, 0.0, 0.0], [True, False, False]),
    ],
)
def test_typical_acceptance_asks_more_of_a_sure_target(row: list[float], taken: list[bool]) -> None:
    sequence = decoding.Sequence((1,), SamplingParams(1.0), 9, frozenset(), GumbelNoise(0, 3, CPU))
    logits = torch.tensor([row, row]).log()
    for token, is_taken in enumerate(taken):
        assert allowed(Typical(), chain((token,)), sequence, logits, logits) == [is_taken]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_factor_accepts_as_if_the_token_were_so_many_times_as_likely(factor: float) -> None:
    """At 4000 places: the chance is f p / (1 - p + f p), within 4 standard deviations."""
    proposal = chain((0,) * 1000)
    logits = torch.tensor([[0.1, 1.0, -0.5, 0.4]]).expand(1001, -1)
    p, taken = float(distributions(logits[:1], SamplingParams(1.0), [[]])[0, 0]), 0
    for seed in range(4):
        sequence = sequence_of(1.0, seed)
        found = scores(logits, sequence, [(), *proposal.texts])
        taken += sum(allowed(Factor(factor), proposal, sequence, logits, found))
    chance = factor * p / (1.0 - p + factor * p)
    assert taken / 4000 == pytest.approx(chance, abs=4 * (chance * (1 - chance) / 4000) ** 0.5)
