"""What the target has written, as the ids of a draft with another vocabulary; grows with it.

Contract: `follow` reads the tokens of a sequence; `ids` are then those of the same text in the
draft's vocabulary. A round encodes only the text since the last *seam*: a space after a character
that is none, where a token of the draft begins. Whatever comes later, tokenizers of both kinds cut
there as they did, so nothing before a seam is encoded again and a round costs the same in a long
conversation as in a short one. Text that has no spaces gets a seam by force; should the tokenizer
have cut otherwise, that costs a draft, never correctness.

Special tokens of the target: where the draft has one of the same text ("<|im_start|>" in all ChatML
models), that stands in its place; any other is left out. Either way nothing is merged across it.
Bytes that are no text become U+FFFD; a character whose last bytes are not there yet waits, in
`pending`.

Not here: drafting (cross_tokenizer), bytes of tokens (vocabularies).
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from itertools import pairwise

from localspec.drafters.parts import Vocabulary
from localspec.drafters.vocabularies import starts_of

LONGEST_TAIL = 64  # tokens since the last seam; text without spaces is then cut by force,
KEPT_TAIL = 16  # this many tokens before its end
REMEMBERED = 512  # tokens of the target after which older ones count half

Table = Sequence[bytes | None]


class Transcript:
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
