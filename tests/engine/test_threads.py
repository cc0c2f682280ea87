"""The number of threads follows the machine: chosen by a clock that the step itself moves, and
changed by rounds of a made-up machine that other programs slow down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from localspec.controller.load import Load, Shown
from localspec.engine.threads import RETRY_S, ROUNDS, Threads, candidates, choose_threads


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

    choose_threads(step, beside_page, clock=lambda: now)
    return torch.get_num_threads()


def test_candidates_go_down_by_halves() -> None:
    assert candidates(12) == [12, 11, 6, 3, 1]
    assert candidates(2) == [2, 1] and candidates(1) == [1]


def test_the_fastest_is_taken() -> None:
    assert chosen({4: 2.0, 3: 2.0, 2: 1.0, 1: 3.0}, default=4) == 2


def test_torch_keeps_its_own_number_unless_another_is_clearly_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert chosen({2: 1.1, 1: 1.0}, default=2) == 2
    assert chosen({2: 1.2, 1: 1.0}, default=2) == 1


def test_a_slow_step_is_timed_few_times() -> None:
    taken = []

    def step() -> None:
        taken.append(torch.get_num_threads())

    torch.set_num_threads(1)
    choose_threads(step, clock=lambda: 2.0 * len(taken))
    assert len(taken) == 2


def test_a_core_is_left_to_others_unless_all_are_worth_more_and_beside_a_page_much_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert chosen({2: 1.0, 1: 1.1}, default=2) == 1
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


# -- while it runs --------------------------------------------------------------------------

QUIET = {2: 0.060, 1: 0.084}  # seconds a round of 350M parameters by the number of threads
BUSY = {2: 0.220, 1: 0.092}  # beside a program that keeps one of two cores busy


class Machine:
    """Rounds one after another. took_s: by the number of threads, now. spent: seconds so far."""

    def __init__(
        self, took_s: Mapping[int, float], number: int | None = None, worth: float = 1.0
    ) -> None:
        self.took_s, self.spent = took_s, 0.0
        most = max(took_s)
        self.threads = Threads(most, number or most, worth, clock=lambda: self.spent)
        self.believed_s, self.load = took_s[most], Load()

    def run(self, num_rounds: int) -> list[int]:
        """The number of threads that each round ran with."""
        return [self._round() for _ in range(num_rounds)]

    def _round(self) -> int:
        number = torch.get_num_threads()
        self.spent += self.took_s[number]
        self.load.observe(Shown(1, self.believed_s, self.believed_s, self.took_s[number], True))
        self.threads.observe(self.load.value)
        return number


def test_a_reply_goes_on_with_fewer_threads_once_another_program_slows_it() -> None:
    machine = Machine(QUIET)
    assert set(machine.run(int(RETRY_S / QUIET[2]))) == {2}
    machine.took_s = BUSY
    machine.run(3 * ROUNDS)
    found = machine.run(2000)
    assert found.count(1) > 0.97 * len(found)


def test_the_usual_number_is_back_once_the_machine_is_quiet_again() -> None:
    machine = Machine(BUSY, number=1)
    machine.took_s = QUIET
    machine.run(int(1.1 * RETRY_S / QUIET[1]))
    assert set(machine.run(50 * ROUNDS)) == {2}


def test_a_model_loaded_on_a_busy_machine_gets_the_usual_number_later() -> None:
    machine = Machine(QUIET, number=1)
    assert machine.run(1) == [1]
    machine.spent += RETRY_S  # the chat waits for its person
    machine.run(2 * ROUNDS)
    assert machine.run(1) == [2]


def test_a_machine_that_is_slow_with_any_number_keeps_it_and_tries_seldom() -> None:
    machine = Machine(QUIET)
    machine.took_s = {2: 0.120, 1: 0.168}
    found = machine.run(5000)
    assert 0 < found.count(1) < 0.03 * len(found) and found[-1] == 2


def test_where_no_other_number_helps_trials_become_rare() -> None:
    machine = Machine({2: 0.12, 1: 0.168})
    machine.believed_s = 0.06
    early, late = machine.run(3000).count(1), machine.run(3000).count(1)
    assert 0 < late < 0.6 * early


def test_one_slow_round_changes_nothing() -> None:
    machine = Machine(QUIET)
    for _ in range(100):
        machine.took_s = {2: 2.0, 1: 2.0}
        assert machine.run(1) == [2]
        machine.took_s = QUIET
        assert set(machine.run(ROUNDS)) == {2}


def test_one_thread_is_not_made_fewer() -> None:
    machine = Machine({1: 0.1})
    machine.took_s = {1: 1.0}
    assert set(machine.run(10 * ROUNDS)) == {1}


def test_all_cores_must_be_worth_it_where_a_page_is_drawn_on_one() -> None:
    machine = Machine(QUIET, number=1, worth=1.6)
    found = machine.run(2000)
    assert found[-1] == 1 and found.count(2) < 0.1 * len(found)


def test_of_many_cores_those_that_are_free_are_found_step_by_step() -> None:
    quiet = {8: 0.1, 7: 0.11, 4: 0.19, 2: 0.37, 1: 0.73}
    machine = Machine(quiet, number=7, worth=1.15)
    assert set(machine.run(ROUNDS)) == {7}
    machine.took_s = {8: 0.9, 7: 0.8, 4: 0.2, 2: 0.38, 1: 0.73}
    machine.run(1000)
    assert machine.run(1) == [4]
    machine.took_s = quiet
    machine.run(2000)
    assert machine.run(1) == [7]
