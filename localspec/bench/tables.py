"""Tables of results: columns that know what to show of a row, as aligned text or as Markdown.

Contract: pure. A value that is None, or that a result of an earlier version does not have, is a
dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Line = Sequence[str]
DASH = "-"


@dataclass(frozen=True)
class Column:
    heading: str
    cell: Callable[[Row], str]


def text(heading: str, name: str | None = None) -> Column:
    """name: of the value in the row, None where it is the heading."""
    return Column(heading, lambda row: str(row[name or heading]))


def number(heading: str, name: str, form: str) -> Column:
    """form: a format of numbers, such as .2f."""
    return Column(heading, lambda row: shown(row.get(name), form))


def limits(heading: str, name: str) -> Column:
    """The interval from NAME_low to NAME_high."""
    return Column(heading, lambda row: interval(row.get(f"{name}_low"), row.get(f"{name}_high")))


def with_limits(heading: str, name: str, of_limits: str | None = None) -> Column:
    """A value and its interval in brackets. of_limits: their name where it is not the value's."""
    value, spread = number("", name, ".2f"), limits("", of_limits or name)
    return Column(heading, lambda row: f"{value.cell(row)} ({spread.cell(row)})")


def shown(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


def interval(low: float | None, high: float | None) -> str:
    return DASH if low is None or high is None else f"{low:.2f} to {high:.2f}"


def known(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns that are not a dash in every row."""
    return [column for column in columns if any(column.cell(row) != DASH for row in rows)]


def aligned(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Lines of text, left-aligned."""
    lines = _lines(columns, rows)
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def as_markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    headings, *lines = (f"| {' | '.join(line)} |" for line in _lines(columns, rows))
    return "\n".join([headings, f"|{'---|' * len(columns)}", *lines])


def _lines(columns: Sequence[Column], rows: Sequence[Row]) -> list[Line]:
    headings = [column.heading for column in columns]
    return [headings, *([column.cell(row) for column in columns] for row in rows)]
