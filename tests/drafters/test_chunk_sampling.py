"""Warps with their settings as tensors, and drawing on the device, are those of the engine."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from localspec.core import SamplingParams
from localspec.drafters.chunk import Warp, drawn, knobs_of, probabilities, warp_of
from localspec.engine.sampling import distributions, draw

SAMPLINGS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(1.0),
    "cold": SamplingParams(0.004),
    "top_k": SamplingParams(1.2, top_k=7),
    "top_p": SamplingParams(1.1, top_p=0.8),
    "min_p": SamplingParams(1.2, min_p=0.1),
    "both": SamplingParams(0.9, top_k=12, top_p=0.9),
    "all": SamplingParams(0.8, top_k=9, top_p=0.95, min_p=0.02),
}


@pytest.mark.parametrize("name", list(SAMPLINGS))
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_warps_are_those_of_the_engine(name: str, spread: float) -> None:
    sampling = SAMPLINGS[name]
    logits = spread * torch.randn(40, 97, generator=torch.Generator().manual_seed(1))
    knobs = torch.tensor(knobs_of(sampling, 97), dtype=torch.float64)
    wanted_with = sampling if sampling.temperature > 0.0 else SamplingParams(1.0)
    wanted = distributions(logits, wanted_with, [[]] * 40)
    for row, expected in zip(logits, wanted, strict=True):
        found = probabilities(row, warp_of(sampling), knobs)
        assert torch.allclose(found, expected, atol=1e-6)
        assert torch.equal(found > 0, expected > 0), "the same tokens are cut"


def test_equal_logits_are_cut_alike() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 1.0, 3.0, 0.0])
    for sampling in (SamplingParams(1.0, top_k=2), SamplingParams(1.0, top_p=0.5)):
        knobs = torch.tensor(knobs_of(sampling, 6), dtype=torch.float64)
        expected = distributions(row[None], sampling, [[]])[0]
        assert torch.allclose(probabilities(row, warp_of(sampling), knobs), expected)


def test_drawing_is_the_engines_drawing() -> None:
    rows = torch.rand(200, 31, generator=torch.Generator().manual_seed(2)) ** 6
    mine, theirs = (torch.Generator().manual_seed(3) for _ in "ab")
    for row in rows:
        uniform = torch.rand(1, generator=mine, dtype=torch.float64)
        found = drawn(row, row.argmax(dim=-1, keepdim=True), uniform)
        assert int(found) == draw(row, theirs)


def test_a_number_that_rounds_up_to_the_total_draws_the_likeliest() -> None:
    row = torch.tensor([0.2, 0.5, 0.3])
    almost = torch.tensor([1.0], dtype=torch.float64)
    assert int(drawn(row, row.argmax(dim=-1, keepdim=True), almost)) == 1


def test_kinds_of_sampling_differ_by_what_is_in_use_only() -> None:
    assert warp_of(SamplingParams(0.7)) == warp_of(SamplingParams(1.3, seed=4)) != Warp()
    assert warp_of(SamplingParams(0.7, top_k=5)) == warp_of(SamplingParams(0.2, top_k=90))
    for flags in product((False, True), repeat=3):
        assert warp_of(Warp(True, *flags).example()) == Warp(True, *flags)
    assert warp_of(Warp().example()) == Warp()
