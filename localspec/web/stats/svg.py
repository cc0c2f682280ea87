"""Plots as SVG text, made here so that they can be shown, saved and put into a report.

Contract: pure; data in, one self-contained `<svg>` out, every text escaped. Colours are given as
presentation attributes and text takes `currentColor`, so that the page's own style decides in
light and dark. Series differ by dash and marker as well as by colour. A plot without a point is
"": an empty one would show invented axes.

Not here: which figures are plotted (stats_plots).
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 70, 44
COLOURS = ("#0d9488", "#8b5cf6", "#d97706", "#2d5aff", "#db2777", "#65a30d", "#879696")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 6", "1 4")
BOX = "box"  # how bars are shown in a legend; points show their marker, lines their dash
MAX_TICKS = 6
LABEL_LENGTH = 22


@dataclass(frozen=True)
class Series:
    """Points of one name. is_line: joined; else marked one by one."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str | None = None
    is_line: bool = True


@dataclass(frozen=True)
class Group:
    """Bars that stand together. values: one for each bar's name, None leaves it out."""

    label: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Axes:
    """What is said around a plot. y_top: a fixed upper end. line: a level to compare with."""

    title: str
    x_label: str
    y_label: str
    y_top: float | None = None
    line: float | None = None
    line_label: str = ""
    y_digits: int = 0


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
    low, high = min(xs), max(xs)
    frame = _Frame(low, high if high > low else low + 1.0, y_ticks[-1])
    parts = [_grid(frame, axes, y_ticks)]
    parts += [_x_tick(frame.x(tick), _short(tick)) for tick in x_ticks if low <= tick <= high]
    for place, one in enumerate(drawn):
        parts.append(_series(frame, one, place))
    names = [(one.name, one.colour or COLOURS[i % len(COLOURS)]) for i, one in enumerate(drawn)]
    marks = [DASHES[i % len(DASHES)] if one.is_line else None for i, one in enumerate(drawn)]
    return _svg(axes, parts, names, marks)


def bars(axes: Axes, names: Sequence[str], groups: Sequence[Group]) -> str:
    """Groups of bars, one bar for each name."""
    values = [value for group in groups for value in group.values if value is not None]
    if not values:
        return ""
    top = axes.y_top or max([*values, axes.line or 0.0])
    frame = _Frame(0.0, float(len(groups)), _ticks(0.0, top)[-1])
    parts = [_grid(frame, axes, _ticks(0.0, top))]
    share = min(0.3, 0.8 / len(names))
    for place, group in enumerate(groups):
        parts.append(_x_tick(frame.x(place + 0.5), group.label[:LABEL_LENGTH], is_ticked=False))
        begin = place + 0.5 - share * len(names) / 2
        for index, value in enumerate(group.values):
            if value is not None:
                label = f"{group.label}, {names[index]}"
                left = frame.x(begin + index * share)
                width = frame.x(begin + (index + 0.92) * share) - left
                parts.append(_bar(frame, left, width, value, index, label, axes.y_digits))
    legend = [(name, COLOURS[i % len(COLOURS)]) for i, name in enumerate(names)]
    shown = legend if len(legend) > 1 else []
    return _svg(axes, parts, shown, [BOX] * len(shown))


@dataclass(frozen=True)
class _Frame:
    """From values to places. x_low, x_high, y_high: the ends of the axes; y begins at 0."""

    x_low: float
    x_high: float
    y_high: float

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = min(1.0, max(0.0, value / self.y_high))
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    if high <= low:
        high = low + 1.0
    rough = (high - low) / MAX_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(n * step, 10) for n in range(first, last + 1)]


def _grid(frame: _Frame, axes: Axes, ticks: Sequence[float]) -> str:
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="currentColor" stroke-opacity="0.14"/>'
            f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>'
        )
    if axes.line is not None:
        y = frame.y(axes.line)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="currentColor" stroke-opacity="0.75" stroke-dasharray="5 4"/>'
            f'<text x="{WIDTH - RIGHT - 2}" y="{y - 5:.1f}" text-anchor="end">'
            f"{html.escape(axes.line_label)}</text>"
        )
    return "".join(parts)


def _x_tick(x: float, label: str, is_ticked: bool = True) -> str:
    y = HEIGHT - BOTTOM
    mark = (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" stroke="currentColor" '
        'stroke-opacity="0.5"/>'
        if is_ticked
        else ""
    )
    text = html.escape(label)
    return f'{mark}<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{text}</text>'


def _series(frame: _Frame, series: Series, place: int) -> str:
    colour = series.colour or COLOURS[place % len(COLOURS)]
    points = [(frame.x(x), frame.y(y)) for x, y in series.points]
    parts = []
    if series.is_line and len(points) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{DASHES[place % len(DASHES)]}" stroke-linejoin="round"/>'
        )
    if not series.is_line or len(points) <= 40:
        for (x, y), (at, value) in zip(points, series.points, strict=True):
            label = html.escape(f"{series.name}: {_short(at)}, {value:.4g}")
            parts.append(_marker(x, y, colour, place, label))
    return "".join(parts)


def _marker(x: float, y: float, colour: str, place: int, label: str) -> str:
    title = f"<title>{label}</title>"
    match place % 3:
        case 0:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}">{title}</circle>'
        case 1:
            return (
                f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="{colour}">'
                f"{title}</rect>"
            )
        case _:
            corners = f"{x:.1f},{y - 4:.1f} {x - 4:.1f},{y + 3:.1f} {x + 4:.1f},{y + 3:.1f}"
            return f'<polygon points="{corners}" fill="{colour}">{title}</polygon>'


def _bar(
    frame: _Frame, left: float, width: float, value: float, index: int, label: str, digits: int
) -> str:
    top, bottom = frame.y(value), frame.y(0.0)
    colour = COLOURS[index % len(COLOURS)]
    # Told apart in grey too: every second bar is hollow.
    fill = 'fill-opacity="0.28"' if index % 2 else ""
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}" '
        f'rx="2" fill="{colour}" {fill} stroke="{colour}">'
        f"<title>{html.escape(label)}: {value:.4g}</title></rect>"
        f'<text x="{left + width / 2:.1f}" y="{top - 4:.1f}" text-anchor="middle">'
        f"{value:.{digits}f}</text>"
    )


def _legend(names: Sequence[tuple[str, str]], marks: Sequence[str | None]) -> str:
    parts, x, y = [], float(LEFT), 36.0
    for place, ((name, colour), dash) in enumerate(zip(names, marks, strict=True)):
        length = 36 + 6.4 * len(name)
        if x + length > WIDTH and x > LEFT:
            x, y = float(LEFT), y + 15.0
        if dash is None:
            sign = _marker(x + 7, y + 1, colour, place, html.escape(name))
        elif dash == BOX:
            opacity = ' fill-opacity="0.28"' if place % 2 else ""
            sign = (
                f'<rect x="{x:.0f}" y="{y - 3:.0f}" width="14" height="9" rx="2" '
                f'fill="{colour}"{opacity} stroke="{colour}"/>'
            )
        else:
            sign = (
                f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y + 1:.0f}" y2="{y + 1:.0f}" '
                f'stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
            )
        parts.append(f'{sign}<text x="{x + 22:.0f}" y="{y + 5:.0f}">{html.escape(name)}</text>')
        x += length
    return "".join(parts)


def _svg(
    axes: Axes,
    parts: Sequence[str],
    names: Sequence[tuple[str, str]],
    marks: Sequence[str | None],
) -> str:
    title = html.escape(axes.title)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<svg class="ls-plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'color="#1f2937" font-family="system-ui, sans-serif" font-size="11.5" role="img" '
        f'aria-label="{title}"><g fill="currentColor">'
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="600">{title}</text>'
        f"{_legend(names, marks)}{''.join(parts)}"
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{html.escape(axes.x_label)}</text>"
        f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(axes.y_label)}</text></g></svg>"
    )


def _short(value: float) -> str:
    return f"{value:g}" if abs(value) < 100_000 else f"{value:.2g}"
