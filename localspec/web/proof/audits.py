"""The replays of logged replies without drafting, one kept for each reply.

Contract: a replay runs in the service's queue; it only compares and logs nothing. Answers are the
state of a replay as plain data.

Not here: what a replay is (chat.audit).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from localspec.chat import audit
from localspec.chat.service import ChatService, Task
from localspec.errors import StoreError

MAX_KEPT = 50


class Audits:
    """The replays of this server, by message id."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._kept: OrderedDict[int, tuple[audit.Replay, Task]] = OrderedDict()

    def start(self, message_id: int) -> dict[str, Any]:
        """Queue a replay, unless one is under way or it cannot be. Raises StoreError."""
        known = self._kept.get(message_id)
        if known is None or known[1].done.is_set():
            refusal = self._refusal(message_id)
            if refusal is not None:
                return {"state": "refused", "text": refusal}
            replay = self._service.replay(message_id)
            task = self._service.enqueue("a replay without drafting", replay.run)
            self._kept[message_id] = replay, task
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return self.state(message_id)

    def state(self, message_id: int) -> dict[str, Any]:
        known = self._kept.get(message_id)
        if known is None:
            return {"state": "none", "text": ""}
        replay, task = known
        if not task.done.is_set():
            return {"state": "running", "text": "Replaying without drafting …"}
        if replay.finding is None:
            text = replay.refusal or task.error or "The replay was stopped."
            return {"state": "failed", "text": text}
        return {"state": replay.finding.outcome, "text": audit.sentence(replay.finding)}

    def stop(self, message_id: int) -> dict[str, Any]:
        known = self._kept.get(message_id)
        if known is not None:
            known[1].cancel.set()
        return self.state(message_id)

    def _refusal(self, message_id: int) -> str | None:
        row = self._service.turn_of(message_id)
        if row is None:
            raise StoreError("The log has no such reply.")
        loaded = self._service.status().description
        if loaded is None:
            return "No model is loaded. Wait until it is, then try again."
        return audit.why_not(row, loaded.target, loaded.dtype)
