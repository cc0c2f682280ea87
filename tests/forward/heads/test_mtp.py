"""A multi-token-prediction module computes while drafting what it computed in training, and files
that do not fit are refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.errors import ModelError
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST
from localspec.forward.heads.files import CONFIG, WEIGHTS, TargetSizes, write_head
from localspec.forward.heads.mtp import KIND, MtpHead, MtpShape, MtpWeights, read_mtp
from localspec.training.head_recipe import HeadRecipe
from localspec.training.mtp import make
from tests.heads import lesson_of, random_texts, teacher_of
from tests.tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_llama, with_cache

SMALL = {"num_heads": 2, "ffn_size": 48}


def target() -> Decoder:
    return with_cache(tiny_llama())


def recipe_for(model: Decoder) -> HeadRecipe:
    recipe = make(teacher_of(model), SMALL, 5)
    with torch.no_grad():  # fresh weights are near the identity; every part must count
        for parameter in recipe.module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return recipe


def in_full(recipe: HeadRecipe) -> MtpWeights:
    tensors = {name: weight.detach() for name, weight in recipe.module.state_dict().items()}
    return MtpWeights(MtpShape.of(recipe.settings, "head"), tensors)


def folder_with(tmp_path: Path, model: Decoder) -> Path:
    make(teacher_of(model), SMALL, 0).save(tmp_path / "head")
    return tmp_path / "head"


def test_drafting_computes_what_training_computed() -> None:
    """Every step of every draft that a text allows, each from a cache caught up to its start."""
    torch.manual_seed(3)
    model = target()
    recipe, teacher = recipe_for(model), teacher_of(model)
    text = random_texts(VOCAB_SIZE, 4, 1, 12)[0]
    lesson = lesson_of(model, [text])
    with torch.no_grad():
        trained = recipe.states(teacher, lesson, 4)
    features = lesson.features[LAST][0]  # [n, d]
    for start in range(1, len(text) - 4):
        head = MtpHead(in_full(recipe), 16)
        tokens = text[1 : start + 1]
        rows = head.advance(tokens, features[:start], model.embed(tokens))
        state = rows[-1:]
        for step in range(4):
            place = start - 1 + step
            assert torch.allclose(state[0], trained[step][0, place], atol=1e-4), (start, step)
            token = text[start + step + 1 : start + step + 2]
            state = head.advance(token, state, model.embed(token))


def test_rows_in_pieces_equal_rows_at_once() -> None:
    torch.manual_seed(4)
    model = target()
    weights = in_full(recipe_for(model))
    states, tokens = torch.randn(9, HIDDEN_SIZE), list(range(9))
    whole = MtpHead(weights, 16).advance(tokens, states, model.embed(tokens))
    head = MtpHead(weights, 16)
    pieces = [
        head.advance(tokens[i:j], states[i:j], model.embed(tokens[i:j]))
        for i, j in ((0, 4), (4, 5), (5, 9))
    ]
    assert torch.allclose(torch.cat(pieces), whole, atol=1e-5)


def test_a_bias_of_the_attention_counts() -> None:
    torch.manual_seed(5)
    model = target()
    plain = in_full(recipe_for(model))
    shape = MtpShape(**{**plain.shape.settings(), "has_bias": True})
    bias = torch.randn(shape.shapes(HIDDEN_SIZE)["qkv.bias"])
    states, tokens = torch.randn(3, HIDDEN_SIZE), [1, 2, 3]
    found = [
        MtpHead(MtpWeights(shape, {**plain.tensors, "qkv.bias": added}), 8).advance(
            tokens, states, model.embed(tokens)
        )
        for added in (torch.zeros_like(bias), bias)
    ]
    without = MtpHead(plain, 8).advance(tokens, states, model.embed(tokens))
    assert torch.allclose(found[0], without, atol=1e-6)
    assert not torch.allclose(found[1], without, atol=1e-2)


def test_a_saved_module_is_read_back(tmp_path: Path) -> None:
    model = target()
    recipe = make(teacher_of(model), SMALL, 0)
    recipe.save(tmp_path)
    found = read_mtp(tmp_path, model)
    assert found.shape == MtpShape.of(recipe.settings, "head")
    saved = recipe.module.state_dict()
    assert found.tensors.keys() == saved.keys()
    for name, tensor in found.tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, saved[name].bfloat16().float()), name


def test_memory_covers_weights_cache_and_tables(tmp_path: Path) -> None:
    model = target()
    small, large = (MtpHead(in_full(recipe_for(model)), size) for size in (16, 32))
    per_slot = 2 * 4 * HIDDEN_SIZE + 2 * 4 * 32  # keys and values, and two rows of the tables
    assert large.memory_bytes - small.memory_bytes == 16 * per_slot


Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("input.weight"), "lacks input.weight"),
        (lambda t: t.update({"more": torch.zeros(1)}), "holds more, which is not known"),
        (lambda t: t.update({"down.weight": torch.zeros(3, 3)}), "down.weight is float32"),
        (
            lambda t: t.update({"down.weight": t["down.weight"].to(torch.int8)}),
            "must be floating point",
        ),
        (lambda t: t["down.weight"].fill_(float("nan")), "values that are no numbers"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Change, said: str) -> None:
    folder = folder_with(tmp_path, target())
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ModelError, match=said):
        read_mtp(folder, target())


@pytest.mark.parametrize(
    "settings",
    [
        {"num_heads": 0},
        {"num_heads": "2"},
        {"num_heads": 3, "num_kv_heads": 2},
        {"head_dim": 7},
        {"head_dim": 1 << 40},
        {"rotation_base": -1.0},
        {"rotation_base": 10**400},
        {"norm_epsilon": None},
        {"has_bias": 1},
    ],
)
def test_settings_no_module_has_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = folder_with(tmp_path, target())
    config = json.loads((folder / CONFIG).read_text())
    config["settings"].update(settings)
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"say {list(settings)[-1]} = "):
        read_mtp(folder, target())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": 128}, "hidden_size 128; this one has 64"),
        ({"vocab_size": 99}, "vocab_size 99; this one has 64"),
        ({"num_layers": 9}, "num_layers 9; this one has 2"),
    ],
)
def test_a_module_for_another_target_is_refused(
    tmp_path: Path, changed: dict[str, int], said: str
) -> None:
    model = target()
    sizes = TargetSizes(**{**vars(TargetSizes.of(model)), **changed})
    recipe = make(teacher_of(model), SMALL, 0)
    write_head(tmp_path, KIND, sizes, recipe.settings, recipe.module.state_dict())
    with pytest.raises(ModelError, match=said):
        read_mtp(tmp_path, model)
