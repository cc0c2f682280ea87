"""A pair is not begun where it could not be kept, nor beside another training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localspec.core.errors import ConfigError, StoreError
from localspec.training.work_folder import alone_in
from tests.kit.command_line import invoke
from tools.demo_pair.__main__ import pair
from tools.demo_pair.pipeline import train
from tools.demo_pair.settings import PairSettings


def test_places_that_cannot_be_written_are_named_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    below = tmp_path / "file" / "below"
    for out, work, flag in ((below, tmp_path / "w", "--out"), (tmp_path / "o", below, "--work")):
        with pytest.raises(StoreError, match=flag):
            train(PairSettings((), (), out, work), print)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_second_training_in_one_work_folder_is_refused(tmp_path: Path) -> None:
    settings = PairSettings((), (), tmp_path / "out", tmp_path / "work")
    with alone_in(tmp_path / "work"), pytest.raises(ConfigError, match="Another training"):
        train(settings, print)


def test_the_command_has_the_flags_it_had() -> None:
    result = invoke("--help", commands={"": pair})
    assert result.exit_code == 0
    for flag in ("--corpus", "--held-out", "--work", "--start-from", "--draft-minutes", "--json"):
        assert flag in result.stdout


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_minutes": float("nan")}, "Target minutes is nan"),
        ({"target_minutes": 0.0}, "Target minutes is 0"),
        ({"target_minutes": -1.0}, "Target minutes is -1"),
        ({"draft_minutes": float("inf")}, "Draft minutes is inf"),
        ({"target_layers": 0}, "Target layers is 0"),
        ({"hidden_size": 0}, "Hidden size is 0"),
        ({"hidden_size": 12}, "Choose a multiple of 8"),
        ({"device": "quantum"}, "'quantum' is not here"),
    ],
)
def test_what_cannot_be_trained_is_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        PairSettings((), (), Path("out"), Path("work"), **changes)


def test_the_defaults_stand() -> None:
    assert PairSettings((), (), Path("out"), Path("work")).target_config().num_hidden_layers == 12
