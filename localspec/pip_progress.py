"""Read pip's output and say one plain line per package instead.

Contract: standard library only. Every line of pip goes to the log; `follow` returns why pip
failed in three kinds (disk, network, other) and whether it had begun to change the environment.

Not here: what to do about a failure (localspec/bootstrap.py).
"""

from __future__ import annotations

import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TextIO

SILENCE_SECONDS = 15.0

_FETCHED = re.compile(
    r"(?:Downloading|Using cached|Processing)\s+(?:\S*/)?([A-Za-z0-9_.]+)-([^-\s]+)-\S+\.whl"
    r"(?:\s+\((?:(?P<size>[\d.]+ \w?B)|from .*)\))?$"
)
_INSTALLING = re.compile(r"Installing collected packages: (.+)")
_NETWORK = (
    "Failed to establish a new connection",
    "NewConnectionError",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "getaddrinfo failed",
    "Network is unreachable",
    "Read timed out",
    "ConnectTimeoutError",
    "ProxyError",
    "Max retries exceeded",
    "No route to host",
)


@dataclass(frozen=True)
class PipOutcome:
    """How pip ended. return_code 0: everything is installed."""

    return_code: int = 0
    has_begun_installing: bool = False
    is_network_missing: bool = False
    is_disk_full: bool = False
    last_error: str = "it gave no reason."
    num_packages: int = 0

    def plus(self, line: str) -> PipOutcome:
        """The outcome after one more line of output."""
        seen = self
        if _INSTALLING.match(line):
            seen = replace(seen, has_begun_installing=True)
        if _fetched(line):
            seen = replace(seen, num_packages=seen.num_packages + 1)
        if "No space left on device" in line or "not enough space on the disk" in line:
            seen = replace(seen, is_disk_full=True)
        if any(sign in line for sign in _NETWORK):
            seen = replace(seen, is_network_missing=True)
        if line.startswith("ERROR:"):
            seen = replace(seen, last_error=line.removeprefix("ERROR:").strip())
        return seen


def follow(process: subprocess.Popen[str], log: TextIO, say: Callable[[str], None]) -> PipOutcome:
    """Consume the output of a running pip until it ends."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(process, lines), daemon=True).start()
    outcome, doing, quiet_since = PipOutcome(), "asking for the list of packages", time.monotonic()
    while (line := _next(lines, doing, quiet_since, say)) is not None:
        log.write(line)
        outcome = outcome.plus(line.strip())
        if told := plain_line(line.strip(), outcome):
            say(told)
            doing, quiet_since = told.strip(), time.monotonic()
    return replace(outcome, return_code=process.wait())


def plain_line(line: str, outcome: PipOutcome) -> str | None:
    """What a person wants to know of a line of pip, None for most."""
    if fetched := _fetched(line):
        size = f", {fetched['size']}" if fetched["size"] else ""
        return f"  {outcome.num_packages:3}. {fetched[1]} {fetched[2]}{size}"
    if installing := _INSTALLING.match(line):
        return f"  unpacking {installing[1].count(',') + 1} packages"
    if line.startswith("WARNING: Retrying"):
        return "  the network does not answer, trying again"
    return None


def _fetched(line: str) -> re.Match[str] | None:
    return _FETCHED.match(line)


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None, "pip is started with its output piped"
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _next(
    lines: queue.Queue[str | None], doing: str, quiet_since: float, say: Callable[[str], None]
) -> str | None:
    """The next line; while none comes, say now and then that the work goes on."""
    while True:
        try:
            return lines.get(timeout=SILENCE_SECONDS)
        except queue.Empty:
            say(f"  ... still at: {doing} ({time.monotonic() - quiet_since:.0f} s)")
