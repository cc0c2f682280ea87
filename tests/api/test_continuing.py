"""A reply that a request ends with is continued only where that is asked for."""

from __future__ import annotations

import pytest

from tests.api.doors import REPLY, Doors

BEGUN = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One two"}]
REST = REPLY.removeprefix("One two")
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/v1/chat/completions", {"messages": BEGUN}, REPLY),
        ("/v1/chat/completions", {"messages": BEGUN, "add_generation_prompt": True}, REPLY),
        ("/v1/chat/completions", {"messages": BEGUN, "continue_final_message": True}, REST),
        (
            "/v1/chat/completions",
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
            REST,
        ),
        ("/v1/responses", {"input": BEGUN}, REPLY),
        ("/v1/messages", {"messages": BEGUN, "max_tokens": 99}, REST),
    ],
)
def test_a_reply_is_continued_on_request_alone(
    doors: Doors, path: str, fields: dict[str, object], said: str
) -> None:
    with doors.http() as http:
        answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    assert doors.fake.requests[-1].continues is (said == REST)
    assert f'"{said}"' in answer.text
    assert doors.service.flush()
    stored = doors.service.store.branch(doors.service.turn_rows()[-1]["message_id"])
    assert [one.text for one in stored] == ["Count.", "One two", said]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"continue_final_message": True}, "continue_final_message"),
        (
            "/v1/chat/completions",
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ("/v1/chat/completions", {"add_generation_prompt": False}, "add_generation_prompt"),
        (
            "/v1/chat/completions",
            {
                "messages": [*BEGUN[:1], {"role": "assistant", "tool_calls": [CALL]}],
                "continue_final_message": True,
            },
            "messages",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(
    doors: Doors, path: str, fields: dict[str, object], param: str
) -> None:
    with doors.http() as http:
        answer = http.post(path, json={"messages": BEGUN[:1], **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
