"""The folders of a training are asked for first and held by one training at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.core.errors import ConfigError, StoreError
from localspec.training.work_folder import alone_in, require_writable, resumable

HOLDER = """
import sys, time
from pathlib import Path
from localspec.training.work_folder import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_place_that_cannot_be_written_names_its_flag_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    new, below = tmp_path / "new", tmp_path / "file" / "work"
    require_writable(new, new / "target.json", "--work")
    with pytest.raises(StoreError, match=r"file/work cannot be written .*with --work"):
        require_writable(below, below / "target.json", "--work")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_held_by_one_and_free_again_after_it(tmp_path: Path) -> None:
    with (
        alone_in(tmp_path / "work"),
        pytest.raises(ConfigError, match="Another training is running"),
        alone_in(tmp_path / "work"),
    ):
        raise AssertionError("two held it")
    with alone_in(tmp_path / "work"):
        pass


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_holder_stands_in_nobody_s_way(tmp_path: Path, root: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="Another training"), alone_in(tmp_path):
            pass
        os.kill(holder.pid, signal.SIGKILL)
    with alone_in(tmp_path):
        pass


@pytest.mark.slow
def test_a_stop_by_hand_says_that_the_same_command_goes_on(tmp_path: Path) -> None:
    said = list[str]()
    with pytest.raises(KeyboardInterrupt), resumable(tmp_path / "work", said.append):
        raise KeyboardInterrupt
    assert len(said) == 1 and "the same command continues" in said[0]
