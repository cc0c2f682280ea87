"""The noise is Gumbel, independent in all that it depends on, and the same however it is asked for.

N = 2^18 numbers a test; each of the tests counts as one of TESTS, so the whole file fails by chance
once in 10,000 versions of the hash (it is fixed, so it passes or fails for good).
"""

from __future__ import annotations

import pytest
import torch

from localspec.engine import noise as module
from localspec.engine.noise import GumbelNoise
from tests.kit.chi_squared import p_value
from tests.kit.tiny import CPU

V, ROWS, CELLS = 1024, 256, 16
TESTS = 32
SIGNIFICANCE = 1e-4 / TESTS


def numbers(seed: int = 7, first: int = 0, vocab_size: int = V) -> torch.Tensor:
    """[ROWS, V]."""
    return GumbelNoise(seed, vocab_size, CPU).rows(first, ROWS).clone()


def uniform(gumbel: torch.Tensor) -> torch.Tensor:
    """Where each number lies in the Gumbel distribution, in [0, 1]."""
    return torch.exp(-torch.exp(-gumbel.double()))


def cells(gumbel: torch.Tensor) -> torch.Tensor:
    return (uniform(gumbel) * CELLS).long().clamp(max=CELLS - 1).flatten()


def independence(left: torch.Tensor, right: torch.Tensor) -> float:
    """p-value of the joint counts of two sets of numbers."""
    joint = torch.bincount(cells(left) * CELLS + cells(right), minlength=CELLS**2)
    return p_value(joint, torch.full((CELLS**2,), 1.0 / CELLS**2))


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1])
def test_the_numbers_are_gumbel(seed: int) -> None:
    places = (uniform(numbers(seed)) * 1000).long().flatten()
    assert p_value(torch.bincount(places, minlength=1000), torch.full((1000,), 1e-3)) > SIGNIFICANCE


@pytest.mark.slow
def test_the_upper_tail_is_fine() -> None:
    """An unlikely token wins with its own chance: of numbers above 8, cells of equal chance."""
    found = torch.cat([numbers(seed)[numbers(seed) > 8.0] for seed in range(40)]).double()
    chance = 1.0 - torch.exp(-torch.exp(torch.tensor(-8.0, dtype=torch.float64)))
    assert len(found) == pytest.approx(40 * ROWS * V * float(chance), rel=0.06)
    places = ((1.0 - uniform(found)) / chance * 20).long().clamp(max=19)
    assert p_value(torch.bincount(places, minlength=20), torch.full((20,), 0.05)) > SIGNIFICANCE
    assert float(found.max()) > 13.0


def test_numbers_hardly_ever_repeat() -> None:
    values = numbers().flatten()[: 2**16]
    assert len(values.unique()) > 0.99 * len(values)


@pytest.mark.parametrize("step", [1, 2, 3, 16, 100])
def test_neighbouring_tokens_are_independent(step: int) -> None:
    found = numbers()
    assert independence(found[:, :-step], found[:, step:]) > SIGNIFICANCE


@pytest.mark.parametrize("step", [1, 2, 15, 16, 17])
def test_positions_are_independent(step: int) -> None:
    found = numbers()
    assert independence(found[:-step], found[step:]) > SIGNIFICANCE


@pytest.mark.parametrize("other", [8, 6, 7 + 2**32, -7])
def test_seeds_are_independent(other: int) -> None:
    assert independence(numbers(7), numbers(other)) > SIGNIFICANCE


@pytest.mark.parametrize(("seed_step", "place_step"), [(1, 1), (1, -1), (-1, 16)])
def test_a_later_position_of_another_seed_is_independent(seed_step: int, place_step: int) -> None:
    left, right = numbers(7, 32), numbers(7 + seed_step, 32 + place_step)
    assert independence(left, right) > SIGNIFICANCE


def test_rows_do_not_depend_on_how_they_are_asked_for() -> None:
    whole = GumbelNoise(3, 50, CPU).rows(0, 200).clone()
    asked = GumbelNoise(3, 50, CPU)
    for position, count in ((5, 1), (5, 9), (14, 40), (90, 3), (2, 4), (60, 17), (61, 1)):
        assert torch.equal(asked.rows(position, count), whole[position : position + count])


@pytest.mark.parametrize("size", [1, 2, 49, 50, 51])
def test_a_tokens_noise_does_not_depend_on_the_vocabulary(size: int) -> None:
    wide, narrow = (GumbelNoise(3, v, CPU).rows(4, 20) for v in (70_000, size))
    assert torch.equal(wide[:, :size], narrow)


def test_the_bits_are_those_of_splitmix64() -> None:
    """Java's SplittableRandom and Steele et al.: the first outputs for seed 0."""
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [module.mixed(n * module.GOLDEN & module.MASK) for n in (1, 2, 3)] == known
    values = torch.arange(1, 4) * module.signed(module.GOLDEN)
    assert module.hashed(values).tolist() == [module.signed(value) for value in known]


def test_the_extreme_bits_give_finite_numbers() -> None:
    bits = torch.tensor([0, 2**31 - 1, -(2**31)], dtype=torch.int32)
    found = module.gumbel(bits)
    assert bool(found.isfinite().all()) and float(found[0]) > 22.0 and float(found[1:].max()) < -2.8


# -- planted faults -------------------------------------------------------------------------------


def test_fault_a_key_without_the_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module.GumbelNoise._made
    monkeypatch.setattr(module.GumbelNoise, "_made", lambda noise, position: made(noise, 0))
    found = numbers()
    assert independence(found[:-16], found[16:]) < SIGNIFICANCE


def test_fault_noise_of_16_bits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    gumbel = module.gumbel
    monkeypatch.setattr(module, "gumbel", lambda bits: gumbel(bits & 0x7FFF0000))
    values = numbers().flatten()[: 2**16]
    assert len(values.unique()) < 0.99 * len(values)
