"""How many threads are chosen, with a clock that the step itself moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from localspec.machine.threads import candidates, choose_threads


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chosen(step_s: dict[int, float], default: int) -> int:
    """What is chosen where a step takes so long with each number of threads."""
    now = 0.0
    torch.set_num_threads(default)

    def step() -> None:
        nonlocal now
        now += step_s[torch.get_num_threads()]

    found = choose_threads(step, clock=lambda: now)
    assert torch.get_num_threads() == found
    return found


def test_candidates_go_down_by_halves() -> None:
    assert candidates(12) == [12, 6, 3, 1]
    assert candidates(1) == [1]


def test_the_fastest_is_taken() -> None:
    assert chosen({4: 2.0, 2: 1.0, 1: 3.0}, default=4) == 2


def test_torch_keeps_its_own_number_unless_another_is_clearly_better() -> None:
    assert chosen({2: 1.1, 1: 1.0}, default=2) == 2
    assert chosen({2: 1.2, 1: 1.0}, default=2) == 1


def test_a_slow_step_is_timed_few_times() -> None:
    taken = []

    def step() -> None:
        taken.append(torch.get_num_threads())

    torch.set_num_threads(1)
    choose_threads(step, clock=lambda: 2.0 * len(taken))
    assert len(taken) == 2
