"""What config.json says of a native family is read as transformers reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from localspec.formats.attention import key_heads_of
from localspec.formats.decoder_settings import settings_of
from localspec.formats.rotation_settings import Incomplete, NotNative
from tests.kit.families import SETTINGS, SHAPE

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "configs"
# Configs in which transformers itself leaves a key out, and which one.
INCOMPLETE = {"qwen3_moe, shares as they are, a dense layer": "head_dim"}
TIED = {"tie_word_embeddings": False}


def written(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of a family as `save_pretrained` writes it, and with every key."""
    settings = {**TIED, **SHAPE, **SETTINGS[name]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    said = json.loads(config.to_json_string(use_diff=True))
    said.pop("time_step_limit", None)  # of layers that no native model has; infinite
    return said, {**TIED, **config.to_dict()}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_written_config_is_read_as_transformers_completes_it(name: str) -> None:
    said, complete = written(name)
    wanted = settings_of(said, complete)
    try:
        assert settings_of({**TIED, **said}) == wanted
    except Incomplete as error:
        assert name in INCOMPLETE and INCOMPLETE[name] in str(error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers warns of some of these
@pytest.mark.parametrize("name", SETTINGS)
def test_a_key_that_is_left_out_is_never_guessed(name: str) -> None:
    """Without any one of its keys a config is read as transformers completes it, or is said to be
    incomplete."""
    said, _ = written(name)
    for key in said.keys() - {"model_type"}:
        less = {each: value for each, value in {**TIED, **said}.items() if each != key}
        try:
            found = settings_of(less)
        except (Incomplete, NotNative):
            continue
        try:
            complete = {**TIED, **AutoConfig.for_model(**less).to_dict()}
        except Exception:  # transformers refuses some of them, in errors of many types
            continue
        assert found == settings_of(less, complete), key


@pytest.mark.parametrize("value", [3, True, "yes", [1]])
def test_a_key_that_nothing_reads_is_named(value: Any) -> None:
    said, complete = written("llama")
    with pytest.raises(NotNative, match=r"config.json says attention_tricks, a setting"):
        settings_of({**said, "attention_tricks": value})
    with pytest.raises(NotNative, match="attention_tricks"):
        settings_of({**said, "attention_tricks": value}, complete)


@pytest.mark.parametrize("more", [{"attention_tricks": None}, {"attention_tricks": False},
                                  {"unsloth_fixed": True}, {"attention_dropout": 0.1}])  # fmt: skip
def test_a_key_that_says_nothing_or_is_of_training_is_no_matter(more: dict[str, Any]) -> None:
    said, _ = written("llama")
    assert settings_of({**said, **more}) == settings_of(said)


def test_the_sizes_of_a_layer_are_read_where_its_number_is_written_with_zeros() -> None:
    """transformers writes "02" for the third of 12 layers."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    settings = {**SHAPE, **SETTINGS["gemma4"], "layer_types": kinds, "num_hidden_layers": 12}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    said = json.loads(config.to_json_string(use_diff=True))
    assert "02" in said["per_layer_config"]
    sizes = [layer.head_dim for layer in settings_of({**TIED, **said}).layers]
    assert sizes == [16, 16, 32] * 4
    assert [key_heads_of(said, layer)[1] for layer in range(12)] == sizes


def test_layers_without_experts_beside_layers_with_a_shared_one_are_named() -> None:
    said, _ = written("qwen3_next")
    with pytest.raises(NotNative, match="some of its layers have no experts"):
        settings_of({**said, "mlp_only_layers": [1]})


def test_a_key_of_a_rotation_that_nothing_reads_is_named() -> None:
    said, _ = written("llama")
    rotation = {**said["rope_parameters"], "twist": 2.0}
    with pytest.raises(NotNative, match="its rotation has twist"):
        settings_of({**said, "rope_parameters": rotation})


def test_the_older_names_of_a_rotation_are_read() -> None:
    said, _ = written("llama, stretched")
    new = settings_of(said)
    given = dict(said.pop("rope_parameters"))
    theta, kind = given.pop("rope_theta"), given.pop("rope_type")
    old = settings_of({**said, "rope_theta": theta, "rope_scaling": {**given, "type": kind}})
    (wanted,), (found,) = new.rotations, old.rotations
    assert found == wanted
    assert replace(old, rotations=()) == replace(new, rotations=())


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the data folder is not here")
def test_published_configs_are_read_without_asking_transformers() -> None:
    for folder in sorted(CONFIGS.iterdir()):
        said = json.loads((folder / "config.json").read_text("utf-8"))
        complete = AutoConfig.for_model(**said).to_dict()
        assert settings_of(said) == settings_of(said, complete), folder.name


def test_the_demo_model_needs_no_class_of_transformers() -> None:
    folder = Path(__file__).resolve().parents[2] / "assets" / "demo" / "target"
    assert settings_of(json.loads((folder / "config.json").read_text("utf-8"))).is_tied
