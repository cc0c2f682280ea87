"""Plots: made where there is data, saying what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from localspec.bench.plots import origin, save_plots

MACHINE = {
    "target": "demo", "draft": "demo-draft", "dtype": "bfloat16", "device": "Some CPU",
    "num_threads": 2, "num_prompts": 4, "prompts": "prompts.jsonl", "max_tokens": 64,
    "measured_at_utc": "2026-11-20T10:00:00+00:00",
    "peers": {"llama_cpp": "plain", "llama_cpp_draft@3": "assisted"},
}  # fmt: skip
CURVE = {"widths": [1, 2, 4], "verify_ms": [2.0, 2.1, 2.2], "relative": [1.0, 1.05, 1.1]}
RATES = {"off": 100.0, "draft_model": 150.0, "draft_model@4": 200.0, "auto": 190.0,
         "llama_cpp": 120.0, "llama_cpp_draft@3": 260.0}  # fmt: skip
CELL = {"temperature": 0.0, "task": "chat", "best": "draft_model@4", "auto_to_best": 0.95}


def row(arm: str, task: str, rate: float | None) -> dict[str, Any]:
    ratio = None if rate is None else rate / 100.0
    spread = (None, None) if ratio is None else (0.9 * ratio, 1.1 * ratio)
    return {"arm": arm, "temperature": 0.0, "task": task, "tokens_per_second": rate,
            "ratio_to_off": ratio, "ratio_low": spread[0], "ratio_high": spread[1]}  # fmt: skip


def result(**changes: Any) -> dict[str, Any]:
    tasks = ("all", "all_not_repeating", "chat")
    rows = [row(arm, task, rate) for arm, rate in RATES.items() for task in tasks]
    costs = {"by_context": {"128": CURVE}}
    return {"machine": MACHINE, "rows": rows, "cells": [CELL], "costs": costs, **changes}


def texts(path: Path) -> list[str]:
    tree = ElementTree.parse(path)
    return ["".join(node.itertext()) for node in tree.iter("{http://www.w3.org/2000/svg}text")]


def test_every_plot_is_an_svg_that_says_where_it_comes_from(tmp_path: Path) -> None:
    written = save_plots(result(), tmp_path / "plots")
    names = ["rates.svg", "speedup.svg", "cost-curve.svg", "auto-against-best.svg"]
    assert [path.name for path in written] == names
    lines = origin(result()).split("\n")
    assert lines == [
        "demo with demo-draft, bfloat16 · Some CPU, threads: 2",
        "4 prompts of prompts.jsonl, at most 64 tokens a reply · 2026-11-20",
    ]
    assert all(set(lines) <= set(texts(path)) for path in written)


def test_a_file_name_becomes_the_prefix(tmp_path: Path) -> None:
    for name in ("run.svg", "run.png"):
        assert save_plots(result(), tmp_path / name)[0] == tmp_path / "run-rates.svg"


def test_a_plot_without_data_is_not_made(tmp_path: Path) -> None:
    bare = {"machine": MACHINE, "rows": [row("off", "all", None)], "cells": []}
    assert save_plots(bare, tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()
    only_off = [{**CELL, "best": "off"}]
    assert "auto-against-best.svg" not in {
        path.name for path in save_plots(result(cells=only_off), tmp_path / "plots")
    }


def test_bars_carry_the_rates_and_the_paired_interval(tmp_path: Path) -> None:
    shown = texts(save_plots(result(), tmp_path)[0])
    assert {"off", "100", "draft_model", "150, 1.50× (1.35 to 1.65)"} <= set(shown)


def test_speedups_show_each_other_engine_at_its_best_setting_only(tmp_path: Path) -> None:
    shown = texts(save_plots(result(), tmp_path)[1])
    assert {"auto", "draft_model", "llama_cpp_draft@3", "all", "chat"} <= set(shown)
    assert not {"llama_cpp", "draft_model@4", "off", "all_not_repeating"} & set(shown)


def test_the_cost_curve_and_the_choice_show_what_was_measured(tmp_path: Path) -> None:
    _, _, curve, auto = (texts(path) for path in save_plots(result(), tmp_path))
    assert "128 tokens of context, plain step 2.00 ms" in curve
    assert {"chat, T 0", "0.95, best: draft_model@4"} <= set(auto)
