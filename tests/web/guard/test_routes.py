"""Every route of Gradio was looked at: open ones are answered, all others are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.service import ChatService
from localspec.record.store import Store
from localspec.web.guard.routes import OPEN, route_of
from tests.kit.fakes import FakeBackend, session_info
from tests.kit.own_cookie import KEY, own_cookie
from tests.web.guard.shut_routes import SHUT

HOST = "127.0.0.1:7860"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT")


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The guarded application over the fake, as `serve` would run it."""
    from localspec.web.server import make_app

    store = Store.open(tmp_path_factory.mktemp("routes") / "localspec.db")
    service = ChatService(store, session_info, lambda *_: FakeBackend())
    yield make_app(service, "127.0.0.1", 7860, "token", key=KEY)
    service.close()
    store.close()


def unwrapped(guard: Any) -> Any:
    """The FastAPI application behind the guard, and what else may stand before it."""
    app = guard
    while not hasattr(app, "routes"):
        app = app._app
    return app


def mounted(app: Any, prefix: str = "") -> set[str]:
    """ "METHOD /path" of every route, those of mounted and included applications too. A slash at
    the end is no route of its own."""
    found: set[str] = set()
    for route in app.routes:
        inner = vars(route).get("original_router") or vars(route).get("app")
        path = f"{prefix}{vars(route).get('path', '')}"
        if inner is not None and hasattr(inner, "routes"):
            found |= mounted(inner, path)
        else:
            methods = vars(route).get("methods") or ["?"]
            found |= {f"{method} {path.rstrip('/') or '/'}" for method in methods}
    return found


def ask(guard: Any, method: str, path: str, has_key: bool = True) -> int:
    """The status of a request of our own page."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = {"host": HOST, "origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
    if has_key:
        headers["cookie"] = own_cookie(7860)
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(guard(scope, receive, send))
    return int(sent[0]["status"])


def test_every_route_was_decided_and_every_decision_names_a_route(guard: Any) -> None:
    there = mounted(unwrapped(guard))
    is_open = {f"{route.method} {route.path}" for route in OPEN}
    is_shut = {line for lines in SHUT.values() for line in lines}
    # Starlette answers HEAD wherever it answers GET; the guard does not.
    own = {"GET /healthz", "GET /live", "GET /export", "GET /localspec/{name}"}
    heads = {line.replace("GET", "HEAD") for line in is_open if line.startswith("GET")}
    scripts = {"GET /static/js/{path:path}"}  # a part of /static/{path:path}
    assert len(there) > 50, "the routes of Gradio were not found"
    assert there - is_open - is_shut - heads == set()
    assert is_open - there - scripts == set()
    assert is_shut - there == set()
    assert own <= is_open and is_open & is_shut == set()


def test_a_route_that_is_not_listed_is_refused(guard: Any) -> None:
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount

    async def new(request: Any) -> Any:
        return PlainTextResponse("a new feature")

    mount = next(route for route in unwrapped(guard).routes if isinstance(route, Mount))
    for path in ("/gradio_api/run_code", "/brand-new"):
        mount.app.router.add_route(path, new, methods=["GET", "POST"])
        assert f"POST {path}" in mounted(unwrapped(guard))
        assert ask(guard, "GET", path) == 403
        assert ask(guard, "POST", path) == 403


@pytest.mark.parametrize("line", [line for lines in SHUT.values() for line in lines])
def test_shut_routes_answer_403(guard: Any, line: str) -> None:
    method, template = line.split(" ")
    path = "".join("x" if part.endswith("}") else part for part in _parts(template))
    assert ask(guard, method, path) == 403


def _parts(template: str) -> list[str]:
    import re

    return re.split(r"(\{[^}]*\})", template)


@pytest.mark.parametrize("route", OPEN, ids=lambda route: f"{route.method} {route.path}")
def test_open_routes_answer_nothing_without_the_key_nor_to_other_methods(
    guard: Any, route: Any
) -> None:
    path = "".join("x" if part.endswith("}") else part for part in _parts(route.path))
    if route.path != "/healthz":
        assert ask(guard, route.method, path, has_key=False) == 401
    for method in METHODS:
        if route_of(method, path) is None:
            assert ask(guard, method, path) == 403


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../../etc/passwd",
        "/assets/..",
        "/assets/.hidden",
        "/assets/a/b",
        "/assets//etc/passwd",
        "/assets/x\\..\\y",
        "/assets/x\0",
        "/assets/x\n",
        "/assets/",
        "/static/js/../img/x",
        "/localspec/../server.py",
        "/localspec/%2e%2e",
        "/live/",
        "//live",
        "/LIVE",
        "/gradio_api/queue/data/x",
    ],
)
def test_no_path_leads_out_of_its_folder(path: str) -> None:
    assert route_of("GET", path) is None


def test_the_page_names_only_files_that_are_open(guard: Any) -> None:
    import gradio

    frontend = Path(gradio.__file__).parent / "templates" / "frontend"
    names = [path.name for path in (frontend / "assets").iterdir()]
    shut = [name for name in names if route_of("GET", f"/assets/{name}") is None]
    assert len(names) > 100 and shut == []
    index = (frontend / "index.html").read_text(encoding="utf-8")
    for path in ("./static/js/iframeResizer.contentWindow.min.js",):
        assert path.removeprefix("./") in index and route_of("GET", path.removeprefix("."))
