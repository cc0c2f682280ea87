"""/v1/messages, as Anthropic's clients speak it.

Contract: as chat_completions; one choice. What a model thinks is a block of its own, without a
signature. `speculation` is a field of the message, in a stream of its last event.

Source: docs.anthropic.com/en/api/messages, docs.anthropic.com/en/api/messages-streaming.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from localspec.api.accounts import speculation_of
from localspec.api.faults import Fault, Refused
from localspec.api.fields import Common, Fields, Part, StopText, role_of, text_of
from localspec.api.formats import called, held, schema_of
from localspec.api.pieces import Ending, Piece, pieces, whole
from localspec.api.replies import Asked, event
from localspec.api.tools import refuse_only_foreign, tool_of
from localspec.core.backend import Message, Request, ToolCall
from localspec.core.turn_stats import TurnStats

STOPPED: dict[Ending | None, str] = {
    "eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "calls": "tool_use",
}  # fmt: skip
OF_PROGRAMS = (None, "custom")  # Types of tools that the sender runs, with a schema of its own.
APART = ("tool_use", "tool_result", "thinking", "redacted_thinking")  # no text of the message


class Block(Part):
    """A part of a message, with the fields of what is no text. input: the arguments of a call.
    content: the answer of a tool."""

    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: str | list[Part] | None = None
    thinking: str = ""


class AnthropicMessage(Fields):
    """One message."""

    role: str
    content: str | list[Block]

    def messages(self, param: str) -> list[Message]:
        """The answers of tools in it, then its text with the calls of tools. Raises Refused."""
        parts = [] if isinstance(self.content, str) else self.content
        answers = [
            Message("tool", text_of(one.content, param), call_id=one.tool_use_id)
            for one in parts
            if one.type == "tool_result"
        ]
        calls = tuple(
            ToolCall(one.id, one.name, json.dumps(one.input, ensure_ascii=False))
            for one in parts
            if one.type == "tool_use"
        )
        rest = [one for one in parts if one.type not in APART]
        text = text_of(self.content if isinstance(self.content, str) else rest, param)
        if answers and not text:
            return answers
        thinking = "".join(one.thinking for one in parts)
        role = role_of(self.role, f"{param}.role")
        return [*answers, Message(role, text, calls, thinking=thinking)]


class Thinking(Fields):
    """Whether the model thinks, and for how many tokens at most. It is always given."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: str | None = None


class OutputConfig(Fields):
    """The form of the reply."""

    format: dict[str, Any] | None = None


class ToolChoice(Fields):
    """Whether the model may or must call a tool, and which."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountFields(Common):
    """The body of a request for a count of tokens: as of a message, whose length is left out."""

    messages: list[AnthropicMessage]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    system: str | list[Part] | None = None
    stop_sequences: list[StopText] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None

    @property
    def most_calls(self) -> int | None:
        is_one = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return 1 if is_one else None

    @property
    def continues_reply(self) -> bool:
        return True  # Anthropic's prefill

    def requests(self) -> list[Request]:
        """Raises RequestError, Refused."""
        if self.thread is not None:  # by the code its client sends the whole conversation instead
            kept = "localspec keeps no threads. Send the whole conversation."
            raise Refused(Fault(400, kept, "thread_unsupported_request", "thread"))
        choice = "auto" if self.tool_choice is None else self.tool_choice.type
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            self.thinking_budget = self.thinking.budget_tokens
        stops = tuple(self.stop_sequences or ())
        request = self.request(self._all_messages(), self.max_tokens, stops)
        if self.thinking is not None:
            switches = {"enabled": True, "disabled": False, "adaptive": None}
            request = replace(request, thinks=switches[self.thinking.type])
        refuse_only_foreign(self._foreign, len(self.tools or ()) - len(self._foreign))
        functions = [one for one in self.tools or () if one.get("type") in OF_PROGRAMS]
        tools = [_tool(one) for one in functions if choice != "none"]
        form = None if self.output_config is None else self.output_config.format
        schema = schema_of(form and {**form, "strict": True}, "output_config.format")
        if self.tool_choice is None or choice not in ("any", "tool"):
            return [held(request, "output_config.format", schema, tools)]
        name = self.tool_choice.name if choice == "tool" else None
        return [held(request, "tools", schema, tools, called(tools, name))]

    def ignored(self) -> list[str]:
        return [*super().ignored(), *(f"tools.{name}" for name in dict.fromkeys(self._foreign))]

    @property
    def _foreign(self) -> list[str]:
        types = (one.get("type") for one in self.tools or ())
        return [str(one) for one in types if one not in OF_PROGRAMS]

    def _all_messages(self) -> tuple[Message, ...]:
        """The system prompt first. Raises Refused."""
        system = text_of(self.system, "system")
        messages = [Message("system", system)] if system else []
        for place, one in enumerate(self.messages):
            messages += one.messages(f"messages.{place}")
        return tuple(messages)


class MessagesFields(CountFields):
    """The body of a request."""

    max_tokens: Annotated[int, Field(ge=1)]


class MessageHead:
    """What the message is, before and after its text. stops, max_tokens: of the request."""

    def __init__(self, model: str, stops: list[str] | None, max_tokens: int) -> None:
        self._fields = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._only_stop = stops[0] if stops is not None and len(stops) == 1 else None
        self._max_tokens = max_tokens

    def ending(self, last: Piece) -> dict[str, Any]:
        """Return why the reply ended. Which of several stop strings ended it is not known."""
        reason = last.finish_reason
        text = self._only_stop if reason == "stop" else None
        stop_reason = STOPPED.get(reason)
        num_tokens = last.stats.told("num_output_tokens")
        if reason == "length" and num_tokens is not None and num_tokens < self._max_tokens:
            stop_reason = "model_context_window_exceeded"
        return {"stop_reason": stop_reason, "stop_sequence": text}

    def message(
        self, content: list[dict[str, Any]], usage: dict[str, int], **more: Any
    ) -> dict[str, Any]:
        ending = {"stop_reason": None, "stop_sequence": None}
        return {**self._fields, "content": content, **ending, "usage": usage, **more}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """In OpenAI's format. Raises Refused."""
    function = {key: tool[key] for key in ("name", "description") if key in tool}
    return tool_of({**function, "parameters": tool.get("input_schema", {})})


def _use(call: ToolCall) -> dict[str, Any]:
    block = {"type": "tool_use", "id": call.call_id, "name": call.name}
    # Of one that was cut, what Anthropic's client makes of the same events.
    return {**block, "input": from_json(call.arguments or "{}", allow_partial=True)}


async def answer(asked: Asked, head: MessageHead) -> dict[str, Any]:
    """The whole message. Raises as `Asked.chunks`."""
    found = await whole(asked, asked.replies[0])
    content = [{**_empty("thinking"), "thinking": found.reasoning}] if found.reasoning else []
    if found.text or not (content or found.calls):
        content.append({**_empty("text"), "text": found.text})
    content += [_use(call) for call in found.calls]
    speculation = speculation_of(asked.replies[0], found.stats)
    usage = _usage(found.stats)
    return {**head.message(content, usage, speculation=speculation), **head.ending(found)}


async def events(asked: Asked, head: MessageHead) -> AsyncGenerator[bytes | None]:
    """The message as a stream: its blocks one after the other, then how it ended. It begins when
    its turn does, for its head says how long the prompt is."""
    reply, kind, index, has_begun = asked.replies[0], "", -1, False
    async with aclosing(pieces(asked, reply)) as coming:
        async for piece in coming:
            if piece is None:
                yield _event("ping") if has_begun else None
                continue
            if not has_begun:
                usage = {**_usage(piece.stats), "output_tokens": 0}
                yield _event("message_start", message=head.message([], usage))
            has_begun = True
            for of_kind, text in (("thinking", piece.reasoning), ("text", piece.text)):
                if not text:
                    continue
                if kind != of_kind:
                    if kind:
                        yield _event("content_block_stop", index=index)
                    kind, index = of_kind, index + 1
                    block = _empty(kind)
                    yield _event("content_block_start", index=index, content_block=block)
                delta = {"type": f"{kind}_delta", kind: text}
                yield _event("content_block_delta", index=index, delta=delta)
            if kind and (piece.calls or piece.finish_reason is not None):
                yield _event("content_block_stop", index=index)
                kind = ""
            for call in piece.calls:
                index += 1
                block = {**_use(call), "input": {}}
                yield _event("content_block_start", index=index, content_block=block)
                delta = {"type": "input_json_delta", "partial_json": call.arguments}
                yield _event("content_block_delta", index=index, delta=delta)
                yield _event("content_block_stop", index=index)
            if piece.finish_reason is not None:
                yield _event(
                    "message_delta",
                    delta=head.ending(piece),
                    usage=_usage(piece.stats),
                    speculation=speculation_of(reply, piece.stats),
                )
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _empty(kind: str) -> dict[str, Any]:
    block = {"type": kind, kind: ""}
    return {**block, "signature": ""} if kind == "thinking" else block


def _usage(stats: TurnStats) -> dict[str, int]:
    """Tokens that the cache had already are counted apart, as Anthropic does."""
    return {
        "input_tokens": stats.num_prompt_tokens - stats.num_reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.num_reused_tokens,
        "output_tokens": stats.num_output_tokens,
    }
