"""A reply in pieces, with what the model thinks, and the tools it calls, apart from what it says.

Contract: a reply that begins with "<think>" has its text up to "</think>" as `reasoning`; all other
text is `text`. Neither mark is in any piece, however the chunks divide it. Joined, the pieces of a
reply that does not think are its text.

Not here: waiting for the chunks (replies), the formats of the interfaces.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from localspec.api.replies import Asked
from localspec.api.tools import Calls, names_of
from localspec.backend import Logprob, ToolCall, TurnStats
from localspec.chat.reply_text import num_begun
from localspec.chat.service import Reply
from localspec.core import FinishReason

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Piece:
    """stats: the totals so far. finish_reason, calls: of the last piece."""

    stats: TurnStats
    text: str = ""
    reasoning: str = ""
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Whole:
    """A reply at its end."""

    reply: Reply
    stats: TurnStats
    text: str
    reasoning: str
    logprobs: tuple[Logprob, ...]
    finish_reason: FinishReason
    calls: tuple[ToolCall, ...] = ()


class Thoughts:
    """Divides a text that grows."""

    def __init__(self) -> None:
        self._held = ""  # may become a mark
        self._is_open: bool | None = None  # None: it has not begun
        self._is_at_mark = False  # line breaks after a mark belong to it

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, text) that are certain by now."""
        self._held += text
        if self._is_open is None:
            self._begin()
        if self._is_open is None:
            return "", ""
        reasoning = self._thought() if self._is_open else ""
        return reasoning, "" if self._is_open else self._taken(len(self._held))

    def _begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._is_open = self._is_at_mark = True
            self._held = begun[len(OPEN) :]
        elif not OPEN.startswith(begun):
            self._is_open = False

    def _thought(self) -> str:
        thought, mark, rest = self._held.partition(CLOSE)
        certain = thought if mark else thought[: len(thought) - num_begun(thought, CLOSE)]
        found = self._taken(len(certain.rstrip("\n")))
        if mark:
            self._is_open, self._is_at_mark, self._held = False, True, rest
        return found

    def _taken(self, count: int) -> str:
        """So many characters of what is held."""
        found, self._held = self._held[:count], self._held[count:]
        if self._is_at_mark:
            found = found.lstrip("\n")
            self._is_at_mark = not found
        return found

    def flush(self) -> tuple[str, str]:
        """What was held, once no more text comes."""
        rest = self._taken(len(self._held))
        return (rest, "") if self._is_open else ("", rest)


async def pieces(asked: Asked, reply: Reply) -> AsyncGenerator[Piece | None]:
    """Those of one reply as they come; None where there was none for a while. Raises as
    `Asked.chunks`."""
    thoughts = Thoughts()
    calls = Calls(names_of(() if reply.request is None else reply.request.tools))
    async with aclosing(asked.chunks(reply)) as chunks:
        async for chunk in chunks:
            if chunk is None:
                yield None
                continue
            reasoning, text = thoughts.push(chunk.text)
            said = calls.push(text)
            piece = Piece(chunk.stats, said, reasoning, chunk.logprobs, chunk.finish_reason)
            if chunk.finish_reason is not None:
                more_reasoning, more_text = thoughts.flush()
                said += calls.push(more_text)
                rest, found = calls.flush()
                reasoning += more_reasoning
                piece = replace(piece, reasoning=reasoning, text=said + rest, calls=found)
            yield piece


async def whole(asked: Asked, reply: Reply) -> Whole:
    """One reply at its end. Raises as `Asked.chunks`."""
    async with aclosing(pieces(asked, reply)) as coming:
        found = [piece async for piece in coming if piece is not None]
    last = found[-1]
    assert last.finish_reason is not None, "a reply that has ended has a reason"
    return Whole(
        reply,
        last.stats,
        "".join(piece.text for piece in found),
        "".join(piece.reasoning for piece in found),
        tuple(one for piece in found for one in piece.logprobs),
        last.finish_reason,
        last.calls,
    )
