"""The characters by which byte-level BPE writes bytes: GPT-2's alphabet.

Source: github.com/openai/gpt-2, encoder.py.
"""

from __future__ import annotations

# Printable Latin-1 characters stand for themselves, the other bytes for the characters from U+0100
# on, in order. Printable means: without the soft hyphen and the space that does not break.
PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))
OTHERS = [byte for byte in range(0x100) if byte not in PRINTABLE]
NOT_LATIN_1 = "▁"  # takes the place of characters that are not in the alphabet
_BYTE_OF = dict.fromkeys(OTHERS, NOT_LATIN_1)
_BYTE_OF |= {0x100 + place: chr(byte) for place, byte in enumerate(OTHERS)}


def bytes_of_piece(piece: str) -> bytes | None:
    """Return the bytes of a token of byte-level BPE, None for one that is not written in its
    alphabet."""
    try:
        return piece.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return None
