"""The guard lets this launch's browser in and nobody else; streams pass through it unbuffered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from localspec.web.guard.bodies import Bodies
from localspec.web.guard.page_key import PageKey
from localspec.web.guard.policy import content_policy, script_hashes
from localspec.web.guard.routes import MESSAGE_BYTES, SMALL_BYTES
from localspec.web.guard.security import COOKIE_S, Guard, Hosts, ticket_purpose
from localspec.web.server import hosts_of
from tests.kit.own_cookie import KEY, own_cookie

TOKEN = "right-token"
HOST = "127.0.0.1:7860"
COOKIE = {"cookie": f"other=1; {own_cookie(7860)}"}
POSTED = {**COOKIE, "origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
JOIN = "/gradio_api/queue/join"
Headers = dict[str, str]


class Inner:
    """The application behind the guard: counts calls, keeps what it got, answers."""

    def __init__(
        self, body: bytes = b"secret", content_type: bytes = b"text/plain", status: int = 200
    ) -> None:
        self.status = status
        self.calls = 0
        self.scope: Any = None
        self.received: list[Any] = []
        self.body = body
        self.content_type = content_type

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        self.scope = scope
        self.received.append(await receive())
        headers = [(b"content-type", self.content_type), (b"access-control-allow-origin", b"*")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def call(
    inner: Any,
    headers: Headers,
    path: str = "/live",
    method: str = "GET",
    query: str = "",
    parts: tuple[bytes, ...] = (b"",),
    twice: tuple[tuple[bytes, bytes], ...] = (),
    pause_s: float = 0.0,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request through a guard, made here or given. parts: of the
    request's body, pause_s before each; twice: headers that come in addition."""
    sent: list[Any] = []
    waiting = [*parts]

    async def run() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(pause_s)
            part = waiting.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(waiting)}

        async def send(message: Any) -> None:
            sent.append(message)

        given = {"host": HOST, **headers}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [*((n.encode(), v.encode()) for n, v in given.items()), *twice],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 7860),
        }
        hosts = hosts_of("127.0.0.1", 7860)
        made = Guard(inner, TOKEN, hosts, bodies=Bodies(body_s=0.2), key=KEY)
        await (inner if isinstance(inner, Guard) else made)(scope, receive, send)

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
        {"cookie": f"localspec_7860={TOKEN}"},
        {"cookie": own_cookie(7861)},
        {"cookie": own_cookie(7861).replace("7861", "7860", 1)},
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
        {"origin": "http://localhost:7860"},  # our own other name: another site to a browser
        {"upgrade": "websocket", "connection": "upgrade"},
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
    cookie, _, attributes = headers["set-cookie"].partition("; ")
    assert attributes == f"HttpOnly; Max-Age={COOKIE_S}; Path=/; SameSite=strict"
    assert b"url=/?c=3" in body and TOKEN.encode() not in body and TOKEN not in cookie
    assert call(inner, {"cookie": cookie})[0] == 200


def test_a_ticket_opens_the_page_once_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(Inner(), TOKEN, Hosts(frozenset({HOST}), 7860), key=KEY)
    ticket = f"token={KEY.signed(ticket_purpose(TOKEN))}"
    status, headers, _ = call(guard, {}, "/", query=ticket)
    assert status == 200 and "set-cookie" in headers
    status, headers, body = call(guard, {}, "/", query=ticket)
    assert status == 401 and "set-cookie" not in headers and b"opened before" in body
    assert call(guard, {}, "/", query=f"token={TOKEN}")[0] == 200
    of_another_launch = KEY.signed(ticket_purpose("another token"))
    assert call(guard, {}, "/", query=f"token={of_another_launch}")[0] == 401
    monkeypatch.setattr("localspec.web.guard.security.TICKET_S", -1.0)
    assert call(guard, {}, "/", query=f"token={KEY.signed(ticket_purpose(TOKEN))}")[0] == 401


def test_a_browser_gets_in_again_after_a_restart_with_the_same_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def guard(key: PageKey, token: str = "of another launch") -> Guard:
        return Guard(Inner(), token, Hosts(frozenset({HOST}), 7860), key=key)

    _, headers, _ = call(guard(KEY, TOKEN), {}, "/", query=f"token={TOKEN}")
    cookie = {"cookie": headers["set-cookie"].partition(";")[0]}
    status, headers, _ = call(guard(KEY), cookie, "/")
    assert status == 200 and "localspec_7860=" in headers["set-cookie"], "a visit renews it"
    status, _, body = call(guard(KEY), cookie, "/", query=f"token={TOKEN}&c=3")
    assert status == 200 and b"url=/?c=3" in body, "a bookmark of the link of an earlier launch"
    assert call(guard(PageKey()), cookie)[0] == 401, "another key knows no browser"
    monkeypatch.setattr("localspec.web.guard.security.COOKIE_S", -1)
    assert call(guard(KEY), cookie)[0] == 401, "too old"


def test_a_query_cannot_break_out_of_the_welcome_page() -> None:
    _, _, body = call(Inner(), {}, "/", query=f"token={TOKEN}&c=%22%3E%3Cscript%3E")
    assert b"<script" not in body


def test_a_wrong_token_sets_no_cookie() -> None:
    status, headers, _ = call(Inner(), {}, "/", query="token=wrong")
    assert status == 401 and "set-cookie" not in headers


@pytest.mark.parametrize(
    "headers",
    [
        {},  # no browser sends an unsafe request without saying where it comes from
        {"sec-fetch-site": "none"},
        {"origin": "null", "sec-fetch-site": "same-origin"},
        {"origin": f"http://{HOST}", "sec-fetch-site": "cross-site"},
    ],
)
def test_an_unsafe_request_must_come_from_our_page(headers: Headers) -> None:
    inner = Inner()
    assert call(inner, {**COOKIE, **headers}, JOIN, "POST")[0] == 403
    assert inner.calls == 0


@pytest.mark.parametrize(
    "headers", [{"origin": f"http://{HOST}"}, {"sec-fetch-site": "same-origin"}]
)
def test_an_unsafe_request_of_our_page_passes(headers: Headers) -> None:
    # Browsers leave Sec-Fetch-Site out where a page is not on loopback and has no TLS.
    assert call(Inner(), {**COOKIE, **headers}, JOIN, "POST")[0] == 200


@pytest.mark.parametrize("name", ["host", "origin", "cookie", "content-length", "sec-fetch-site"])
def test_a_header_that_comes_twice_is_refused(name: str) -> None:
    inner = Inner()
    given = {"host": HOST, "content-length": "0", **POSTED}
    second = ((name.encode(), given[name].encode()),)
    assert call(inner, given, JOIN, "POST", twice=second)[0] == 403
    assert inner.calls == 0


def test_what_a_proxy_would_say_is_not_believed() -> None:
    inner = Inner()
    said = {
        "x-forwarded-host": "evil.test",
        "x-forwarded-for": "192.0.2.1",
        "x-gradio-server": "http://evil.test",
        "forwarded": "for=192.0.2.1",
    }
    assert call(inner, {**COOKIE, **said}, "/config")[0] == 200
    names = {name.decode() for name, _ in inner.scope["headers"]}
    assert names == {"host", "cookie"}


def test_the_page_gets_only_the_parameters_it_knows() -> None:
    inner = Inner()
    call(inner, COOKIE, "/", query="c=3&deep_link=../../x&__theme=dark&file=/etc/passwd")
    assert inner.scope["query_string"] == b"c=3&__theme=dark"


def test_a_body_within_the_limit_arrives_whole() -> None:
    inner = Inner()
    assert call(inner, POSTED, JOIN, "POST", parts=(b"[1,", b" 2,", b" 3]"))[0] == 200
    assert inner.received[0]["body"] == b"[1, 2, 3]" and not inner.received[0]["more_body"]


WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
NAMED_FILE = {"data": [{"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}]}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (json.dumps(NAMED_FILE).encode(), 403),
        (json.dumps(NAMED_FILE).replace("path", "\\u0070ath").encode(), 403),
        *((json.dumps(NAMED_FILE).encode(name), 400) for name in WIDE),
        (json.dumps(NAMED_FILE).encode("utf-8-sig"), 400),
        (b'{"data": "\x00"}', 400),
        (b'{"data": "\xff"}', 400),
        (b'{"data": NaN}', 400),
        (b"[" * 100_000, 400),
        (b"data=1", 400),
    ],
)
def test_what_could_name_a_file_does_not_pass(body: bytes, status: int) -> None:
    inner = Inner()
    assert call(inner, POSTED, JOIN, "POST", parts=(body,))[0] == status
    assert inner.calls == 0


def test_the_application_reads_the_value_that_the_guard_read() -> None:
    inner = Inner()
    body = '{"data": ["é 😀 \\ud800"], "data": ["the second"], "n": 1.50}'.encode()
    length = {"content-length": str(len(body))}
    assert call(inner, {**POSTED, **length}, JOIN, "POST", parts=(body,))[0] == 200
    assert inner.received[0]["body"] == b'{"data": ["the second"], "n": 1.5}'
    assert b"content-length" not in dict(inner.scope["headers"]), "the length may be another"
    body = '["é 😀 \\ud800"]'.encode()
    assert call(inner, POSTED, JOIN, "POST", parts=(body,))[0] == 200
    assert json.loads(inner.received[1]["body"]) == ["é 😀 \ud800"]


@pytest.mark.parametrize(
    "length", [str(MESSAGE_BYTES + 1), "many", "-1", "", "1e3", "²", "9" * 5000]
)
def test_a_length_that_is_too_much_or_no_number_is_refused(length: str) -> None:
    inner = Inner()
    status, headers, _ = call(inner, {**POSTED, "content-length": length}, JOIN, "POST")
    assert (status, headers["connection"], inner.calls) == (413, "close", 0)


@pytest.mark.parametrize(
    ("path", "limit"), [(JOIN, MESSAGE_BYTES), ("/gradio_api/cancel", SMALL_BYTES)]
)
def test_a_body_without_a_length_is_counted(path: str, limit: int) -> None:
    inner, half = Inner(), b"1".rjust(limit // 2)
    assert call(inner, POSTED, path, "POST", parts=(half, b" " * len(half)))[0] == 200
    assert call(inner, POSTED, path, "POST", parts=(half, half, b"x"))[0] == 413
    assert inner.calls == 1


def test_a_question_has_no_body() -> None:
    inner = Inner()
    assert call(inner, COOKIE, "/live", parts=(b"x",))[0] == 413
    assert inner.calls == 0


def test_a_body_that_drips_is_cut_off() -> None:
    inner = Inner()
    status, headers, body = call(inner, POSTED, JOIN, "POST", parts=(b"x",) * 50, pause_s=0.02)
    assert (status, headers["connection"], inner.calls) == (408, "close", 0)
    assert b"too slowly" in body


def test_only_so_many_bodies_are_read_at_once() -> None:
    async def run() -> list[int]:
        bodies = Bodies(body_s=0.2, max_at_once=2)
        sent: list[int] = []

        async def never() -> dict[str, Any]:
            await asyncio.sleep(60)
            raise AssertionError

        async def send(message: Any) -> None:
            if "status" in message:
                sent.append(message["status"])

        headers = [(n.encode(), v.encode()) for n, v in {"host": HOST, **POSTED}.items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": JOIN,
            "query_string": b"",
            "headers": headers,
        }
        guard = Guard(Inner(), TOKEN, Hosts(frozenset({HOST}), 7860), bodies=bodies, key=KEY)
        await asyncio.gather(*(guard(scope, never, send) for _ in range(5)))
        return sent

    assert sorted(asyncio.run(run())) == [408, 408, 503, 503, 503]


def test_health_needs_no_cookie() -> None:
    assert call(Inner(b"ok"), {}, "/healthz")[0] == 200


def test_answers_carry_the_policy_and_no_cross_origin_permission() -> None:
    for headers in (COOKIE, {}):
        _, received, _ = call(Inner(), headers)
        assert "frame-ancestors 'none'" in received["content-security-policy"]
        assert received["x-content-type-options"] == "nosniff"
        assert received["x-dns-prefetch-control"] == "off"
        assert received["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in received


def test_a_browser_keeps_what_is_named_by_its_content_and_no_answer_of_ours() -> None:
    kept = call(Inner(), COOKIE, "/assets/index-Bu-jdMIA.js")[1]["cache-control"]
    assert "private" in kept and "immutable" in kept
    assert call(Inner(), COOKIE, "/live")[1]["cache-control"] == "no-store"
    assert "cache-control" not in call(Inner(), COOKIE, "/localspec/chat.js")[1], (
        "as it says itself"
    )
    gone = Inner(status=404)
    for path in ("/assets/index-Bu-jdMIA.js", "/localspec/chat.js"):
        assert call(gone, COOKIE, path)[1]["cache-control"] == "no-store"


def test_only_the_scripts_of_the_page_itself_are_allowed_inline() -> None:
    html = b"<script>a()</script><script src='/x.js'></script><script type=module>b()</script>"
    _, received, body = call(Inner(html, b"text/html"), COOKIE, "/")
    assert body == html
    hashes = script_hashes(html)
    assert len(hashes) == 2
    assert all(one in received["content-security-policy"] for one in hashes)
    script_part = content_policy().split("script-src")[1].split(";")[0]
    assert "unsafe-inline" not in script_part


def test_a_stream_is_not_held_back() -> None:
    passed: list[str] = []

    async def nothing() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

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
        guard = Guard(stream, TOKEN, Hosts(frozenset({HOST}), 7860), key=KEY)
        await guard(scope, nothing, send)
        return passed

    assert asyncio.run(run()) == ["one", "after one", "two", "after two"]


def test_web_sockets_are_refused() -> None:
    inner, sent = Inner(), []

    async def run() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        guard = Guard(inner, TOKEN, Hosts(frozenset({HOST}), 7860))
        await guard({"type": "websocket", "path": "/", "headers": []}, receive, send)

    asyncio.run(run())
    assert sent[0]["type"] == "websocket.close" and inner.calls == 0


def test_serving_at_another_address_allows_that_one_too() -> None:
    assert "192.0.2.7:7860" in hosts_of("192.0.2.7", 7860).names
    assert "192.0.2.7:7860" not in hosts_of("127.0.0.1", 7860).names
