"""The flags of `generate` that choose a kind of text and leniency, on a stand-in for the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from localspec.backend import Request, TurnStats
from localspec.cli import app
from localspec.generate_command import stats_json
from localspec.leniency import Leniency, Threshold, Typical

PROMPT = "Write a function that adds."
Asked = list[Request]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The requests that reach the engine, which answers each with three tokens."""
    requests: Asked = []

    def answer(options: object, request: Request, home: object) -> dict[str, Any]:
        requests.append(request)
        is_exact = request.sampling.leniency is None
        stats = TurnStats(4, num_output_tokens=3, exact=is_exact, num_lenient_tokens=1 - is_exact)
        return {"text": "a b c", "stats": stats_json(stats)}

    monkeypatch.setattr("localspec.generate_command.answer", answer)
    return requests


def run(home: Path, *flags: str) -> list[str]:
    ended = CliRunner().invoke(app, ["generate", PROMPT, "--home", str(home), "--json", *flags])
    assert ended.exit_code == 0, ended.output
    return ended.output.splitlines()


@pytest.mark.parametrize(
    ("flags", "workload", "rule"),
    [
        ((), "code", None),
        (("--workload", "story"), "story", None),
        (("--lenient", "threshold"), "code", Threshold(0.75, 0.2)),
        (("--lenient", "threshold", "--workload", "story"), "story", Threshold(0.5, 0.1)),
        (("--lenient", "typical"), "code", Typical()),
        (("--lenient", "threshold", "--workload", "chat"), "chat", None),
    ],
)
def test_flags_settle_the_kind_and_the_rule(
    asked: Asked, tmp_path: Path, flags: tuple[str, ...], workload: str, rule: Leniency | None
) -> None:
    *shown, last = run(tmp_path, *flags)
    assert asked[0].sampling.leniency == rule
    found = json.loads(last)
    assert (found["workload"], found["stats"]["exact"]) == (workload, rule is None)
    assert found["is_workload_recognised"] is ("--workload" not in flags)
    assert ("1 of 3 tokens would have been refused" in shown[-1]) is (rule is not None)


def test_a_profile_in_ones_home_is_lenient_and_a_flag_overrides_it(
    asked: Asked, tmp_path: Path
) -> None:
    own = tmp_path / "profiles" / "workloads" / "code.toml"
    own.parent.mkdir(parents=True)
    own.write_text("threshold = 0.9\nlenient = true\nfirst_num_draft_tokens = 5\n")
    run(tmp_path)
    run(tmp_path, "--lenient", "exact")
    assert [one.sampling.leniency for one in asked] == [Threshold(0.9), None]
    assert [one.first_num_draft_tokens for one in asked] == [5, 5]
