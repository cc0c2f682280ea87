"""A pair is not begun where it could not be kept, nor beside another training."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from localspec.errors import ConfigError, StoreError
from localspec.training.places import alone_in
from tools.demo_pair.__main__ import app
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
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for flag in ("--corpus", "--held-out", "--work", "--start-from", "--draft-minutes", "--json"):
        assert flag in result.output
