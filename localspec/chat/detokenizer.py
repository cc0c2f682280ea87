"""Token ids of a growing reply back to text.

Contract: complete characters only, and all pushed and flushed text together is the text of the
whole. A token of a byte-fallback vocabulary ("<0xF0>") is one byte: a run of them is read as UTF-8,
and half a character in it is one U+FFFD, where the library's decoder gives up the whole run.

Not here: stop strings, thought and answer (reply_text).
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NONE_SPELLED: Mapping[int, str] = {}
NO_BYTES: Mapping[int, int] = {}
# Lone surrogates, which no decoded text holds: they stand for the control tokens of stop strings.
STAND_INS = range(0xD800, 0xDC00)
_WITHOUT_STAND_INS = dict.fromkeys(STAND_INS)


def byte_tokens(encoder: Tokenizer) -> Mapping[int, int]:
    """Return the byte of each byte-fallback token; none where the decoder does not read them."""
    named = {encoder.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    tokens = {token: byte for token, byte in named.items() if token is not None}
    letter = next((token for token, byte in tokens.items() if byte == ord("A")), None)
    reads_bytes = letter is not None and encoder.decode([letter]) == "A"
    return tokens if reads_bytes else NO_BYTES


def without_stand_ins(text: str) -> str:
    """Return the text without the characters that stand for control tokens."""
    return text.translate(_WITHOUT_STAND_INS)


class Detokenizer:
    """Text of a growing reply, complete characters only.

    All pushed and flushed text together is the text of the whole. The tokens of the last piece are
    decoded again with the next, because leading spaces depend on the tokens before. spelled: the
    text of control tokens that is to be shown. bytes_of: see `byte_tokens`.
    """

    def __init__(
        self,
        encoder: Tokenizer,
        spelled: Mapping[int, str] = NONE_SPELLED,
        bytes_of: Mapping[int, int] = NO_BYTES,
    ) -> None:
        self._encoder = encoder
        self._spelled = spelled
        self._bytes_of = bytes_of
        self._run = codecs.getincrementaldecoder("utf-8")(errors="replace")  # of byte tokens
        self._window: list[int] = []  # tokens of the piece shown last, then those not yet shown
        self._num_shown = 0  # tokens of the window that are already shown
        self._held = ""  # U+FFFD at the end, of which more bytes may make a character
        self._num_skipped = 0  # characters after those that are shown, and were shown before

    def push(self, token: int) -> str:
        """The characters that `token` completes, "" while one is still incomplete."""
        if token in self._spelled:
            return self.flush() + self._spelled[token]
        byte = self._bytes_of.get(token)
        if byte is not None:
            text = self._show() + self._run.decode(bytes([byte]))
            self._window, self._num_shown = [token], 1
            return self._settled(text)
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        return self._settled(self._end_of_run() + self._show(text))

    def begin(self, tokens: Sequence[int], shown: str) -> None:
        """Continue after these tokens, of which `shown` is the text shown."""
        pushed = without_stand_ins("".join(map(self.push, tokens)))
        self._num_skipped = len(shown) - len(pushed)

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of all these tokens."""
        if self._spelled.keys().isdisjoint(tokens) and self._bytes_of.keys().isdisjoint(tokens):
            return self._decode(list(tokens))
        return "".join(map(self.push, tokens)) + self.flush()

    def flush(self) -> str:
        """The rest at the end of the reply, half a character as U+FFFD."""
        text = self._settled(self._end_of_run() + self._show()) + self._held
        self._held = ""
        return text

    def _end_of_run(self) -> str:
        """Return what is left of a run of byte tokens: half a character as U+FFFD, or nothing."""
        return self._run.decode(b"", final=True)

    def _settled(self, new: str) -> str:
        """Return what may be shown now of the text held so far and the new one."""
        text = self._held + new
        shown = text.rstrip(REPLACEMENT)
        self._held = text[len(shown) :]
        num_skipped = min(self._num_skipped, len(shown))
        self._num_skipped -= num_skipped
        return shown[num_skipped:]

    def _show(self, text: str | None = None) -> str:
        """Return the new part of the window's text."""
        text = self._decode(self._window) if text is None else text
        new = text[len(self._decode(self._window[: self._num_shown])) :]
        # Tokens without text (control tokens) must not displace the last one with text.
        if new:
            self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return new

    def _decode(self, tokens: list[int]) -> str:
        return str(self._encoder.decode(tokens, skip_special_tokens=True))
