"""Warps against numbers worked out by hand and against transformers' own; the choice by integrating
the noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as theirs

from localspec.core import decoding
from localspec.core.decoding import SamplingParams
from localspec.core.errors import RequestError
from localspec.engine.noise import GumbelNoise
from localspec.engine.sampling import Warp, choices, distributions, perturbed, scores, warp_of
from tests.kit.tiny import CPU

GRID = 80
INTEGRATED = (
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(0.3),
    SamplingParams(1.4, top_k=2),
    SamplingParams(1.0, top_p=0.75),
    SamplingParams(1.0, min_p=0.4),
    SamplingParams(0.8, top_k=2, top_p=0.9, min_p=0.05),
)
HAND = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()


def warped(logits: torch.Tensor = HAND, **sampling: Any) -> list[float]:
    params = SamplingParams(**{"temperature": 1.0, **sampling})
    row: list[float] = distributions(logits, params, [[0]])[0].tolist()
    return row


def test_top_k_keeps_the_k_most_likely() -> None:
    assert warped(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0])


def test_top_k_beyond_the_vocabulary_changes_nothing() -> None:
    assert warped(top_k=99) == pytest.approx([0.5, 0.25, 0.15, 0.1])


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert warped(top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert warped(top_p=0.76) == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0])


def test_top_p_always_keeps_the_most_likely() -> None:
    assert warped(top_p=1e-6) == pytest.approx([1, 0, 0, 0])


def test_min_p_is_a_share_of_the_highest() -> None:
    assert warped(min_p=0.25) == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0])


def test_temperature_sharpens_by_powers() -> None:
    squares = [0.25, 0.0625, 0.0225, 0.01]
    assert warped(temperature=0.5) == pytest.approx([s / sum(squares) for s in squares], abs=1e-6)


def test_temperature_zero_is_one_hot() -> None:
    assert warped(temperature=0.0, top_p=0.5) == [1.0, 0.0, 0.0, 0.0]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]])
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0)
    found = distributions(logits, params, [[0, 1, 0]])
    assert torch.allclose(found, torch.tensor([[1.0, -2.0, 0.5, 0.0]]).softmax(-1))
    assert logits.tolist() == [[2.0, -1.0, 0.5, 0.0]]  # the caller's are not modified


def test_presence_counts_once_and_frequency_each_time_of_the_reply_alone() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]] * 2)
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    found = distributions(logits, params, [[3, 0, 0, 1], [3]], prompt_length=1)
    wanted = torch.tensor([[1.0, -1.75, 0.5, 0.0], [2.0, -1.0, 0.5, 0.0]])
    assert torch.allclose(found, wanted.softmax(-1))
    assert logits[0, 0] == 2.0, "the caller's are not modified"
    both = SamplingParams(1.0, repetition_penalty=2.0, presence_penalty=0.5)
    once = distributions(logits[:1], both, [[3, 0]], prompt_length=1)
    assert torch.allclose(once, torch.tensor([[0.5, -1.0, 0.5, 0.0]]).softmax(-1))


def test_each_row_has_its_own_history() -> None:
    logits = torch.zeros(2, 4) + torch.tensor([1.0, 1.0, 0.0, 0.0])
    params = SamplingParams(temperature=0.0, repetition_penalty=3.0)
    assert distributions(logits, params, [[0], [1]]).argmax(-1).tolist() == [1, 0]


def reference(logits: torch.Tensor, params: SamplingParams, history: list[int]) -> torch.Tensor:
    """transformers' processors in its own order."""
    ids, scores = torch.tensor([history]), logits[None]
    chain: list[Any] = []
    if params.repetition_penalty != 1.0:
        chain.append(theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(theirs.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(theirs.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(theirs.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(theirs.MinPLogitsWarper(params.min_p))
    for step in chain:
        scores = step(ids, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_agrees_with_transformers(sampling: dict[str, float]) -> None:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(11)
    logits = 3.0 * torch.randn(40, 50, generator=rng)
    histories = [torch.randint(50, (12,), generator=rng).tolist() for _ in range(40)]
    found = distributions(logits, params, histories)
    wanted = torch.stack(
        [reference(row, params, history) for row, history in zip(logits, histories, strict=True)]
    )
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.allclose(found.sum(-1), torch.ones(40))


def test_a_minute_temperature_is_greedy_and_not_nan() -> None:
    """Logits divided by it overflow; what comes must still be a distribution."""
    for temperature in (1e-6, 1e-30, 1e-40):
        assert warped(3.0 + 10.0 * HAND, temperature=temperature) == [1.0, 0.0, 0.0, 0.0]


# -- the choice -----------------------------------------------------------------------------------


def sequence_of(params: SamplingParams, *tokens: int, vocab_size: int = 4) -> decoding.Sequence:
    noise = GumbelNoise(params.seed or 0, vocab_size, CPU)
    return decoding.Sequence(tokens or (0,), params, 50, frozenset(), noise)


def integrated(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Chance of each of 3 tokens to be chosen, over a grid of GRID^3 numbers of equal chance."""
    steps = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    grid = -torch.log(-torch.log(steps)).float()
    noise = torch.cartesian_prod(grid, grid, grid)  # [GRID^3, 3]
    chosen = perturbed(logits.expand(len(noise), -1), warp_of(params), noise).argmax(-1)
    return torch.bincount(chosen, minlength=3) / len(noise)


@pytest.mark.slow
@pytest.mark.parametrize("params", INTEGRATED, ids=str)
@pytest.mark.parametrize("logits", [[0.3, 1.0, -0.4], [2.0, 0.0, 1.9], [0.0, 0.0, 0.0]], ids=str)
def test_over_all_noise_the_choice_is_distributed_as_the_warped_row(
    logits: list[float], params: SamplingParams
) -> None:
    row = torch.tensor([logits])
    found, wanted = integrated(row, params), distributions(row, params, [[]])[0]
    assert torch.allclose(found, wanted, atol=0.01)
    assert torch.equal(found > 0, wanted > 0), "a token that is cut is never chosen"


def test_fault_noise_that_the_temperature_does_not_scale_is_seen() -> None:
    row = torch.tensor([[0.3, 1.0, -0.4]])
    hot = integrated(row, SamplingParams(1.0))
    assert not torch.allclose(hot, distributions(row, SamplingParams(0.5), [[]])[0], atol=0.01)


def test_greedy_chooses_the_likeliest_and_asks_for_no_noise() -> None:
    sequence: Any = sequence_of(SamplingParams())
    sequence.noise = None
    assert choices(scores(HAND.repeat(2, 1), sequence, [(), (1,)])) == [0, 0]


def test_a_row_is_judged_with_the_noise_of_its_place_wherever_it_is_asked_for() -> None:
    """After one token more of text, or one more of draft; in a chain, in a tree and alone."""
    params, logits = SamplingParams(2.0, seed=4), HAND.repeat(5, 1)
    tree = scores(logits, sequence_of(params), [(), (1,), (2,), (1, 3), (2, 0)])
    later = scores(logits[:2], sequence_of(params, 0, 1), [(), (3,)])
    assert torch.equal(tree[1], tree[2]) and torch.equal(tree[3], tree[4])
    assert torch.equal(later, tree[[1, 3]])
    assert torch.equal(scores(logits[:1], sequence_of(params), [(2, 0)])[0], tree[4])
    assert not torch.equal(tree[0], tree[1])


def test_penalties_count_the_drafted_tokens_before_a_row() -> None:
    sequence = sequence_of(SamplingParams(repetition_penalty=3.0), 2)
    rows = torch.tensor([[1.0, 1.1, 1.2, 0.6]] * 3)
    assert choices(scores(rows, sequence, [(), (1,), (1, 0)])) == [1, 0, 3]
    counted = sequence_of(SamplingParams(frequency_penalty=0.3), 2)
    assert choices(scores(rows, counted, [(), (2,), (2, 2)])) == [2, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_row_that_holds_no_numbers_chooses_nothing(
    bad: float, temperature: float, cuts: dict[str, Any]
) -> None:
    rows = torch.tensor([[0.0, 9.0, 0.0, 0.0], [0.0, bad, 0.0, 0.0], [float("-inf")] * 4])
    sequence = sequence_of(SamplingParams(temperature, **cuts))
    assert choices(scores(rows, sequence, [(), (1,), (2,)])) == [1, None, None]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_single_forbidden_tokens_are_no_fault(temperature: float) -> None:
    rows = torch.tensor([[0.0, float("-inf"), float("-inf"), 1.0]])
    for seed in range(20):
        sequence = sequence_of(SamplingParams(temperature, seed=seed))
        assert choices(scores(rows, sequence, [()]))[0] in (0, 3)


@pytest.mark.parametrize("params", INTEGRATED, ids=str)
def test_settings_as_tensors_give_the_same_scores(params: SamplingParams) -> None:
    """As a recorded draft reads them."""
    logits = 3.0 * torch.randn(30, 97, generator=torch.Generator().manual_seed(1))
    noise, warp = GumbelNoise(1, 97, CPU).rows(0, 30), warp_of(params)
    as_tensors = Warp(*(None if each is None else torch.tensor([each]) for each in warp))
    found, wanted = perturbed(logits, as_tensors, noise), perturbed(logits, warp, noise)
    assert torch.equal(found.isfinite(), wanted.isfinite()), "the same tokens are cut"
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": float("nan")}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_k": -1}],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(sampling: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(sampling))):
        SamplingParams(**sampling)  # type: ignore[arg-type]
