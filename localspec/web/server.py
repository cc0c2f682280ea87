"""The server: our FastAPI app with the Gradio page mounted on it, behind the guard.

`serve` blocks until the person ends the program. It binds the port first, so that a taken port
is said at once, brings the page up, and only then lets the service load its model. Everything
Gradio might do beyond this machine or beyond the page is switched off here, in one place.

Routes of our own: /healthz, /live (the strip), /export, /localspec/* (our script and style).
"""

from __future__ import annotations

import contextlib
import ipaddress
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
from localspec.record.export import Format
from localspec.web.guard.environment import settle
from localspec.web.guard.password import Password
from localspec.web.guard.policy import App
from localspec.web.guard.routes import HEALTH_PATH
from localspec.web.guard.security import Guard

STATIC = Path(__file__).parent / "static"
STATIC_FILES = (
    "page.css",
    "queue.js",
    "live.js",
    "ui.js",
    "chat.js",
    "compose.js",
    "drafts.js",
    "address.js",
    "side.js",
    "keys.js",
    "live.css",
    "tokens.js",
    "tokens.css",
    "stats.js",
    "stats.css",
    "race.css",
    "models.js",
    "models.css",
    "icon.svg",
)
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


def serve(
    service: ChatService,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    password: str | None = None,
) -> None:
    """Serve the page until the program is ended; the service is started and closed here.

    port 0 takes any free one. on_ready gets the full address, token included, once the page
    answers. password: what other machines are asked for; without one only loopback is served.
    Raises SetupError when the port is taken or the address needs a password.
    """
    door = _door(host, password)
    with contextlib.closing(_bind(host, port)) as bound:
        port = bound.getsockname()[1]
        token = secrets.token_urlsafe(24)
        app = make_app(service, host, port, token, door)

        from localspec.web.guard.connections import server_of  # uvicorn: only when a page is served

        server = server_of(app)
        url = f"http://{_shown_host(host)}:{port}/?token={token}"
        announcer = threading.Thread(
            target=_announce, args=(server, service, url, on_ready), daemon=True
        )
        announcer.start()
        try:
            server.run(sockets=[bound])
        finally:
            service.close()


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach a server listening there."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may point anywhere
        return False


def _door(host: str, password: str | None) -> Password | None:
    if is_loopback(host):
        return None
    if password is None:
        raise SetupError(
            f"{host} can be reached from other machines, so it needs a password. Start from a "
            "terminal, which asks for one, or set LOCALSPEC_PASSWORD, or leave --host out."
        )
    return Password(password)


def _shown_host(host: str) -> str:
    """The host of the address to open here. 0.0.0.0 and :: are every address, so also loopback."""
    wildcards = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
    host = wildcards.get(host, host)
    return f"[{host}]" if ":" in host else host


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


def make_app(
    service: ChatService, host: str, port: int, token: str, password: Password | None = None
) -> App:
    """The whole guarded application."""
    settle(os.environ)  # Gradio reads most of what it could be opened by on import

    import gradio
    from fastapi import FastAPI

    from localspec.web.layout import theme
    from localspec.web.models.tab import add_models_routes, desk_of
    from localspec.web.talk.presence import Arrivals, Presence
    from localspec.web.wiring import build_page

    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _add_routes(api, service)
    add_models_routes(api, desk_of(service))
    presence = Presence(service.stop)
    page = build_page(service, presence)
    # Mounted Gradio otherwise takes itself for not yet launched, and any path for its developer's.
    page.has_launched = True
    with_page = gradio.mount_gradio_app(
        api,
        page,
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
    return Guard(Arrivals(with_page, presence), token, port, allowed_hosts(host, port), password)


HEAD = """<link rel="icon" href="/localspec/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/localspec/page.css">
<link rel="stylesheet" href="/localspec/live.css">
<link rel="stylesheet" href="/localspec/tokens.css">
<link rel="stylesheet" href="/localspec/stats.css">
<link rel="stylesheet" href="/localspec/race.css">
<link rel="stylesheet" href="/localspec/models.css">
<script type="module" src="/localspec/queue.js"></script>
<script type="module" src="/localspec/live.js"></script>
<script type="module" src="/localspec/keys.js"></script>
<script type="module" src="/localspec/tokens.js"></script>
<script type="module" src="/localspec/stats.js"></script>
<script type="module" src="/localspec/models.js"></script>"""


def allowed_hosts(host: str, port: int) -> frozenset[str]:
    """Names by which a browser may call this server: this machine, and where the person asked
    for another address than loopback, that one and the machine's own name. (The guard adds the
    number that each connection was made to.)"""
    names = {*LOOPBACK, f"[{host}]" if ":" in host else host}
    if host in ("0.0.0.0", "::"):
        names |= {socket.gethostname(), f"{socket.gethostname()}.local"}
    return frozenset(f"{name.lower()}:{port}" for name in names)


def _add_routes(api: Any, service: ChatService) -> None:
    from starlette.background import BackgroundTask
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

    from localspec.machine.hardware import found_line, probe
    from localspec.web.hardware_line import HardwareLine
    from localspec.web.live import live_state, scope_of
    from localspec.web.proof.paths import add_proof_routes, number_of
    from localspec.web.talk.import_route import add_import_route

    hardware = HardwareLine(lambda: found_line(probe()))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def live(request: Request) -> Response:
        start = number_of(request.query_params.get("rounds_from"))
        state = live_state(service.status(), start, hardware.line())
        return JSONResponse(state, headers={"cache-control": "no-store"})

    def download(request: Request) -> Response:
        query = request.query_params
        kind = EXPORTS.get(query.get("format", ""))
        if kind is None:
            return PlainTextResponse("The formats are csv, jsonl, markdown and sqlite.", 400)
        folder = Path(tempfile.mkdtemp(prefix="localspec-export-"))
        try:
            scope, name = scope_of(service, query.get("scope"), query.get("conversation"))
            service.export(scope, kind.format, folder / "export")
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
    add_proof_routes(api, service)
    add_import_route(api, service)
