"""A new result is held against what drafts already, on the same rows, and takes no better one's
place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localspec.machine.trained import offered_results, read_artifact
from localspec.training.judging import Judgement, Rival, judge_rival
from localspec.training.recipe import Recipe
from localspec.training.run import train
from localspec.training.target import Target
from tests.training.runs import PLACE, Said, settings

pytestmark = pytest.mark.slow  # trains


@pytest.mark.parametrize("kind", ["draft", "medusa", "eagle", "mtp"])
def test_every_kind_is_trained_and_what_was_saved_is_judged_as_it_was_before_saving(
    kind: str, target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    first = train(settings(target_folder, prompts, tmp_path, kind=kind), said)
    assert first.artifact.kind == kind and len(first.artifact.acceptance) >= 2
    again = settings(target_folder, prompts, tmp_path, kind=kind, out=tmp_path / "new",
                     in_use=(first.folder,))  # fmt: skip
    (rival,) = train(again, said).rivals
    assert rival.folder == first.folder and rival.judgement is not None
    assert rival.judgement.acceptance == first.artifact.acceptance
    if kind in ("draft", "medusa"):  # the others' loss depends on a setting of the training
        assert rival.judgement.loss == pytest.approx(first.judgement.loss, abs=1e-6)


def test_a_worse_result_has_a_folder_of_its_own_and_is_not_offered(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    home = tmp_path / "home"
    better = train(settings(target_folder, prompts, tmp_path, num_steps=24), said)
    worse = settings(target_folder, prompts, tmp_path, num_steps=1, hidden_size=4,
                     in_use=(better.folder,))  # fmt: skip
    found = train(worse, said)
    assert found.folder != better.folder and (found.folder / "config.json").is_file()
    assert found.judgement.expected_tokens < better.judgement.expected_tokens
    assert "not offered" in read_artifact(found.folder).refusal
    assert offered_results(home, target_folder) == {"draft": better.folder}
    assert train(worse, said).folder == found.folder, "the very same is not kept twice"
    assert len(list(found.folder.parent.iterdir())) == 2


def test_a_better_result_is_offered_in_the_earlier_one_s_place(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    first = train(
        settings(target_folder, prompts, tmp_path, num_steps=1, hidden_size=4, out=None), said
    )
    better = settings(target_folder, prompts, tmp_path, num_steps=24, in_use=(first.folder,))
    found = train(better, said)
    assert offered_results(tmp_path / "home", target_folder) == {"draft": found.folder}
    assert (first.folder / "config.json").is_file(), "nothing is lost"


def test_heads_that_no_chat_could_use_are_no_rivals_and_said(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    first = train(settings(target_folder, prompts, tmp_path, kind="medusa"), said)
    note = json.loads((first.folder / "made.json").read_text("utf-8"))
    (first.folder / "made.json").write_text(json.dumps(note | {"mark": "another"}), "utf-8")
    places = (first.folder, tmp_path / "gone")
    found = train(
        settings(target_folder, prompts, tmp_path, kind="medusa", out=None, in_use=places,
                 work=tmp_path / "work-b"),
        said,
    )  # fmt: skip
    other, gone = found.rivals
    assert "other weights" in other.reason and "no head at" in gone.reason
    assert not any(rival.stays_before(found.judgement) for rival in found.rivals)


def test_a_published_head_is_not_replaced_unjudged(
    target_folder: Path, prompts: Path, tmp_path: Path, said: Said
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"medusa_num_heads": 3}')
    there = settings(target_folder, prompts, tmp_path, kind="medusa", in_use=(tmp_path / "theirs",))
    found = train(there, said)
    (rival,) = found.rivals
    assert rival.judgement is None and "format" in rival.reason
    assert rival.stays_before(found.judgement)


def test_an_equally_good_rival_gives_way() -> None:
    rival = Rival(Path("old"), Judgement((0.5, 0.5), 1.0))
    assert not rival.stays_before(Judgement((0.5, 0.5), 2.0))
    assert rival.stays_before(Judgement((0.5, 0.49), 0.5))


def test_a_draft_that_the_memory_does_not_hold_stays_unmeasured(
    loaded_target: Target, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(_: Recipe) -> Judgement:
        raise AssertionError("it was loaded")

    monkeypatch.setattr("localspec.loading.fitting.free_bytes_now", lambda _: 1000)
    rival = judge_rival("draft", target_folder, loaded_target, PLACE, measured)
    assert rival.judgement is None and "for its weights" in rival.reason
    assert rival.stays_before(Judgement((0.9,), 1.0))
