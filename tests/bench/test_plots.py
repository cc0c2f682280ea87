"""Pictures: made where there is data, saying what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localspec.bench.plots import (
    draw_auto,
    draw_cost_curve,
    draw_rates,
    draw_speedup,
    origin,
    save_plots,
)

pytest.importorskip("matplotlib")
MACHINE = {
    "target": "demo", "draft": "demo-draft", "dtype": "bfloat16", "device": "Some CPU",
    "num_threads": 2, "num_prompts": 4, "prompts": "prompts.jsonl", "max_tokens": 64,
    "measured_at_utc": "2026-11-20T10:00:00+00:00",
}  # fmt: skip
CURVE = {"widths": [1, 2, 4], "verify_ms": [2.0, 2.1, 2.2], "relative": [1.0, 1.05, 1.1]}
RATES = {"off": 100.0, "draft_model": 150.0, "draft_model@4": 200.0, "auto": 190.0,
         "llama_cpp": 120.0, "llama_cpp_draft@3": 260.0}  # fmt: skip


def row(arm: str, task: str, rate: float | None) -> dict[str, Any]:
    ratio = None if rate is None else rate / 100.0
    spread = (None, None) if ratio is None else (0.9 * ratio, 1.1 * ratio)
    return {"arm": arm, "temperature": 0.0, "task": task, "tokens_per_second": rate,
            "ratio_to_off": ratio, "ratio_low": spread[0], "ratio_high": spread[1]}  # fmt: skip


def result(**changes: Any) -> dict[str, Any]:
    tasks = ("all", "all_not_repeating", "chat")
    rows = [row(arm, task, rate) for arm, rate in RATES.items() for task in tasks]
    return {"machine": MACHINE, "rows": rows, "costs": {"by_context": {"128": CURVE}}, **changes}


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_every_picture_is_written_as_a_png(tmp_path: Path) -> None:
    written = save_plots(result(), tmp_path / "plots")
    names = ["rates.png", "speedup.png", "cost-curve.png", "auto-against-fixed.png"]
    assert [path.name for path in written] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_file_name_becomes_the_prefix(tmp_path: Path) -> None:
    written = save_plots(result(), tmp_path / "run.png")
    assert written[0] == tmp_path / "run-rates.png"


def test_a_picture_without_data_is_not_made(tmp_path: Path) -> None:
    bare = {"machine": MACHINE, "rows": [row("off", "all", None)]}
    assert save_plots(bare, tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()
    without_fixed = [each for each in result()["rows"] if each["arm"] != "draft_model@4"]
    assert draw_auto(result(rows=without_fixed)) is None


def test_bars_carry_the_rates_and_the_paired_interval() -> None:
    figure = draw_rates(result())
    assert figure is not None
    axes = figure.axes[0]
    widths = [patch.get_width() for patch in axes.patches]  # type: ignore[attr-defined]
    assert widths == list(RATES.values())
    assert texts(axes)[:2] == ["100", "150   1.50× (1.35 to 1.65)"]


def test_speedups_show_each_other_engine_at_its_best_setting_only() -> None:
    figure = draw_speedup(result())
    assert figure is not None
    _, labels = figure.axes[0].get_legend_handles_labels()
    assert labels == ["auto", "draft_model", "llama_cpp_draft@3"]
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert ticks == ["all", "chat"]


def test_the_cost_curve_draws_what_was_measured() -> None:
    figure = draw_cost_curve(result())
    assert figure is not None
    line = figure.axes[0].lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == (CURVE["widths"], CURVE["relative"])


def test_auto_is_held_against_the_best_fixed_arm_of_our_own() -> None:
    figure = draw_auto(result())
    assert figure is not None
    assert texts(figure.axes[0]) == ["0.95, best: draft_model@4"] * 2  # all, chat


def test_plain_decoding_counts_as_a_fixed_length() -> None:
    slow = [row(arm, "all", rate) for arm, rate in
            {"off": 100.0, "ngram@4": 60.0, "auto": 98.0}.items()]  # fmt: skip
    figure = draw_auto(result(rows=slow))
    assert figure is not None and texts(figure.axes[0]) == ["0.98, best: off"]


def test_every_picture_says_where_it_comes_from() -> None:
    assert origin(result()) == (
        "demo with demo-draft, bfloat16 · Some CPU, threads: 2\n"
        "4 prompts of prompts.jsonl, at most 64 tokens a reply · 2026-11-20"
    )
    for draw in (draw_rates, draw_speedup, draw_cost_curve, draw_auto):
        figure = draw(result())
        assert figure is not None and figure.get_supxlabel() == origin(result())
