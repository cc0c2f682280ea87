"""A reply in pieces, with the tools that the model calls apart from what it says.

Contract: joined, the pieces of a reply without calls are its text. `reasoning` is what the model
thinks before it. A reply with calls ends by "calls", unless its length cut the last of them.

Not here: waiting for the chunks (replies), telling thought and answer apart (chat.thinking), the
formats of the interfaces.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal, cast

from localspec.api.replies import PING_S, Asked
from localspec.api.tools import Calls, schemas_of
from localspec.chat.detokenizer import REPLACEMENT
from localspec.chat.service import Reply
from localspec.core.backend import Logprob, ToolCall
from localspec.core.decoding import FinishReason
from localspec.core.turn_stats import TurnStats

BYTES = frozenset(map(chr, range(0xDC80, 0xDD00)))  # of backend.BYTES_AS_TEXT
Ending = FinishReason | Literal["calls"]


@dataclass(frozen=True)
class Piece:
    """stats: the totals so far. lengths: see Chunk. finish_reason: of the last piece. calls: those
    that have become whole, and of the last piece also the one that was cut."""

    stats: TurnStats
    text: str = ""
    reasoning: str = ""
    logprobs: tuple[Logprob, ...] = ()
    lengths: tuple[int, ...] = ()
    finish_reason: Ending | None = None
    calls: tuple[ToolCall, ...] = ()


async def pieces(asked: Asked, reply: Reply) -> AsyncGenerator[Piece | None]:
    """Those of one reply as they come; None where there was none for a while, or none that a client
    sees, as within a long call. Raises as `Asked.chunks`."""
    tools = schemas_of(() if reply.request is None else reply.request.tools)
    calls: Calls | None = None
    shown_s = time.monotonic()  # when a client was shown something
    async with aclosing(asked.chunks(reply)) as chunks:
        async for chunk in chunks:
            if chunk is None:
                yield None
                continue
            if calls is None:  # the turn has begun, so the model that writes the calls is known
                calls = Calls(tools, asked.most_calls, asked.call_format(reply))
            said, reason = calls.push(chunk.text), chunk.finish_reason
            whole_calls, ending = calls.taken(), cast("Ending | None", reason)
            if reason is not None:
                rest, last_calls, are_whole = calls.flush(is_cut=reason == "length")
                said, whole_calls = said + rest, (*whole_calls, *last_calls)
                ending = "calls" if are_whole else reason
            shown = (chunk.stats, said, chunk.thinking, chunk.logprobs, chunk.lengths)
            yield Piece(*shown, ending, whole_calls)
            if said or chunk.thinking or whole_calls:
                shown_s = time.monotonic()
            elif time.monotonic() - shown_s >= PING_S:
                shown_s = time.monotonic()
                yield None


def shown_token(text: str) -> str:
    """Return the text of a token as JSON can hold it: a part of a character as U+FFFD."""
    is_part = any(character in BYTES for character in text)
    return REPLACEMENT if is_part else text


async def whole(asked: Asked, reply: Reply) -> Piece:
    """One reply at its end, as one piece. Raises as `Asked.chunks`."""
    async with aclosing(pieces(asked, reply)) as coming:
        found = [piece async for piece in coming if piece is not None]
    return replace(
        found[-1],
        text="".join(piece.text for piece in found),
        reasoning="".join(piece.reasoning for piece in found),
        logprobs=tuple(one for piece in found for one in piece.logprobs),
        lengths=tuple(length for piece in found for length in piece.lengths),
        calls=tuple(call for piece in found for call in piece.calls),
    )
