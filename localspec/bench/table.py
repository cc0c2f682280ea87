"""Cells and columns of the tables that `bench` prints. Unknown is a dash."""

from __future__ import annotations

from collections.abc import Sequence

DASH = "-"


def shown(value: float | None, form: str) -> str:
    """The number in this format, or a dash."""
    return DASH if value is None else format(value, form)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of equal length as text in columns, left-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
