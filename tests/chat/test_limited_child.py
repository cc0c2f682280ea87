"""A child that takes too much, stands still or ends is given up within the parent's own limits."""

from __future__ import annotations

import sys
import threading
import time

import psutil
import pytest

from localspec.chat.limited_child import ChildEnded, LimitedChild, Limits
from tests.kit.waiting import until

RUDE = "tests.chat.rude_child"
LIMITS = Limits(seconds=30.0, num_bytes=128 * 2**20)

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process")


def test_child_answers_each_question_whatever_its_libraries_print() -> None:
    with LimitedChild(RUDE, LIMITS) as child:
        for number in range(3):
            assert child.ask({"do": "print", "n": number}) == {"do": "print", "n": number}


@pytest.mark.parametrize(
    ("what", "seconds", "reason"),
    [
        ("spin", 0.5, "ran for more than"),
        pytest.param("stand still", 0.5, "ran for more than", marks=posix_only),
        ("end", 30.0, "its process ended"),
        ("grow", 30.0, "more than 128 MiB of memory|its process ended"),
    ],
)
def test_child_that_does_not_answer_is_ended(what: str, seconds: float, reason: str) -> None:
    limits = Limits(seconds, LIMITS.num_bytes)
    with LimitedChild(RUDE, limits) as child, pytest.raises(ChildEnded, match=reason):
        child.ask({"do": what})


def test_stop_ends_the_child_at_once() -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    started_s = time.monotonic()
    with LimitedChild(RUDE, LIMITS) as child, pytest.raises(ChildEnded, match="was stopped"):
        child.ask({"do": "sleep"}, stop)
    assert time.monotonic() - started_s < 10.0


@posix_only
def test_close_ends_what_the_child_started() -> None:
    with LimitedChild(RUDE, LIMITS) as child:
        other = psutil.Process(child.ask({"do": "start another"})["pid"])
        assert other.is_running()
    until(lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE)
