"""/v1/chat/completions, as OpenAI's clients speak it.

Contract: `ChatFields.requests` gives the requests of all choices; `answer` and `events` the two
forms of the result. A reply is the same, token for token, as the page's with the same messages,
settings and seed. With several choices each has its own seed, and a stream has them one after the
other.

Source: platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from localspec.api.accounts import StreamUsage, speculation_of, usage_of
from localspec.api.faults import refusal
from localspec.api.fields import (
    MOST_LOGPROBS,
    Common,
    Fields,
    Part,
    StopText,
    StreamOptions,
    choices_of,
    refuse_unless,
    require_choices,
    role_of,
    stops_of,
    text_of,
)
from localspec.api.formats import schema_of, with_choice
from localspec.api.pieces import Ending, Piece, pieces, shown_token, whole
from localspec.api.replies import DONE, Asked, event
from localspec.api.tools import arguments_of, tool_of
from localspec.chat.detokenizer import REPLACEMENT
from localspec.core.backend import BYTES_AS_TEXT, Logprob, Message, Request, ToolCall

# Of a reply that came to its own end.
FINISHED: dict[Ending | None, str] = {
    "eos": "stop", "stop": "stop", "length": "length", "calls": "tool_calls",
}  # fmt: skip


class CalledFunction(Fields):
    """What a call asked for."""

    name: str
    arguments: str = "{}"


class EarlierCall(Fields):
    """A call of an earlier reply."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Tool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    function: dict[str, Any]


class ToolName(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: ToolName


class ChatMessage(Fields):
    """One message. reasoning_content, or reasoning by its newer name: of an earlier reply; the chat
    format says whether the model is shown it again."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None

    def message(self, place: int) -> Message:
        """place: in the list of messages. Raises Refused."""
        where = f"messages.{place}"
        calls = tuple(
            ToolCall(
                call.id,
                call.function.name,
                arguments_of(call.function.arguments, f"{where}.tool_calls"),
            )
            for call in self.tool_calls or ()
        )
        text, role = text_of(self.content, "messages"), role_of(self.role, f"{where}.role")
        thinking = self.reasoning_content or self.reasoning or ""
        named = (self.tool_call_id or "", self.name or "", thinking)
        return Message(role, text, calls, *named)


class ChoiceFields(Common):
    """What OpenAI's two interfaces with choices share."""

    stop: StopText | list[StopText] | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stream_usage(self) -> StreamUsage:
        return StreamUsage(self.stream_options, self.num_choices)


class ResponseFormat(Fields):
    """The form of the reply."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Prediction(Fields):
    """A text that the reply is expected to repeat in large parts."""

    type: Literal["content"]
    content: str | list[Part]


class ChatFields(ChoiceFields):
    """The body of a request."""

    messages: list[ChatMessage]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    prediction: Prediction | None = None

    @property
    def most_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None

    @property
    def continues_reply(self) -> bool:
        return bool(self.continue_final_message)

    def requests(self) -> list[Request]:
        """Raises RequestError, Refused."""
        self._refuse_the_impossible()
        messages = tuple(one.message(place) for place, one in enumerate(self.messages))
        require_choices(self.num_choices)
        limit = self.max_completion_tokens or self.max_tokens
        request = self.request(messages, limit, stops_of(self.stop))
        request = self._held(request)
        if self.reasoning_effort == "none":
            request = replace(request, thinks=False)
        if self.logprobs:
            request = replace(request, num_logprobs=self.top_logprobs or 0)
        if self.prediction is not None:
            text = text_of(self.prediction.content, "prediction.content")
            request = replace(request, prediction=text)
        return choices_of(request, self.num_choices)

    def _held(self, request: Request) -> Request:
        """With its tools, and held to its format or to a call. Raises Refused."""
        choice, form = self.tool_choice, self.response_format
        tools = [tool_of(one.function) for one in self.tools or ()]
        fields = None if form is None else {**(form.json_schema or {}), "type": form.type}
        schema = schema_of(fields, "response_format")
        if isinstance(choice, NamedTool):
            name = choice.function.name
            return with_choice(request, tools, None, name, "response_format", schema)
        return with_choice(request, tools, choice, None, "response_format", schema)

    def _refuse_the_impossible(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs needs logprobs to be true.", "top_logprobs")
        if self.continues_reply and self.messages and self.messages[-1].role != "assistant":
            why = "but the last message is not the assistant's."
            raise refusal(f"continue_final_message is True, {why}", "continue_final_message")
        why = "must be the opposite of continue_final_message."
        allowed = (None, not self.continues_reply)
        refuse_unless(self.add_generation_prompt, allowed, "add_generation_prompt", why)
        refuse_unless(self.modalities, (None, ["text"]), "modalities", "localspec writes text.")


class Head:
    """What all parts of one answer have in common."""

    def __init__(self, prefix: str, kind: str, model: str, fingerprint: str | None) -> None:
        self._fields = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def with_choices(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._fields, "choices": choices, **more}


async def answer(asked: Asked, head: Head) -> dict[str, Any]:
    """The whole answer. Raises as `Asked.chunks`."""
    found = [await whole(asked, reply) for reply in asked.replies]
    choices = [
        {
            "index": index,
            "message": _message(one),
            "logprobs": _logprobs(one.logprobs),
            "finish_reason": FINISHED.get(one.finish_reason),
            "speculation": speculation_of(reply, one.stats),
        }
        for index, (reply, one) in enumerate(zip(asked.replies, found, strict=True))
    ]
    return head.with_choices(choices, usage=usage_of([one.stats for one in found], len(found)))


async def events(asked: Asked, head: Head, usage: StreamUsage) -> AsyncGenerator[bytes | None]:
    """The answer as a stream: of each choice its role, its text and calls as they come, its end.
    A call is an event of its own, for some clients read the first of an event alone."""
    for index, reply in enumerate(asked.replies):
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        has_begun, num_calls = False, 0
        async with aclosing(pieces(asked, reply)) as coming:
            async for piece in coming:
                if piece is None:
                    yield None
                    continue
                so_far = usage.so_far(piece.stats)
                if not has_begun:
                    has_begun = True
                    yield event(head.with_choices([_choice(index, delta)], **so_far))
                if said := _delta(piece):
                    choice = _choice(index, said, logprobs=_logprobs(piece.logprobs))
                    yield event(head.with_choices([choice], **so_far))
                for call in _calls(piece.calls):
                    called = {"tool_calls": [{"index": num_calls, **call}]}
                    yield event(head.with_choices([_choice(index, called)], **so_far))
                    num_calls += 1
                if piece.finish_reason is not None:
                    last = _choice(index, {}, FINISHED[piece.finish_reason])
                    last["speculation"] = speculation_of(reply, piece.stats)
                    yield event(head.with_choices([last], **so_far))
                    usage.end(piece.stats)
    if usage.has_event:
        yield event(head.with_choices([], usage=usage.whole()))
    yield DONE


def _message(found: Piece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": found.text, "refusal": None}
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    if found.calls:
        message |= {"content": found.text or None, "tool_calls": _calls(found.calls)}
    return message


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def _delta(piece: Piece) -> dict[str, Any]:
    said: dict[str, Any] = {"reasoning_content": piece.reasoning, "content": piece.text}
    found = {name: value for name, value in said.items() if value}
    return found if found or not piece.logprobs else {"content": ""}


def _choice(
    index: int,
    delta: Mapping[str, Any],
    finish: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(found: Sequence[Logprob]) -> dict[str, Any] | None:
    if not found:
        return None
    content = [
        {**_token(one.text, one.logprob), "top_logprobs": [_token(*each) for each in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    """bytes: of a token that is only a part of a character they may be unknown."""
    known = None if REPLACEMENT in text else list(text.encode("utf-8", BYTES_AS_TEXT))
    return {"token": shown_token(text), "logprob": logprob, "bytes": known}
