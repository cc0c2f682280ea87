"""Plots are sound SVG that escapes names, shows no invented axes and tells series apart in grey."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from localspec.web.stats.svg import DASHES, Axes, Group, Series, bars, lines

AXES = Axes("Speed & <more>", "turn", "tok/s", line=1.0, line_label="plain")


def test_names_are_escaped_and_the_svg_is_sound() -> None:
    drawn = lines(AXES, [Series("<b>&", [(1, 2), (2, 3)])])
    root = ElementTree.fromstring(drawn)
    assert root.get("aria-label") == "Speed & <more>"
    assert "<b>" not in drawn and "script" not in drawn
    ElementTree.fromstring(bars(AXES, ("a", "b<"), [Group("g&", (1.0, None))]))


def test_nothing_to_show_is_no_plot() -> None:
    assert lines(AXES, []) == "" and lines(AXES, [Series("a", [])]) == ""
    assert bars(AXES, ("a",), [Group("g", (None,))]) == ""


def test_every_mark_lies_inside_the_picture() -> None:
    drawn = lines(AXES, [Series("a", [(0, 0), (1e6, 1e-3)]), Series("b", [(5, 7e5)])])
    for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn):
        assert 0 <= float(x) <= 640 and 0 <= float(y) <= 280
    assert lines(AXES, [Series("one point", [(3, 3)])])


def test_lines_differ_by_dash_and_bars_by_filling() -> None:
    assert len(set(DASHES)) == len(DASHES)
    two = [Series("a", [(1, 1), (2, 2)]), Series("b", [(1, 2), (2, 1)])]
    dashes = re.findall(r'<polyline[^>]*stroke-dasharray="([^"]*)"', lines(AXES, two))
    assert len(set(dashes)) == 2
    filled = bars(AXES, ("a", "b"), [Group("g", (1.0, 2.0))])
    assert filled.count('fill-opacity="0.28"') == 2  # the bar and its sign in the legend


def test_whole_numbers_get_whole_ticks() -> None:
    drawn = lines(AXES, [Series("a", [(1, 1), (4, 2)])])
    assert ">2.5<" not in drawn and ">2<" in drawn and ">4<" in drawn
