"""Results of trainings are found by the weights of their target, and offered by their note."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from localspec.core.config import SHIPPED_PROFILES, Settings
from localspec.core.errors import ModelError
from localspec.core.options import LoadOptions
from localspec.formats.fingerprint import NOTE, fingerprint, require_trained_for
from localspec.machine.catalogue import folder_model
from localspec.machine.plan_report import make_plans
from localspec.machine.sources import resolve
from localspec.machine.trained import (
    Artifact,
    offered_results,
    read_artifact,
    shelf_of,
    trained_drafts,
)
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tiny import agreeing_draft, tiny_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft for it, and a target of the same name with other weights."""
    root = tmp_path_factory.mktemp("models")
    module = tiny_llama(num_layers=2, vocab_size=VOCAB_SIZE)
    save_model(root / "target", module)
    save_model(root / "draft", agreeing_draft(module))
    save_model(root / "other" / "target", tiny_llama(9, num_layers=2, vocab_size=VOCAB_SIZE))
    return root


@pytest.fixture
def trained_target(models: Path) -> Path:
    return models / "target"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def kept(home: Path, target: Path, name: str, kind: str = "medusa", **changes: Any) -> Path:
    """A result for a target. changes: of its note; from: a folder with its files."""
    source = changes.pop("source", None)
    folder = shelf_of(home, fingerprint(target)) / name
    if source is None:
        folder.mkdir(parents=True)
    else:
        shutil.copytree(source, folder)
    values: dict[str, Any] = {
        "kind": kind, "target": target.name, "mark": fingerprint(target), "acceptance": (0.5,),
        "before": None, "num_tokens": 1, "num_steps": 1, "minutes": 1.0, **changes,
    }  # fmt: skip
    (folder / NOTE).write_text(json.dumps(asdict(Artifact(**values))), encoding="utf-8")
    return folder


def test_a_result_is_found_by_weights_and_not_by_name(
    home: Path, trained_target: Path, models: Path, tmp_path: Path
) -> None:
    folder = kept(home, trained_target, "one")
    moved = shutil.copytree(trained_target, tmp_path / "under another name")
    assert (
        offered_results(home, trained_target) == offered_results(home, moved) == {"medusa": folder}
    )
    assert offered_results(home, models / "other" / "target") == {}
    assert offered_results(tmp_path / "no home", trained_target) == {}


def test_the_newest_of_a_kind_is_offered_unless_its_note_says_why_not(
    home: Path, trained_target: Path
) -> None:
    kept(home, trained_target, "a", made_at_utc="2026-11-01")
    newer = kept(home, trained_target, "b", made_at_utc="2026-11-02")
    kept(
        home,
        trained_target,
        "c",
        made_at_utc="2026-11-03",
        refusal="It is kept and not offered: worse.",
    )
    other = kept(home, trained_target, "d", "eagle")
    damaged = kept(home, trained_target, "e", "mtp")
    (damaged / NOTE).write_text("{")
    kept(home, trained_target, ".half.part", "mtp")
    assert offered_results(home, trained_target) == {"medusa": newer, "eagle": other}
    shutil.rmtree(newer)
    assert offered_results(home, trained_target)["medusa"].name == "a", "deleting one withdraws it"


def test_what_was_trained_is_loaded_after_what_is_named_and_before_a_profile_s(
    home: Path, trained_target: Path, models: Path, tmp_path: Path
) -> None:
    profile = home / "profiles" / "models" / "own.toml"
    profile.parent.mkdir(parents=True)
    (tmp_path / "of profile").mkdir()
    profile.write_text(
        f'default = "own"\n[models.own]\nlicense = "none"\nfolder = "{trained_target}"\n'
        f'drafts = ["{models / "draft"}"]\nheads = ["{tmp_path / "of profile"}"]\n'
        f'accepted = "{tmp_path / "accepted.json"}"\n'
    )
    before = resolve(LoadOptions(model="own", home=home))
    assert before.draft is not None and before.draft.path == models / "draft"
    assert before.heads == (tmp_path / "of profile",)
    assert before.accepted is not None
    draft = kept(home, trained_target, "draft", "draft", source=models / "draft")
    head = kept(home, trained_target, "head")
    (tmp_path / "named").mkdir()
    found = resolve(LoadOptions(model="own", home=home, heads=(str(tmp_path / "named"),)))
    assert found.draft is not None
    assert (found.draft.path, found.draft.name) == (draft, "draft")
    assert found.heads == (tmp_path / "named", head, tmp_path / "of profile")
    assert found.accepted is None, "it was measured with another draft"
    named = resolve(LoadOptions(model=str(trained_target), home=home, draft=str(models / "draft")))
    assert named.draft is not None and named.draft.path == models / "draft"


def test_a_plan_and_the_models_tab_count_the_draft_that_was_trained(
    home: Path, trained_target: Path, models: Path
) -> None:
    settings = Settings(home, (home / "profiles" / "models", SHIPPED_PROFILES))
    bare = make_plans(LoadOptions(model=str(trained_target), context=256), settings)
    assert all(each.draft is None for each in bare.plans)
    draft = kept(home, trained_target, "draft", "draft", source=models / "draft")
    assert [each.path for each in trained_drafts(home, trained_target)] == [draft]
    plans = make_plans(LoadOptions(model=str(trained_target), context=256), settings).plans
    assert any(each.draft_name == "draft" for each in plans)
    (offered,) = folder_model(trained_target, home=home).drafts
    assert offered.id == str(draft) and offered.is_here, "a name to load it by"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The weight files that are opened while the test runs."""
    opened, whole = list[Path](), Path.open

    def noting(path: Path, *rest: Any, **named: Any) -> Any:
        opened.extend([path] if path.suffix == ".safetensors" else [])
        return whole(path, *rest, **named)

    monkeypatch.setattr(Path, "open", noting)
    yield opened


def test_weights_are_read_for_it_once_and_never_where_nothing_was_trained(
    home: Path, models: Path, tmp_path: Path, reads: list[Path]
) -> None:
    target = shutil.copytree(models / "target", tmp_path / "target")
    reads.clear()
    assert offered_results(home, target) == {} and not reads
    kept(home, target, "one")
    for _ in range(3):
        assert offered_results(home, target)
    assert len(reads) == 1


def test_a_result_of_an_earlier_version_is_read_and_still_names_its_target(
    trained_target: Path, tmp_path: Path
) -> None:
    """It had no date and no reason in its note, and lay in a folder of any name."""
    mark = fingerprint(trained_target)
    note = {"made_by": "x", "kind": "eagle", "target": "target", "mark": mark,
            "acceptance": [0.4, 0.2], "before": None, "num_tokens": 5, "num_steps": 2,
            "minutes": 0.5, "is_personal": False}  # fmt: skip
    (tmp_path / NOTE).write_text(json.dumps(note))
    found = read_artifact(tmp_path)
    assert (found.acceptance, found.refusal) == ((0.4, 0.2), "")
    require_trained_for(tmp_path, trained_target)
    (tmp_path / NOTE).write_text(json.dumps(note | {"mark": "another"}))
    with pytest.raises(ModelError, match="other weights"):
        require_trained_for(tmp_path, trained_target)


def test_a_folder_that_was_not_trained_here_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="was not made by"):
        read_artifact(tmp_path)
    (tmp_path / NOTE).write_text("[]")
    with pytest.raises(ModelError, match="is damaged"):
        read_artifact(tmp_path)
