"""Text between two vocabularies: what the target wrote as the draft's ids, and the way back.

Contract: `DraftText.follow` reads the tokens of a sequence; `ids` are then those of the same text
in the draft's vocabulary. A round encodes only the text since the last *seam*: a space after a
character that is none, where a token of the draft begins. Whatever comes later, tokenizers of both
kinds cut there as they did, so nothing before a seam is encoded again and a round costs the same in
a long conversation as in a short one. Text that has no spaces gets a seam by force; should the
tokenizer have cut otherwise, that costs a draft, never correctness. A special token of the target
becomes the draft's of the same text ("<|im_start|>" in all ChatML models); any other is left out.
Either way nothing is merged across it. Bytes that are no text become U+FFFD; a character whose last
bytes are not there yet waits, in `pending`.

`Retokeniser` takes the bytes that the draft wrote, one of its tokens after the other; `told` is
what the target's tokenizer makes of them after the text before. The target's earlier tokens stand,
so only tokens that begin where those end count; where none does (the target itself cut a word in
two), the new text is encoded by itself. A token is *whole* when more text is not likely to change
it: its word is followed by another, or the draft has said that word in one token so far. After " w"
and "or" there is nothing whole, "ld" may come. (After " w" alone there is: to ask the draft whether
the word goes on would cost a step each round, and only the last token of a draft can come out wrong
by it.) Where the text ended inside a character, what is drafted must begin with the bytes that are
there. A guess that comes out wrong costs a draft, never correctness: nothing here is drawn.

Not here: drafting (cross_tokenizer), bytes of tokens (vocabularies).
Source: universal assisted generation, in transformers since 4.46, re-encodes likewise.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from localspec.drafters.parts import Vocabulary
from localspec.drafters.vocabularies import starts_of

LONGEST_TAIL = 64  # tokens since the last seam; text without spaces is then cut by force,
KEPT_TAIL = 16  # this many tokens before its end
REMEMBERED = 512  # tokens of the target after which older ones count half

Table = Sequence[bytes | None]


class DraftText:
    """One sequence of the target in the draft's ids.

    own, own_table: the draft's vocabulary and its bytes. targets_table: bytes of the target's ids.
    markup: the draft's special id for a special id of the target."""

    def __init__(
        self, own: Vocabulary, own_table: Table, targets_table: Table, markup: Mapping[int, int]
    ) -> None:
        self._own = own
        self._own_table = own_table
        self._targets_table = targets_table
        self._markup = markup
        self._opening = own.opening()
        self._source: list[int] | None = None  # the list that is followed, to know it again
        self._num_read = 0
        self._begin()

    @property
    def tail(self) -> str:
        """The text since the last seam."""
        return "".join(self._parts)

    @property
    def pending(self) -> bytes:
        """The first bytes of a character that is not complete."""
        return self._decoder.getstate()[0]

    @property
    def aligned_share(self) -> float:
        """Share of the target's tokens that are one token of the draft too, of this text so far; a
        half until something was read."""
        return (self._num_aligned + 1.0) / (self._num_seen + 2.0)

    def is_reading(self, tokens: list[int]) -> bool:
        """Whether `tokens` is the list it has been reading, perhaps longer now."""
        return tokens is self._source and len(tokens) >= self._num_read

    def follow(self, tokens: list[int]) -> bool:
        """Read what was added to `tokens` since the last call; all of it if it is another list.
        Returns whether it is."""
        # Within a turn the list only grows.
        is_another = tokens is not self._source or len(tokens) < self._num_read
        if is_another:
            self._begin()
            self._source = tokens
        if len(tokens) == self._num_read:
            return is_another
        for token in tokens[self._num_read :]:
            piece = _piece(self._targets_table, token)
            if piece is None:
                self._close(self._markup.get(token))
            else:
                self._add(self._decoder.decode(piece))
        self._num_read = len(tokens)
        self._encode()
        return is_another

    def _begin(self) -> None:
        self.ids = list(self._opening)
        self._num_read = 0
        self._num_settled = len(self.ids)  # of ids: those before the last seam
        self._num_seen = self._num_aligned = 0.0  # tokens of the target
        self._decoder: codecs.IncrementalDecoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open()

    def _open(self) -> None:
        """Text begins anew: what comes is encoded apart from what was."""
        self._parts = list[str]()
        self._ends = [0]  # of the target's tokens in the tail, in bytes

    def _add(self, text: str) -> None:
        self._parts.append(text)
        self._ends.append(self._ends[-1] + len(text.encode()))

    def _close(self, special: int | None) -> None:
        """A special token of the target: settle what is before it."""
        unfinished = self._decoder.decode(b"", final=True)
        if unfinished:
            self._add(unfinished)
        self._encode()
        self._num_settled = len(self.ids)
        self._open()
        is_doubled = len(self.ids) == len(self._opening) and self.ids[-1:] == [special]
        if special is not None and not is_doubled:
            self.ids.append(special)
            self._num_settled += 1

    def _encode(self) -> None:
        """Encode the tail and settle what is before its last seam."""
        tail = self.tail
        found = self._own.encode(tail) if tail else []
        self.ids[self._num_settled :] = found
        raw = tail.encode()
        starts = starts_of(found, self._own_table)
        if starts is None or starts[-1] != len(raw):  # it did not come back, so it has no seams
            self._num_settled = len(self.ids)
            self._open()
            return
        cut = last_seam(raw, starts)
        if cut:
            self._count(starts[: cut + 1])
        self._num_settled += cut
        self._parts = [raw[starts[cut] :].decode()]
        self._ends = [end - starts[cut] for end in self._ends if end >= starts[cut]]

    def _count(self, starts: list[int]) -> None:
        """Learn how many of the target's tokens were one token of the draft; starts: of those of
        the draft that are settled now."""
        ends = [end for end in self._ends if end <= starts[-1]]
        theirs = {(begin, end) for begin, end in pairwise(ends) if end > begin}
        ours = set(pairwise(starts))
        if self._num_seen > REMEMBERED:
            self._num_seen, self._num_aligned = self._num_seen / 2.0, self._num_aligned / 2.0
        self._num_seen += len(theirs)
        self._num_aligned += len(theirs & ours)


def last_seam(raw: bytes, starts: Sequence[int]) -> int:
    """Index of the last token that text may be encoded from by itself; 0 if there is none.

    starts: [n + 1] of the tokens of `raw`, whose first token begins at a seam already."""
    for index in range(len(starts) - 2, 0, -1):
        at = starts[index]
        if raw[at] == 0x20 and not _is_space_before(raw, at):
            return index
    if len(starts) - 1 > LONGEST_TAIL:
        for index in range(len(starts) - 1 - KEPT_TAIL, 0, -1):
            if raw[starts[index]] & 0xC0 != 0x80:  # not inside a character
                return index
    return 0


def _is_space_before(raw: bytes, at: int) -> bool:
    """Whether the character before byte `at` is a space of any kind."""
    return raw[max(0, at - 4) : at].decode(errors="ignore")[-1:].isspace()


def _piece(table: Table, token: int) -> bytes | None:
    return table[token] if 0 <= token < len(table) else None


LONG_WORD = 24  # bytes after which a word's tokens count, all but the last
FIRST_OF_SCRIPTS_WITHOUT_SPACES = "\u2e80"  # Chinese, Japanese and after them emoji


@dataclass(frozen=True)
class TargetToken:
    """A token of the target. end: in bytes from where the draft began. confidence: the draft's,
    of all its tokens that begin in this one."""

    token: int
    end: int
    confidence: float


class Retokeniser:
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

    def told(self) -> list[TargetToken]:
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
        return [TargetToken(token, end, self._chance(begin, end)) for token, begin, end in found]

    def whole(self) -> list[TargetToken]:
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
