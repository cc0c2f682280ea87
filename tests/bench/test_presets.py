"""What the suites compare, and that flags beside one replace single values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from localspec.bench import presets, suite
from localspec.bench.arms import PEERS, parse_arms
from localspec.bench.peers import environments
from localspec.bench.peers.environments import environment_of
from localspec.bench.presets import preset
from localspec.cli import app
from localspec.drafters.registry import REGISTRY
from localspec.errors import ConfigError, SetupError, StoreError


def pretend_installed(home: Path, name: str) -> None:
    environment = environment_of(name, home)
    environment.python.parent.mkdir(parents=True)
    environment.python.write_text("")
    environment.marker.write_text(json.dumps(environment.fingerprint()))


def test_quick_takes_the_peers_that_are_installed(tmp_path: Path) -> None:
    assert set(preset("quick", tmp_path).arms) == {"off", "auto", "transformers", *REGISTRY}
    pretend_installed(tmp_path, "llama_cpp")
    assert {"llama_cpp", "llama_cpp_draft"} < set(preset("quick", tmp_path).arms)
    assert "vllm" not in preset("quick", tmp_path).arms


def test_quick_is_small(tmp_path: Path) -> None:
    chosen = preset("quick", tmp_path)
    assert (chosen.temperatures, chosen.max_tokens) == ((0.0,), 32)
    assert chosen.limit is not None and chosen.limit <= 6


def test_the_suite_of_drafters_has_all_of_them_at_three_temperatures(tmp_path: Path) -> None:
    chosen = preset("drafters", tmp_path)
    assert set(chosen.arms) == {"off", "auto", *REGISTRY}
    assert chosen.temperatures == (0.0, 0.7, 1.0)


def test_full_names_every_peer_and_every_fixed_length(tmp_path: Path) -> None:
    chosen = preset("full", tmp_path)
    names = {arm.name for arm in parse_arms(chosen.arms)}
    assert names >= {"off", "auto", *REGISTRY, *PEERS}
    assert names >= {f"{name}@{length}" for name in REGISTRY for length in range(1, 9)}
    assert (chosen.limit, chosen.temperatures) == (None, (0.0, 0.7))


def test_an_unknown_suite_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quick, drafters, full"):
        preset("fast", tmp_path)


# -- the command line -------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Settings that `bench` was run with; nothing is loaded."""
    seen: list[Any] = []

    def noting(options: Any, settings: Any, report: Any) -> dict[str, Any]:
        seen.append((options, settings))
        machine = {"target": "t", "draft": None, "dtype": "float32", "device": "cpu", "torch": "2",
                   "num_threads": 2, "controller": "cold", "max_tokens": 8}  # fmt: skip
        return {"machine": machine, "rows": [], "cells": [], "near_ties": [], "differences": [],
                "skipped": [], "ending": None}  # fmt: skip

    monkeypatch.setattr(suite, "run_bench", noting)
    return seen


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["bench", *words])


def test_without_flags_the_comparison_is_what_it_was(asked: list[Any]) -> None:
    assert run().exit_code == 0
    (_, settings), *_ = asked
    assert settings.arms == ("off", "ngram", "draft_model", "self_quant", "auto")
    assert (settings.temperatures, settings.max_tokens, settings.limit) == ((0.0,), 64, None)


def test_flags_replace_single_values_of_a_suite(asked: list[Any], tmp_path: Path) -> None:
    ended = run("--suite", "quick", "--max-tokens", "9", "--temperatures", "0,0.7",
                "--home", str(tmp_path))  # fmt: skip
    assert ended.exit_code == 0
    settings = asked[0][1]
    assert (settings.max_tokens, settings.temperatures) == (9, (0.0, 0.7))
    assert settings.limit == preset("quick", tmp_path).limit and settings.home == tmp_path


def test_one_drafter_is_compared_with_off(asked: list[Any]) -> None:
    run("--drafter", "ngram", "--model", "x")
    options, settings = asked[0]
    assert settings.arms == ("off", "ngram") and options.model == "x"


def test_the_json_goes_to_a_file_and_to_the_last_line(asked: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    ended = run("--out", str(out), "--json")
    assert json.loads(out.read_text()) == json.loads(ended.stdout.splitlines()[-1])


def test_a_file_that_cannot_be_written_is_said_before_anything_runs(
    asked: list[Any], tmp_path: Path
) -> None:
    ended = run("--out", str(tmp_path / "gone" / "bench.json"))
    assert isinstance(ended.exception, ConfigError) and asked == []


def test_setting_up_peers_compares_nothing_and_says_what_failed(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes: list[Path] = []

    def one_fails(home: Path, say: Any) -> dict[str, str]:
        homes.append(home)
        return {"vllm": "No network."}

    monkeypatch.setattr(environments, "set_up_all", one_fails)
    ended = run("--setup-peers", "--home", str(tmp_path), "--json")
    assert homes == [tmp_path] and asked == []
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "ready": ["llama_cpp"], "failed": {"vllm": "No network."},
    }  # fmt: skip
    assert isinstance(ended.exception, SetupError) and "vllm" in str(ended.exception)


def test_replaying_without_a_log_says_so(asked: list[Any], tmp_path: Path) -> None:
    ended = run("replay", "--home", str(tmp_path))
    assert isinstance(ended.exception, StoreError) and asked == []


@pytest.mark.parametrize("name", ["inflate", "replay"])
def test_what_stands_beside_the_comparison_has_help_and_json(name: str) -> None:
    shown = CliRunner().invoke(
        app, ["bench", name, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}
    )
    assert shown.exit_code == 0 and "--json" in shown.output


def test_installed_counts_an_engine_without_an_environment(tmp_path: Path) -> None:
    assert presets.installed(("transformers", "vllm"), tmp_path) == ("transformers",)
