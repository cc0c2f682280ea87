"""A run that is killed, wherever it stands, goes on and ends as an undisturbed one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.errors import StoreError
from localspec.machine.trained import Artifact
from localspec.training import artifact as made_file
from localspec.training.collect import AnswerLog
from localspec.training.run import train
from localspec.training.train_loop import TrainLoop
from tests.kit.waiting import until
from tests.training.runs import Said, settings

pytestmark = pytest.mark.slow  # trains


class Killed(BaseException):
    """What no handler in the program catches."""


Arrange = Callable[[pytest.MonkeyPatch, Path], None]


def dies_at(call: int, whole: Callable[..., Any]) -> Callable[..., Any]:
    """`whole`, until the call of this number, which does not return."""
    calls = [0]

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        return whole(*args, **kwargs)

    return dying


def after_an_answer(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(AnswerLog, "add", dies_at(9, AnswerLog.add))


def inside_a_step(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(TrainLoop, "backward", dies_at(3, TrainLoop.backward))


def while_judging(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(TrainLoop, "measure", dies_at(4, TrainLoop.measure))


def inside_a_checkpoint(patch: pytest.MonkeyPatch, folder: Path) -> None:
    calls, whole = [0], torch.save

    def half_written(content: Any, path: Path) -> None:
        calls[0] += 1
        whole(content, path)
        if calls[0] == 4:
            path.write_bytes(path.read_bytes()[:1000])
            raise Killed

    patch.setattr(torch, "save", half_written)


def before_the_swap(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(os, "replace", dies_at(4, os.replace))


def between_the_renames(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(Path, "rename", dies_at(1, Path.rename))


def while_it_is_copied(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(Path, "rename", dies_at(2, Path.rename))


def while_the_result_is_written(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(made_file, "asdict", dies_at(1, made_file.asdict))


@pytest.fixture(scope="module")
def undisturbed(
    target_folder: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(settings(target_folder, prompts, folder, minutes=0.0), Said()).artifact


@pytest.mark.parametrize(
    "arrange",
    [
        after_an_answer, inside_a_step, while_judging, inside_a_checkpoint, before_the_swap,
        while_the_result_is_written, between_the_renames, while_it_is_copied,
    ],
)  # fmt: skip
def test_a_killed_run_ends_as_an_undisturbed_one(
    arrange: Arrange,
    undisturbed: Artifact,
    target_folder: Path,
    prompts: Path,
    tmp_path: Path,
    said: Said,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        arrange(patch, tmp_path)
        with pytest.raises(Killed):
            train(settings(target_folder, prompts, tmp_path), said)
    assert not (tmp_path / "out").exists(), "nothing appears before it is whole"
    if arrange is not while_it_is_copied:
        assert not list((tmp_path / "home").glob("trained/*/[!.]*"))
    result = train(settings(target_folder, prompts, tmp_path), said)
    made = replace(result.artifact, made_at_utc=undisturbed.made_at_utc)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert [*result.folder.parent.iterdir()] == [result.folder], "no half result is left"
    if arrange is not after_an_answer:  # answers that are drawn anew are other answers
        assert replace(made, minutes=undisturbed.minutes) == undisturbed


def test_only_the_answers_under_way_are_lost(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        after_an_answer(patch, tmp_path)
        with pytest.raises(Killed):
            train(settings(target_folder, prompts, tmp_path), said)
    (path,) = (tmp_path / "work").rglob("answers.jsonl")
    kept = path.read_bytes()
    assert kept.count(b"\n") == 8
    path.write_bytes(kept + b'{"key": "half a li')
    train(settings(target_folder, prompts, tmp_path), said)
    assert path.read_bytes().startswith(kept)
    assert len(AnswerLog(path).answers) == 36


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = torch.save, [0]

    def full(content: Any, path: Path) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(28, "No space left on device")
        whole(content, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(StoreError, match="continues from the one before"):
        train(settings(target_folder, prompts, tmp_path), said)
    train(settings(target_folder, prompts, tmp_path), said)
    assert any("Continuing from the checkpoint at step 2" in line for line in said)


def test_a_damaged_checkpoint_is_named_and_nothing_is_unpickled(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    train(settings(target_folder, prompts, tmp_path), said)
    (path,) = (tmp_path / "work").rglob("checkpoint.pt")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(StoreError, match="Delete it to begin the training anew"):
        train(settings(target_folder, prompts, tmp_path), said)


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from localspec.training.run import train
from tests.kit.waiting import until
from tests.training.runs import settings
target, prompts, folder = map(Path, sys.argv[1:])
train(settings(target, prompts, folder, num_steps=400), print)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_process_killed_outright_is_continued_by_another(
    target_folder: Path, prompts: Path, tmp_path: Path, root: Path, said: Said
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(target_folder), str(prompts), str(tmp_path)]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL)

    def has_checkpoint() -> bool:
        assert process.poll() is None, "it ended before it could be killed"
        return bool(list((tmp_path / "work").rglob("checkpoint.pt")))

    until(has_checkpoint)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    train(settings(target_folder, prompts, tmp_path), said)
    assert any("Continuing from the checkpoint" in line for line in said)
    assert (tmp_path / "out" / "config.json").is_file()
