"""The server: our FastAPI app with the Gradio page mounted on it, behind the guard, and the
interfaces for programs beside it, behind theirs.

`serve` blocks until the person ends the program. It binds the port first, so that a port in use is
reported at once and a browser starts meanwhile, brings the page up, and only then lets the service
load its model. Everything by which Gradio could reach beyond this machine or this page is switched
off in `make_app`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from localspec.api.app import make_api
from localspec.chat.programs import ProgramService
from localspec.chat.service import ChatService
from localspec.core.errors import SetupError
from localspec.core.interrupts import ENDINGS, end_at_once, handle, raise_again
from localspec.core.options import is_loopback
from localspec.record.running import announced
from localspec.web.guard.environment import settle
from localspec.web.guard.page_key import PageKey, page_key
from localspec.web.guard.password import Password
from localspec.web.guard.policy import App
from localspec.web.guard.programs import ProgramGuard, nothing_else
from localspec.web.guard.security import Guard, Hosts, ticket_purpose
from localspec.web.quick_gradio import import_httpx_without_proxies, without_type_stubs

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SCRIPTS = ("queue", "live", "strip", "keys", "settings", "stats", "models")
HEAD = "\n".join(
    (
        '<link rel="icon" href="/localspec/icon.svg" type="image/svg+xml">',
        *(f'<script type="module" src="/localspec/{name}.js"></script>' for name in SCRIPTS),
        '<link rel="stylesheet" href="/localspec/style.css">',
    )
)


def serve(
    service: ChatService,
    host: str,
    port: int,
    on_bound: Callable[[str, str], None],
    password: str | None = None,
    origins: Sequence[str] = (),
) -> None:
    """Serve the page and the interfaces for programs until the program is ended; the service is
    started and closed here.

    port 0 takes any free one. on_bound gets two addresses once the port is ours: with the token,
    and with a ticket that is good once, for the browser that is opened. password: what other
    machines are asked for; without one only loopback is served. origins: of other pages that may
    use the interfaces.
    Raises SetupError when the port is taken or the address needs a password.
    """
    key = page_key(service.data_folder)
    required = _password_of(host, password, key)
    with contextlib.closing(_bind(host, port)) as bound:
        port = bound.getsockname()[1]
        token = secrets.token_urlsafe(24)
        address = f"{_address_of(host, port)}/?token="
        with announced(service.data_folder, f"{address}{token}", has_page=True):
            _end_well_at_once()
            # A browser takes a second to start, and importing Gradio takes two: what it asks for
            # before the page is there waits at the socket.
            on_bound(f"{address}{token}", f"{address}{key.signed(ticket_purpose(token))}")
            page = make_app(service, host, port, token, required, key)
            _run(with_interfaces(page, service, host, port, origins), bound, service)


def serve_interfaces(
    service: ChatService,
    host: str,
    port: int,
    on_bound: Callable[[str], None],
    origins: Sequence[str] = (),
) -> None:
    """As `serve`, without a page; on_bound gets the address. Beyond loopback too, programs are
    asked for a key and for nothing else."""
    with contextlib.closing(_bind(host, port)) as bound:
        port = bound.getsockname()[1]
        address = _address_of(host, port)
        with announced(service.data_folder, f"{address}/v1", has_page=False):
            _end_well_at_once()
            on_bound(address)
            _run(with_interfaces(nothing_else, service, host, port, origins), bound, service)


def with_interfaces(
    page: App, service: ChatService, host: str, port: int, origins: Sequence[str] = ()
) -> App:
    """The application with the interfaces for programs beside it."""
    api = make_api(ProgramService(service))
    return ProgramGuard(api, page, service.api_keys.opens, hosts_of(host, port), origins)


def _end_well_at_once() -> None:
    """Until the server runs: Gradio is still to be imported, and nothing has begun."""
    for number in ENDINGS:
        end_at_once(number, code=0)


def _run(app: App, bound: socket.socket, service: ChatService) -> None:
    """Until the program is ended."""
    from localspec.web.guard.connections import server_of  # uvicorn: only when it is needed

    server = server_of(app)
    threading.Thread(target=_load_behind, args=(server, service), daemon=True).start()
    for number in ENDINGS:  # uvicorn looks after two of them, and hands them on in the end
        handle(number, server.handle_exit)
    try:
        server.run(sockets=[bound])
    finally:
        raise_again()  # nobody has to wait for the close
        service.close()


def _password_of(host: str, password: str | None, key: PageKey) -> Password | None:
    if is_loopback(host):
        return None
    if password is None:
        raise SetupError(
            f"{host} can be reached from other machines, so it needs a password. Start from a "
            "terminal, which asks for one, or set LOCALSPEC_PASSWORD, or leave --host out."
        )
    return Password(password, key.salt)


def _address_of(host: str, port: int) -> str:
    """The address to open here. 0.0.0.0 and :: are every address, so also loopback."""
    wildcards = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
    host = wildcards.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _load_behind(server: Any, service: ChatService) -> None:
    """Start the service once the page can be had: until then the processor is for the page."""
    pause = threading.Event()
    while not server.started:
        if server.should_exit:
            return
        pause.wait(0.01)
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
    service: ChatService,
    host: str,
    port: int,
    token: str,
    password: Password | None = None,
    key: PageKey | None = None,
) -> App:
    """The whole guarded application. key: as in Guard."""
    settle(os.environ)  # Gradio reads most of what it could be opened by on import

    import_httpx_without_proxies()
    with without_type_stubs():
        import gradio
        from fastapi import FastAPI

        from localspec.web.layout import theme
        from localspec.web.models.models_controller import controller_of
        from localspec.web.routes import add_routes
        from localspec.web.talk.presence import Arrivals, Presence
        from localspec.web.wiring import build_page

    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_routes(api, service, controller_of(service))
    presence = Presence(service.stop)
    page = build_page(service, presence)
    # Otherwise a mounted Gradio believes that it is not launched and treats any path as a
    # developer's.
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
    hosts = hosts_of(host, port)
    return Guard(Arrivals(with_page, presence), token, hosts, password, key=key)


def hosts_of(host: str, port: int) -> Hosts:
    """Names by which a browser may call this server: this machine, and where the person asked
    for another address than loopback, that one and the machine's own name. (The guard adds the
    number that each connection was made to.)"""
    names = {*LOOPBACK, f"[{host}]" if ":" in host else host}
    if host in ("0.0.0.0", "::"):
        names |= {socket.gethostname(), f"{socket.gethostname()}.local"}
    return Hosts(frozenset(f"{name.lower()}:{port}" for name in names), port)
