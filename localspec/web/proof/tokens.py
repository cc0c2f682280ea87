"""The data behind the token view: where each token of a reply came from, and its replay.

Contract: everything comes from the log. Numbers are given raw; static/tokens.js shows them as text
nodes. A replay runs in the service's queue, only compares, and is kept, the latest of each reply.

Not here: the kinds of tokens (provenance), what a replay is (chat.audit).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from localspec.chat import audit
from localspec.chat.service import ChatService, Task
from localspec.core import AUTO, OFF
from localspec.drafters.registry import label_of
from localspec.errors import StoreError
from localspec.web.proof.provenance import KINDS, Provenance, provenance_of

MAX_KEPT = 50  # replays
LENIENT = "Checking was lenient here, as you chose: other guesses passed as well."


def token_view(service: ChatService, message_id: int) -> dict[str, Any]:
    """The view of a stored reply, and the drafters that it can be made again with. Raises
    StoreError for one that the log does not have, or of which an earlier version logged less."""
    reply = service.reply_record(message_id)
    sizes = (len(reply.tokens), len(reply.steps))
    if reply.record is None or (len(reply.record.lengths), len(reply.record.rounds)) != sizes:
        raise StoreError(
            "The log does not have what was drafted for this reply, as an earlier localspec wrote "
            "it. Regenerate it to see where each token comes from."
        )
    found = provenance_of(reply.text, reply.provenance, reply.steps, reply.record)
    return as_json(reply.row, found) | {"drafters": _drafters(service)}


def _drafters(service: ChatService) -> list[dict[str, str]]:
    """Those that are loaded, plain decoding and the controller's choice among them."""
    loaded = service.status().description
    known = () if loaded is None else loaded.drafters
    able = [(one.name, label_of(one.name)) for one in known if one.is_available]
    choices = ((OFF, "without drafting"), (AUTO, "with drafting"), *able)
    return [{"name": name, "label": label} for name, label in choices]


def as_json(row: Mapping[str, Any], found: Provenance) -> dict[str, Any]:
    counts = ("num_draft_tokens", "num_accepted_tokens", "num_output_tokens")
    return {
        **{name: row[name] for name in counts},
        "runs": found.runs,
        "rounds": [asdict(one) for one in found.rounds],
        "legend": [
            {"kind": kind, "label": KINDS[kind][0], "meaning": KINDS[kind][1], "count": count}
            for kind, count in found.counts.items()
        ],
        "notes": [LENIENT] if row["exact"] is False else [],
    }


class Audits:
    """The replays of this server, by message id."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._kept: OrderedDict[int, tuple[audit.Replay, Task]] = OrderedDict()

    def start(self, message_id: int, drafter: str) -> dict[str, Any]:
        """Queue a replay, unless one is under way or it cannot be. drafter: as in Request. Raises
        StoreError."""
        known = self._kept.get(message_id)
        if known is None or known[1].done.is_set():
            replay = self._service.replay(message_id, drafter)
            refusal = self._refusal(replay)
            if refusal is not None:
                return {"state": "refused", "text": refusal}
            task = self._service.enqueue("making a reply again", replay.run)
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
            return {"state": "running", "text": "Making it again …"}
        if replay.finding is None:
            text = replay.refusal or task.error or "The replay was stopped."
            return {"state": "failed", "text": text}
        outcome = "changed" if replay.finding.is_explained else replay.finding.outcome
        return {"state": outcome, "text": audit.sentence(replay)}

    def stop(self, message_id: int) -> dict[str, Any]:
        known = self._kept.get(message_id)
        if known is not None:
            known[1].cancel.set()
        return self.state(message_id)

    def _refusal(self, replay: audit.Replay) -> str | None:
        loaded = self._service.status().description
        if loaded is None:
            return "No model is loaded. Wait until it is, then try again."
        return audit.why_not(replay.row, loaded.target)
