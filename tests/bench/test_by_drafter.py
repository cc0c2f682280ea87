"""The table of drafters: acceptance by position, costs, and the choice against the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from localspec.bench.by_drafter import cells, chosen, columns, markdown
from localspec.bench.stage import Run
from localspec.cli import app


def run(lengths: tuple[int, ...], drafted: int = 4) -> Run:
    tokens = tuple(range(20))
    return Run(
        tokens, tokens, 100.0, len(lengths), drafted * len(lengths), sum(lengths),
        accepted_lengths=lengths, draft_ms=1.0 * len(lengths), drafted_verify_ms=5.0 * len(lengths),
    )  # fmt: skip


def row(arm: str, ratio: float | None, task: str = "all", temperature: float = 0.0) -> Any:
    rate = None if ratio is None else 100.0 * ratio
    return {
        "arm": arm, "task": task, "temperature": temperature, "ratio_to_off": ratio,
        "ratio_low": None, "ratio_high": None, "num_prompts": 3, "tokens_per_second": rate,
        "mean_accepted_length": 2.0, **columns([run((1, 2))]),
    }  # fmt: skip


def test_acceptance_by_position_counts_rounds_that_got_so_far() -> None:
    made = columns([run((0, 1, 4)), run((2,))])
    assert made["acceptance_by_position"] == [0.75, 0.5, 0.25, 0.25]
    assert made["num_draft_tokens_per_round"] == 4.0
    assert (made["draft_ms_per_round"], made["verify_ms_per_round"]) == (1.0, 5.0)


def test_an_arm_that_never_drafted_knows_nothing() -> None:
    assert set(columns([run(())]).values()) == {None}


def test_the_choice_is_held_against_the_best_single_way_off_included() -> None:
    rows = [row("off", 1.0), row("a", 1.5), row("b", 1.2), row("auto", 1.44)]
    (cell,) = cells(rows)
    assert (cell["best"], cell["auto_to_best"]) == ("a", pytest.approx(0.96))
    (cell,) = cells([row("off", 1.0), row("a", 0.5), row("auto", 0.9)])
    assert (cell["best"], cell["auto_to_best"]) == ("off", pytest.approx(0.9))
    assert chosen(cells(rows))[1].startswith("The controller's choice")
    assert chosen(cells([row("off", 1.0), row("auto", 1.0)])) == []


def test_a_cell_says_how_sure_the_comparison_is_and_how_it_stands_to_what_was_foreseeable() -> None:
    """b is the best of all by one lucky prompt; on the other half of the prompts a was."""
    timed = {
        (0.0, "all"): {
            "off": [(10, 100.0)] * 4,
            "a": [(10, 80.0)] * 4,
            "b": [(10, 100.0), (10, 100.0), (10, 20.0), (10, 90.0)],
            "auto": [(10, 80.0)] * 4,
        }
    }
    rows = [row("off", 1.0), row("a", 1.25), row("b", 1.29), row("auto", 1.25)]
    (cell,) = cells(rows, timed)
    assert cell["best"] == "b" and cell["auto_to_best"] == pytest.approx(1.25 / 1.29)
    assert cell["auto_to_best_low"] < 1.0 < cell["auto_to_best_high"]
    # Each half against the other's best: b (95 ms) on the odd ones, a (80 ms) on the even ones.
    assert cell["auto_to_foreseen"] == pytest.approx((190.0 + 160.0) / 320.0)
    assert f"{350.0 / 320.0:.2f}" in chosen([cell])[3]


def test_cells_without_a_ratio_are_left_out() -> None:
    assert cells([row("off", 1.0), row("auto", None)]) == []
    assert [c["task"] for c in cells([row("off", 1.0, "qa"), row("auto", 1.0, "qa")])] == ["qa"]


def test_the_markdown_shows_speedup_by_task_and_the_choice() -> None:
    rows = [row("off", 1.0), row("a", 1.5), row("auto", 1.44)]
    lines = markdown({"rows": rows, "cells": cells(rows)}).split("\n")
    assert "| 0 | all | 1.50 | 1.44 |" in lines
    assert "| 0 | all | `a` 1.50 | 1.44 | 0.96 (-) | - |" in lines
    assert not any("best single" in line for line in markdown({"rows": rows}).split("\n"))


def test_the_markdown_shows_cost_in_plain_steps_and_dashes() -> None:
    text = markdown({"rows": [row("off", 1.0), row("a", None)]})
    assert "| `a` | 0 | 1.00 / 0.50 / 0.00 / 0.00 | 2.00 | 4.0 | 0.60 | -x (-) |" in text
    assert "| 0 | all | - |" in text


def test_the_table_is_printed_from_a_kept_result(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"rows": [row("off", 1.0), row("a", 1.5)]}))
    told = CliRunner().invoke(app, ["bench", "table", str(kept)])
    assert told.exit_code == 0 and "| `a` |" in told.output
    kept.write_text("[]")
    told = CliRunner().invoke(app, ["bench", "table", str(kept)])
    assert told.exit_code != 0 and "Name a file that it wrote" in str(told.exception)
