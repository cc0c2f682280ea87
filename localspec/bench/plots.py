"""Plots of a comparison as SVG files, from the JSON that `bench` writes.

Contract: `save_plots` draws what the result holds and nothing else: rates by arm, speedup by task,
the cost of a round by its width, and `auto` against the best single way. A plot without data is
not made. Each carries machine, precision, prompts and date. Where many arms would crowd a plot,
each other engine is shown at its fastest setting only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from localspec.bench.results import ALL, NOT_REPEATING
from localspec.bench.tables import interval
from localspec.core.decoding import AUTO, OFF
from localspec.core.files import replacing
from localspec.core.plots import (
    COLOURS,
    GREY,
    Axes,
    Group,
    Row,
    Series,
    bars,
    lines,
    rows,
    stacked,
    standalone,
)
from localspec.core.units import took

Result = Mapping[str, Any]
OWN, OTHER = COLOURS[0], COLOURS[2]
DRAWINGS = (".svg", ".png")  # .png: what earlier versions drew; its stem is a prefix all the same
WAYS = ("_draft", "_lookup")  # how another engine drafts, behind its name
RATE_NOTE = "tokens per second; ratio to plain decoding (off) with its 95 % interval"


def plot_path(out: Path, name: str) -> Path:
    """Where the plot of this name goes: into the folder `out`, or beside it with its stem as a
    prefix when it names a drawing."""
    if out.suffix.lower() in DRAWINGS:
        return out.with_name(f"{out.stem}-{name}.svg")
    return out / f"{name}.svg"


def save_plots(result: Result, out: Path) -> list[Path]:
    """Draw into the folder `out`, or by the prefix it names. Returns the files written. Raises
    OSError when one cannot be written."""
    plots = {
        "rates": _by_temperature(result, _rates),
        "speedup": _by_temperature(result, _speedup),
        "cost-curve": [_cost_curve(result)],
        "auto-against-best": [_auto(result)],
    }
    written = list[Path]()
    for name, drawn in plots.items():
        svg = stacked(drawn, origin(result))
        if svg:
            path = plot_path(out, name)
            with replacing(path) as part:
                part.write_text(standalone(svg), encoding="utf-8")
            written.append(path)
    return written


def _by_temperature(result: Result, draw: Callable[[Result, float], str]) -> list[str]:
    temperatures = dict.fromkeys(row["temperature"] for row in result["rows"])
    return [draw(result, temperature) for temperature in temperatures]


def _rates(result: Result, temperature: float) -> str:
    """Bars of tokens a second by arm, the paired ratio to plain decoding beside each."""
    shown = [
        Row(row["arm"], row["tokens_per_second"], _rate_note(row), _colour(result, row["arm"]))
        for row in result["rows"]
        if (row["temperature"], row["task"]) == (temperature, ALL) and row["tokens_per_second"]
    ]
    return rows(Axes(f"Tokens per second, temperature {temperature:g}", RATE_NOTE, ""), shown)


def _colour(result: Result, arm: str) -> str:
    return GREY if arm == OFF else OTHER if arm in _other_arms(result) else OWN


def _rate_note(row: Mapping[str, Any]) -> str:
    rate = f"{row['tokens_per_second']:.0f}"
    if row["arm"] == OFF or row["ratio_to_off"] is None:
        return rate
    limits = interval(row["ratio_low"], row["ratio_high"])
    return f"{rate}, {row['ratio_to_off']:.2f}× ({limits})"


def _speedup(result: Result, temperature: float) -> str:
    """Groups of bars by task: the paired ratio of each arm that chooses for itself."""
    here = {
        (row["arm"], row["task"]): row
        for row in result["rows"]
        if row["temperature"] == temperature and row["ratio_to_off"] is not None
    }
    arms = _compared_arms(result)
    groups = list[Group]()
    for task in dict.fromkeys(task for _, task in here if task != NOT_REPEATING):
        found = [here.get((arm, task)) for arm in arms]
        ratios = [None if row is None else row["ratio_to_off"] for row in found]
        groups.append(Group(task, ratios, [_limits(row) for row in found]))
    axes = Axes(
        f"Speedup over plain decoding, temperature {temperature:g}", "task", "times plain",
        line=1.0, line_label="plain decoding", y_digits=2,
    )  # fmt: skip
    return bars(axes, arms, groups)


def _limits(row: Mapping[str, Any] | None) -> tuple[float, float] | None:
    if row is None or row["ratio_low"] is None:
        return None
    return row["ratio_low"], row["ratio_high"]


def _cost_curve(result: Result) -> str:
    """Lines: what a round costs by the tokens it checks, in plain steps."""
    curves = result.get("costs", {}).get("by_context", {})
    series = [
        Series(
            f"{context} tokens of context, plain step {took(curve['verify_ms'][0])}",
            list(zip(curve["widths"], curve["relative"], strict=True)),
        )
        for context, curve in curves.items()
    ]
    axes = Axes(
        "Cost of checking several tokens at once", "tokens checked in one round",
        "cost in plain steps", line=1.0, line_label="a plain step",
    )  # fmt: skip
    return lines(axes, series)


def _auto(result: Result) -> str:
    """Bars: the rate of `auto` over that of the best single way known afterwards, by temperature
    and task."""
    shown = [
        Row(
            f"{cell['task']}, T {cell['temperature']:g}",
            cell["auto_to_best"],
            f"{cell['auto_to_best']:.2f}, best: {cell['best']}",
        )
        for cell in result["cells"]
        if cell["task"] != NOT_REPEATING and cell["best"] != OFF
    ]
    label = "rate of auto over that of the best single way (ratio of rates)"
    return rows(Axes("auto against the best single way", label, "", line=1.0), shown)


def _other_arms(result: Result) -> list[str]:
    """Arms of other engines: those with a note about their engine."""
    return list(result["machine"]["peers"])


def _compared_arms(result: Result) -> list[str]:
    """Our arms without a fixed length, `auto` first, then each other engine's fastest setting; as
    many as have a colour of their own."""
    names = dict.fromkeys(row["arm"] for row in result["rows"] if row["ratio_to_off"] is not None)
    others = {name for name in names if name in _other_arms(result)}
    own = [name for name in names if name != OFF and "@" not in name and name not in others]
    # By engine: the last one, which is the fastest, stays.
    rated = sorted(others, key=lambda arm: _overall(result, arm))
    fastest = {_engine_of(name): name for name in rated}.values()
    return [*sorted(own, key=lambda name: name != AUTO), *fastest][: len(COLOURS)]


def _engine_of(arm: str) -> str:
    """llama_cpp_draft@3 -> llama_cpp."""
    name = arm.partition("@")[0]
    return next((name.removesuffix(way) for way in WAYS if name.endswith(way)), name)


def _overall(result: Result, arm: str) -> float:
    """The sum over temperatures of an arm's ratio over all prompts."""
    return sum(
        row["ratio_to_off"] or 0.0
        for row in result["rows"]
        if (row["arm"], row["task"]) == (arm, ALL)
    )


def origin(result: Result) -> str:
    """What a figure must carry: models, precision, machine, prompts, date."""
    machine = result["machine"]
    draft = f" with {machine['draft']}" if machine["draft"] else ""
    return (
        f"{machine['target']}{draft}, {machine['dtype']} · {machine['device']}, threads: "
        f"{machine['num_threads']}\n{machine['num_prompts']} prompts of {machine['prompts']}, at "
        f"most {machine['max_tokens']} tokens a reply · {machine['measured_at_utc'][:10]}"
    )
