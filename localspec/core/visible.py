"""Strangers' words as they may stand in a sentence, in a terminal and on the page alike.

The files of a model, a server or the name of a file may hold characters that nobody sees: controls
move a terminal's cursor and set its colours, others turn the direction of the text around them.
"""

from __future__ import annotations

import unicodedata

# Categories of Unicode: controls, formats, private use, ends of lines.
HIDDEN_CATEGORIES = ("Cc", "Cf", "Co", "Zl", "Zp")
HALF_OF_A_PAIR = "Cs"  # stands for a byte that is no text, as in a file's name
# Characters of these categories that stay: ends of lines and tabs, the joiners of Persian and of
# emoji, and the tags of flags.
KEPT = frozenset("\n\t\u200c\u200d") | {chr(code) for code in range(0xE0020, 0xE0080)}


def visible(text: str) -> str:
    """Return the text with a space in the place of each hidden character, and a question mark in
    that of a byte that is no text. Lines stay lines."""
    return text if text.isprintable() else "".join(map(_shown, text))


def one_line(text: str) -> str:
    """Return the text as one line without hidden characters."""
    return " ".join(visible(text).split())


def _shown(character: str) -> str:
    category = unicodedata.category(character)
    if category == HALF_OF_A_PAIR:
        return "?"
    return " " if category in HIDDEN_CATEGORIES and character not in KEPT else character
