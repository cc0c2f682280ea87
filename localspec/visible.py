"""Strangers' words as they may stand in a sentence, in a terminal and on the page alike.

The files of a model, a server or the name of a file may hold characters that nobody sees: controls
move a terminal's cursor and set its colours, others turn the direction of the text around them.
"""

from __future__ import annotations

import unicodedata

# Categories of Unicode: controls, formats, halves of pairs, private use, ends of lines.
HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
# Characters of these categories that stay: ends of lines and tabs, the joiners of Persian and of
# emoji, and the tags of flags.
KEPT = frozenset("\n\t\u200c\u200d") | {chr(code) for code in range(0xE0020, 0xE0080)}


def visible(text: str) -> str:
    """Return the text with a space in the place of each hidden character. Lines stay lines."""
    if text.isprintable():
        return text
    return "".join(" " if _is_hidden(character) else character for character in text)


def one_line(text: str) -> str:
    """Return the text as one line without hidden characters."""
    return " ".join(visible(text).split())


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in HIDDEN_CATEGORIES and character not in KEPT
