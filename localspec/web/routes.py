"""The routes of our own, beside Gradio's: what the page's scripts ask for.

/healthz (the server is up), /live (figures), /export and /report (files), /import (conversations
out of a file), /read (the text of a file to attach), /tokens and /audit (where the tokens of a
reply came from, and its replay), /models (the Models tab), /localspec/* (scripts and styles).

Contract: every route only reads its query or body and calls the service or the tab's controller.
Message ids are numbers. A LocalspecError becomes a sentence with status 409.

Not here: who may ask, and what a browser may keep (guard).
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from localspec.chat.documents import read_file
from localspec.chat.importing import Report
from localspec.chat.service import ChatService, Format, Scope, clean
from localspec.core.decoding import OFF
from localspec.core.errors import LocalspecError, RequestError, StoreError
from localspec.core.files import parsed
from localspec.core.units import counted
from localspec.machine.found_line import found_line
from localspec.machine.hardware import probe
from localspec.web.guard.routes import HEALTH_PATH, IMPORT_PATH, READ_PATH
from localspec.web.guard.security import is_this_machine
from localspec.web.live import HardwareLine, live_state
from localspec.web.models.models_controller import ModelsController
from localspec.web.proof.report import report_zip
from localspec.web.proof.tokens import Audits, token_view
from localspec.web.stats.selection import WEEK, week_begin
from localspec.web.words import number_of

STATIC = Path(__file__).parent / "static"
STATIC_FILES = frozenset(file.name for file in STATIC.iterdir())
STYLES = ("page", "actions", "settings", "live", "tokens", "stats", "race", "models")


# Of each format of the log, the end of the file's name and its media type.
EXPORTS: dict[Format, tuple[str, str]] = {
    "csv": ("csv", "text/csv; charset=utf-8"),
    "jsonl": ("jsonl", "application/x-ndjson"),
    "markdown": ("md", "text/markdown; charset=utf-8"),
    "sqlite": ("db", "application/vnd.sqlite3"),
}


def add_routes(api: Any, service: ChatService, models: ModelsController) -> None:
    """Add all of them to the server's application."""
    routes = _Routes(service, models)
    api.add_exception_handler(LocalspecError, _refused)
    api.add_route(HEALTH_PATH, routes.health)
    api.add_route("/live", routes.live)
    api.add_route("/localspec/{name}", routes.static)
    api.add_route("/tokens", routes.tokens)
    api.add_route("/audit", routes.audit, methods=["GET", "POST", "DELETE"])
    api.add_route("/export", routes.export)
    api.add_route("/report", routes.report)
    api.add_route(IMPORT_PATH, routes.import_file, methods=["POST"])
    api.add_route(READ_PATH, routes.read, methods=["POST"])
    api.add_route("/models", routes.show_models)
    api.add_route("/models", routes.act_on_models, methods=["POST"])


class _Routes:
    """What is answered at each path."""

    def __init__(self, service: ChatService, models: ModelsController) -> None:
        self._service = service
        self._models = models
        self._launch = secrets.token_hex(8)  # by which a page knows that localspec was restarted
        self._hardware = HardwareLine(lambda: found_line(probe()))
        self._audits = Audits(service)
        self._style = b"".join((STATIC / f"{name}.css").read_bytes() for name in STYLES)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def live(self, request: Request) -> Response:
        service = self._service
        start = number_of(request.query_params.get("rounds_from"))
        named = request.query_params.get("c")
        shown = None if named is None else number_of(named) or 0  # 0: a new chat
        wanted = None if service.options is None else service.options.model
        state = live_state(service.status(shown), start, self._hardware.line(), wanted)
        return JSONResponse({**state, "launch": self._launch})

    async def static(self, request: Request) -> Response:
        name, headers = request.path_params["name"], {"cache-control": "no-cache"}
        if name == "style.css":  # all in one answer: the page waits for each
            return Response(self._style, media_type="text/css", headers=headers)
        if name not in STATIC_FILES:
            return PlainTextResponse("There is no such file.", 404)
        return FileResponse(STATIC / name, headers=headers)

    def tokens(self, request: Request) -> Response:
        return _of_message(request, lambda message_id: token_view(self._service, message_id))

    def audit(self, request: Request) -> Response:
        def start(message_id: int) -> dict[str, Any]:
            return self._audits.start(message_id, request.query_params.get("drafter", OFF))

        acts = {"POST": start, "DELETE": self._audits.stop}
        return _of_message(request, acts.get(request.method, self._audits.state))

    def export(self, request: Request) -> Response:
        query = request.query_params
        format = next((one for one in EXPORTS if one == query.get("format")), None)
        if format is None:
            return PlainTextResponse("The formats are csv, jsonl, markdown and sqlite.", 400)
        suffix, media_type = EXPORTS[format]
        try:
            scope, name = scope_of(self._service, query.get("scope"), query.get("conversation"))
            file = self._service.export_to_send(scope, format)
        except LocalspecError as error:
            return PlainTextResponse(str(error), 409)
        return FileResponse(
            file,
            media_type=media_type,
            filename=f"localspec-{name}.{suffix}",
            background=BackgroundTask(shutil.rmtree, file.parent),
        )

    def report(self, request: Request) -> Response:
        try:
            packed = report_zip(self._service, request.query_params)
        except LocalspecError as error:
            return PlainTextResponse(str(error), 409)
        headers = {"content-disposition": 'attachment; filename="localspec-report.zip"'}
        return Response(packed, media_type="application/zip", headers=headers)

    async def import_file(self, request: Request) -> Response:
        body, report = await request.body(), Report()
        found = await run_in_threadpool(self._service.import_conversations, body, report)
        return JSONResponse(
            {"imported": len(found), "last": found[-1], "left_out": clean(report.said())}
        )

    async def read(self, request: Request) -> Response:
        name, body = request.query_params.get("name", "file"), await request.body()
        stop = threading.Event()
        watch = asyncio.create_task(_set_when_gone(request, stop))
        try:
            return JSONResponse(await run_in_threadpool(_read, self._service, name, body, stop))
        except LocalspecError as error:  # an answer: the person's file is as it is
            return JSONResponse({"error": str(error)})
        finally:
            watch.cancel()

    def show_models(self, request: Request) -> Response:
        return JSONResponse(self._models.view())

    async def act_on_models(self, request: Request) -> Response:
        asked = _action_in(await request.body(), is_this_machine(request.scope))
        return JSONResponse(await run_in_threadpool(self._models.act, asked))


def _of_message(request: Request, find: Callable[[int], dict[str, Any]]) -> Response:
    """What is found of the message that the address names."""
    message_id = number_of(request.query_params.get("message"))
    if message_id is None:
        return JSONResponse({"error": "Name a message by its number."}, 400)
    return JSONResponse(find(message_id))


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 409)


async def _set_when_gone(request: Request, stop: threading.Event) -> None:
    """Set `stop` when the browser no longer waits for the answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stop.set()


def _read(service: ChatService, name: str, data: bytes, stop: threading.Event) -> dict[str, Any]:
    """A file to attach: its name, its text, and what was read in words."""
    found = read_file(name, data, stop)
    num_tokens = service.num_tokens(found.text)
    tokens = "" if num_tokens is None else counted(num_tokens, "token")
    said = ", ".join(part for part in (found.said, tokens) if part)
    return {"name": found.name, "text": clean(found.text), "said": said}


def scope_of(
    service: ChatService, scope: str | None, conversation: str | None
) -> tuple[Scope, str]:
    """The export scope a link asks for, and a word for its file name. Raises StoreError."""
    if scope == "conversation":
        handle = number_of(conversation)
        if handle is None:
            raise StoreError("There is no conversation to export yet. Send a message first.")
        return Scope(conversation_id=handle), f"conversation-{handle}"
    if scope == "session":
        if service.session_id is None:
            raise StoreError("This session has no turn to export yet. Send a message first.")
        return Scope(session_id=service.session_id), f"session-{service.session_id}"
    if scope == WEEK:
        return Scope(since=week_begin().isoformat()), f"since-{week_begin()}"
    return Scope(), "all"


def _action_in(body: bytes, is_from_here: bool) -> dict[str, Any]:
    """What a button of the Models tab asks. Raises RequestError."""
    try:
        asked = parsed(body)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise RequestError("What the page sent is no request. Reload it.")
    if asked.get("act") in ("folder", "connect") and not is_from_here:
        raise RequestError("That can be named only from a browser on this machine.")
    return asked
