"""A result as text and as Markdown."""

from __future__ import annotations

from typing import Any

from localspec.bench.report import is_surely_below, markdown, render

MACHINE = {"target": "t", "draft": None, "dtype": "float32", "device": "cpu", "torch": "2",
           "num_threads": 2, "controller": "cold", "max_tokens": 8}  # fmt: skip
UNKNOWN = dict.fromkeys(
    ("tokens_per_second", "ratio_to_off", "ratio_low", "ratio_high", "acceptance_rate",
     "mean_accepted_length", "repetition", "identical_to_off", "peak_memory_bytes",
     "energy_joules_per_token")
)  # fmt: skip


def row(arm: str, **values: Any) -> dict[str, Any]:
    start = {"arm": arm, "temperature": 0.0, "task": "all", "num_prompts": 3}
    return {**start, **UNKNOWN, **values}


def cell(**values: Any) -> dict[str, Any]:
    start = {"temperature": 0.7, "task": "qa", "best": "off", "best_ratio": 1.0, "auto_ratio": 0.9,
             "auto_ratio_low": 0.85, "auto_ratio_high": 0.95, "auto_to_best": 0.9,
             "auto_to_best_low": 0.85, "auto_to_best_high": 0.95,
             "auto_to_foreseen": None}  # fmt: skip
    return {**start, **values}


def result(*rows: dict[str, Any], **values: Any) -> dict[str, Any]:
    start = {"machine": MACHINE, "rows": list(rows), "cells": [], "near_ties": [],
             "differences": [], "skipped": [], "ending": None}  # fmt: skip
    return {**start, **values}


def line_of(text: str, start: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_the_unknown_is_a_dash_and_what_is_left_out_is_said() -> None:
    text = render(
        result(
            row("off"),
            row("auto", num_prompts=0, reason="no drafter."),
            near_ties=[{"prompt": "a", "arm": "auto", "position": 3, "gap": 1e-6}],
            differences=[{"prompt": "b", "arm": "auto", "position": 1, "gap": None}],
            skipped=[{"prompt": "z", "task": "chat", "reason": "too long."}],
            ending="stopped by hand.",
        )
    )
    assert "auto did not run: no drafter." in text and "Skipped z: too long." in text
    assert "Near-tie: auto on a at token 3" in text and "the output stops there" in text
    assert "Incomplete: stopped by hand." in text
    assert line_of(text, "auto ") == ["auto", "0", "all", "0", *["-"] * 7]
    assert "Memory and energy" not in text


def test_costs_have_one_line_an_arm_and_leave_out_what_nobody_knows() -> None:
    rows = [row("off", peak_memory_bytes=2**30), row("auto", peak_memory_bytes=2**31),
            row("off", task="chat", peak_memory_bytes=2**30)]  # fmt: skip
    text = render(result(*rows)).partition("Memory and energy, over all prompts\n")[2]
    assert [line.split()[0] for line in text.splitlines()] == ["arm", "off", "auto"]
    assert "2.0 GiB" in text and "joules" not in text


def test_auto_against_plain_decoding_is_shown_by_temperature_and_task() -> None:
    fine = cell(task="code", auto_ratio=1.2, auto_ratio_low=1.1, auto_ratio_high=1.3)
    alone = cell(task="math", auto_ratio=0.8, auto_ratio_low=None, auto_ratio_high=None)
    text = render(result(row("off"), cells=[cell(), fine, alone]))
    assert line_of(text, "0.7") == ["0.7", "qa", "0.90", "0.85", "to", "0.95"]
    assert "best single way" not in text, "plain decoding was the only one"
    assert "1 of 2 intervals lie below 0.97 of plain decoding: T 0.7 qa." in text, (
        "one prompt has no interval, which was counted as one that lies above"
    )


def test_auto_is_held_against_the_best_single_way_where_there_was_a_choice() -> None:
    chosen = cell(best="ngram", best_ratio=1.25, auto_to_foreseen=1.09)
    line = line_of(render(result(row("off"), cells=[chosen])), "0.7")
    assert line[6:] == ["ngram", "1.25", "0.90", "0.85", "to", "0.95", "1.09"]


def test_a_cell_is_surely_below_only_by_its_whole_interval() -> None:
    assert is_surely_below(cell()) and not is_surely_below(cell(auto_ratio_high=0.98))
    assert not is_surely_below(cell(auto_ratio_high=None))


def test_the_markdown_shows_cost_in_plain_steps_speedup_by_task_and_dashes() -> None:
    drafted = {
        "acceptance_by_position": [1.0, 0.5, 0.0, 0.0], "num_draft_tokens_per_round": 4.0,
        "draft_ms_per_round": 1.0, "verify_ms_per_round": 5.0, "mean_accepted_length": 2.0,
    }  # fmt: skip
    rows = [row("off", tokens_per_second=100.0), row("a", tokens_per_second=150.0, **drafted),
            row("b")]  # fmt: skip
    lines = markdown({"rows": rows}).split("\n")
    assert "| `a` | 0 | 1.00 / 0.50 / 0.00 / 0.00 | 2.00 | 4.0 | 0.60 | - (-) |" in lines
    assert "| `b` | 0 | - | - | - | - | - (-) |" in lines
    assert "| 0 | all | 1.50 | - |" in lines
    assert not any("best single" in line for line in lines)


def test_the_markdown_shows_the_cells_of_this_version_and_of_earlier_ones() -> None:
    old = {name: value for name, value in cell().items() if "auto_ratio_" not in name}
    lines = markdown({"rows": [], "cells": [cell(), old]}).split("\n")
    assert "| 0.7 | qa | 0.90 (0.85 to 0.95) | `off` 1.00 | 0.90 (0.85 to 0.95) | - |" in lines
    assert "| 0.7 | qa | 0.90 (-) | `off` 1.00 | 0.90 (0.85 to 0.95) | - |" in lines
