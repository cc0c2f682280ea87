"""A training from questions to a result: whole, resumed, and refused where it must be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from localspec.core.errors import ConfigError, DraftMismatch, MemoryShortage
from localspec.core.speculation import expected_tokens
from localspec.formats.fingerprint import NOTE, fingerprint
from localspec.forward.load import load_model
from localspec.machine.trained import Artifact, read_artifact
from localspec.training import run as run_file
from localspec.training.run import train
from localspec.training.train_loop import TrainLoop
from localspec.training.work_folder import alone_in, work_folder
from tests.training.runs import Said, make_folder, settings

pytestmark = pytest.mark.slow  # trains


@pytest.fixture(scope="module")
def trained(
    target_folder: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Artifact]:
    """The folders of a finished training, to be copied, and its note."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(settings(target_folder, prompts, folder), Said()).artifact


@pytest.fixture
def finished(trained: tuple[Path, Artifact], tmp_path: Path) -> Artifact:
    """A training that ended in tmp_path."""
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    return trained[1]


def test_a_draft_is_trained_and_loads_beside_its_target(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    made = train(settings(target_folder, prompts, tmp_path, num_steps=30), said).artifact
    assert read_artifact(tmp_path / "out") == made
    draft = load_model(tmp_path / "out", torch.float32, torch.device("cpu"), 64).model
    assert draft.vocab_size == 420
    token_maps = [
        Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
        for folder in (target_folder, tmp_path / "out")
    ]
    assert token_maps[0] == token_maps[1]
    first = next(line for line in said if line.startswith("held out"))
    assert made.acceptance[0] > float(first.split("position ")[1].split("%")[0]) / 100 + 0.05


def test_a_draft_learns_on_from_another_and_is_never_made_worse(
    finished: Artifact, target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    again = settings(target_folder, prompts, tmp_path, out=tmp_path / "more",
                     work=tmp_path / "more-work", start_from=tmp_path / "out")  # fmt: skip
    made = train(again, said).artifact
    assert made.before is not None
    assert made.before == pytest.approx(finished.acceptance, abs=0.05)  # kept in bf16
    tokens = [expected_tokens(rates, len(rates)) for rates in (made.before, made.acceptance)]
    assert tokens[1] >= tokens[0] - 1e-3


def answers_of(folder: Path) -> Path:
    (found,) = (folder / "work").rglob("answers.jsonl")
    return found


def test_a_second_run_asks_nothing_twice_and_says_the_same(
    finished: Artifact, target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    answers = answers_of(tmp_path).read_bytes()
    second = train(settings(target_folder, prompts, tmp_path), said)
    assert answers_of(tmp_path).read_bytes() == answers
    assert replace(second.artifact, made_at_utc=finished.made_at_utc) == finished
    assert [second.folder] == [*second.folder.parent.iterdir()], "the same content is kept once"
    assert read_artifact(tmp_path / "out") == second.artifact


def test_another_target_in_one_work_folder_goes_its_own_way(
    finished: Artifact, prompts: Path, tmp_path: Path, tokenizer: Tokenizer, said: Said
) -> None:
    """Answers of one target would teach another its own weights do not write."""
    before, first = answers_of(tmp_path), answers_of(tmp_path).read_bytes()
    (tmp_path / "work" / "thesis.tex").write_text("mine")
    retrained = make_folder(tmp_path / "retrained", tokenizer, seed=6)
    train(settings(retrained, prompts, tmp_path, out=None), said)
    assert before.read_bytes() == first
    assert len(list((tmp_path / "work").rglob("answers.jsonl"))) == 2
    assert (tmp_path / "work" / "thesis.tex").read_text() == "mine"


def test_a_training_of_an_earlier_version_goes_on_where_it_lies(
    finished: Artifact, target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    """Its folder had any name, and a note of its target."""
    old = tmp_path / "training" / "tiny"
    old.parent.mkdir()
    shutil.move(answers_of(tmp_path).parent, old)
    mark = fingerprint(target_folder)
    (old / "target.json").write_text(json.dumps({"mark": mark, "name": "tiny"}))
    answers = (old / "answers.jsonl").read_bytes()
    train(settings(target_folder, prompts, tmp_path, work=tmp_path / "training"), said)
    assert (old / "answers.jsonl").read_bytes() == answers
    assert [*(tmp_path / "training").iterdir()] == [old]
    assert work_folder(old, mark) == old, "also as it was named with --work"
    assert work_folder(old, "f" * 64) == old / ("f" * 16)


@pytest.mark.parametrize("name", ["letter.txt", "head.json", NOTE])
def test_an_out_folder_with_something_else_in_it_is_left_alone(
    name: str, target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"would be lost.*another --out"):
        train(settings(target_folder, prompts, tmp_path), said)
    assert (tmp_path / "out" / name).read_text() == "mine"
    assert not (tmp_path / "work").exists()


def test_a_copy_in_out_gives_way_only_where_home_holds_it_too(
    finished: Artifact, target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    again = settings(target_folder, prompts, tmp_path, kind="medusa")
    assert train(again, said).artifact == read_artifact(tmp_path / "out")
    assert {read_artifact(each).kind for each in (tmp_path / "home").glob("trained/*/*")} == {
        "draft", "medusa",
    }  # fmt: skip
    shutil.rmtree(tmp_path / "home")
    before = (tmp_path / "out" / NOTE).read_bytes()
    with pytest.raises(ConfigError, match="would be lost"):
        train(settings(target_folder, prompts, tmp_path, kind="eagle"), said)
    assert (tmp_path / "out" / NOTE).read_bytes() == before


def test_an_unfinished_training_with_other_options_is_not_lost(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainLoop, "save", stops_after(3, TrainLoop.save))
        with pytest.raises(KeyboardInterrupt):
            train(settings(target_folder, prompts, tmp_path), said)
    with pytest.raises(ConfigError, match=r"options .*there, .*layers.*now"):
        train(settings(target_folder, prompts, tmp_path, layers=2), said)
    train(settings(target_folder, prompts, tmp_path), said)
    assert any("Continuing from the checkpoint at step 3" in line for line in said)


def test_a_finished_training_makes_room_for_another(
    finished: Artifact, target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    made = train(settings(target_folder, prompts, tmp_path, layers=2), said).artifact
    assert not any("Continuing" in line for line in said)
    assert made.num_steps == 4


def stops_after(count: int, whole: Callable[..., None]) -> Callable[..., None]:
    """`whole`, interrupted from the keyboard after so many calls."""
    calls = [0]

    def stopping(*args: Any, **kwargs: Any) -> None:
        whole(*args, **kwargs)
        calls[0] += 1
        if calls[0] == count:
            raise KeyboardInterrupt

    return stopping


def test_a_draft_larger_than_its_target_is_refused_before_it_is_trained(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    with pytest.raises(DraftMismatch, match="could never be faster"):
        train(settings(target_folder, prompts, tmp_path, layers=8), said)
    assert not (tmp_path / "out").exists() and not list((tmp_path / "work").rglob("answers.jsonl"))


@pytest.mark.parametrize(
    "flags",
    [{"kind": "draft", "hidden_size": 128}, {"kind": "draft", "hidden_size": 0},
     {"kind": "draft", "layers": 0}, {"kind": "medusa", "num_heads": 20},
     {"kind": "eagle", "num_heads": 1000}, {"kind": "mtp", "num_heads": 7}],
)  # fmt: skip
def test_a_shape_that_cannot_be_is_refused_before_anything_is_loaded(
    flags: dict[str, Any],
    target_folder: Path,
    prompts: Path,
    tmp_path: Path,
    said: Said,
) -> None:
    wanted = settings(target_folder, prompts, tmp_path, **flags)
    with pytest.raises(ConfigError, match=r"--num-heads|--layers"):
        train(wanted, said)
    assert not said and not (tmp_path / "work").exists()


def test_a_head_too_large_for_the_memory_is_refused_before_it_is_made(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_file, "free_bytes_now", lambda _: 10**9)
    wanted = settings(target_folder, prompts, tmp_path, kind="eagle", ffn_size=1 << 20)
    with pytest.raises(MemoryShortage, match="The training needs"):
        train(wanted, said)
    assert not said


def test_a_second_training_in_one_work_folder_is_refused(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    with (
        alone_in(work_folder(tmp_path / "work", fingerprint(target_folder))),
        pytest.raises(ConfigError, match="Another training is running"),
    ):
        train(settings(target_folder, prompts, tmp_path), said)
    assert not said
    train(settings(target_folder, prompts, tmp_path), said)


def test_too_little_memory_is_said_before_the_target_is_loaded(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.loading.fitting.free_bytes_now", lambda _: 1000)
    with pytest.raises(MemoryShortage, match=r"tiny needs .* for its weights"):
        train(settings(target_folder, prompts, tmp_path), said)
    assert not said


def test_a_full_disk_is_said_before_the_first_step(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        run_file, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=1000))
    )
    with pytest.raises(MemoryShortage, match="on the disk"):
        train(settings(target_folder, prompts, tmp_path), said)
    assert not list((tmp_path / "work").rglob("checkpoint.pt"))


def test_a_narrow_draft_keeps_the_main_directions_of_the_embedding(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    train(settings(target_folder, prompts, tmp_path, hidden_size=16), said)
    draft = load_model(tmp_path / "out", torch.float32, torch.device("cpu"), 64).model
    assert draft.embed([0]).shape == (1, 16)
