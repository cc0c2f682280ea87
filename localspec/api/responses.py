"""/v1/responses, as OpenAI's clients speak it.

Contract: as chat_completions; one choice. Nothing is kept to be asked for later, so a request that
continues an earlier response by its id is refused.

Source: platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from localspec.api.accounts import prediction_tokens, speculation_of
from localspec.api.faults import Fault, fault_in_stream, refusal
from localspec.api.fields import (
    Common,
    Fields,
    Part,
    StreamOptions,
    refuse_unless,
    role_of,
    text_of,
)
from localspec.api.formats import schema_of, with_choice
from localspec.api.pieces import Piece, pieces, whole
from localspec.api.replies import Asked, event
from localspec.api.tools import arguments_of, refuse_only_foreign, tool_of
from localspec.chat.service import Reply, clean
from localspec.core.backend import Message, Request, ToolCall
from localspec.core.turn_stats import TurnStats

LOGPROBS = "message.output_text.logprobs"  # All else that can be included is not there anyway.


class InputItem(Fields):
    """One item of the input: a message, what the model thought, a call, or what it gave."""

    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None

    def message(self, where: str) -> Message | None:
        """None for a thought, which the next reply is not shown. Raises Refused."""
        known = ("message", "reasoning", "function_call", "function_call_output")
        refuse_unless(self.type, known, f"{where}.type", f"must be one of {', '.join(known)}.")
        if self.type == "reasoning":
            return None
        if self.type == "function_call":
            arguments = arguments_of(self.arguments, f"{where}.arguments")
            return Message("assistant", "", (ToolCall(self.call_id, self.name, arguments),))
        if self.type == "function_call_output":
            return Message("tool", text_of(self.output, f"{where}.output"), call_id=self.call_id)
        role = role_of(self.role, f"{where}.role")
        return Message(role, text_of(self.content, f"{where}.content"))


class Function(Fields):
    """A function that the model may call. strict: always so where a call is asked for."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> dict[str, Any]:
        known = {"name", "description", "parameters"}
        return tool_of(self.model_dump(include=known, exclude_none=True))


class ForeignTool(Part):
    """A tool that the sender does not run, or whose form only its maker's models know."""


AnyTool = Annotated[
    Annotated[Function, Tag("Function")] | Annotated[ForeignTool, Tag("ForeignTool")],
    Discriminator(lambda tool: "Function" if _type_of(tool) == "function" else "ForeignTool"),
]


def _type_of(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)


class NamedFunction(Fields):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFields(Fields):
    """Of the reply's text."""

    format: dict[str, Any] | None = None


class ResponseFields(Common):
    """The body of a request."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextFields | None = None
    tools: list[AnyTool] | None = None
    tool_choice: str | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    stream_options: StreamOptions | None = None

    @property
    def most_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None

    def requests(self) -> list[Request]:
        """Raises RequestError, Refused."""
        self._refuse_the_impossible()
        messages = [Message("system", clean(self.instructions))] if self.instructions else []
        if isinstance(self.input, str):
            messages.append(Message("user", clean(self.input)))
        else:
            found = (item.message(f"input.{place}") for place, item in enumerate(self.input))
            messages += _joined([one for one in found if one is not None])
        request = self.request(tuple(messages), self.max_output_tokens, ())
        if (self.reasoning or {}).get("effort") == "none":
            request = replace(request, thinks=False)
        refuse_only_foreign(self._foreign, len(self.tools or ()) - len(self._foreign))
        schema, tools = (
            schema_of(self.format, "text.format"),
            [one.tool() for one in self.tools or () if isinstance(one, Function)],
        )
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            return [with_choice(request, tools, None, choice.name, "text.format", schema)]
        return [with_choice(request, tools, choice, None, "text.format", schema)]

    def ignored(self) -> list[str]:
        return [*super().ignored(), *(f"tools.{name}" for name in dict.fromkeys(self._foreign))]

    @property
    def _foreign(self) -> list[str]:
        return [one.type for one in self.tools or () if isinstance(one, ForeignTool)]

    @property
    def format(self) -> dict[str, Any]:
        """Of the reply."""
        return (self.text and self.text.format) or {"type": "text"}

    def _refuse_the_impossible(self) -> None:
        if LOGPROBS in (self.include or ()):
            raise refusal(f"include asks for {LOGPROBS}; chat completions have them.", "include")


class Response:
    """The object that the events of a stream and the whole answer show, as it becomes complete."""

    def __init__(self, fields: ResponseFields, model: str) -> None:
        self._asked = fields
        self._model = model
        self._id = f"resp_{secrets.token_hex(12)}"
        self._item_id = f"msg_{secrets.token_hex(12)}"
        self._created = int(time.time())

    def shown(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        asked = self._asked
        sampling = asked.sampling()
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": asked.most_calls is None,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(asked.reasoning or {})},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": asked.format},
            "tool_choice": asked.model_dump()["tool_choice"] or "auto",
            "tools": [one.model_dump() for one in asked.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
            **more,
        }

    def item(self, status: str, text: str | None = None) -> dict[str, Any]:
        """The message of the output. text: None while it has no part yet."""
        content = [] if text is None else [part(text)]
        kind = {"id": self._item_id, "type": "message", "role": "assistant"}
        return {**kind, "status": status, "content": content}

    def ended(self, reply: Reply, found: Piece) -> dict[str, Any]:
        """At the end of the reply."""
        is_cut = found.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        output = [thought(found.reasoning)] if found.reasoning else []
        if found.text or not found.calls:
            output.append(self.item("completed", found.text))
        output += [call_item(call) for call in found.calls]
        output[-1]["status"] = status  # a cut comes last
        return self.shown(
            status,
            output,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage=_usage(found.stats),
            speculation=speculation_of(reply, found.stats),
        )

    def place(self, index: int) -> dict[str, Any]:
        """Where a part of the text belongs. index: of the item in the output."""
        return {"item_id": self._item_id, "output_index": index, "content_index": 0}


async def answer(asked: Asked, response: Response) -> dict[str, Any]:
    """The whole response. Raises as `Asked.chunks`."""
    reply = asked.replies[0]
    return response.ended(reply, await whole(asked, reply))


async def events(asked: Asked, response: Response) -> AsyncGenerator[bytes | None]:
    """The response as a stream. What the model thinks is given whole, before its text. None: a
    moment without news."""
    stream, reply = _Stream(response), asked.replies[0]
    for each in stream.begun():
        yield each
    try:
        async with aclosing(pieces(asked, reply)) as coming:
            async for piece in coming:
                if piece is None:
                    yield None
                    continue
                for each in stream.of(piece):
                    yield each
                if piece.finish_reason is not None:
                    for each in stream.ended(response.ended(reply, stream.whole(piece))):
                        yield each
    except Exception as error:  # the head was sent, so the stream says it
        yield stream.failed(fault_in_stream(error))


class _Stream:
    """The events of one response, in their order."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._number = 0
        self._text = ""
        self._reasoning = ""
        self._calls = list[ToolCall]()
        self._index: int | None = None  # of the message among the items, once it is begun

    def begun(self) -> Iterator[bytes]:
        begun = self._response.shown("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def of(self, piece: Piece) -> Iterator[bytes]:
        """What a piece of the reply adds."""
        self._reasoning += piece.reasoning
        self._calls += piece.calls
        is_over = piece.finish_reason is not None
        if self._index is None and (piece.text or (is_over and not self._calls)):
            yield from self._message_begun()
        if piece.text and self._index is not None:
            self._text += piece.text
            delta = {"delta": piece.text, "logprobs": []}
            place = self._response.place(self._index)
            yield self._event("response.output_text.delta", **place, **delta)

    def whole(self, last: Piece) -> Piece:
        """The reply, once its last piece has come."""
        calls = tuple(self._calls)
        return replace(last, text=self._text, reasoning=self._reasoning, calls=calls)

    def ended(self, response: Mapping[str, Any]) -> Iterator[bytes]:
        """The end of every item, and of the response as it is in the end."""
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                yield from self._message_ended(index)
            elif item["type"] == "function_call":
                yield from self._called(index, item)
            elif self._index is not None:
                continue  # the reasoning, which was given before the message
            else:
                yield self._event("response.output_item.added", output_index=index, item=item)
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, fault: Fault) -> bytes:
        """The end of a response that failed, with the text that it had."""
        output = [self._response.item("incomplete", self._text)] if self._text else []
        error = {"code": fault.code or "server_error", "message": fault.message}
        shown = self._response.shown("failed", output, error=error)
        return self._event("response.failed", response=shown)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _message_begun(self) -> Iterator[bytes]:
        self._index = 0
        if self._reasoning:
            item = thought(self._reasoning)
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.output_item.done", output_index=0, item=item)
            self._index = 1
        item = self._response.item("in_progress")
        yield self._event("response.output_item.added", output_index=self._index, item=item)
        place = self._response.place(self._index)
        yield self._event("response.content_part.added", **place, part=part(""))

    def _message_ended(self, index: int) -> Iterator[bytes]:
        place, text = self._response.place(index), self._text
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=part(text))

    def _called(self, index: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        """A call is given whole: its arguments are known at the end of the reply alone."""
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        place, given = {"item_id": item["id"], "output_index": index}, item["arguments"]
        yield self._event("response.function_call_arguments.delta", **place, delta=given)
        yield self._event("response.function_call_arguments.done", **place, arguments=given)


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Calls are items of their own here; chat formats have them in the reply's message."""
    found = list[Message]()
    for message in messages:
        if message.tool_calls and found and found[-1].role == "assistant":
            calls = (*found[-1].tool_calls, *message.tool_calls)
            found[-1] = replace(found[-1], tool_calls=calls)
        else:
            found.append(message)
    return found


def call_item(call: ToolCall) -> dict[str, Any]:
    kind = {"id": f"fc_{call.call_id}", "type": "function_call", "status": "completed"}
    return {**kind, "call_id": call.call_id, "name": call.name, "arguments": call.arguments}


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": "rs_0", "type": "reasoning", "summary": [], "content": content}


def _usage(stats: TurnStats) -> dict[str, Any]:
    return {
        "input_tokens": stats.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": stats.num_reused_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": stats.num_output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": stats.num_thinking_tokens,
            **prediction_tokens([stats]),
        },
        "total_tokens": stats.num_prompt_tokens + stats.num_output_tokens,
    }
