"""A pair is not begun where it could not be kept, nor beside another training."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.errors import ConfigError, StoreError
from localspec.training.places import alone_in
from localspec.training.run import TrainSettings, train


def test_places_that_cannot_be_written_are_named_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    below = tmp_path / "file" / "below"
    for out, work, flag in ((below, tmp_path / "w", "--out"), (tmp_path / "o", below, "--work")):
        with pytest.raises(StoreError, match=flag):
            train(TrainSettings((), (), out, work), print)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_second_training_in_one_work_folder_is_refused(tmp_path: Path) -> None:
    settings = TrainSettings((), (), tmp_path / "out", tmp_path / "work")
    with alone_in(tmp_path / "work"), pytest.raises(ConfigError, match="Another training"):
        train(settings, print)
