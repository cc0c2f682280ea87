"""A full queue, a fault of the engine and a time that is over are told in the API's own errors."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from localspec.api import replies
from localspec.api.faults import Refused
from localspec.api.pieces import whole
from localspec.api.replies import Asked
from localspec.chat.programs import ProgramService
from localspec.core.backend import Message, Request
from localspec.core.errors import LocalspecError, QueueFull
from tests.api.doors import Doors, serve_interfaces
from tests.kit.fakes import FakeBackend, Script
from tests.kit.services import close, open_service
from tests.kit.waiting import until

ENDLESS = Script(reply=200 * "again and ", round_s=0.01)
ASKED = Request((Message("user", "hello"),), workload="auto")


def test_a_full_queue_answers_with_the_time_to_wait(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path, ENDLESS)
    programs = ProgramService(service, most_waiting=2)
    first = programs.answer(ASKED)
    until(lambda: service.current is first)
    waiting = [programs.answer(ASKED) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait already") as caught:
        programs.answer(ASKED)
    assert caught.value.retry_after_s >= 1
    service.stop(waiting[0])
    waiting.append(programs.answer(ASKED))
    for reply in (*waiting, first):
        service.stop(reply)
    close(service)


@pytest.mark.slow
def test_a_full_queue_is_429_with_retry_after(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    def full(self: ProgramService, *asked: object) -> None:
        raise QueueFull(32, 2.0)

    monkeypatch.setattr(ProgramService, "answer", full)
    with doors.openai() as client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(
            model="demo-12m", messages=[{"role": "user", "content": "hello"}]
        )
    assert caught.value.response.headers["retry-after"] == "2"
    assert caught.value.code == "queue_full"


@pytest.mark.slow
def test_a_request_during_the_first_load_is_judged_after_it(tmp_path: Path) -> None:
    may_load, script = threading.Event(), Script(reply="one two")
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
    with (
        serve_interfaces(FakeBackend(script), tmp_path, may_load) as doors,
        doors.http() as http,
        ThreadPoolExecutor(7) as pool,
    ):
        paths = ("/v1/chat/completions", "/v1/messages")
        asked = [
            pool.submit(http.post, path, json=body | more)
            for path in paths
            for more in ({"model": "gpt-9"}, {"model": "demo-12m"}, {})
        ]
        listed = pool.submit(http.get, "/v1/models")
        assert not wait([*asked, listed], 0.3).done
        may_load.set()
        assert [one["id"] for one in listed.result().json()["data"]] == ["demo-12m"]
        answers = [one.result() for one in asked]
    assert [one.status_code for one in answers] == 2 * [404, 200, 200]
    assert {one.json().get("model") for one in answers} == {None, "demo-12m"}


@pytest.mark.slow
def test_who_names_no_drafter_has_the_one_that_the_server_was_started_with(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
    backend = FakeBackend(Script(reply="one two"))
    with serve_interfaces(backend, tmp_path, drafter="off") as doors, doors.http() as http:
        for more in ({}, {"drafter": "auto"}):
            assert http.post("/v1/chat/completions", json=body | more).status_code == 200
    assert [one.drafter for one in backend.requests] == ["off", "auto"]


@pytest.mark.slow
def test_under_a_load_nothing_is_lost_and_who_goes_away_frees_its_place(doors: Doors) -> None:
    """16 clients; one in four reads the beginning of a long reply and leaves."""
    num_before = len(doors.service.turn_rows())

    def ask(number: int) -> str:
        with doors.openai() as client:
            if number % 4 == 0:
                message = {"role": "user", "content": "endless and slow"}
                stream = client.chat.completions.create(
                    model="demo-12m",
                    messages=[message],  # type: ignore[list-item]
                    stream=True,
                )
                next(iter(stream))
                stream.close()
                return ""
            found = client.chat.completions.create(
                model="demo-12m", messages=[{"role": "user", "content": f"echo {number}"}]
            )
            return found.choices[0].message.content or ""

    with ThreadPoolExecutor(16) as clients:
        texts = list(clients.map(ask, range(48)))
    assert texts == ["" if number % 4 == 0 else f"echo {number}" for number in range(48)]
    until(lambda: doors.service.current is None and not doors.service.worker.num_waiting)
    assert doors.service.flush()
    rows = doors.service.turn_rows()[num_before:]
    reasons = [row["finish_reason"] for row in rows]
    assert (reasons.count("eos"), reasons.count("cancelled")) == (36, 12)


HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "stream": True}
STREAMS = {
    "/v1/chat/completions": HELLO,
    "/v1/messages": HELLO,
    "/v1/completions": {"prompt": "hello", "stream": True},
    "/v1/responses": {"input": "hello", "stream": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_has_nothing_to_say_is_kept_open(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "PING_S", 0.02)
    backend = FakeBackend(Script(reply="one two", prefill_s=0.3))
    with serve_interfaces(backend, tmp_path) as doors, doors.http() as http:
        lines = http.post(path, json=STREAMS[path]).text.splitlines()
    assert sum(line.startswith((":", "event: ping")) for line in lines) >= 3
    assert any("two" in line for line in lines if line.startswith("data:"))


def test_who_leaves_a_stream_that_has_nothing_to_say_frees_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "PING_S", 0.02)
    backend = FakeBackend(Script(reply=200 * "again ", prefill_s=0.3, round_s=0.01))
    with serve_interfaces(backend, tmp_path) as doors, doors.http() as http:
        asked = HELLO | {"max_tokens": 500}
        with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            assert any(line.startswith(":") for line in answer.iter_lines())
        until(lambda: doors.service.current is None)
        assert doors.service.flush()
        (row,) = doors.service.turn_rows()
    assert row["finish_reason"] == "cancelled"


@pytest.mark.slow
def test_a_fault_of_the_engine_is_told(tmp_path: Path) -> None:
    import openai

    fault = LocalspecError("The card is on fire. Cool it.")
    backend = FakeBackend(Script(fail_at_round=0, fault=fault))
    with (
        serve_interfaces(backend, tmp_path) as doors,
        doors.openai() as client,
        pytest.raises(openai.InternalServerError, match="on fire") as caught,
    ):
        client.chat.completions.create(
            model="demo-12m", messages=[{"role": "user", "content": "hello"}]
        )
    assert caught.value.status_code == 503


def test_a_model_that_was_unloaded_is_listed_for_the_next_request_loads_it(tmp_path: Path) -> None:
    import openai

    with (
        serve_interfaces(FakeBackend(Script(reply="ok")), tmp_path) as doors,
        doors.openai() as client,
    ):
        doors.service.unload()
        until(lambda: doors.service.lifecycle.loaded is None)
        assert [one.id for one in client.models.list()] == ["demo-12m"]
        assert client.models.retrieve("demo-12m").owned_by == "localspec"
        asked = [{"role": "user", "content": "hello"}]
        with pytest.raises(openai.NotFoundError, match="no model 'other' here, but 'demo-12m'"):
            client.chat.completions.create(model="other", messages=asked)  # type: ignore[arg-type]
        assert doors.service.lifecycle.loaded is None, "nothing was loaded for it"
        reply = client.chat.completions.create(model="demo-12m", messages=asked)  # type: ignore[arg-type]
        assert reply.choices[0].message.content == "ok"


def test_a_model_that_could_not_be_loaded_again_is_unavailable(tmp_path: Path) -> None:
    backend = FakeBackend(Script())
    with serve_interfaces(backend, tmp_path) as doors, doors.http() as http:

        def fail(report: object) -> FakeBackend:
            raise LocalspecError("The file is gone. Download it again.")

        doors.service.unload()
        doors.service.lifecycle.opener = fail
        doors.service.retry()
        until(lambda: doors.service.lifecycle.phase == "failed")
        found = http.get("/v1/models/demo-12m")
        assert http.get("/v1/models").json()["data"] == []
    assert found.status_code == 503 and "The file is gone" in found.json()["error"]["message"]


def test_a_wrong_path_or_method_is_told_what_there_is(doors: Doors) -> None:
    with doors.http() as http:
        answers = [http.post("/chat/completions"), http.post("/v1/v1/messages")]
        answers.append(http.get("/v1/completions"))
    assert [one.status_code for one in answers] == [404, 404, 405]
    beside, *others = (one.json()["error"]["message"] for one in answers)
    assert "this address with /v1 behind it" in beside
    assert all("POST /v1/completions, POST /v1/responses" in one for one in others)
    assert answers[-1].headers["allow"] == "POST"


def test_what_is_no_json_is_refused_before_anything_is_decoded(doors: Doors) -> None:
    bodies = (b"", b"{", b'{"input": "hi", "metadata": {"weight": NaN}}')
    with doors.http() as http:
        answers = [http.post("/v1/responses", content=body) for body in bodies]
        others = [http.post("/v1/completions", json=body) for body in ([1], "x", 5)]
    assert [one.status_code for one in (*answers, *others)] == 6 * [400]
    assert all("Invalid JSON: " in one.json()["error"]["message"] for one in answers)
    assert all("body is no JSON object" in one.json()["error"]["message"] for one in others)
    assert doors.fake.requests == []


COUNTED = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")
NEARLY_FULL = "echo" + 4080 * " a"  # of a context of 4,096 tokens


@pytest.mark.parametrize(
    ("path", "name", "place", "whole", "cut"),
    [
        ("chat/completions", "max_tokens", "finish_reason", "stop", "length"),
        ("chat/completions", "max_completion_tokens", "finish_reason", "stop", "length"),
        ("completions", "max_tokens", "finish_reason", "stop", "length"),
        ("responses", "max_output_tokens", "status", "completed", "incomplete"),
        ("messages", "max_tokens", "stop_reason", "end_turn", "model_context_window_exceeded"),
    ],
)
def test_a_limit_beyond_the_context_ends_the_reply_with_the_context(
    doors: Doors, path: str, name: str, place: str, whole: str, cut: str
) -> None:
    def ended(text: str, **fields: object) -> tuple[str, dict[str, Any]]:
        text_field = {"completions": "prompt", "responses": "input"}.get(path)
        message = {"role": "user", "content": text}
        asked: dict[str, object] = {text_field: text} if text_field else {"messages": [message]}
        answer = http.post(f"/v1/{path}", json=asked | fields)
        assert answer.status_code == 200, answer.text
        (found,) = answer.json().get("choices", [answer.json()])
        return found[place], answer.json()["usage"]

    with doors.http() as http:
        assert ended("Count.", **{name: 128_000})[0] == whole
        reason, usage = ended(NEARLY_FULL, **{name: 4096})
        short, _ = ended("Count.", **{name: 3})
    assert reason == cut and short == ("max_tokens" if path == "messages" else cut)
    assert sum(usage[part] for part in usage if part in COUNTED) == 4096


def test_the_length_that_a_model_is_listed_with_can_be_asked_for(doors: Doors) -> None:
    asked = {"messages": [{"role": "user", "content": "Count."}]}
    with doors.http() as http:
        version = {"anthropic-version": "2023-06-01"}
        listed = http.get("/v1/models", headers=version).json()["data"][0]
        answer = http.post("/v1/messages", json={**asked, "max_tokens": listed["max_tokens"]})
        assert answer.json()["stop_reason"] == "end_turn"
        length = http.get("/v1/models").json()["data"][0]["max_model_len"]
        answer = http.post("/v1/chat/completions", json={**asked, "max_tokens": length})
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_a_reply_is_stopped_when_its_time_is_over(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path, ENDLESS)
    programs = ProgramService(service)
    reply = programs.answer(ASKED)
    asked = Asked(service, [reply], limit_s=0.1)
    # In a thread: the main one may have the loop of a browser's tests.
    with ThreadPoolExecutor() as threads, pytest.raises(Refused, match="longer than 0 seconds"):
        threads.submit(asyncio.run, whole(asked, reply)).result()
    asked.stop()
    assert reply.done.wait(20)
    assert reply.view.finish_reason == "cancelled"
    close(service)
