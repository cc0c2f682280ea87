"""Requests as programs make them by themselves: each is answered, and only named fields are lost.

The bodies follow the public sources of vLLM's and guidellm's benchmarks, of Codex (codex-api), and
what proxies of Claude Code have written down of its requests.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.doors import REPLY, Doors

RANDOM = "kr\N{REPLACEMENT CHARACTER}<|im_end|> ow\u00e9 (\N{GRINNING FACE}] <think> 7 \u0000 vel"
ALL_USAGE = {"include_usage": True, "continuous_usage_stats": True}
BENCHED: list[tuple[str, dict[str, Any]]] = [
    (
        "completions",
        {
            "model": "demo-12m", "prompt": RANDOM, "repetition_penalty": 1.0, "max_tokens": 30,
            "logprobs": None, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "temperature": 0.0,
        },
    ),
    (
        "chat/completions",
        {
            "model": "demo-12m", "messages": [
                {"role": "user", "content": [{"type": "text", "text": RANDOM}]}
            ],
            "max_completion_tokens": 30, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True}, "top_k": -1, "min_p": 0.0,
        },
    ),
    (
        "completions",
        {
            "model": "demo-12m", "stream": True, "stream_options": ALL_USAGE, "max_tokens": 30,
            "stop": None, "ignore_eos": True, "prompt": RANDOM,
        },
    ),
    (
        "chat/completions",
        {
            "model": "demo-12m", "stream": True, "stream_options": ALL_USAGE, "stop": None,
            "max_completion_tokens": 30, "ignore_eos": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": RANDOM}]}],
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BENCHED)
def test_a_benchmark_gets_as_many_tokens_as_it_asks_for(
    doors: Doors, path: str, body: dict[str, Any]
) -> None:
    with doors.http() as http:
        answer = http.post(f"/v1/{path}", json=body, headers={"x-request-id": "bench-0"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "bench-0"
    assert "x-localspec-ignored" not in answer.headers
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    *events, last = map(json.loads, lines)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 30
    assert all(len(one["choices"]) == 1 for one in events)
    if body["stream_options"] is ALL_USAGE:
        assert all(one["usage"]["prompt_tokens"] > 5 for one in events)


def typed(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


COMMAND = {
    "type": "object",
    "properties": {
        "cmd": {"type": "string", "description": "To run."}, "workdir": {"type": "string"},
        "yield_time_ms": {"type": "number"},
    },
    "required": ["cmd"], "additionalProperties": False,
}  # fmt: skip
CODEX: dict[str, Any] = {
    "model": "demo-12m",
    "instructions": "You are a coding agent in a terminal.",
    "input": [
        typed("developer", "<permissions>read only</permissions>"),
        typed("user", "<environment_context><cwd>/tmp</cwd></environment_context>"),
        typed("user", "List the files."),
    ],
    "tools": [
        {
            "type": "function", "name": "exec_command", "description": "Run a command.",
            "strict": False, "parameters": COMMAND,
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "description": "Edit.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "low"},
    "service_tier": "priority",
    "client_metadata": {"x-codex-installation-id": "1"},
}  # fmt: skip
CODEX_AFTER = [
    {
        "type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Look."}],
        "content": [{"type": "reasoning_text", "text": "Look."}], "encrypted_content": None,
    },
    {
        "type": "message", "id": "msg_1", "role": "assistant", "phase": "commentary",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    },
    {
        "type": "function_call", "id": "fc_1", "status": "completed", "name": "exec_command",
        "arguments": '{"cmd":"ls"}', "call_id": "call_1",
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "a.py\n"},
]  # fmt: skip


@pytest.mark.parametrize("after", [[], CODEX_AFTER])
def test_codex_is_answered(doors: Doors, after: list[dict[str, Any]]) -> None:
    with doors.http() as http:
        answer = http.post("/v1/responses", json={**CODEX, "input": [*CODEX["input"], *after]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-localspec-ignored"] == "tools.web_search, tools.custom"
    assert answer.text.count("event: response.completed") == 1 and REPLY[:20] in answer.text
    asked = doors.fake.requests[-1]
    assert [one["function"]["name"] for one in asked.tools] == ["exec_command"]
    roles = [one.role for one in asked.messages]
    assert roles == ["system", "system", "user", "user", *(["assistant", "tool"] if after else [])]


def cached(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}


CLAUDE_CODE: dict[str, Any] = {
    "model": "demo-12m",
    "max_tokens": 32000,
    "stream": True,
    "system": [{"type": "text", "text": "For Claude Code."}, cached("You help in a terminal.")],
    "messages": [{"role": "user", "content": [cached("List the files.")]}],
    "tools": [
        {
            "name": "Bash", "description": "Run a command.", "eager_input_streaming": True,
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
                "properties": {"command": {"type": "string"}}, "required": ["command"],
                "additionalProperties": False,
            },
        }
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
    "diagnostics": {"previous_message_id": None},
}  # fmt: skip
CLAUDE_CODE_AFTER = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Look.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py",
                "is_error": False, "cache_control": {"type": "ephemeral"},
            },
            {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
        ],
    },
]  # fmt: skip
TITLE = {
    "system": [{"type": "text", "text": "Name the chat."}],
    "tools": [],
    "thinking": {"type": "disabled"},
    "temperature": 1,
    "output_config": {
        "effort": "low",
        "format": {
            "type": "json_schema",
            "schema": {
                "type": "object", "properties": {"title": {"type": "string"}},
                "required": ["title"], "additionalProperties": False,
            },
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"messages": [*CLAUDE_CODE["messages"], *CLAUDE_CODE_AFTER]},
        {"thinking": {"type": "enabled", "budget_tokens": 31_999}},
        {"max_tokens": 128_000, "messages": [*CLAUDE_CODE["messages"], *CLAUDE_CODE_AFTER,
                                             {"role": "system", "content": "Plan mode is on."}]},
        TITLE,
        {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]},
    ],
)  # fmt: skip
def test_claude_code_is_answered(doors: Doors, more: dict[str, Any]) -> None:
    beta = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
    body = {**CLAUDE_CODE, **more}
    with doors.http(**beta) as http:
        answer = http.post("/v1/messages?beta=true", json=body)
        counted = {name: body[name] for name in ("model", "messages", "tools", "system")}
        count = http.post("/v1/messages/count_tokens?beta=true", json=counted)
    assert answer.status_code == 200, answer.text
    assert "x-localspec-ignored" not in answer.headers
    assert "event: error" not in answer.text and "event: message_stop" in answer.text
    assert '"stop_reason": "end_turn"' in answer.text or more.get("max_tokens") == 1
    assert count.json()["input_tokens"] > 3
    thinks = {"adaptive": None, "enabled": True, "disabled": False}[body["thinking"]["type"]]
    assert doors.fake.requests[-1].thinks is thinks
