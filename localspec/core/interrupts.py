"""Ctrl-C while a program still imports what it needs: it ends at once, without a traceback.

Contract: imports next to nothing, for the call comes before all else. Python raises
KeyboardInterrupt anywhere; in the midst of an import it may be printed and lost. A program that
ignores Ctrl-C, as one in the background of a shell does, goes on ignoring it.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # typing would be the longest import of all
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

INTERRUPTED = 130  # as shells have it
# Ctrl-C, a supervisor, a terminal that is closed; Windows has no such signal.
ENDINGS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))


def handle(number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
    """Answer a signal by this, unless it is ignored."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def end_at_once(number: int = signal.SIGINT, code: int = INTERRUPTED) -> None:
    """There is nothing that has to be put away."""
    handle(number, lambda *_: os._exit(code))


def raise_again() -> None:
    """KeyboardInterrupt at Ctrl-C, as Python has it."""
    handle(signal.SIGINT, signal.default_int_handler)
