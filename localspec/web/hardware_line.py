"""What this machine has, in one sentence that is never far from the present.

Contract: `line` answers at once with what was found last, "" before anything was. When that is
older than REFRESH_S it is looked up anew in a thread of its own, one at a time: a driver that is
slow, or asleep, holds nothing up. While nobody asks, nothing is looked up.

Not here: finding (machine).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

REFRESH_S = 5.0

log = logging.getLogger(__name__)


class HardwareLine:
    """find: looks the sentence up; may take seconds."""

    def __init__(self, find: Callable[[], str], refresh_s: float = REFRESH_S) -> None:
        self._find = find
        self._refresh_s = refresh_s
        self._line = ""
        self._asked_s: float | None = None
        self._lock = threading.Lock()

    def line(self) -> str:
        now = time.monotonic()
        is_old = self._asked_s is None or now - self._asked_s >= self._refresh_s
        if is_old and self._lock.acquire(blocking=False):
            self._asked_s = now
            threading.Thread(target=self._refresh, name="hardware", daemon=True).start()
        return self._line

    def _refresh(self) -> None:
        try:
            self._line = self._find()
        except Exception:  # the edge of this thread: a line is a help, not a condition
            log.exception("the hardware could not be looked up")
        finally:
            self._lock.release()
