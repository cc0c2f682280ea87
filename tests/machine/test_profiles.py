"""Profiles of models: what is accepted, and how a mistake is answered."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localspec.core.config import PROJECT_FOLDER, SHIPPED_PROFILES
from localspec.core.errors import ConfigError, ModelError
from localspec.machine.model import Model
from localspec.machine.profiles import find_profile, load_profile, load_profiles

SHIPPED = load_profiles((SHIPPED_PROFILES,))
GOOD = """
title = "Family"
family = "llama"
default = "a/b"

[models."a/b"]
license = "Apache-2.0"
num_layers = 2
hidden_size = 8
num_heads = 2
num_kv_heads = 1
head_dim = 4
intermediate_size = 16
vocab_size = 10
context_length = 64
is_tied = true
drafts = ["a/c"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "family.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_profile_is_read_into_its_entries(tmp_path: Path) -> None:
    profile = load_profile(written(tmp_path, GOOD))
    entry = profile.models["a/b"]
    assert (profile.name, profile.title, profile.default) == ("family", "Family", "a/b")
    shape = (entry.shape.family, entry.shape.num_layers, entry.shape.is_tied)
    assert shape == ("llama", 2, True)
    assert entry.drafts == (Model("a/c"),)


def test_a_ready_number_of_parameters_comes_before_the_estimate_by_the_sizes(
    tmp_path: Path,
) -> None:
    estimated = load_profile(written(tmp_path, GOOD)).models["a/b"].shape
    assert estimated.num_params == 10 * 8 + 2 * (2 * 8 * (8 + 4) + 3 * 8 * 16 + 2 * 8) + 8
    said = load_profile(written(tmp_path, GOOD + "num_params = 1300\n")).models["a/b"].shape
    assert (said.num_params, said.linear_params) == (1300, estimated.linear_params)
    for profile in SHIPPED.values():
        for model in profile.models.values():
            if model.known_shape is not None:
                assert model.shape.counted is not None, f"{model.id} carries no number"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("num_kv_head", "num_kv_heads"), ("licence", "license"), ("draft", "drafts")],
)
def test_typo_in_a_profile_names_the_nearest_key(tmp_path: Path, wrong: str, right: str) -> None:
    text = GOOD.replace(f"{right} =", f"{wrong} =")
    with pytest.raises(ConfigError, match=f"'{wrong}'. Did you mean '{right}'"):
        load_profile(written(tmp_path, text))


def test_a_typo_at_the_top_names_the_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'model'\. Did you mean 'models'"):
        load_profile(written(tmp_path, GOOD.replace("[models.", "[model.")))


@pytest.mark.parametrize("key", ["license", "num_layers", "is_tied", "drafts"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{key} =")]
    with pytest.raises(ConfigError, match=f"has no '{key}'"):
        load_profile(written(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize(
    ("line", "wrong", "word"),
    [
        ("num_layers = 2", 'num_layers = "2"', "whole number"),
        ("num_layers = 2", "num_layers = true", "whole number"),
        ("num_layers = 2", "num_layers = -2", "whole number"),
        ("is_tied = true", "is_tied = 1", "true or false"),
        ('drafts = ["a/c"]', 'drafts = "a/c"', "a list"),
        ('license = "Apache-2.0"', "license = 2", "text"),
        ('title = "Family"', "title = 3", "text"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(
    tmp_path: Path, line: str, wrong: str, word: str
) -> None:
    assert line in GOOD
    with pytest.raises(ConfigError, match=word):
        load_profile(written(tmp_path, GOOD.replace(line, wrong)))


def test_a_default_that_is_no_model_names_the_nearest(tmp_path: Path) -> None:
    text = GOOD.replace('default = "a/b"', 'default = "a/bb"')
    with pytest.raises(ConfigError, match="Did you mean 'a/b'"):
        load_profile(written(tmp_path, text))


def test_broken_toml_and_a_missing_file_are_plain_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        load_profile(written(tmp_path, "= 3"))
    with pytest.raises(ConfigError, match="There is no profile file"):
        load_profile(tmp_path / "none.toml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
@pytest.mark.timeout(20)
def test_a_pipe_among_the_profiles_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "own.toml")
    with pytest.raises(ConfigError, match="it is a device or a pipe, not a file"):
        load_profiles([tmp_path])


def test_an_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'qwem3'. Did you mean 'qwen3'\?"):
        find_profile("qwem3", SHIPPED)


def test_a_profile_can_be_given_by_path(tmp_path: Path) -> None:
    assert find_profile(str(written(tmp_path, GOOD)), {}).title == "Family"


def test_a_persons_profile_comes_before_the_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "qwen3.toml").write_text(GOOD, encoding="utf-8")
    profiles = load_profiles((tmp_path, SHIPPED_PROFILES))
    assert profiles["qwen3"].title == "Family"
    assert "llama3" in profiles


def test_the_shipped_profiles_are_whole() -> None:
    named = set("qwen3 qwen2_5 llama3 demo gemma3 mistral smollm2 smollm3 phi4".split())
    assert set(SHIPPED) >= named
    known = {id for profile in SHIPPED.values() for id in (*profile.models, *profile.heads)}
    for profile in SHIPPED.values():
        for entry in profile.models.values():
            assert entry.license and {draft.id for draft in entry.drafts} <= known


def test_the_demo_profile_points_into_the_project() -> None:
    demo = find_profile("demo", SHIPPED)
    draft = demo.models[demo.default].drafts[0].id
    for model, name in ((demo.default, "target"), (draft, "draft")):
        folder = demo.models[model].path
        assert folder == PROJECT_FOLDER / "assets" / "demo" / name


def test_every_shipped_model_says_its_licence_and_where_its_terms_are() -> None:
    for profile in SHIPPED.values():
        for entry in profile.models.values():
            assert entry.license
            assert entry.path is not None or (entry.terms or "").startswith("https://"), entry.id
            if entry.license.startswith(("Llama", "Gemma")):
                assert entry.is_gated is True, entry.id


def test_a_target_without_a_draft_says_what_drafts_there() -> None:
    for name in ("mistral", "smollm3", "phi4"):
        for entry in SHIPPED[name].models.values():
            assert entry.drafts == () and "n-gram" in entry.note and "quantised" in entry.note


def test_no_shipped_pair_has_vocabularies_that_cannot_be_one() -> None:
    """Rows that pad an embedding are no tokens; a difference beyond that is another language."""
    entries = {entry.id: entry for profile in SHIPPED.values() for entry in profile.models.values()}
    for entry in entries.values():
        for draft in (each for each in entry.drafts if each.head is None):
            if entry.path is None:
                padding = abs(entry.shape.vocab_size - entries[draft.id].shape.vocab_size)
                assert padding <= 128, f"{entry.id} and {draft.id}"


def test_a_gated_that_is_no_truth_value_is_refused(tmp_path: Path) -> None:
    text = GOOD.replace('license = "Apache-2.0"', 'license = "Apache-2.0"\ngated = "yes"')
    with pytest.raises(ConfigError, match="'gated' is 'yes', but must be true or false"):
        load_profile(written(tmp_path, text))


def test_a_family_that_is_not_known_is_a_fault_of_its_model_alone(tmp_path: Path) -> None:
    other = GOOD.split("[models")[1].replace('"a/b"]', '"a/odd"]\nfamily = "lama"')
    profile = load_profile(written(tmp_path, f"{GOOD}[models.{other.lstrip('.')}"))
    assert profile.models["a/b"].shape.num_layers == 2
    odd = profile.models["a/odd"]
    with pytest.raises(
        ModelError, match=r"family 'lama', which is not known\. Did you mean 'llama'"
    ):
        _ = odd.shape
    assert odd.known_shape is None and odd.fault
