"""Plots are sound SVG that escapes names, shows no invented axes and tells series apart in grey."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import defaultdict
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from localspec.core.plots import (
    COLOURS,
    DASHES,
    LETTER,
    LOST,
    Axes,
    Group,
    Series,
    bars,
    lines,
    standalone,
)
from localspec.drafters.registry import PLAIN_COLOUR, REGISTRY

BY_DRAFTER = [PLAIN_COLOUR, *(info.colour for info in REGISTRY.values())]
VALUES = {"lost": 0.98, "even": 0.998, "won": 1.4}
AXES = Axes("Speed & <more>", "turn", "tok/s", line=1.0, line_label="plain")


def test_a_bar_below_the_level_is_told_from_one_at_it() -> None:
    drawn = bars(AXES, ("a",), [Group(name, (value,)) for name, value in VALUES.items()])
    boxes = ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}rect")
    fills = {str(box[0].text).split(",")[0]: box.get("fill") for box in boxes}
    assert fills == {"lost": LOST, "even": COLOURS[0], "won": COLOURS[0]}


@pytest.mark.parametrize("value", [0.5, 0.9, 0.95, 0.99, 1.0, 1.05])
def test_the_figure_over_a_bar_is_not_crossed_by_the_level(value: float) -> None:
    drawn = bars(replace(AXES, y_digits=2), ("a",), [Group("g", (value,))])
    parts = list(ElementTree.fromstring(drawn).iter())
    (figure,) = (one for one in parts if one.text == f"{value:.2f}" and "y" in one.attrib)
    _, level = (one for one in parts if one.get("stroke-dasharray"))
    height = float(figure.attrib["y"]) - float(level.attrib["y1"])
    assert not -1 < height < 9


def test_names_are_escaped_and_the_svg_is_sound() -> None:
    drawn = lines(AXES, [Series("<b>&", [(1, 2), (2, 3)])])
    root = ElementTree.fromstring(drawn)
    assert root.get("aria-label") == "Speed & <more>"
    assert "<b>" not in drawn and "script" not in drawn
    ElementTree.fromstring(bars(AXES, ("a", "b<"), [Group("g&", (1.0, None))]))


def test_a_label_is_wrapped_below_its_bars_and_never_cut() -> None:
    label = "draft model with a head of its own"
    few, many = (bars(AXES, ("a",), [Group(label, (1.0,))] * count) for count in (1, 8))
    assert f">{label}<" in few
    words = ElementTree.fromstring(many).itertext()
    assert " ".join(words).count(label) == 16, "below each bar, and as its title"
    assert standalone(many).split('height="')[1] > standalone(few).split('height="')[1]


def test_the_names_of_all_drafters_lie_beside_each_other_without_touching() -> None:
    labels = sorted(info.label for info in REGISTRY.values())
    drawn = bars(replace(AXES, width=440), ("gain",), [Group(one, (1.0,)) for one in labels])
    lines_of = defaultdict[float, list[tuple[float, float]]](list)
    for x, y, words in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)</text>', drawn):
        if any(words in label for label in labels):
            half = LETTER * len(words) / 2
            lines_of[float(y)].append((float(x) - half, float(x) + half))
    assert sum(map(len, lines_of.values())) > len(labels)
    for line in lines_of.values():
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(sorted(line)))
        assert min(line)[0] >= 0 and max(line)[1] <= 440


def test_values_over_bars_never_touch() -> None:
    axes, group = replace(AXES, width=440, y_digits=2), Group("g", (1.21, 1.21))
    for count, said in ((2, "1.21"), (6, "1.2"), (8, None)):
        drawn = bars(axes, ("a", "b"), [group] * count)
        found = re.findall(r'<text x="([\d.]+)"[^>]*middle">(1[^<]*)</text>', drawn)
        assert [one for _, one in found] == ([said] * 2 * count if said else [])
        for (x, _), (after, _) in itertools.pairwise(found):
            assert float(x) + LETTER * len(str(said)) < float(after)


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


def test_a_plot_is_a_file_of_its_own_size_on_white() -> None:
    file = standalone(lines(AXES, [Series("a", [(1, 2), (2, 3)])]))
    root = ElementTree.fromstring(file)
    assert (root.get("width"), root.get("height")) == ("640", "280")
    assert root[0].get("fill") == "#ffffff"


@pytest.mark.parametrize("highest", [900.0, 9_500.0, 25_000.0, 240_000.0])
def test_the_numbers_of_an_axis_do_not_reach_its_name(highest: float) -> None:
    drawn = lines(AXES, [Series("a", [(1.0, 1.0), (2.0, highest)])])
    texts = list(ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text"))
    numbers = [each for each in texts if each.get("text-anchor") == "end"]
    assert len(numbers) > 2
    for each in numbers:
        assert float(str(each.get("x"))) - LETTER * len(str(each.text)) > 13 + 6  # half of a letter


def test_whole_numbers_get_whole_ticks() -> None:
    drawn = lines(AXES, [Series("a", [(1, 1), (4, 2)])])
    assert ">2.5<" not in drawn and ">2<" in drawn and ">4<" in drawn


def channels(colour: str) -> list[float]:
    """Red, green and blue without gamma."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]


def luminance(colour: str) -> float:
    return sum(map(operator.mul, (0.2126, 0.7152, 0.0722), channels(colour)))


@pytest.mark.parametrize("colour", [*COLOURS, *BY_DRAFTER])
@pytest.mark.parametrize("ground", ["#f8fafc", "#151d27"])
def test_every_colour_is_seen_on_a_light_page_and_on_a_dark_one(colour: str, ground: str) -> None:
    low, high = sorted((luminance(colour), luminance(ground)))
    assert (high + 0.05) / (low + 0.05) >= 2.9


def test_no_two_drafters_have_near_colours() -> None:
    for one, other in itertools.combinations(BY_DRAFTER, 2):
        shares = [
            (a ** (1 / 3), b ** (1 / 3))
            for a, b in zip(channels(one), channels(other), strict=True)
        ]
        assert math.dist(*zip(*shares, strict=True)) > 0.2, (one, other)
