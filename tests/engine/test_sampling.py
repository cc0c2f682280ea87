"""Warps against numbers worked out by hand and against transformers' own; draws against chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as theirs

from localspec.core import SamplingParams
from localspec.engine import sampling
from localspec.engine.sampling import distributions, draw, uniforms
from localspec.errors import RequestError

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


def test_draws_follow_the_weights() -> None:
    """N = 6000 draws over 5 tokens; chi-squared with 4 degrees stays below 23.5 (p = 1e-4)."""
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0, 4.0, 0.5])
    rng = torch.Generator().manual_seed(5)
    counts = torch.zeros(7)
    for _ in range(6000):
        counts[draw(weights, rng)] += 1
    expected = 6000 * weights / weights.sum()
    seen = weights > 0
    assert counts[~seen].sum() == 0
    assert float(((counts - expected)[seen] ** 2 / expected[seen]).sum()) < 23.5


def test_same_seed_draws_the_same_tokens() -> None:
    weights = torch.rand(50, generator=torch.Generator().manual_seed(1))

    def drawn(seed: int) -> list[int]:
        rng = torch.Generator().manual_seed(seed)
        return [draw(weights, rng) for _ in range(30)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_uniform_at_the_upper_end_never_draws_an_impossible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    almost_one = torch.tensor(1.0 - 2.0**-53, dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: almost_one)
    assert draw(torch.tensor([0.3, 0.7, 0.0]), torch.Generator()) == 1
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros((), dtype=torch.float64))
    assert draw(torch.tensor([0.0, 0.7, 0.3]), torch.Generator()) == 1


def test_uniforms_lie_below_one() -> None:
    drawn = uniforms(1000, torch.Generator().manual_seed(0))
    assert 0.0 <= min(drawn) < 0.01 and 0.99 < max(drawn) < 1.0


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": float("nan")}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_k": -1}],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(sampling: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(sampling))):
        SamplingParams(**sampling)  # type: ignore[arg-type]


@pytest.mark.parametrize("uniform", [0.0, 1e-9, 0.3, 0.5, 0.999999999])
def test_both_ways_of_inverting_a_row_name_the_same_token(uniform: float) -> None:
    row = torch.rand(500, generator=torch.Generator().manual_seed(4))
    row[::3] = 0.0
    here, there = sampling._inverted_here(row, uniform), sampling._inverted_there(row, uniform)
    assert here[0] == there[0] and here[1] == pytest.approx(there[1])
    assert row[here[0]] > 0.0
