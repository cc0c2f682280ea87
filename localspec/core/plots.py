"""Plots as SVG text: on the page and in its report.

Contract: pure; data in, one self-contained `<svg>` out, every text escaped. Colours are
presentation attributes and text takes `currentColor`, so that a page's own style decides in light
and dark. Series differ by dash and marker as well as by colour, bars of one group by filling. A
plot without a single value is "": an empty one would show axes that nothing was measured on.
"""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 70, 44
COLOURS = ("#0d9488", "#8b5cf6", "#d97706", "#2d5aff", "#db2777", "#65a30d", "#879696")
LOST = "#dc2626"  # of a bar that is below the level to compare with, to two digits
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 6", "1 4")
MAX_TICKS = 6
MAX_MARKED_POINTS = 40  # of a line; more would hide it
LETTER = 6.4  # mean width of a letter
LINE = 13  # height of a line of a label
BAR = 22  # width of an upright bar, for its value over it, as far as its group has room
HOLLOW = ' fill-opacity="0.28"'
FAINT = 'stroke-opacity="0.14"'
COMPARED = 'stroke-opacity="0.75" stroke-dasharray="5 4"'


@dataclass(frozen=True)
class Axes:
    """What stands around a plot. y_top: a fixed upper end. line: a level to compare with. y_digits:
    of the values over bars, where they have room. width: in pixels, at the size of text it is made
    for."""

    title: str
    x_label: str
    y_label: str
    y_top: float | None = None
    line: float | None = None
    line_label: str = ""
    y_digits: int = 0
    width: int = WIDTH


@dataclass(frozen=True)
class Series:
    """Points of one name. is_line: joined; else each is marked."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str | None = None
    is_line: bool = True


@dataclass(frozen=True)
class Group:
    """Bars that stand together. values: one for each bar's name, None leaves it out."""

    label: str
    values: Sequence[float | None]


def lines(axes: Axes, series: Sequence[Series]) -> str:
    """Points over a number."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points] + ([] if axes.line is None else [axes.line])
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(0.0, axes.y_top or max(ys))
    if all(float(x).is_integer() for x in xs):  # turns and rounds have no halves
        x_ticks = [tick for tick in x_ticks if tick.is_integer()]
    coloured = [
        replace(one, colour=one.colour or COLOURS[place % len(COLOURS)])
        for place, one in enumerate(drawn)
    ]
    signs = [(one.name, _sign(one, place)) for place, one in enumerate(coloured)]
    legend, more = _legend(signs, axes)
    low, high = min(xs), max(xs)
    frame = _Frame(
        low, high if high > low else low + 1.0, y_ticks[-1],
        top=TOP + more, height=HEIGHT + more, width=axes.width,
    )  # fmt: skip
    parts = [legend, _grid(frame, y_ticks), _level(frame, axes)]
    parts += [_x_tick(frame, tick, _short(tick)) for tick in x_ticks if low <= tick <= high]
    parts += [_series(frame, one, place) for place, one in enumerate(coloured)]
    return _svg(axes, frame, parts)


def bars(axes: Axes, names: Sequence[str], groups: Sequence[Group]) -> str:
    """Groups of upright bars, one bar for each name."""
    values = [value for group in groups for value in group.values if value is not None]
    if not values:
        return ""
    top = axes.y_top or max([*values, axes.line or 0.0])
    labels = _labels_below([group.label for group in groups], axes.width)
    below = LINE * (max(map(len, labels)) - 1)
    high = _ticks(0.0, top)[-1]
    signs = [(name, _box(0, -3, 14, 9, place)) for place, name in enumerate(names)]
    legend, above = _legend(signs if len(names) > 1 else [], axes)
    frame = _Frame(
        0.0, float(len(groups)), high, top=TOP + above, height=HEIGHT + above + below,
        margin_bottom=BOTTOM + below, width=axes.width,
    )  # fmt: skip
    parts = [legend, _grid(frame, _ticks(0.0, top))]
    width = frame.x(1.0) - frame.x(0.0)  # of a group
    share = min(max(0.3, BAR / width), 0.8 / len(names))
    digits = _digits(values, axes.y_digits, width * (share if len(names) > 1 else 1.0))
    level = 0.0 if axes.line is None else frame.y(axes.line)
    for place, group in enumerate(groups):
        half = LETTER * max(map(len, labels[place])) / 2
        middle = min(max(frame.x(place + 0.5), half), axes.width - half)
        y = frame.bottom + 16
        for at, line in enumerate(labels[place]):
            parts += [_text(middle, y + LINE * at, line, "middle")] if line else []
        begin = place + 0.5 - share * len(names) / 2
        for index, value in enumerate(group.values):
            if value is not None:
                x = frame.x(begin + index * share), frame.x(begin + (index + 0.92) * share)
                label = f"{group.label}, {names[index]}: {value:.4g}"
                bar = _bar(frame, x, value, index, label, digits, level)
                is_lost = round(value, 2) < (axes.line or 0.0)
                parts.append(bar.replace(COLOURS[index % len(COLOURS)], LOST) if is_lost else bar)
    return _svg(axes, frame, [*parts, _level(frame, axes)])


def _digits(values: Sequence[float], digits: int, room: float) -> int | None:
    """Of the values over bars: one fewer where they would touch; None where they still would."""
    for count in range(digits, min(digits, 1) - 1, -1):
        if LETTER * max(len(f"{value:.{count}f}") + 0.4 for value in values) < room:
            return count
    return None


def _labels_below(labels: Sequence[str], width: int) -> list[list[str]]:
    """Each label in lines that fit beside the others. Where a word is too long for that, labels
    take turns on two or more levels, as many as give the word room: labels of one level then stand
    that many groups apart, and half a group lies free between them."""
    room = (width - LEFT - RIGHT) / len(labels) / LETTER
    longest = max(len(word) for label in labels for word in _wrapped(label, 1))
    num_levels = 1 if longest <= room else max(2, math.ceil(longest / room + 0.5))
    wide = room if num_levels == 1 else (num_levels - 0.5) * room
    lines = [_wrapped(label, int(wide)) for label in labels]
    above = list[str]()  # empty lines before the labels of a level
    starts = [above]
    for level in range(num_levels - 1):
        above = [*above, *[""] * max(map(len, lines[level::num_levels]))]
        starts.append(above)
    return [[*starts[place % num_levels], *label] for place, label in enumerate(lines)]


def _wrapped(label: str, room: int) -> list[str]:
    return textwrap.wrap(label, max(1, room), break_long_words=False) or [""]


def standalone(svg: str) -> str:
    """The plot as a file: with its size, and on white."""
    head, _, rest = svg.partition(">")
    size = 'width="{}" height="{}"'.format(*_size(svg))
    return f'{head} {size}><rect width="100%" height="100%" fill="#ffffff"/>{rest}'


def _size(svg: str) -> tuple[int, int]:
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
    assert found is not None, "not a plot of this module"
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class _Frame:
    """From values to places in the picture. y begins at 0."""

    x_low: float
    x_high: float
    y_high: float
    left: int = LEFT
    margin_right: int = RIGHT
    top: int = TOP
    height: int = HEIGHT
    margin_bottom: int = BOTTOM
    width: int = WIDTH

    @property
    def right(self) -> int:
        return self.width - self.margin_right

    @property
    def bottom(self) -> int:
        return self.height - self.margin_bottom

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        share = min(1.0, max(0.0, value / self.y_high))
        return self.bottom - share * (self.bottom - self.top)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    if high <= low:
        high = low + 1.0
    rough = (high - low) / MAX_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(n * step, 10) for n in range(first, last + 1)]


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def _rule(x1: float, x2: float, y1: float, y2: float, style: str) -> str:
    return (
        f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="currentColor" '
        f"{style}/>"
    )


def _grid(frame: _Frame, ticks: Sequence[float]) -> str:
    """Horizontal lines with their numbers."""
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(_rule(frame.left, frame.right, y, y, FAINT))
        parts.append(_text(frame.left - 7, y + 4, _short(tick), "end"))
    return "".join(parts)


def _level(frame: _Frame, axes: Axes) -> str:
    """The level to compare with; the legend names it."""
    if axes.line is None:
        return ""
    y = frame.y(axes.line)
    return _rule(frame.left, frame.right, y, y, COMPARED)


def _x_tick(frame: _Frame, value: float, label: str) -> str:
    x, y = frame.x(value), frame.bottom
    return _rule(x, x, y, y + 4, 'stroke-opacity="0.5"') + _text(x, y + 16, label, "middle")


def _series(frame: _Frame, series: Series, place: int) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in series.points]
    parts = []
    if series.is_line and len(points) > 1:
        parts.append(_path(" ".join(f"{x:.1f},{y:.1f}" for x, y in points), series, place))
    if not series.is_line or len(points) <= MAX_MARKED_POINTS:
        for (x, y), (at, value) in zip(points, series.points, strict=True):
            label = f"{series.name}: {_short(at)}, {value:.4g}"
            parts.append(_marker(x, y, str(series.colour), place, label))
    return "".join(parts)


def _marker(x: float, y: float, colour: str, place: int, label: str) -> str:
    title = f"<title>{html.escape(label)}</title>"
    match place % 3:
        case 0:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}">{title}</circle>'
        case 1:
            corner = f'x="{x - 3:.1f}" y="{y - 3:.1f}"'
            return f'<rect {corner} width="6" height="6" fill="{colour}">{title}</rect>'
        case _:
            corners = f"{x:.1f},{y - 4:.1f} {x - 4:.1f},{y + 3:.1f} {x + 4:.1f},{y + 3:.1f}"
            return f'<polygon points="{corners}" fill="{colour}">{title}</polygon>'


def _bar(
    frame: _Frame, x: tuple[float, float], value: float, index: int, label: str,
    digits: int | None, level: float,
) -> str:  # fmt: skip
    top, middle, width = frame.y(value), sum(x) / 2, x[1] - x[0]
    title = f"<title>{html.escape(label)}</title>"
    box = _box(x[0], top, width, frame.bottom - top, index, title)
    if top - LINE < level < top:  # the line would cross the figure
        top = level
    return box if digits is None else box + _text(middle, top - 4, f"{value:.{digits}f}", "middle")


def _box(x: float, y: float, width: float, height: float, index: int, title: str = "") -> str:
    """Every second one is hollow, so that bars are told apart in grey too."""
    colour = COLOURS[index % len(COLOURS)]
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
        f'fill="{colour}"{HOLLOW if index % 2 else ""} stroke="{colour}">{title}</rect>'
    )


def _sign(series: Series, place: int) -> str:
    """How a series is shown in the legend: its marker, or its dash."""
    if series.is_line:
        return _path("0,1 18,1", series, place)
    return _marker(7, 1, str(series.colour), place, series.name)


def _path(points: str, series: Series, place: int) -> str:
    return (
        f'<polyline points="{points}" fill="none" stroke="{series.colour}" stroke-width="2" '
        f'stroke-dasharray="{DASHES[place % len(DASHES)]}" stroke-linejoin="round"/>'
    )


def _legend(signs: Sequence[tuple[str, str]], axes: Axes) -> tuple[str, int]:
    """Each name behind its sign, the level to compare with last, in as many lines as it takes; and
    the height of those that have no room over the plot."""
    level = [(axes.line_label, _rule(0, 18, 1, 1, COMPARED))] if axes.line_label else []
    parts, x, y = [], float(LEFT), 36
    for name, sign in [*signs, *level]:
        length = 36 + LETTER * len(name)
        if x + length > axes.width and x > LEFT:
            x, y = float(LEFT), y + 15
        parts.append(f'<g transform="translate({x:.0f} {y})">{sign}{_text(22, 5, name)}</g>')
        x += length
    return "".join(parts), max(0, y - 51)


def _svg(axes: Axes, frame: _Frame, parts: Sequence[str]) -> str:
    title, middle = html.escape(axes.title), (frame.top + frame.bottom) / 2
    y_label = _text(0, 0, axes.y_label, "middle")
    return (
        '<svg class="ls-plot" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {frame.width} {frame.height}" color="#1f2937" '
        f'font-family="system-ui, sans-serif" font-size="11.5" role="img" aria-label="{title}">'
        f'<g fill="currentColor"><text x="{min(frame.left, LEFT)}" y="20" font-size="14" '
        f'font-weight="600">{title}</text>{"".join(parts)}'
        f"{_text((frame.left + frame.right) / 2, frame.height - 8, axes.x_label, 'middle')}"
        f'<g transform="translate(13 {middle}) rotate(-90)">{y_label}</g></g></svg>'
    )


def _short(value: float) -> str:
    """In thousands from 10,000 on: longer numbers would reach the axis' name."""
    return f"{value:g}" if abs(value) < 10_000 else f"{value / 1000:g}k"
