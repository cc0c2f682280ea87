"""Pictures of a comparison, from the JSON that `bench` writes.

Contract: `save_plots` draws what the result holds and nothing else: rates by arm, speedup by
task, the cost of a round by its width, and `auto` against the best fixed length. A picture
whose data is absent is not made. Each carries machine, precision, prompts and date. Colours
are told apart by colour-blind readers (Okabe and Ito); our plain decoding is grey. Where many
arms would crowd a picture, each other engine is shown at its best setting only.

Not here: any figure of its own. matplotlib comes in when a picture is drawn, without a screen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.bench.arms import PEERS
from localspec.bench.report import ALL, NOT_REPEATING
from localspec.core import AUTO, OFF

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]
Row = Mapping[str, Any]

GREY, INK = "#767676", "#222222"
OWN, OTHER = "#0072B2", "#E69F00"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")
DOTS_PER_INCH = 150
WIDTH = 9.0  # inches


def is_drawing(out: Path) -> bool:
    """Whether `out` names a drawing, whose stem becomes a prefix, rather than a folder."""
    return out.suffix.lower() == ".png"


def save_plots(result: Result, out: Path) -> list[Path]:
    """Draw into the folder `out`, or beside it with its stem as a prefix when it names a .png.
    Returns the files written. Raises OSError when the folder cannot be written."""
    folder, prefix = (out.parent, f"{out.stem}-") if is_drawing(out) else (out, "")
    drawings: dict[str, Callable[[Result], Figure | None]] = {
        "rates": draw_rates,
        "speedup": draw_speedup,
        "cost-curve": draw_cost_curve,
        "auto-against-fixed": draw_auto,
    }
    written = list[Path]()
    for name, draw in drawings.items():
        figure = draw(result)
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{prefix}{name}.png"
            figure.savefig(path, dpi=DOTS_PER_INCH, facecolor="white")
            written.append(path)
    return written


def draw_rates(result: Result) -> Figure | None:
    """Bars of tokens a second by arm, the paired ratio to plain decoding beside each."""
    temperatures = _temperatures(result)
    by_temperature = {t: _measured(result, t, ALL) for t in temperatures}
    if not any(by_temperature.values()):
        return None
    height = 1.6 + 0.34 * sum(len(rows) for rows in by_temperature.values())
    figure, panels = _figure(result, "Tokens per second", height, len(temperatures))
    fastest = max(row["tokens_per_second"] for rows in by_temperature.values() for row in rows)
    for axes, (temperature, rows) in zip(panels, by_temperature.items(), strict=True):
        rates = [row["tokens_per_second"] for row in rows]
        colours = [_rate_colour(row["arm"]) for row in rows]
        axes.barh(range(len(rows)), rates, color=colours, height=0.7)
        axes.set_yticks(range(len(rows)), [row["arm"] for row in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.45 * fastest)  # room for the words beside the bars
        for place, row in enumerate(rows):
            axes.annotate(
                _rate_note(row),
                (row["tokens_per_second"], place),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=INK,
            )
        axes.set_title(f"Temperature {temperature:g}", loc="left", fontsize=10)
    panels[-1].set_xlabel(
        "tokens per second; ratio to our plain decoding (off) with its 95 % interval"
    )
    return figure


def _rate_colour(arm: str) -> str:
    return GREY if arm == OFF else OTHER if _engine(arm) is not None else OWN


def _rate_note(row: Row) -> str:
    rate = f"{row['tokens_per_second']:.0f}"
    if row["arm"] == OFF or row["ratio_to_off"] is None:
        return rate
    if row["ratio_low"] is None:
        return f"{rate}   {row['ratio_to_off']:.2f}×"
    return (
        f"{rate}   {row['ratio_to_off']:.2f}× ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
    )


def draw_speedup(result: Result) -> Figure | None:
    """Groups of bars by task: the paired ratio of each arm that chooses for itself."""
    arms = _compared_arms(result)
    tasks = [task for task in _tasks(result) if task != NOT_REPEATING]
    if not arms or not any(_ratio_rows(result, arm) for arm in arms):
        return None
    temperatures = _temperatures(result)
    height = 1.4 + 2.4 * len(temperatures)
    figure, panels = _figure(result, "Speedup over plain decoding", height, len(temperatures))
    share = min(0.25, 0.8 / len(arms))
    for axes, temperature in zip(panels, temperatures, strict=True):
        for index, arm in enumerate(arms):
            rows = {
                r["task"]: r for r in _ratio_rows(result, arm) if r["temperature"] == temperature
            }
            shown = [(place, rows[task]) for place, task in enumerate(tasks) if task in rows]
            places = [place + (index - (len(arms) - 1) / 2) * share for place, _ in shown]
            heights = [row["ratio_to_off"] for _, row in shown]
            axes.bar(places, heights, 0.9 * share, color=COLOURS[index], label=arm)
            _intervals(axes, places, [row for _, row in shown])
        axes.axhline(1.0, color=INK, linewidth=1)
        axes.set_xticks(range(len(tasks)), tasks)
        axes.tick_params("x", length=0)
        axes.set_ylabel("times plain")
        axes.set_title(f"Temperature {temperature:g}", loc="left", fontsize=10)
    highest = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, highest)
    panels[0].legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(arms),
        frameon=False,
        fontsize=8,
        handlelength=1.0,
        columnspacing=1.0,
    )
    return figure


def _intervals(axes: Axes, places: Sequence[float], rows: Sequence[Row]) -> None:
    known = [(place, row) for place, row in zip(places, rows, strict=True) if row["ratio_low"]]
    for place, row in known:
        axes.plot([place, place], [row["ratio_low"], row["ratio_high"]], color=INK, linewidth=1)


def draw_cost_curve(result: Result) -> Figure | None:
    """Lines: what a round costs by the tokens it checks, in plain steps."""
    curves = result.get("costs", {}).get("by_context", {})
    if not curves:
        return None
    figure, (axes,) = _figure(result, "Cost of checking several tokens at once", 4.2, 1)
    for index, (context, curve) in enumerate(curves.items()):
        plain_ms = curve["verify_ms"][0]
        label = f"{context} tokens of context, plain step {plain_ms:.2f} ms"
        axes.plot(curve["widths"], curve["relative"], "o-", color=COLOURS[index], label=label)
        axes.set_xticks(curve["widths"])
    axes.axhline(1.0, color=GREY, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens checked in one round")
    axes.set_ylabel("cost in plain steps")
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_auto(result: Result) -> Figure | None:
    """Dots: the rate of `auto` over that of the best fixed arm in hindsight, cell by cell."""
    cells = [
        (temperature, task, *found)
        for temperature in _temperatures(result)
        for task in _tasks(result)
        if task != NOT_REPEATING and (found := _against_best(result, temperature, task)) is not None
    ]
    if not cells:
        return None
    title = "auto against the best fixed length in hindsight"
    figure, (axes,) = _figure(result, title, 1.6 + 0.3 * len(cells), 1)
    ratios = [ratio for _, _, ratio, _ in cells]
    axes.hlines(range(len(cells)), 1.0, ratios, color=GREY, linewidth=1)
    axes.plot(ratios, range(len(cells)), "o", color=COLOURS[0])
    axes.axvline(1.0, color=INK, linewidth=1)
    for place, (_, _, ratio, best) in enumerate(cells):
        side = 8 if ratio >= 1.0 else -8
        axes.annotate(
            f"{ratio:.2f}, best: {best}",
            (ratio, place),
            (side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.set_yticks(range(len(cells)), [f"{task}, T {t:g}" for t, task, _, _ in cells])
    axes.invert_yaxis()
    low, high = min(1.0, *ratios), max(1.0, *ratios)
    word = 0.5 * max(0.1, high - low)  # room for the words beside the dots
    axes.set_xlim(low - (word if low < 1.0 else 0.02), high + (word if high > 1.0 else 0.02))
    axes.set_xlabel("rate of auto over the best fixed arm's (ratio of rates, no interval)")
    return figure


def _against_best(result: Result, temperature: float, task: str) -> tuple[float, str] | None:
    """(auto's rate over the best fixed arm's, that arm); None without auto or fixed lengths."""
    rows = {row["arm"]: row for row in _measured(result, temperature, task)}
    fixed = [
        row for name, row in rows.items() if name == OFF or ("@" in name and not _engine(name))
    ]
    if AUTO not in rows or len(fixed) < 2:
        return None
    best = max(fixed, key=lambda row: float(row["tokens_per_second"]))
    return rows[AUTO]["tokens_per_second"] / best["tokens_per_second"], best["arm"]


# -- what a result holds --------------------------------------------------------------------


def _measured(result: Result, temperature: float, task: str) -> list[Row]:
    return [
        row
        for row in result["rows"]
        if (row["temperature"], row["task"]) == (temperature, task) and row["tokens_per_second"]
    ]


def _ratio_rows(result: Result, arm: str) -> list[Row]:
    return [r for r in result["rows"] if r["arm"] == arm and r["ratio_to_off"] is not None]


def _temperatures(result: Result) -> list[float]:
    return list(dict.fromkeys(row["temperature"] for row in result["rows"]))


def _tasks(result: Result) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in result["rows"]))


def _compared_arms(result: Result) -> list[str]:
    """Our arms without a fixed length, `auto` first, then each other engine's fastest setting;
    as many as have a colour."""
    names = dict.fromkeys(row["arm"] for row in result["rows"] if row["ratio_to_off"] is not None)
    own = [name for name in names if name != OFF and "@" not in name and not _engine(name)]
    fastest = dict[str, str]()
    for name in names:
        engine = _engine(name)
        if engine is not None:
            rival = fastest.get(engine, name)
            fastest[engine] = max(rival, name, key=lambda each: _overall(result, each))
    return [*sorted(own, key=lambda name: name != AUTO), *fastest.values()][: len(COLOURS)]


def _overall(result: Result, arm: str) -> float:
    rows = _ratio_rows(result, arm)
    return sum(float(row["ratio_to_off"]) for row in rows if row["task"] == ALL)


def _engine(arm: str) -> str | None:
    """The other engine that runs an arm, None for ours."""
    kind = PEERS.get(arm.partition("@")[0])
    return None if kind is None else kind.engine


# -- the look -------------------------------------------------------------------------------


def _figure(result: Result, title: str, height: float, rows: int) -> tuple[Figure, list[Axes]]:
    """A figure with its title and origin, and `rows` calm panels."""
    from matplotlib.figure import Figure  # heavy, and only needed for pictures

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.supxlabel(origin(result), x=0.01, ha="left", fontsize=7.5, color=GREY)
    panels = list(figure.subplots(rows, 1, squeeze=False)[:, 0])
    for axes in panels:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(labelsize=9, colors=INK)
    return figure, panels


def origin(result: Result) -> str:
    """What a figure must carry: models, precision, machine, prompts, date."""
    machine = result["machine"]
    draft = f" with {machine['draft']}" if machine.get("draft") else ""
    prompts = f"{machine.get('num_prompts')} prompts of {machine.get('prompts')}"
    models = f"{machine.get('target')}{draft}, {machine.get('dtype')}"
    place = f"{machine.get('device')}, threads: {machine.get('num_threads')}"
    asked = f"{prompts}, at most {machine.get('max_tokens')} tokens a reply"
    date = str(machine.get("measured_at_utc", ""))[:10]
    return f"{models} · {place}\n{asked} · {date}".rstrip(" ·")
