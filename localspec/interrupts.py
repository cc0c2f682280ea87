"""Ctrl-C while a program still imports what it needs: it ends at once, without a traceback.

Contract: imports next to nothing, for the call comes before all else. Python raises
KeyboardInterrupt anywhere; in the midst of an import it may be printed and lost. Who ignores
Ctrl-C, as what a shell runs in the background, goes on ignoring it.
"""

import os
import signal

INTERRUPTED = 130  # as shells have it
# Ctrl-C, a supervisor, a terminal that is closed; Windows has no such signal.
ENDINGS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))


def end_at_once(number: int = signal.SIGINT, code: int = INTERRUPTED) -> None:
    """Until `raise_again`: there is nothing that has to be put away."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda *_: os._exit(code))


def raise_again(number: int = signal.SIGINT) -> None:
    """From now on KeyboardInterrupt."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler)
