"""A file is replaced whole or not at all, and a place that cannot be written is known before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localspec.core.files import parsed, read_json, replacing, try_lock, why_not_writable


def test_the_new_one_takes_the_old_ones_place_when_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "kept.json"
    for text in ("old", "new"):
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
            assert not path.exists() or path.read_text(encoding="utf-8") == "old"
        assert path.read_text(encoding="utf-8") == text
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt(), ValueError("not ours")])
def test_what_was_there_stays_where_writing_fails(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "kept.json"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(type(error)), replacing(path) as part:
        part.write_text("half", encoding="utf-8")
        raise error
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text("old", encoding="utf-8")
    assert why_not_writable(path) is None
    assert path.read_text(encoding="utf-8") == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_and_a_place_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert why_not_writable(tmp_path / "file" / "below.json") is not None
    assert why_not_writable(tmp_path) == "it is a folder"


def test_a_link_is_followed_and_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old", encoding="utf-8")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    with replacing(link) as part:
        part.write_text("new", encoding="utf-8")
    assert link.is_symlink() and (tmp_path / "real").read_text(encoding="utf-8") == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_is_refused_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert why_not_writable(pipe) == "it is a device or a pipe, not a file"
    with pytest.raises(OSError, match="not a file"), replacing(pipe):
        pass
    assert pipe.is_fifo()


def test_json_nested_without_end_is_a_value_error() -> None:
    assert parsed("[[1]]") == [[1]]
    with pytest.raises(ValueError, match="nested too deeply"):
        parsed("[" * 50_000 + "]" * 50_000)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe that has a name")
def test_json_is_not_awaited_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(OSError, match="a device or a pipe"):
        read_json(tmp_path / "config.json")


def test_a_file_is_locked_once(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("ab") as one, (tmp_path / "lock").open("ab") as other:
        assert try_lock(one) and not try_lock(other)
    with (tmp_path / "lock").open("ab") as after:
        assert try_lock(after)
