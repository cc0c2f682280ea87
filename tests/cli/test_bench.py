"""The command line of `bench`: suites, flags, files, and where other commands went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localspec.bench import compare
from localspec.bench.arms import OtherArm, OtherEngines, parse_arms
from localspec.bench.kept import compact_json
from localspec.bench.settings import BenchSettings, suite_settings
from localspec.cli.bench import bench_with
from localspec.core.errors import ConfigError, RequestError, SetupError
from localspec.core.flags import listed, listed_numbers
from localspec.drafters.registry import REGISTRY
from tests.kit.command_line import Ended, invoke

RESULT: dict[str, Any] = {
    "machine": {"target": "t", "draft": None, "dtype": "float32", "device": "cpu", "torch": "2",
                "num_threads": 2, "controller": "cold", "max_tokens": 8, "cpu_load": 1.23456789},
    "rows": [], "cells": [], "near_ties": [], "differences": [], "skipped": [], "ending": None,
}  # fmt: skip


def others(set_up: Callable[..., Any] = lambda *_: (["x"], {})) -> OtherEngines:
    arm = OtherArm(lambda *_: pytest.fail("not opened"), takes_length=True)
    return OtherEngines({"vllm_draft": arm}, ("vllm_draft@2",), lambda _: ("vllm_draft",), set_up)


# -- suites ------------------------------------------------------------------------------------


def test_quick_is_small_and_takes_the_other_engines_that_are_installed(tmp_path: Path) -> None:
    chosen = suite_settings("quick", tmp_path)
    assert set(chosen.arms) == {"off", "auto", *REGISTRY}
    assert (chosen.temperatures, chosen.max_tokens) == ((0.0,), 32)
    assert chosen.limit is not None and chosen.limit <= 6
    assert "vllm_draft" in suite_settings("quick", tmp_path, others()).arms


def test_the_suite_of_drafters_has_all_of_them_at_three_temperatures(tmp_path: Path) -> None:
    chosen = suite_settings("drafters", tmp_path)
    assert set(chosen.arms) == {"off", "auto", *REGISTRY}
    assert chosen.temperatures == (0.0, 0.7, 1.0)


def test_full_names_every_fixed_length_and_every_other_engine(tmp_path: Path) -> None:
    engines = others()
    chosen = suite_settings("full", tmp_path, engines)
    names = {arm.name for arm in parse_arms(chosen.arms, engines.arms)}
    assert names >= {"off", "auto", *REGISTRY, "vllm_draft@2"}
    assert names >= {f"{name}@{length}" for name in REGISTRY for length in range(1, 9)}
    assert (chosen.limit, chosen.temperatures) == (None, (0.0, 0.7))


def test_an_unknown_suite_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quick, drafters, full"):
        suite_settings("fast", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": 0}, {"limit": 0}, {"temperatures": ()}, {"temperatures": (0.0, 0.0)},
     {"warm_prompts": -1}, {"peer_threads": 0}, {"peer_threads": 10**8}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BenchSettings(**changes)


def test_a_temperature_out_of_range_is_refused() -> None:
    with pytest.raises(RequestError, match="temperature"):
        BenchSettings(temperatures=(9.0,))


def test_flags_are_lists_and_a_bad_number_is_said() -> None:
    assert listed("off, ngram,") == ("off", "ngram")
    assert listed_numbers("0,0.7", float) == (0.0, 0.7)
    with pytest.raises(ConfigError, match="0;7"):
        listed_numbers("0;7", float)


# -- the command -------------------------------------------------------------------------------


@pytest.fixture
def bench_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(options, settings) that `bench` was run with; nothing is loaded."""
    seen: list[Any] = []

    def noting(options: Any, settings: Any, *_: Any) -> dict[str, Any]:
        seen.append((options, settings))
        return RESULT

    monkeypatch.setattr(compare, "run_bench", noting)
    return seen


def run(*words: str) -> Ended:
    return invoke("bench", *words)


def run_with(engines: OtherEngines, *words: str) -> Ended:
    return invoke(*words, commands={"": bench_with(lambda: engines)})


def test_without_flags_the_comparison_is_what_it_was(bench_calls: list[Any]) -> None:
    assert run().exit_code == 0
    (_, settings), *_ = bench_calls
    assert settings.arms == ("off", "ngram", "draft_model", "self_quant", "mtp", "auto")
    assert (settings.temperatures, settings.max_tokens, settings.limit) == ((0.0,), 64, None)


def test_flags_replace_single_values_of_a_suite(bench_calls: list[Any], tmp_path: Path) -> None:
    ended = run("--suite", "quick", "--max-tokens", "9", "--temperatures", "0,0.7",
                "--home", str(tmp_path))  # fmt: skip
    assert ended.exit_code == 0
    settings = bench_calls[0][1]
    assert (settings.max_tokens, settings.temperatures) == (9, (0.0, 0.7))
    assert settings.limit == 4 and settings.home == tmp_path


def test_one_drafter_is_compared_with_off(bench_calls: list[Any]) -> None:
    run("--drafter", "ngram", "--model", "x")
    options, settings = bench_calls[0]
    assert settings.arms == ("off", "ngram") and options.model == "x"


def test_a_drafter_beside_arms_is_refused(bench_calls: list[Any]) -> None:
    ended = run("--drafter", "ngram", "--arms", "off,auto")
    assert isinstance(ended.error, ConfigError) and bench_calls == []


def test_the_json_goes_to_the_last_line_and_compactly_to_a_file(
    bench_calls: list[Any], tmp_path: Path
) -> None:
    out = tmp_path / "bench.json"
    ended = run("--out", str(out), "--json")
    assert json.loads(ended.lines[-1]) == RESULT
    kept = json.loads(out.read_text())
    assert kept.pop("machine") == {**RESULT["machine"], "cpu_load": 1.23457}
    assert kept == {name: value for name, value in RESULT.items() if name != "machine"}


def test_a_kept_file_has_one_line_for_each_row() -> None:
    rows = [{"arm": arm, "acceptance_by_position": [0.123456789, 0.5]} for arm in ("off", "auto")]
    lines = compact_json({"rows": rows, "ending": None, "nothing": []}).splitlines()
    assert lines[2] == ' {"arm": "off", "acceptance_by_position": [0.123457, 0.5]},'
    assert len(lines) == 8


def test_a_file_that_cannot_be_written_is_said_before_anything_runs(
    bench_calls: list[Any], tmp_path: Path
) -> None:
    ended = run("--out", str(tmp_path / "gone" / "bench.json"))
    assert isinstance(ended.error, ConfigError) and bench_calls == []


@pytest.mark.parametrize(
    "words",
    [("--setup-peers",), ("--peer-threads", "2"), ("--arms", "off,vllm_draft@2"),
     ("--drafter", "llama_cpp")],
)  # fmt: skip
def test_other_engines_name_the_command_that_compares_them(
    bench_calls: list[Any], words: tuple[str, ...]
) -> None:
    ended = run(*words)
    assert isinstance(ended.error, ConfigError) and bench_calls == []
    assert "python -m tools.peers" in str(ended.error)


def test_a_caller_with_other_engines_has_the_same_command_with_them(
    bench_calls: list[Any], tmp_path: Path
) -> None:
    ended = run_with(others(), "--arms", "off,vllm_draft@2", "--peer-threads", "2")
    assert ended.exit_code == 0, ended
    settings = bench_calls[0][1]
    assert (settings.arms, settings.peer_threads) == (("off", "vllm_draft@2"), 2)


def test_setting_up_compares_nothing_and_says_what_failed(
    bench_calls: list[Any], tmp_path: Path
) -> None:
    homes: list[Path] = []

    def one_fails(home: Path, say: Any) -> tuple[list[str], dict[str, str]]:
        homes.append(home)
        return ["llama_cpp"], {"vllm": "No network."}

    ended = run_with(others(one_fails), "--setup-peers", "--home", str(tmp_path), "--json")
    assert homes == [tmp_path] and bench_calls == []
    assert json.loads(ended.lines[-1]) == {
        "ready": ["llama_cpp"], "failed": {"vllm": "No network."},
    }  # fmt: skip
    assert isinstance(ended.error, SetupError) and "vllm" in str(ended.error)


def test_the_table_is_printed_from_a_kept_result(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(compact_json(RESULT))
    told = run("table", str(kept))
    assert told.exit_code == 0 and "| drafter |" in told.stdout
    kept.write_text("[]")
    told = run("table", str(kept))
    assert told.exit_code != 0 and "Name a file that it wrote" in str(told.error)


@pytest.mark.slow
def test_every_kept_comparison_of_ours_can_be_printed(root: Path) -> None:
    for kept in sorted((root / "assets" / "benchmarks").glob("*.json")):
        assert run("table", str(kept)).exit_code == 0, kept.name


def test_the_command_has_help_and_json() -> None:
    shown = run("--help")
    assert shown.exit_code == 0 and "--json" in shown.stdout
