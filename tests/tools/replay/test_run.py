"""A log in, a table of policies out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localspec.core.decoding import Step
from localspec.core.errors import ConfigError, StoreError
from tests.tools.replay.logs import log_of
from tools.replay.__main__ import app
from tools.replay.run import render, run_replay

PLAIN = (Step("off", 0, 0, 1, 0.0, 10.0, 100),) * 4
GOOD = (Step("draft_model", 4, 4, 5, 4.0, 11.0, 104, signal="model"),) * 6
ROW_KEYS = [
    "policy", "tokens_per_second", "ratio_to_off", "ratio_to_best_fixed", "num_rounds",
    "num_probes", "acceptance_rate", "host_us",
]  # fmt: skip


def quiet(_: str) -> None:
    pass


@pytest.fixture
def log(tmp_path: Path) -> Path:
    log_of(tmp_path / "log.db", *((*PLAIN, *GOOD),) * 12).close()
    return tmp_path / "log.db"


def test_every_policy_has_a_row_and_a_good_drafter_wins(log: Path) -> None:
    result = run_replay(log, (), 0, quiet)
    (world,) = result["worlds"]
    rows = {row["policy"]: row for row in world["rows"]}
    assert list(rows)[:3] == ["auto", "off", "draft_model@1"] and len(rows) == 12
    assert all(list(row) == ROW_KEYS for row in rows.values())
    assert rows["off"]["ratio_to_off"] == 1.0 < rows["auto"]["ratio_to_off"]
    assert rows[world["best_fixed"]]["ratio_to_best_fixed"] == 1.0
    assert max(row["ratio_to_best_fixed"] for row in rows.values() if "@" in row["policy"]) == 1.0
    assert rows["off"]["acceptance_rate"] is None and rows["off"]["host_us"] is None
    assert rows["auto"]["host_us"] > 0.0
    json.dumps(result)


def test_asked_for_policies_alone_are_shown(log: Path) -> None:
    result = run_replay(log, ("auto", "draft_model", "draft_model@4", "auto"), 0, quiet)
    policies = [row["policy"] for row in result["worlds"][0]["rows"]]
    assert policies == ["auto", "draft_model", "draft_model@4"]


def test_the_same_seed_gives_the_same_rows(log: Path) -> None:
    first, again = (run_replay(log, ("auto",), 5, quiet) for _ in range(2))
    for result in (first, again):
        result["worlds"][0]["rows"][0].pop("host_us")
    assert first == again


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("draft_modle", "Did you mean 'draft_model'"),
        ("draft_model@", "no policy"),
        ("draft_model@16", "from 1 to 15"),
        ("auto@3", "no policy"),
    ],
)
def test_a_policy_that_is_none_is_refused(log: Path, policy: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_replay(log, (policy,), 0, quiet)


def test_the_table_names_best_first_and_shows_what_is_unknown_as_a_dash(log: Path) -> None:
    text = render(run_replay(log, ("off", "auto", "draft_model@4"), 0, quiet))
    lines = text.splitlines()
    assert lines[0].startswith("big, small, cpu, fp32: 408 tokens in 12 turns, best fixed draft")
    assert lines[1].startswith("costs: medians of the logged rounds; as logged 26")
    assert lines[2].split()[0] == "policy" and lines[-3].split()[0] == "off"
    assert lines[-3].split()[-2:] == ["-", "-"]
    assert lines[-1].startswith("Drawn, not logged")


def test_a_combination_without_costs_is_named(tmp_path: Path) -> None:
    log_of(tmp_path / "log.db", GOOD).close()
    result = run_replay(tmp_path / "log.db", (), 0, quiet)
    assert result["worlds"] == []
    assert "Left out: big, small, cpu, fp32: its rounds do not say" in render(result)


def test_the_command_has_json_and_says_where_there_is_no_log(tmp_path: Path) -> None:
    log_of(tmp_path / "localspec.db", *((*PLAIN, *GOOD),) * 12).close()
    told = CliRunner().invoke(app, ["--policies", "auto", "--home", str(tmp_path), "--json"])
    assert len(json.loads(told.stdout.splitlines()[-1])["worlds"]) == 1
    refused = CliRunner().invoke(app, ["--home", str(tmp_path / "none")])
    assert isinstance(refused.exception, StoreError)
