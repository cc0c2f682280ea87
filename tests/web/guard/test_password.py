"""Beyond loopback a password stands before everything, and guessing it does not pay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from localspec.chat.service import ChatService
from localspec.core.errors import SetupError
from localspec.core.options import is_loopback
from localspec.web.guard import security
from localspec.web.guard.password import (
    FREE_TRIES,
    MAX_ADDRESSES,
    MAX_WAIT_S,
    TRIES_A_MINUTE,
    Password,
    Tries,
    password_in,
)
from localspec.web.guard.security import COOKIE_S, Guard
from localspec.web.server import hosts_of, serve
from tests.kit.own_cookie import KEY, own_cookie

WORDS = "correct horse battery"
TOKEN = "the-token-of-this-launch"
HOST = "192.0.2.7:7860"


class Inner:
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"secret"})


class Remote:
    """A browser on another machine, before one guard that listens everywhere."""

    def __init__(self, address: str = "192.0.2.99", password: str = WORDS) -> None:
        hosts = hosts_of("0.0.0.0", 7860)
        self.guard = Guard(Inner(), TOKEN, hosts, Password(password, KEY.salt), key=KEY)
        self.address = address

    def ask(
        self,
        method: str = "GET",
        path: str = "/",
        query: str = "",
        body: bytes = b"",
        host: str = HOST,
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = self.scope(method, path, self.address, query, host, **headers)
        asyncio.run(self.guard(scope, receive, send))
        received = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], received, b"".join(m.get("body", b"") for m in sent[1:])

    def scope(
        self,
        method: str,
        path: str,
        address: str,
        query: str = "",
        host: str = HOST,
        **headers: str,
    ) -> dict[str, Any]:
        given = {"host": host, **headers}
        if method == "POST":
            given.setdefault("origin", f"http://{host}")
        return {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": (address, 40000),
            "server": ("192.0.2.7", 7860),
        }

    def log_in(self, password: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        return self.ask("POST", "/login", body=form(password), **headers)


def form(password: str) -> bytes:
    return b"password=" + password.encode().replace(b" ", b"+")


def test_the_right_password_gives_a_strict_cookie_that_opens_the_page() -> None:
    remote = Remote()
    status, headers, body = remote.ask()
    assert status == 401 and b'type="password"' in body and b"secret" not in body
    assert headers["referrer-policy"] == "same-origin"
    status, headers, _ = remote.log_in(WORDS)
    assert (status, headers["location"]) == (303, "/")
    cookie, _, rest = headers["set-cookie"].partition("; ")
    assert rest == f"HttpOnly; Max-Age={COOKIE_S}; Path=/; SameSite=strict" and TOKEN not in cookie
    assert remote.ask(path="/live", cookie=cookie)[::2] == (200, b"secret")
    assert Remote().ask(path="/live", cookie=cookie)[0] == 200, "after a restart, too"
    assert Remote(password=f"{WORDS}!").ask(path="/live", cookie=cookie)[0] == 401


@pytest.mark.slow
@pytest.mark.parametrize("password", ["", "wrong", WORDS.upper(), WORDS + " ", WORDS[:-1], "x" * 9])
def test_a_wrong_password_gives_nothing(password: str) -> None:
    status, headers, body = Remote().log_in(password)
    assert status == 401 and "set-cookie" not in headers and b"secret" not in body


def test_the_token_of_the_launch_is_good_on_this_machine_only() -> None:
    remote = Remote()
    assert remote.ask(query=f"token={TOKEN}")[0] == 401
    assert remote.ask(path="/live", cookie=own_cookie(7860))[0] == 401
    for own in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "192.0.2.7"):
        remote.address = own
        assert remote.ask(query=f"token={TOKEN}")[0] == 200
        assert remote.ask(path="/live", cookie=own_cookie(7860))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [{"origin": "null"}, {"origin": "http://evil.test"}, {"sec-fetch-site": "cross-site"}],
)
def test_another_page_cannot_try_passwords(headers: dict[str, str]) -> None:
    assert Remote().log_in(WORDS, **headers)[0] == 403


def test_a_name_that_a_stranger_made_point_here_is_refused() -> None:
    remote = Remote()
    assert remote.ask(host="rebound.test:7860")[0] == 403
    assert remote.ask(host="192.0.2.8:7860")[0] == 403, "not the address it was asked at"


def test_without_a_password_there_is_no_door() -> None:
    remote = Remote("127.0.0.1")
    remote.guard = Guard(Inner(), TOKEN, hosts_of("127.0.0.1", 7860))
    assert remote.log_in(WORDS, host="127.0.0.1:7860", origin="http://127.0.0.1:7860")[0] == 401


def test_guessing_is_made_to_wait_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "Tries", lambda: Tries(lambda: 0.0))  # a try may take a second
    remote = Remote()
    for _ in range(FREE_TRIES):
        assert remote.log_in("wrong")[0] == 401
    status, headers, body = remote.log_in(WORDS)
    assert status == 429 and int(headers["retry-after"]) >= 1 and b"Try again in" in body


def test_half_sent_logins_shut_nobody_out_who_was_here_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(security, "LOGIN_S", 0.3)
    remote = Remote("192.0.2.1")
    assert remote.log_in(WORDS)[0] == 303
    statuses = dict[str, list[int]]()

    async def login(address: str, body: bytes | None) -> None:
        async def receive() -> dict[str, Any]:
            if body is None:
                await asyncio.sleep(60)
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            if "status" in message:
                statuses.setdefault(address, []).append(message["status"])

        await remote.guard(remote.scope("POST", "/login", address), receive, send)

    async def run() -> None:
        half_sent = [login(f"192.0.2.{100 + number // 4}", None) for number in range(40)]
        senders = asyncio.gather(*half_sent)
        await asyncio.sleep(0)
        await login("192.0.2.99", form(WORDS))
        await login("192.0.2.1", form(WORDS))
        await senders
        await login("192.0.2.99", form(WORDS))

    asyncio.run(run())
    assert statuses["192.0.2.100"] == [503, 503, 408, 408], "an address has few places"
    assert statuses["192.0.2.109"] == [503] * 4, "and so have all together"
    assert statuses["192.0.2.1"] == [303], "the place of one that was here before is kept"
    assert statuses["192.0.2.99"] == [503, 303], "the others wait for some seconds"


def test_waits_double_up_to_a_limit_and_end_with_a_right_try() -> None:
    now = [0.0]
    tries = Tries(lambda: now[0])
    waits = []
    for _ in range(20):
        tries.begin("a")
        waits.append(tries.wait_s("a"))
        now[0] += 1000.0
    assert waits[:6] == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == MAX_WAIT_S
    tries.forget("a")
    tries.begin("a")
    assert tries.wait_s("a") == 0.0


def test_all_addresses_together_get_so_many_tries_a_minute() -> None:
    now = [0.0]
    tries = Tries(lambda: now[0])
    for number in range(TRIES_A_MINUTE):
        assert tries.wait_s(f"fd00::{number}") == 0.0
        tries.begin(f"fd00::{number}")
    assert tries.wait_s("a fresh address") == 60.0
    tries.forget("fd00::7")
    assert tries.wait_s("fd00::7") == 0.0, "the password was right from there"
    now[0] = 60.0
    assert tries.wait_s("a fresh address") == 0.0


def test_remembered_addresses_are_bounded() -> None:
    now = [0.0]
    tries = Tries(lambda: now[0])
    for number in range(MAX_ADDRESSES + 50):
        now[0] += 60.0
        tries.begin(str(number))
    assert len(tries._failures) == MAX_ADDRESSES


@pytest.mark.parametrize("password", ["", "short", "x" * 1025])
def test_a_password_that_is_too_short_is_refused_with_the_remedy(password: str) -> None:
    with pytest.raises(SetupError, match="Choose a longer one"):
        Password(password)


def test_the_password_itself_is_not_kept() -> None:
    kept = Password(WORDS)
    assert WORDS not in repr(vars(kept)) and kept.is_right(WORDS)
    assert Password(WORDS)._hash != kept._hash, "salted"


@pytest.mark.parametrize(
    ("form", "password"),
    [
        (b"password=a+b%C3%A4", "a bä"),
        (b"", ""),
        (b"other=x", ""),
        (b"password=%ff", "�"),
        (b"&".join([b"a=b"] * 50), ""),
    ],
)
def test_forms_are_read_whatever_they_hold(form: bytes, password: str) -> None:
    assert password_in(form) == password


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("127.8.8.8", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.7", False),
        ("", False),
        ("my-name", False),
        ("localhost.evil.test", False),
    ],
)
def test_what_counts_as_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_serving_beyond_loopback_without_a_password_is_refused(idle_service: ChatService) -> None:
    def never(url: str, once: str) -> None:
        raise AssertionError("the page must not come up")

    with pytest.raises(SetupError, match="can be reached from other machines"):
        serve(idle_service, "0.0.0.0", 0, never)
    with pytest.raises(SetupError, match="Choose a longer one"):
        serve(idle_service, "0.0.0.0", 0, never, "short")
