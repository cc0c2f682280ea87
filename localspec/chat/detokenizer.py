"""Token ids of a growing reply back to text.

Contract: complete characters only; all pushed and flushed text together equals the decoded whole.

Not here: stop strings, thought and answer (reply_text).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NONE_SPELLED: Mapping[int, str] = {}


class Detokenizer:
    """Text of a growing reply, complete characters only.

    All pushed and flushed text together equals the decoded whole. The tokens of the last piece are
    decoded again with the next, because leading spaces depend on the tokens before. spelled: the
    text of control tokens that is to be shown.
    """

    def __init__(self, encoder: Tokenizer, spelled: Mapping[int, str] = NONE_SPELLED) -> None:
        self._encoder = encoder
        self._spelled = spelled
        self._window: list[int] = []  # tokens of the piece shown last, then those not yet shown
        self._num_shown = 0  # tokens of the window that are already shown
        self._num_skipped = 0  # characters after those that are, too

    def push(self, token: int) -> str:
        """The characters that `token` completes, "" while one is still incomplete."""
        if token in self._spelled:
            rest = self.flush()
            self._window, self._num_shown = [], 0
            return rest + self._spelled[token]
        self._window.append(token)
        text = self._decode(self._window)
        return "" if text.endswith(REPLACEMENT) else self._show(text)

    def begin(self, tokens: Sequence[int], shown: str) -> None:
        """Continue after these tokens, of which `shown` is the text shown."""
        ends = [place + 1 for place, token in enumerate(tokens) if token in self._spelled]
        end = ends[-1] if ends else 0
        before = Detokenizer(self._encoder, self._spelled).whole(tokens[:end])
        self._window, self._num_skipped = list(tokens[end:]), len(shown) - len(before)

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of all these tokens."""
        return "".join(map(self.push, tokens)) + self.flush()

    def flush(self) -> str:
        """The rest at the end of the reply, half a character as U+FFFD."""
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        shown = self._decode(self._window[: self._num_shown])
        new = text[len(shown) + self._num_skipped :]
        self._num_skipped = 0
        # Tokens without text (control tokens) must not displace the last one with text.
        if new:
            self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return new

    def _decode(self, tokens: list[int]) -> str:
        return str(self._encoder.decode(tokens, skip_special_tokens=True))
