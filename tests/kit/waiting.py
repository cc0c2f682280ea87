"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAIT_S = 60.0  # only what hangs takes longer
LOOK_S = 0.005


def until(look: Callable[[], T], wait_s: float = WAIT_S) -> T:
    """What `look` found as soon as that is true; fails after so many seconds."""
    end_s = time.monotonic() + wait_s
    while not (found := look()):
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(LOOK_S)
    return found
