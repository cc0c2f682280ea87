"""What was trained is offered by a profile that the app itself reads, unless it would not help."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.core.config import SHIPPED_PROFILES, Settings, find_profile, load_profiles
from localspec.core.errors import ConfigError
from localspec.training import registration
from localspec.training.artifact import Artifact
from localspec.training.judging import Judgement, Rival
from localspec.training.registration import (
    offer,
    register,
    slug,
    summary,
    toml,
)
from localspec.training.run import TrainResult


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    home = tmp_path / "home"
    return Settings(home, (home / "profiles" / "models", SHIPPED_PROFILES))


def head(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "head.json").write_text(f'{{"kind": "{kind}"}}')
    return folder


def test_a_shipped_family_keeps_all_it_had_and_gains_the_draft(
    settings: Settings, tmp_path: Path
) -> None:
    draft = tmp_path / "drafts" / "personal"
    before = find_profile("qwen3", load_profiles(settings.profile_folders))
    path = offer(settings, "Qwen/Qwen3-8B", tmp_path / "elsewhere", "draft", draft)
    assert path == settings.home / "profiles" / "models" / "qwen3.toml"
    after = find_profile("qwen3", load_profiles(settings.profile_folders))
    assert after.models.keys() - before.models.keys() == {"Qwen/Qwen3-8B-personal"}
    entry = after.models["Qwen/Qwen3-8B"]
    assert entry.drafts == ("Qwen/Qwen3-8B-personal", *before.models["Qwen/Qwen3-8B"].drafts)
    assert after.models["Qwen/Qwen3-8B-personal"].folder == draft
    unchanged = [name for name in before.models if name != "Qwen/Qwen3-8B"]
    assert all(after.models[name] == before.models[name] for name in unchanged)
    assert (after.title, after.default) == (before.title, before.default)


def test_the_demo_target_is_known_by_its_folder(settings: Settings, tmp_path: Path) -> None:
    folder = load_profiles(settings.profile_folders)["demo"].models["localspec/demo"].folder
    assert folder is not None
    path = offer(settings, "any name", folder, "medusa", head(tmp_path / "eagle", "eagle"))
    assert path.name == "demo.toml"
    demo = load_profiles(settings.profile_folders)["demo"]
    assert demo.models["localspec/demo"].heads[-1] == (tmp_path / "eagle").resolve()
    assert demo.models["localspec/demo"].folder == folder


def test_a_target_that_no_profile_knows_gets_one_of_its_own(
    settings: Settings, tmp_path: Path
) -> None:
    target = tmp_path / 'my "model" é'
    target.mkdir()
    path = offer(settings, target.name, target, "medusa", head(tmp_path / "m", "medusa"))
    found = load_profiles(settings.profile_folders)[path.stem]
    assert found.models[found.default].folder == target
    assert found.models[found.default].heads == ((tmp_path / "m").resolve(),)
    offer(settings, target.name, target, "draft", tmp_path / "distilled")
    again = load_profiles(settings.profile_folders)[path.stem]
    (draft_id,) = again.models[again.default].drafts
    assert again.models[draft_id].folder == tmp_path / "distilled"
    assert again.models[again.default].heads == found.models[found.default].heads


def test_a_newer_head_takes_the_place_of_its_kind_only(settings: Settings, tmp_path: Path) -> None:
    for name, kind in (("a", "medusa"), ("b", "eagle"), ("c", "medusa")):
        offer(settings, "t", tmp_path, "medusa", head(tmp_path / name, kind))
    entry = load_profiles(settings.profile_folders)["t"].models["t"]
    assert [folder.name for folder in entry.heads] == ["b", "c"]


def weights(folder: Path, content: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    return folder


def test_two_folders_of_one_name_are_two_targets(settings: Settings, tmp_path: Path) -> None:
    first, second = (weights(tmp_path / name / "target", name) for name in "ab")
    one = offer(settings, "target", first, "medusa", head(tmp_path / "one", "medusa"))
    two = offer(settings, "target", second, "medusa", head(tmp_path / "two", "medusa"))
    assert one.stem == "target" and two.stem.startswith("target-")
    found = load_profiles(settings.profile_folders)
    for path, folder, own in ((one, first, "one"), (two, second, "two")):
        (entry,) = found[path.stem].models.values()
        assert (entry.folder, entry.heads) == (folder, (tmp_path / own,))
    assert offer(settings, "target", second, "medusa", tmp_path / "two") == two, "once and for all"


def test_a_folder_named_as_a_shipped_profile_hides_none_of_it(
    settings: Settings, tmp_path: Path
) -> None:
    folder = weights(tmp_path / "demo", "mine")
    path = offer(settings, "demo", folder, "medusa", head(tmp_path / "m", "medusa"))
    assert path.stem != "demo"
    assert "localspec/demo" in load_profiles(settings.profile_folders)["demo"].models


@pytest.mark.parametrize("kind", ["draft", "head"])
def test_what_was_accepted_before_is_not_said_of_the_new_one(
    kind: str, settings: Settings, tmp_path: Path
) -> None:
    demo = load_profiles(settings.profile_folders)["demo"].models["localspec/demo"]
    assert demo.accepted is not None and demo.folder is not None
    if kind == "draft":
        offer(settings, "localspec/demo", demo.folder, "draft", tmp_path / "distilled")
    else:
        offer(settings, "localspec/demo", demo.folder, "medusa", head(tmp_path / "m", "medusa"))
    after = load_profiles(settings.profile_folders)["demo"].models["localspec/demo"]
    assert after.accepted is None


def test_the_person_s_older_profile_is_kept_beside_the_new_one(
    settings: Settings, tmp_path: Path
) -> None:
    path = offer(settings, "t", tmp_path, "medusa", head(tmp_path / "a", "medusa"))
    own = path.read_text("utf-8") + "# my remark\n"
    path.write_text(own, "utf-8")
    offer(settings, "t", tmp_path, "medusa", head(tmp_path / "b", "eagle"))
    assert path.with_suffix(".toml.bak").read_text("utf-8") == own


def test_a_profile_that_could_not_be_read_takes_no_one_s_place(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = offer(settings, "t", tmp_path, "medusa", head(tmp_path / "a", "medusa"))
    before = path.read_bytes()
    monkeypatch.setattr(registration, "toml", lambda table: toml(table) + 'odd = "key"\n')
    with pytest.raises(ConfigError, match="odd"):
        offer(settings, "t", tmp_path, "medusa", head(tmp_path / "b", "eagle"))
    assert path.read_bytes() == before


def test_names_become_folders_that_every_system_takes() -> None:
    assert slug("Qwen/Qwen3-8B") == "Qwen-Qwen3-8B"
    assert slug("..") == "model"


def result(
    folder: Path,
    acceptance: tuple[float, ...],
    *rivals: Rival,
    before: tuple[float, ...] | None = None,
) -> TrainResult:
    artifact = Artifact("medusa", "t", "mark", acceptance, before, 1, 1, 0.1)
    return TrainResult(artifact, head(folder, "medusa"), Judgement(acceptance, 1.0), rivals)


@pytest.mark.parametrize("acceptance", [(0.0, 0.0), (0.004, 1.0), ()])
def test_a_head_that_accepts_nothing_is_kept_and_not_offered(
    acceptance: tuple[float, ...], settings: Settings, tmp_path: Path
) -> None:
    made = result(tmp_path / "a head", acceptance)
    profile, notice = register(settings, "t", tmp_path, made)
    assert profile is None and notice is not None
    assert "accepted 0 %" in notice and f'--heads "{tmp_path / "a head"}"' in notice
    assert not (settings.home / "profiles").exists()
    assert "from now on" not in summary(made, profile, notice)


def test_a_head_that_helps_is_offered(settings: Settings, tmp_path: Path) -> None:
    made = result(tmp_path / "m", (0.3,), Rival(tmp_path / "old", Judgement((0.2,), 1.0)))
    profile, notice = register(settings, "t", tmp_path, made)
    assert profile is not None and notice is None
    said = summary(made, profile, notice)
    assert "from now on" in said and "gets 1.20 tokens a round" in said


@pytest.mark.parametrize(
    ("rival", "before", "reason"),
    [
        (Judgement((0.9,), 1.0), None, "gets 1.90 tokens a round on the same held-out rows"),
        (None, None, "could not be compared with it (no memory)"),
        (Judgement((0.1,), 1.0), (0.3,), "got no better than the draft it began with"),
    ],
)
def test_what_is_no_improvement_is_not_offered(
    rival: Judgement | None,
    before: tuple[float, ...] | None,
    reason: str,
    settings: Settings,
    tmp_path: Path,
) -> None:
    made = result(tmp_path / "m", (0.3,), Rival(tmp_path / "o", rival, "no memory."), before=before)
    profile, notice = register(settings, "t", tmp_path, made)
    assert profile is None and notice is not None and reason in notice
