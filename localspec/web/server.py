"""The server: our FastAPI app with the Gradio page mounted on it, behind the guard.

`serve` blocks until the person ends the program. It binds the port first, so that a taken port
is said at once, brings the page up, and only then lets the service load its model. Everything
Gradio might do beyond this machine or beyond the page is switched off here, in one place.

Routes of our own: /healthz, /live (the strip), /export, /localspec/* (our script and style).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.chat.service import ChatService
from localspec.errors import LocalspecError, SetupError
from localspec.record.export import Format, export
from localspec.web.security import HEALTH_PATH, App, Guard

STATIC = Path(__file__).parent / "static"
STATIC_FILES = ("page.css", "live.js", "icon.svg")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class ExportKind:
    """A format of the log, and how a browser is told of it."""

    format: Format
    suffix: str
    media_type: str


EXPORTS: dict[str, ExportKind] = {
    kind.format: kind
    for kind in (
        ExportKind("csv", "csv", "text/csv; charset=utf-8"),
        ExportKind("jsonl", "jsonl", "application/x-ndjson"),
        ExportKind("markdown", "md", "text/markdown; charset=utf-8"),
        ExportKind("sqlite", "db", "application/vnd.sqlite3"),
    )
}


def serve(service: ChatService, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the page until the program is ended; the service is started and closed here.

    port 0 takes any free one. on_ready gets the full address, token included, once the page
    answers. Raises SetupError when the port is taken or the environment forbids serving.
    """
    with contextlib.closing(_bind(host, port)) as bound:
        port = bound.getsockname()[1]
        token = secrets.token_urlsafe(24)
        app = make_app(service, host, port, token)

        import uvicorn  # heavy: only when a page is served

        config = uvicorn.Config(
            app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)
        shown_host = "127.0.0.1" if host in ("0.0.0.0", "localhost", "") else host
        url = f"http://{shown_host}:{port}/?token={token}"
        announcer = threading.Thread(
            target=_announce, args=(server, service, url, on_ready), daemon=True
        )
        announcer.start()
        try:
            server.run(sockets=[bound])
        finally:
            service.close()


def _announce(server: Any, service: ChatService, url: str, on_ready: Callable[[str], None]) -> None:
    pause = threading.Event()
    while not server.started:
        if server.should_exit:
            return
        pause.wait(0.01)
    on_ready(url)
    service.start()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    if sys.platform != "win32":  # there the option would let two programs share the port
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise SetupError(
            f"localspec cannot listen at {host}:{port}: {error.strerror or error}. Another "
            "program, perhaps localspec itself, may be using it. Close that, or start with "
            f"--port {port + 1}."
        ) from error
    return bound


def make_app(service: ChatService, host: str, port: int, token: str) -> App:
    """The whole guarded application."""
    gradio = _import_gradio()

    from fastapi import FastAPI

    from localspec.web.layout import theme
    from localspec.web.wiring import build_page

    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _add_routes(api, service)
    with_page = gradio.mount_gradio_app(
        api,
        build_page(service),
        path="",
        server_name=host,
        server_port=port,
        footer_links=[],
        run_history=False,
        app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None},
        allowed_paths=[],
        show_error=False,
        max_file_size="1kb",
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme(),
        head=HEAD,
    )
    return Guard(with_page, token, port, allowed_hosts(host, port))


HEAD = """<link rel="icon" href="/localspec/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/localspec/page.css">
<script type="module" src="/localspec/live.js"></script>"""


def allowed_hosts(host: str, port: int) -> frozenset[str]:
    """Names by which a browser may call this server: this machine, and where the person asked
    for another address than loopback, that one and the machine's own name."""
    names = {*LOOPBACK, f"[{host}]" if ":" in host else host}
    if host in ("0.0.0.0", "::"):
        names |= {socket.gethostname(), *socket.gethostbyname_ex(socket.gethostname())[2]}
    return frozenset(f"{name.lower()}:{port}" for name in names)


def _import_gradio() -> Any:
    if os.environ.get("GRADIO_VIBE_MODE"):
        raise SetupError(
            "GRADIO_VIBE_MODE is set, and with it every visitor of the page may run code. "
            "Unset it and start again."
        )
    # Gradio reads these on import and calls out unless they are set; it offers no other way.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a start that is to download sets it to 0
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    import gradio

    return gradio


def _add_routes(api: Any, service: ChatService) -> None:
    from starlette.background import BackgroundTask
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

    from localspec.web.live import live_state, scope_of

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def live(request: Request) -> Response:
        rounds_from = request.query_params.get("rounds_from")
        state = live_state(service.status(), int(rounds_from) if rounds_from else None)
        return JSONResponse(state, headers={"cache-control": "no-store"})

    def download(request: Request) -> Response:
        query = request.query_params
        kind = EXPORTS.get(query.get("format", ""))
        if kind is None:
            return PlainTextResponse("The formats are csv, jsonl, markdown and sqlite.", 400)
        folder = Path(tempfile.mkdtemp(prefix="localspec-export-"))
        try:
            scope, name = scope_of(service, query.get("scope"), query.get("conversation"))
            service.journal.flush()
            export(service.store, scope, kind.format, folder / "export")
        except LocalspecError as error:
            shutil.rmtree(folder)
            return PlainTextResponse(str(error), 409)
        return FileResponse(
            folder / "export",
            media_type=kind.media_type,
            filename=f"localspec-{name}.{kind.suffix}",
            background=BackgroundTask(shutil.rmtree, folder),
            headers={"cache-control": "no-store"},
        )

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC_FILES:
            return PlainTextResponse("There is no such file.", 404)
        return FileResponse(STATIC / name, headers={"cache-control": "no-cache"})

    api.add_route(HEALTH_PATH, health)
    api.add_route("/live", live)
    api.add_route("/export", download)
    api.add_route("/localspec/{name}", static)
