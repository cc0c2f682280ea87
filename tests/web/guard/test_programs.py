"""Programs get in with a key, whatever their interface; pages of other origins do not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from localspec.web.guard.bodies import Bodies
from localspec.web.guard.programs import ProgramGuard
from localspec.web.server import hosts_of

KEY = "sk-right"
HOST = "127.0.0.1:7860"
BEARER = {"authorization": f"Bearer {KEY}"}


def call(headers: dict[str, str], path: str = "/v1/models", body: bytes = b"{}") -> tuple[int, Any]:
    """Status and headers of the answer, or 200 and what the interfaces got."""
    got: list[Any] = []

    async def api(scope: Any, receive: Any, send: Any) -> None:
        got.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        method = "OPTIONS" if "access-control-request-method" in headers else "POST"
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(n.encode(), v.encode()) for n, v in {"host": HOST, **headers}.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 7860),
        }
        hosts = hosts_of("127.0.0.1", 7860)
        guard = ProgramGuard(
            api,
            page,
            lambda key: key == KEY,
            hosts,
            ["http://allowed.test"],
            Bodies(body_s=0.2),
        )
        await guard(scope, receive, send)

    asyncio.run(run())
    status = sent[0]["status"]
    answer = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    if status >= 400:
        answer["error"] = json.loads(sent[1]["body"])
    return status, answer


@pytest.mark.parametrize(
    "headers", [BEARER, {"x-api-key": KEY}, {"authorization": f"bearer {KEY}"}]
)
def test_a_key_opens(headers: dict[str, str]) -> None:
    assert call(headers)[0] == 200


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": KEY}]
)
def test_no_or_a_wrong_key_is_401_in_the_interfaces_own_words(headers: dict[str, str]) -> None:
    status, answer = call(headers)
    assert status == 401 and answer["www-authenticate"] == "Bearer"
    assert answer["error"]["error"]["code"] == "invalid_api_key"
    status, answer = call(headers, "/v1/messages")
    assert status == 401 and answer["error"]["error"]["type"] == "authentication_error"
    assert call(headers, "/metrics")[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.test:7860"},
        {"origin": "http://evil.test"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1:9999"},
    ],
)
def test_another_name_or_a_page_of_another_origin_is_403(headers: dict[str, str]) -> None:
    assert call({**BEARER, **headers})[0] == 403


def test_a_page_of_an_allowed_origin_is_answered_with_its_permission() -> None:
    origin = {"origin": "http://allowed.test"}
    status, answer = call({**BEARER, **origin})
    assert status == 200 and answer["access-control-allow-origin"] == "http://allowed.test"
    asks_first = {"access-control-request-method": "POST"}
    assert call({**origin, **asks_first})[0] == 200, "before the key can be sent"
    assert call({"origin": "http://evil.test", **asks_first})[0] == 403


def test_a_body_that_is_too_long_is_413() -> None:
    status, answer = call(BEARER, body=bytes(17 * 2**20))
    assert status == 413 and "too long" in answer["error"]["error"]["message"]


def test_other_paths_are_not_ours() -> None:
    assert call({}, "/live")[0] == 299
    assert call({}, "/v1")[0] == 299
