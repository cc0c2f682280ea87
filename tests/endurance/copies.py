"""Runs a case in a copy of this process, which costs less than making anew what the case needs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from typing import TypeVar

LIMIT_S = 120.0

T = TypeVar("T")


def in_a_copy(act: Callable[[], T]) -> T:
    """What `act` gives. Raises AssertionError with what it raised, or where it hangs or dies."""
    forked = multiprocessing.get_context("fork")
    near, far = forked.Pipe()
    process = forked.Process(target=_run, args=(far, act), daemon=True)
    process.start()
    far.close()
    try:
        with closing(near):
            assert near.poll(LIMIT_S), "it hangs"
            found, said = near.recv()  # raises EOFError where the process died
    finally:
        process.kill()
        process.join()
    assert not said, said
    return found  # type: ignore[no-any-return]


def _run(pipe: Connection, act: Callable[[], object]) -> None:
    try:
        pipe.send((act(), ""))
    except BaseException as error:
        pipe.send((None, f"{type(error).__name__}: {error}"))
