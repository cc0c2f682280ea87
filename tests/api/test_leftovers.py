"""Fields that ask for nothing are taken, unknown ones are ignored aloud, and ids come with all."""

from __future__ import annotations

import json
import socket

import pytest

from localspec.api.leftovers import MOST_REMEMBERED, IgnoredLog
from tests.api.doors import Doors

ASKED = [{"role": "user", "content": "Count."}]
CHAT, TEXT = ("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")
RESPONSES, MESSAGES = ("/v1/responses", "input"), ("/v1/messages", "messages")
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}


def body_of(door: tuple[str, str], fields: dict[str, object]) -> dict[str, object]:
    asked = {door[1]: "Count." if door == TEXT else ASKED}
    return asked | ({"max_tokens": 99} if door == MESSAGES else {}) | fields


@pytest.mark.parametrize(
    ("door", "fields"),
    [
        (CHAT, {"verbosity": "low", "prompt_cache_retention": "24h", "reasoning_effort": "high"}),
        (CHAT, {"ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True, "echo": False}),
        (CHAT, {"store": True, "cache_prompt": True, "service_tier": "flex", "n_probs": 0}),
        (CHAT, {"messages": [*ASKED, {"id": "1", "role": "assistant", "content": "", "audio": None,
                                      "reasoning": "Hm."}, *ASKED]}),
        (CHAT, {"stream_options": {"include_obfuscation": False}, "logit_bias": {}}),
        (TEXT, {"best_of": 1, "echo": False, "suffix": "", "length_penalty": 1.0}),
        (TEXT, {"best_of": 2, "n": 2, "use_beam_search": False, "logprobs": None}),
        (RESPONSES, {"store": True, "reasoning": {"effort": "high", "summary": "auto"}}),
        (RESPONSES, {"text": {"verbosity": "low"}, "include": ["reasoning.encrypted_content"]}),
        (RESPONSES, {"truncation": "disabled", "top_logprobs": 0, "background": False}),
        (RESPONSES, {"input": [*ASKED, THOUGHT, *ASKED]}),
        (MESSAGES, {"cache_control": {"type": "ephemeral"}, "output_config": {"effort": "low"}}),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_taken_without_a_word(
    doors: Doors, door: tuple[str, str], fields: dict[str, object]
) -> None:
    with doors.http() as http:
        answer = http.post(door[0], json=body_of(door, fields))
    assert answer.status_code == 200, answer.text
    assert "x-localspec-ignored" not in answer.headers


def test_an_earlier_thought_is_shown_by_both_of_its_names(doors: Doors) -> None:
    with doors.http() as http:
        for name in ("reasoning", "reasoning_content"):
            reply = {"role": "assistant", "content": "One.", name: "Hm."}
            asked = {"messages": [*ASKED, reply, *ASKED]}
            assert http.post(CHAT[0], json=asked).status_code == 200
            assert doors.fake.requests[-1].messages[1].thinking == "Hm."


@pytest.mark.parametrize("door", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_an_unknown_field_is_ignored_and_named(
    doors: Doors, door: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    new = f"topK{door[0].replace('/', '_')}"
    body = body_of(door, {new: 3, "stream": True, "stream_options": {"more\n": 1}, "none": None})
    with doors.http() as http:
        answers = [http.post(door[0], json=body) for _ in range(2)]
    for answer in answers:
        assert answer.status_code == 200
        named = answer.headers["x-localspec-ignored"].split(", ")
        assert named[0] == new and len(named) == 2 and "\n" not in answer.headers
    logged = capsys.readouterr().err
    assert logged.count(new) == 1, "once, not with every request"
    assert "none" not in logged


def test_a_request_of_very_many_unknown_fields_names_some(doors: Doors) -> None:
    body = body_of(CHAT, {f"x{number}": 1 for number in range(50_000)})
    with doors.http() as http:
        answer = http.post(CHAT[0], json=body)
    assert answer.status_code == 200
    named = answer.headers["x-localspec-ignored"].split(", ")
    assert named[:2] == ["x0", "x1"] and len(named) == 17 and named[-1] == "and-others"


def test_the_log_names_only_so_many_fields(capsys: pytest.CaptureFixture[str]) -> None:
    ignored = IgnoredLog()
    for number in range(2 * MOST_REMEMBERED):
        ignored.name("/v1/messages", [f"field{number}"])
    assert capsys.readouterr().err.count("\n") == MOST_REMEMBERED


def test_a_reply_that_ignores_its_end_is_as_long_as_was_asked(doors: Doors) -> None:
    fields = {"ignore_eos": True, "max_tokens": 40}
    with doors.http() as http:
        for door in (CHAT, TEXT):
            answer = http.post(door[0], json=body_of(door, fields)).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 40
        form = {"type": "json_object"}
        refused = http.post(CHAT[0], json=body_of(CHAT, {**fields, "response_format": form}))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "ignore_eos"


@pytest.mark.parametrize("door", [RESPONSES, MESSAGES])
def test_tools_of_other_makers_are_left_out_beside_functions_alone(
    doors: Doors, door: tuple[str, str]
) -> None:
    function: dict[str, object] = {"type": "function", "name": "f", "parameters": {}}
    if door == MESSAGES:
        function = {"name": "f", "input_schema": {"type": "object"}}
    search = {"type": "web_search", "name": "web_search"}
    with doors.http() as http:
        answer = http.post(door[0], json=body_of(door, {"tools": [function, search]}))
        assert answer.status_code == 200
        assert answer.headers["x-localspec-ignored"] == "tools.web_search"
        assert [one["function"]["name"] for one in doors.fake.requests[-1].tools] == ["f"]
        refused = http.post(door[0], json=body_of(door, {"tools": [search]}))
    assert refused.status_code == 400 and "web_search" in refused.json()["error"]["message"]


def test_a_server_says_that_it_is_up_and_which_version_it_is(doors: Doors) -> None:
    with doors.http() as http:
        assert http.get("/version").json()["version"]
        del http.headers["authorization"]
        assert http.get("/health").status_code == 200, "without a key"
        closed = [http.get("/version"), http.post("/tokenize", json={"prompt": "a"})]
        closed.append(http.post("/health"))
    assert [one.status_code for one in closed] == [401, 401, 401]


def test_nothing_is_read_of_who_has_no_key(doors: Doors) -> None:
    """The body that is announced never comes: waiting for it would hold a place of others."""
    with socket.create_connection(("127.0.0.1", doors.port), timeout=5) as one:
        head = f"GET /health HTTP/1.1\r\nhost: 127.0.0.1:{doors.port}\r\ncontent-length: 9\r\n\r\n"
        one.sendall(head.encode())
        assert one.recv(100).startswith(b"HTTP/1.1 200")


def test_a_text_and_a_chat_are_told_as_tokens(doors: Doors) -> None:
    with doors.http() as http:
        text = http.post("/tokenize", json={"prompt": "One two"}).json()
        chat = http.post("/tokenize", json={"messages": ASKED, "add_generation_prompt": True})
        bare = http.post("/tokenize", json={"prompt": "a", "add_special_tokens": False})
    assert text["count"] == len(text["tokens"]) == 2 and text["max_model_len"] == 4096
    assert chat.status_code == 200 and len(chat.json()["tokens"]) == 2
    assert bare.status_code == 400 and bare.json()["error"]["param"] == "add_special_tokens"


def test_every_answer_has_the_id_of_its_request(doors: Doors) -> None:
    with doors.http() as http:
        mine = http.post(CHAT[0], json=body_of(CHAT, {}), headers={"x-request-id": "bench-7"})
        assert mine.headers["x-request-id"] == "bench-7"
        bad = http.post(MESSAGES[0], json={}, headers={"x-request-id": "a b"})
        assert bad.headers["request-id"] == bad.headers["x-request-id"] != "a b"
        assert bad.json()["request_id"] == bad.headers["request-id"]
        closed = http.get("/v1/models", headers={"authorization": "Bearer wrong"})
        ids = [closed.headers["x-request-id"], http.get("/v1/models").headers["x-request-id"]]
    assert closed.status_code == 401 and len({*ids}) == 2


def test_the_usage_of_a_stream_is_told_as_it_grows(doors: Doors) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for door in (CHAT, TEXT):
        with doors.http() as http:
            body = body_of(door, {"stream": True, "stream_options": options})
            lines = http.post(door[0], json=body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        counts = [one["usage"]["completion_tokens"] for one in events if one["usage"]]
        assert counts == sorted(counts) and counts[0] < counts[-1] and len(counts) > 4
        assert events[-1]["choices"] == [] and counts[-1] == counts[-2]
