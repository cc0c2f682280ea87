"""How a command speaks and ends.

Progress goes to stderr. A command prints its text and, with --json, one JSON object on the last
line. A LocalspecError is one sentence on stderr and exit code 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from localspec.core.errors import LocalspecError, StoreError, too_long_a_name
from localspec.core.interrupts import INTERRUPTED, raise_again
from localspec.core.visible import visible


def finish(result: dict[str, Any], text: str, as_json: bool, is_exact: bool = False) -> None:
    """Print it. is_exact: the text is what was asked for, and hidden characters in it are kept out
    of terminals alone. Raises StoreError where the output goes to a place that is full."""
    shown = text if is_exact and not sys.stdout.isatty() else visible(text)
    parts = [shown] if text else []
    if as_json:
        parts.append(json.dumps(result))  # ASCII, which any terminal and pipe has
    try:
        print(*parts, sep="\n", end="\n" * bool(parts), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise StoreError(
            f"The output cannot be written: {error.strerror}. Send it to another place."
        ) from error


def _drop_output() -> None:
    """Let the output go nowhere from now on: else the end of the process would fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def to_stderr(*phrases: str) -> None:
    """Progress for people, a line each, apart from the result on stdout."""
    for phrase in phrases:
        print(visible(phrase), file=sys.stderr, flush=True)


def run(work: Callable[[], object]) -> None:
    """Do the work of this process. End it with exit code 1 after a LocalspecError. Characters that
    the output lacks become question marks."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        raise_again()
        work()
    except LocalspecError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read the output has read enough
        _drop_output()
        sys.exit(1)
    except OSError as error:
        print(too_long_a_name(error), file=sys.stderr)
        sys.exit(1)
