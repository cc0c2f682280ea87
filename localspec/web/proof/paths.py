"""Routes of the proof: /tokens (where each token came from), /audit (replay a reply), /report.

Contract: message ids are numbers and nothing else of a client is used. Answers are never cached.
An audit is started by POST, so that no other page's link can start one (security guards the
method), runs in the service's queue, and is asked after by GET; one is kept per reply.

Not here: what a replay is (chat.audit), what a report says (report).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from localspec.chat import audit
from localspec.chat.service import ChatService
from localspec.errors import LocalspecError, StoreError
from localspec.web.proof.report import report_zip
from localspec.web.proof.tokens import token_view

if TYPE_CHECKING:
    from localspec.chat.service import Task

MAX_KEPT = 50
NO_STORE = {"cache-control": "no-store"}


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
            task = self._service.enqueue("a replay without speculation", replay.run)
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
            return {"state": "running", "text": "Replaying without speculation …"}
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


def add_proof_routes(api: Any, service: ChatService) -> None:
    """Add the routes to the server's own application."""
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response

    audits = Audits(service)

    def answer(data: dict[str, Any]) -> Response:
        return JSONResponse(data, headers=NO_STORE)

    def refused(error: LocalspecError | str, status: int = 404) -> Response:
        return JSONResponse({"error": str(error)}, status, headers=NO_STORE)

    def tokens(request: Request) -> Response:
        message_id = number_of(request.query_params.get("message"))
        if message_id is None:
            return refused("Name a message by its number.", 400)
        try:
            return answer(token_view(service, message_id))
        except LocalspecError as error:
            return refused(error)

    def replay(request: Request) -> Response:
        message_id = number_of(request.query_params.get("message"))
        if message_id is None:
            return refused("Name a message by its number.", 400)
        try:
            if request.method == "POST":
                return answer(audits.start(message_id))
            if request.method == "DELETE":
                return answer(audits.stop(message_id))
            return answer(audits.state(message_id))
        except LocalspecError as error:
            return refused(error)

    def report(request: Request) -> Response:
        query = request.query_params
        try:
            packed = report_zip(service, query)
        except LocalspecError as error:
            return PlainTextResponse(str(error), 409, headers=NO_STORE)
        headers = {"content-disposition": 'attachment; filename="localspec-report.zip"', **NO_STORE}
        return Response(packed, media_type="application/zip", headers=headers)

    api.add_route("/tokens", tokens)
    api.add_route("/audit", replay, methods=["GET", "POST", "DELETE"])
    api.add_route("/report", report)


def number_of(text: str | None) -> int | None:
    """A number out of an address; None for anything else."""
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) < 19
    return int(text) if is_number and text is not None else None
