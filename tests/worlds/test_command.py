"""Policies in made-up worlds, as `python -m tests.worlds` shows them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from localspec.core.errors import ConfigError
from tests.worlds import contest
from tests.worlds.__main__ import main
from tests.worlds.contest import compared, render, run_contest
from tests.worlds.made_up import MODEL, all_worlds, stationary
from tests.worlds.world import World

ROW_KEYS = [
    "policy", "tokens_per_second", "ratio_to_off", "ratio_to_best_fixed", "num_rounds",
    "num_probes", "acceptance_rate", "host_us",
]  # fmt: skip
POLICIES = ("off", "auto", f"{MODEL}@4")


@cache
def short_worlds(seed: int) -> tuple[World, ...]:
    """Two turns of two texts: one whose drafts are accepted, one whose drafts are not."""
    worlds = (stationary("flat", 0.95, seed), stationary("steep", 0.2, seed))
    return tuple(replace(world, turns=world.turns[:2]) for world in worlds)


@pytest.fixture(autouse=True)
def only_short_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "all_worlds", short_worlds)


def played(*policies: str, num_seeds: int = 1, names: tuple[str, ...] = ()) -> dict[str, Any]:
    return run_contest(policies or POLICIES, num_seeds, names, lambda phrase: None)


def test_every_policy_has_a_row_and_a_good_drafter_wins() -> None:
    good, bad = played()["worlds"]
    rows = {row["policy"]: row for row in good["rows"]}
    assert list(rows) == list(POLICIES)
    assert all(list(row) == ROW_KEYS for row in rows.values())
    assert rows["off"]["ratio_to_off"] == pytest.approx(1.0)
    assert rows["auto"]["ratio_to_off"] > 1.0
    assert rows[f"{MODEL}@4"]["ratio_to_best_fixed"] <= 1.0
    assert rows["off"]["acceptance_rate"] is None and rows["off"]["host_us"] is None
    assert rows["auto"]["host_us"] > 0.0
    assert (good["best_fixed"].partition("@")[0], bad["best_fixed"]) == (MODEL, "off")


def test_the_summary_holds_mean_and_least_over_worlds_and_seeds() -> None:
    result = played(num_seeds=2)
    assert [world["seed"] for world in result["worlds"]] == [0, 0, 1, 1]
    ratios = [world["rows"][2]["ratio_to_best_fixed"] for world in result["worlds"]]
    summary = result["summary"][2]
    assert (summary["policy"], summary["num_plays"]) == (f"{MODEL}@4", 4)
    assert summary["mean_ratio_to_best_fixed"] == pytest.approx(sum(ratios) / 4)
    assert summary["least_ratio_to_best_fixed"] == min(ratios)


def test_the_same_seed_gives_the_same_rows() -> None:
    assert played("auto") == played("auto")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("draft_modle", "Did you mean 'draft_model'"),
        ("draft_model@", "no policy"),
        ("draft_model@16", "from 1 to 15"),
        ("auto@3", "no policy"),
    ],
)
def test_an_unknown_policy_is_refused(policy: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        played(policy)


def test_the_table_puts_the_best_rate_first() -> None:
    lines = render(played(names=("flat",))).splitlines()
    assert lines[0].startswith("flat, 0.95 everywhere, seed 0: 400 tokens in 2 turns, best fixed d")
    assert lines[1].split()[0] == "policy" and lines[4].split()[0] == "off"
    assert lines[4].split()[-2:] == ["-", "-"]
    assert [line.split()[:2] for line in lines[7:]] == [[name, "1"] for name in POLICIES]


def test_the_command_plays_the_named_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--worlds", "steep", "--json"]) == 0
    (world,) = json.loads(capsys.readouterr().out.splitlines()[-1])["worlds"]
    assert world["name"] == "steep, 0.2 everywhere"
    assert main(["--worlds", "nowhere"]) == 1
    assert "flat, 0.95 everywhere; steep" in capsys.readouterr().err


def test_a_change_that_costs_one_world_too_much_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against itself nothing is lost; against a better past the world that lost is named."""
    assert main(["--json"]) == 0
    *_, printed = capsys.readouterr().out.splitlines()
    earlier = tmp_path / "earlier.txt"
    earlier.write_text(printed)
    assert main(["--against", str(earlier)]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .endswith("No world breaks the rule (mean -0.01, worst seed -0.03).")
    )
    result = json.loads(printed)
    result["worlds"][1]["rows"][0]["ratio_to_best_fixed"] += 0.02
    earlier.write_text(json.dumps(result))
    assert main(["--against", str(earlier)]) == 1
    assert "1 of 2 break the rule" in (said := capsys.readouterr().out.splitlines()[-1])
    assert said.endswith("steep, 0.2 everywhere (mean -0.020).")


@pytest.mark.parametrize("text", ["", "no result", "{}"])
def test_a_file_without_a_result_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "earlier.txt"
    earlier.write_text(text)
    assert main(["--against", str(earlier)]) == 1
    assert "holds no result" in capsys.readouterr().err


def test_the_seeds_that_both_results_have_are_compared() -> None:
    few, many = played(), played(num_seeds=2)
    assert all(row["mean_before"] == row["mean_after"] for row in compared(many, few))
    with pytest.raises(ConfigError, match="has 1 seeds and this one 2"):
        compared(few, many)


@pytest.mark.slow
def test_worlds_of_one_seed_have_different_names() -> None:
    names = [world.name for world in all_worlds(0)]
    assert len(names) == len(set(names)) > 30, names
