"""A fault has the status, the words and the events by which each interface's clients know it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from localspec.chat.programs import ProgramService
from localspec.core.errors import LocalspecError, QueueFull
from tests.api.doors import Doors, serve_interfaces
from tests.kit.fakes import FakeBackend, Script
from tests.kit.waiting import until

ASKED = [{"role": "user", "content": "Count."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/completions": {"prompt": "Count."},
    "/v1/responses": {"input": ASKED},
    "/v1/messages": {"messages": ASKED, "max_tokens": 99},
}


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with serve_interfaces(
        FakeBackend(Script(reply="one two three")), tmp_path_factory.mktemp("f")
    ) as doors:
        yield doors


def fail(doors: Doors, fault: Exception, after_rounds: int = 0) -> None:
    """Let the next reply fail so."""
    doors.fake.num_rounds = 0
    doors.fake.script.fault, doors.fake.script.fail_at_round = fault, after_rounds


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fault", "status"), [(RuntimeError("boom"), 500), (LocalspecError("The disk is full."), 503)]
)
def test_an_unexpected_fault_is_not_a_busy_server(
    failing: Doors, path: str, fault: Exception, status: int
) -> None:
    fail(failing, fault)
    with failing.http() as http:
        answer = http.post(path, json=BODIES[path])
    error = answer.json()["error"]
    assert answer.status_code == status
    kinds = {500: "api_error", 503: "overloaded_error"}
    assert error["type"] == (kinds[status] if path == "/v1/messages" else "server_error")
    assert str(fault) in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_fault_in_a_stream_is_an_event_of_its_interface(failing: Doors, path: str) -> None:
    fail(failing, RuntimeError("boom"), after_rounds=1)
    failing.fake.script.accepted = (0,)
    with failing.http() as http:
        answer = http.post(path, json={**BODIES[path], "stream": True})
    assert answer.status_code == 200
    lines = [line for line in answer.text.splitlines() if line.startswith(("event: ", "data: "))]
    last = json.loads(lines[-1].removeprefix("data: "))
    if path == "/v1/responses":
        assert lines[-2] == "event: response.failed" == f"event: {last['type']}"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "internal_error"
        assert "boom" in last["response"]["error"]["message"]
        assert last["response"]["output"][0]["content"][0]["text"] == "one"
        assert last["sequence_number"] == sum(line.startswith("data: ") for line in lines) - 1
    elif path == "/v1/messages":
        assert lines[-2] == "event: error" and last["error"]["type"] == "api_error"
        assert last["request_id"] == answer.headers["request-id"]
    else:
        assert last["error"]["type"] == "server_error" and "boom" in last["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_fault_outside_of_the_engine_is_500_too(
    doors: Doors, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ProgramService, *asked: object) -> None:
        raise RecursionError

    monkeypatch.setattr(ProgramService, "answer", broken)
    with doors.http() as http:
        answer = http.post(path, json=BODIES[path])
    assert answer.status_code == 500 and "RecursionError" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]


def test_a_reply_that_a_person_stopped_is_not_asked_for_again_by_the_client(doors: Doors) -> None:
    """OpenAI's and Anthropic's clients repeat a 503 by themselves, but for this header."""
    message = {"role": "user", "content": "endless and slow"}
    with doors.http() as http, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http.post, "/v1/chat/completions", json={"messages": [message]})
        doors.service.stop(until(lambda: doors.service.current))
        answer = asked.result()
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "stopped"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_an_overflow_is_told_in_the_words_that_clients_look_for(doors: Doors, path: str) -> None:
    """LiteLLM looks for OpenAI's, Claude Code for Anthropic's."""
    long = [{"role": "user", "content": 5000 * " a"}]
    body = {name: long if value is ASKED else value for name, value in BODIES[path].items()}
    with doors.http() as http:
        answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        assert error["message"].startswith("prompt is too long: 5004 tokens > 4096 maximum")
    else:
        assert error["code"] == "context_length_exceeded"
        words = "This model's maximum context length is 4096 tokens. This conversation is 5,004"
        assert error["message"].startswith(words)


@pytest.mark.parametrize(("num_slots", "seconds"), [(1, 8), (4, 2), (64, 1)])
def test_the_time_to_wait_is_that_until_a_place_is_free(num_slots: int, seconds: int) -> None:
    assert QueueFull(32, 8.0, num_slots).retry_after_s == seconds
