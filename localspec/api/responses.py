"""/v1/responses, as OpenAI's clients speak it.

Contract: as chat_completions; one choice. Nothing is kept to be asked for later, so a request that
continues an earlier response by its id is refused.

Source: platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field

from localspec.api.accounts import prediction_tokens, speculation_of
from localspec.api.fields import Common, Fields, Part, refuse_unless, role_of, text_of
from localspec.api.formats import held, schema_of
from localspec.api.pieces import Whole, pieces, whole
from localspec.api.replies import Asked, event
from localspec.backend import Message, Request, TurnStats
from localspec.chat.service import clean


class InputItem(Fields):
    """One message of the input."""

    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None


class ResponseFields(Common):
    """The body of a request."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None

    def requests(self) -> list[Request]:
        """Raises RequestError, Refused."""
        self._refuse_the_impossible()
        messages = [Message("system", clean(self.instructions))] if self.instructions else []
        if isinstance(self.input, str):
            messages.append(Message("user", clean(self.input)))
        else:
            for place, item in enumerate(self.input):
                why = "localspec takes messages only."
                refuse_unless(item.type, ("message",), f"input.{place}.type", why)
                role = role_of(item.role, f"input.{place}.role")
                messages.append(Message(role, text_of(item.content, f"input.{place}.content")))
        request = self.request(tuple(messages), self.max_output_tokens, ())
        return [held(request, "text.format", schema_of(self.format, "text.format"))]

    @property
    def format(self) -> dict[str, Any]:
        """Of the reply."""
        return (self.text or {}).get("format") or {"type": "text"}

    def _refuse_the_impossible(self) -> None:
        kept = "localspec keeps no responses. Send the whole conversation."
        refuse_unless(self.store, (None, False), "store", kept)
        refuse_unless(self.previous_response_id, (None,), "previous_response_id", kept)
        refuse_unless(self.conversation, (None,), "conversation", kept)
        refuse_unless(self.background, (None, False), "background", kept)
        refuse_unless(self.tools, (None, []), "tools", "localspec does not call tools yet.")
        refuse_unless(self.tool_choice, (None, "none", "auto"), "tool_choice", "there are none.")
        effort = {name: value for name, value in (self.reasoning or {}).items() if value}
        refuse_unless(effort, ({},), "reasoning", "it has no effect here.")
        refuse_unless(self.include, (None, []), "include", "localspec adds nothing on request.")
        refuse_unless(self.truncation, (None, "disabled"), "truncation", "nothing is ever cut.")
        refuse_unless(self.top_logprobs, (None, 0), "top_logprobs", "chat completions have them.")


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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": asked.format},
            "tool_choice": "auto",
            "tools": [],
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

    def ended(self, found: Whole) -> dict[str, Any]:
        """At the end of the reply."""
        is_cut = found.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        thoughts = [] if not found.reasoning else [thought(found.reasoning)]
        return self.shown(
            status,
            [*thoughts, self.item(status, found.text)],
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage=_usage(found.stats),
            speculation=speculation_of(found.reply, found.stats),
        )

    def place(self, index: int) -> dict[str, Any]:
        """Where a part of the text belongs. index: of the item in the output."""
        return {"item_id": self._item_id, "output_index": index, "content_index": 0}


async def answer(asked: Asked, response: Response) -> dict[str, Any]:
    """The whole response. Raises as `Asked.chunks`."""
    return response.ended(await whole(asked, asked.replies[0]))


async def events(asked: Asked, response: Response) -> AsyncGenerator[bytes | None]:
    """The response as a stream. What the model thinks is given whole, before its text."""
    reply, text, reasoning, number = asked.replies[0], "", "", 0

    def made(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

    begun = response.shown("in_progress", [])
    yield made("response.created", response=begun)
    yield made("response.in_progress", response=begun)
    index, is_open = 0, False
    async with aclosing(pieces(asked, reply)) as coming:
        async for piece in coming:
            if piece is None:
                yield None
                continue
            reasoning += piece.reasoning
            if not is_open and (piece.text or piece.finish_reason is not None):
                is_open = True
                if reasoning:
                    item = thought(reasoning)
                    yield made("response.output_item.added", output_index=0, item=item)
                    yield made("response.output_item.done", output_index=0, item=item)
                    index = 1
                item = response.item("in_progress")
                yield made("response.output_item.added", output_index=index, item=item)
                place = response.place(index)
                yield made("response.content_part.added", **place, part=part(""))
            if piece.text:
                text += piece.text
                delta = {"delta": piece.text, "logprobs": []}
                yield made("response.output_text.delta", **response.place(index), **delta)
            if piece.finish_reason is not None:
                place = response.place(index)
                yield made("response.output_text.done", **place, text=text, logprobs=[])
                yield made("response.content_part.done", **place, part=part(text))
                found = Whole(reply, piece.stats, text, reasoning, (), piece.finish_reason)
                ended = response.ended(found)
                item = ended["output"][-1]
                yield made("response.output_item.done", output_index=index, item=item)
                yield made(f"response.{ended['status']}", response=ended)


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": "rs_0", "type": "reasoning", "summary": [], "content": content}


def _usage(stats: TurnStats) -> dict[str, Any]:
    return {
        "input_tokens": stats.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.num_reused_tokens},
        "output_tokens": stats.num_output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": stats.num_thinking_tokens,
            **prediction_tokens([stats]),
        },
        "total_tokens": stats.num_prompt_tokens + stats.num_output_tokens,
    }
