"""Stop strings: where a reply ends by what it says.

Contract: text comes in pieces of any size and goes out as soon as it cannot become a stop string
any more; neither a stop string nor what follows it is ever shown.

Not here: tokens as text (template), the end-of-text token (engine).
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.errors import RequestError


class StopStrings:
    """Ends a reply at the first stop string to be completed, however the text is cut.

    begun: the text of the reply that this one goes on with; a stop string may have begun in it.
    Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], begun: str = "") -> None:
        if "" in stops:
            raise RequestError("A stop string is empty. Remove it or write what should stop.")
        self._stops = tuple(stops)
        self._held = begun[len(begun) - self._num_open(begun) :]
        self._num_shown = len(self._held)  # of what is held: it stands on the page already

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string is complete).

        What could still become a stop string is held back; on a hit, the stop string and all
        after it are dropped.
        """
        text, shown = self._held + text, self._num_shown
        hits = [(start + len(s), start) for s in self._stops if (start := text.find(s)) >= 0]
        if hits:
            self._held, self._num_shown = "", 0
            return text[shown : min(hits)[1]], True
        end = len(text) - self._num_open(text)
        self._held, self._num_shown = text[end:], max(0, shown - end)
        return text[shown:end], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held = self._held[self._num_shown :]
        self._held, self._num_shown = "", 0
        return held

    def _num_open(self, text: str) -> int:
        """Characters at the end that may become a stop string."""
        return max((_partial_length(text, stop) for stop in self._stops), default=0)


def _partial_length(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
