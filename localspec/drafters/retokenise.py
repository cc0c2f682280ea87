"""What a draft of another vocabulary wrote, told in the target's tokens.

Contract: bytes come in, one token of the draft after the other; `told` is what the target's
tokenizer makes of them after the text before. The target's earlier tokens stand, so only tokens
that begin where those end count; where none does (the target itself cut a word in two), the new
text is encoded by itself. A token is *whole* when more text is not likely to change it: its word is
followed by another, or the draft has said that word in one token so far. After " w" and "or" there
is nothing whole, "ld" may come. (After " w" alone there is: to ask the draft whether the word goes
on would cost a step each round, and only the last token of a draft can come out wrong by it.)
Where the text ended inside a character, what is drafted must begin with the bytes that are there.

A guess that comes out wrong costs a draft, never correctness: nothing here is drawn.

Source: universal assisted generation, in transformers since 4.46, re-encodes likewise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from localspec.drafters.draft_text import Table
from localspec.drafters.parts import Vocabulary
from localspec.drafters.vocabularies import starts_of

LONG_WORD = 24  # bytes after which a word's tokens count, all but the last
FIRST_OF_SCRIPTS_WITHOUT_SPACES = "\u2e80"  # Chinese, Japanese and after them emoji


@dataclass(frozen=True)
class Told:
    """A token of the target. end: in bytes from where the draft began. confidence: the draft's,
    of all its tokens that begin in this one."""

    token: int
    end: int
    confidence: float


class Retelling:
    """before: the text since a seam, which the target has written. pending: the first bytes of a
    character that it began."""

    def __init__(self, targets: Vocabulary, table: Table, before: str, pending: bytes) -> None:
        self._targets = targets
        self._table = table
        self._before = before.encode()
        self._pending = pending
        self._drafted = b""
        self._starts = list[int]()
        self._confidences = list[float]()

    def add(self, piece: bytes, confidence: float) -> bool:
        """Take up a token of the draft; False if it is not what the target has begun."""
        self._starts.append(len(self._drafted))
        self._confidences.append(confidence)
        self._drafted += piece
        length = min(len(self._pending), len(self._drafted))
        return self._drafted[:length] == self._pending[:length]

    def told(self) -> list[Told]:
        """All tokens of what was drafted; the last may go on."""
        known = len(self._before) + len(self._pending)
        ids, starts = self._encoded(self._before + self._drafted)
        if known not in starts:
            if self._pending:  # half a character cannot be encoded by itself
                return []
            ids, starts = self._encoded(self._drafted)
            known = 0
        first = starts.index(known)
        ends = [start - known + len(self._pending) for start in starts[first + 1 :]]
        begins = [0, *ends][: len(ends)]
        found = zip(ids[first:], begins, ends, strict=True)
        return [Told(token, end, self._chance(begin, end)) for token, begin, end in found]

    def whole(self) -> list[Told]:
        """The tokens that more text would not change."""
        told = self.told()
        if not told:
            return []
        word = last_word(_text_of(self._drafted))
        if self._starts[-1] <= word and told[-1].end == len(self._drafted):
            return told
        if told[-1].end - word > LONG_WORD:
            return told[:-1]
        return [each for each in told if each.end <= word]

    def _encoded(self, raw: bytes) -> tuple[list[int], list[int]]:
        """Ids of the complete characters of `raw`, and where they begin; none if they do not come
        back."""
        text = _text_of(raw)
        ids = self._targets.encode(text) if text else []
        starts = starts_of(ids, self._table)
        return (ids, starts) if starts and starts[-1] == len(text.encode()) else ([], [0])

    def _chance(self, begin: int, end: int) -> float:
        pairs = zip(self._starts, self._confidences, strict=True)
        return math.prod(chance for start, chance in pairs if begin <= start < end)


def last_word(text: str) -> int:
    """Where the last word of a text begins, in bytes: a run of letters and digits, or of neither,
    with the space before it. A character of a script that uses no spaces is a word."""
    place = len(text) - 1
    while place > 0 and not _is_word_start(text[place - 1], text[place]):
        place -= 1
    return len(text[: max(0, place)].encode())


def _is_word_start(before: str, character: str) -> bool:
    if before.isspace():  # a space belongs to the word after it
        return False
    changes = before.isalnum() != character.isalnum()
    return changes or character.isspace() or character >= FIRST_OF_SCRIPTS_WITHOUT_SPACES


def _text_of(raw: bytes) -> str:
    """The text up to the first byte that is none."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return raw[: error.start].decode()
