"""How many threads are chosen, with a clock that the step itself moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from localspec.errors import ConfigError
from localspec.placement import candidates, choose_threads, require_threads


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chosen(step_s: dict[int, float], default: int, beside_page: bool = False) -> int:
    """What is chosen where a step takes so long with each number of threads."""
    now = 0.0
    torch.set_num_threads(default)

    def step() -> None:
        nonlocal now
        now += step_s[torch.get_num_threads()]

    found = choose_threads(step, beside_page, clock=lambda: now)
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


def test_a_core_is_left_to_the_page_unless_all_are_worth_much_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert candidates(12, beside_page=True) == [12, 11, 6, 3, 1]
    assert candidates(2, beside_page=True) == [2, 1] and candidates(1, beside_page=True) == [1]
    assert chosen({2: 1.0, 1: 1.4}, default=2) == 2
    assert chosen({2: 1.0, 1: 1.4}, default=2, beside_page=True) == 1
    assert chosen({2: 1.0, 1: 1.9}, default=2, beside_page=True) == 2
    assert chosen({1: 1.0}, default=1, beside_page=True) == 1


def test_beside_a_page_far_fewer_threads_must_still_be_clearly_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    steps = {8: 1.0, 7: 1.05, 4: 0.95, 2: 1.5, 1: 3.0}
    assert chosen(steps, default=8, beside_page=True) == 7
    assert chosen({**steps, 4: 0.7}, default=8, beside_page=True) == 4


def test_where_cores_are_free_none_needs_to_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody said how many threads there may be, on a machine with more."""
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert chosen({2: 1.0, 1: 1.1}, default=2, beside_page=True) == 2


@pytest.mark.parametrize("count", [0, -1, 100_000_000])
def test_threads_that_cannot_be_started_are_refused_by_their_flag(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--threads is {count}, but must lie between 1 and"):
        require_threads("--threads", count)
    assert require_threads("--threads", 1) == 1
