"""The guard lets this launch's browser in and nobody else; streams pass through it unbuffered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from localspec.web.security import MAX_BODY_BYTES, Guard, content_policy, script_hashes
from localspec.web.server import allowed_hosts

TOKEN = "right-token"
HOST = "127.0.0.1:7860"
COOKIE = {"cookie": f"other=1; localspec_7860={TOKEN}"}
Headers = dict[str, str]


class Inner:
    """The application behind the guard: counts calls, answers with its script."""

    def __init__(self, body: bytes = b"secret", content_type: bytes = b"text/plain") -> None:
        self.calls = 0
        self.body = body
        self.content_type = content_type

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        headers = [(b"content-type", self.content_type), (b"access-control-allow-origin", b"*")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def call(
    inner: Any, headers: Headers, path: str = "/live", method: str = "GET", query: str = ""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request through a guard."""
    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(n.encode(), v.encode()) for n, v in {"host": HOST, **headers}.items()],
        }
        guard = Guard(inner, TOKEN, 7860, allowed_hosts("127.0.0.1", 7860))
        await guard(scope, receive, send)

    asyncio.run(run())
    received = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], received, b"".join(m.get("body", b"") for m in sent[1:])


def test_the_cookie_of_this_launch_gets_in() -> None:
    status, _, body = call(Inner(), COOKIE)
    assert (status, body) == (200, b"secret")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"cookie": "localspec_7860=wrong"},
        {"cookie": f"localspec_7861={TOKEN}"},
        {"cookie": "localspec_7860"},
        {"cookie": "=;;==\x7f"},
        {"authorization": f"Bearer {TOKEN}"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/live", "/export", "/config", "/gradio_api/queue/data"])
def test_without_the_cookie_there_is_no_data(headers: Headers, path: str) -> None:
    inner = Inner()
    status, _, body = call(inner, headers, path)
    assert (status, inner.calls) == (401, 0)
    assert b"secret" not in body


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.test"},
        {"host": "evil.test:7860"},
        {"host": "127.0.0.1"},
        {"host": "127.0.0.1:7861"},
        {"host": "127.0.0.1:7860.evil.test"},
        {"host": ""},
        {"origin": "null"},
        {"origin": "http://evil.test"},
        {"origin": "https://127.0.0.1:7860"},
        {"origin": "http://127.0.0.1:8000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/gradio_api/queue/join"),
        ("POST", "/gradio_api/upload"),
        ("GET", "/export"),
        ("GET", "/live"),
        ("GET", "/healthz"),
    ],
)
def test_forged_headers_are_refused_even_with_the_cookie(
    headers: Headers, method: str, path: str
) -> None:
    inner = Inner()
    status, _, _ = call(inner, {**COOKIE, **headers}, path, method)
    assert (status, inner.calls) == (403, 0)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7860", "localhost:7860", "LOCALHOST:7860", "[::1]:7860"]
)
def test_own_names_are_answered(host: str) -> None:
    origin = {"origin": f"http://{host.lower()}", "sec-fetch-site": "same-origin"}
    assert call(Inner(), {**COOKIE, **origin, "host": host})[0] == 200


def test_following_a_link_to_the_page_is_allowed() -> None:
    visit = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    assert call(Inner(), {**COOKIE, **visit}, "/")[0] == 200
    assert call(Inner(), {**COOKIE, **visit}, "/export")[0] == 403


def test_the_token_becomes_a_strict_cookie_and_leaves_the_address() -> None:
    inner = Inner()
    status, headers, body = call(inner, {}, "/", query=f"token={TOKEN}&c=3")
    assert (status, inner.calls) == (200, 0)
    assert headers["set-cookie"] == (f"localspec_7860={TOKEN}; Path=/; HttpOnly; SameSite=Strict")
    assert b"url=/?c=3" in body and TOKEN.encode() not in body


def test_a_query_cannot_break_out_of_the_welcome_page() -> None:
    _, _, body = call(Inner(), {}, "/", query=f"token={TOKEN}&c=%22%3E%3Cscript%3E")
    assert b"<script" not in body


def test_a_wrong_token_sets_no_cookie() -> None:
    status, headers, _ = call(Inner(), {}, "/", query="token=wrong")
    assert status == 401 and "set-cookie" not in headers


@pytest.mark.parametrize(
    "path", ["/gradio_api/upload", "/gradio_api/file=/etc/passwd", "/gradio_api/proxy=x", "/login"]
)
def test_paths_of_gradio_that_are_not_used_are_closed(path: str) -> None:
    inner = Inner()
    assert call(inner, COOKIE, path)[0] == 403
    assert inner.calls == 0


def test_a_body_that_is_too_long_is_refused() -> None:
    inner = Inner()
    long = {"content-length": str(MAX_BODY_BYTES + 1)}
    assert call(inner, {**COOKIE, **long}, method="POST")[0] == 413
    assert inner.calls == 0


def test_a_content_length_that_is_no_number_is_refused() -> None:
    inner = Inner()
    assert call(inner, {**COOKIE, "content-length": "many"}, method="POST")[0] == 413
    assert inner.calls == 0


def test_health_needs_no_cookie() -> None:
    assert call(Inner(b"ok"), {}, "/healthz")[0] == 200


def test_answers_carry_the_policy_and_no_cross_origin_permission() -> None:
    for headers in (COOKIE, {}):
        _, received, _ = call(Inner(), headers)
        assert "frame-ancestors 'none'" in received["content-security-policy"]
        assert received["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in received


def test_only_the_scripts_of_the_page_itself_are_allowed_inline() -> None:
    html = b"<script>a()</script><script src='/x.js'></script><script type=module>b()</script>"
    _, received, body = call(Inner(html, b"text/html"), COOKIE, "/")
    assert body == html
    hashes = script_hashes(html)
    assert len(hashes) == 2
    assert all(one in received["content-security-policy"] for one in hashes)
    script_part = content_policy().decode().split("script-src")[1].split(";")[0]
    assert "unsafe-inline" not in script_part


def test_a_stream_is_not_held_back() -> None:
    passed: list[str] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"one", b"two"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            passed.append(f"after {piece.decode()}")

    async def run() -> list[str]:
        async def send(message: Any) -> None:
            if "body" in message:
                passed.append(message["body"].decode())

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/gradio_api/queue/data",
            "query_string": b"",
            "headers": [(b"host", HOST.encode()), (b"cookie", COOKIE["cookie"].encode())],
        }
        guard = Guard(stream, TOKEN, 7860, frozenset({HOST}))
        await guard(scope, asyncio.sleep, send)  # type: ignore[arg-type]
        return passed

    assert asyncio.run(run()) == ["one", "after one", "two", "after two"]


def test_web_sockets_are_refused() -> None:
    inner, sent = Inner(), []

    async def run() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        guard = Guard(inner, TOKEN, 7860, frozenset({HOST}))
        await guard({"type": "websocket", "path": "/", "headers": []}, receive, send)

    asyncio.run(run())
    assert sent[0]["type"] == "websocket.close" and inner.calls == 0


def test_serving_at_another_address_allows_that_one_too() -> None:
    assert "192.0.2.7:7860" in allowed_hosts("192.0.2.7", 7860)
    assert "192.0.2.7:7860" not in allowed_hosts("127.0.0.1", 7860)
