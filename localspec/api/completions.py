"""/v1/completions: a text is continued as it stands, without a chat format.

Contract: as chat_completions. A prompt may be a list of texts; the choices of the first come first.
The tokens that a tokenizer begins every text with are added; control tokens may be written out.

Source: platform.openai.com/docs/api-reference/completions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field

from localspec.api.accounts import StreamUsage, speculation_of, usage_of
from localspec.api.chat_completions import FINISHED, ChoiceFields, Head
from localspec.api.fields import (
    MOST_LOGPROBS,
    choices_of,
    require_choices,
    stops_of,
)
from localspec.api.pieces import Piece, pieces, shown_token, whole
from localspec.api.replies import DONE, Asked, event
from localspec.chat.detokenizer import REPLACEMENT
from localspec.chat.service import clean
from localspec.core.backend import Message, Request

USUAL_MAX_TOKENS = 16  # OpenAI's and vLLM's


class CompletionFields(ChoiceFields):
    """The body of a request."""

    prompt: str | list[str]
    max_tokens: Annotated[int, Field(ge=1)] | None = USUAL_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    def requests(self) -> list[Request]:
        """Raises RequestError, Refused."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        require_choices(self.num_choices, len(prompts))
        found = list[Request]()
        for prompt in prompts:
            messages = (Message("user", clean(prompt)),)
            request = self.request(messages, self.max_tokens, stops_of(self.stop))
            request = replace(request, is_raw=True, num_logprobs=self.logprobs)
            found += choices_of(request, self.num_choices)
        return found


async def answer(asked: Asked, head: Head, num_choices: int) -> dict[str, Any]:
    """The whole answer. num_choices: of each prompt. Raises as `Asked.chunks`."""
    found = [await whole(asked, reply) for reply in asked.replies]
    choices = [
        {**_choice(index, one, 0), "speculation": speculation_of(reply, one.stats)}
        for index, (reply, one) in enumerate(zip(asked.replies, found, strict=True))
    ]
    return head.with_choices(choices, usage=usage_of([one.stats for one in found], num_choices))


async def events(asked: Asked, head: Head, usage: StreamUsage) -> AsyncGenerator[bytes | None]:
    """The answer as a stream."""
    for index, reply in enumerate(asked.replies):
        num_before = 0  # characters, of the tokens that were given
        async with aclosing(pieces(asked, reply)) as coming:
            async for piece in coming:
                if piece is None:
                    yield None
                    continue
                is_last = piece.finish_reason is not None
                if piece.text or piece.logprobs or is_last:
                    choice = _choice(index, piece, num_before)
                    if is_last:
                        choice["speculation"] = speculation_of(reply, piece.stats)
                    yield event(head.with_choices([choice], **usage.so_far(piece.stats)))
                    if is_last:
                        usage.end(piece.stats)
                num_before += sum(_lengths(piece))
    if usage.has_event:
        yield event(head.with_choices([], usage=usage.whole()))
    yield DONE


def _choice(index: int, piece: Piece, num_before: int) -> dict[str, Any]:
    """num_before: characters before its first token."""
    finish, logprobs = FINISHED.get(piece.finish_reason), _logprobs(piece, num_before)
    return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": finish}


def _lengths(piece: Piece) -> list[int]:
    """Characters of each token with a probability. Of parts of one character the last has it; all
    others have their own, also where the text waits for what may be a stop string."""
    pairs = zip(piece.logprobs, piece.lengths, strict=False)
    return [num if REPLACEMENT in shown_token(one.text) else len(one.text) for one, num in pairs]


def _logprobs(piece: Piece, num_before: int) -> dict[str, Any] | None:
    found = piece.logprobs
    if not found:
        return None
    return {
        "tokens": [shown_token(one.text) for one in found],
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [_by_text(one.top) for one in found],
        "text_offset": list(accumulate(_lengths(piece), initial=num_before))[:-1],
    }


def _by_text(top: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the likeliest tokens by their texts; of parts of characters, the first."""
    found = dict[str, float]()
    for text, logprob in top:
        found.setdefault(shown_token(text), logprob)
    return found
