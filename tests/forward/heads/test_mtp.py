"""A multi-token-prediction module computes while drafting what it computed in training, and files
that do not fit are refused in words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.core.errors import ModelError
from localspec.drafters.mtp import MtpDrafter
from localspec.drafters.parts import Parts
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST, Features
from localspec.forward.heads.autoregressive import AutoregressiveHead, HeadParts, HeadShape
from localspec.forward.heads.files import HeadSettings, TargetSizes
from localspec.forward.heads.mtp import KIND, MtpNetwork, read_shape
from localspec.forward.heads.mtp_files import read_mtp, ships_mtp
from localspec.forward.load import load_model
from localspec.training.recipe import HeadRecipe, make_recipe
from tests.kit.heads import batch_of, change_config, random_texts, teacher_of
from tests.kit.mtp import SIZE, Shipped, shipped, write
from tests.kit.tiny import CPU, HIDDEN_SIZE, VOCAB_SIZE, tiny_llama, with_cache

SMALL = {"num_heads": 2, "ffn_size": 48}


def target() -> Decoder:
    return with_cache(tiny_llama())


def recipe_for(model: Decoder) -> HeadRecipe:
    recipe = make_recipe("mtp", teacher_of(model), SMALL, 5)
    with torch.no_grad():  # fresh weights are near the identity; every part must count
        for parameter in recipe.module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return recipe


def shape_of(recipe: HeadRecipe, model: Decoder) -> HeadShape:
    settings = HeadSettings(recipe.plan.settings, KIND, Path("head"))
    return read_shape(settings, TargetSizes.of(model))


def in_full(recipe: HeadRecipe, model: Decoder) -> HeadParts:
    """The trained weights in fp32, which a file would round."""
    tensors = {name: weight.detach() for name, weight in recipe.module.state_dict().items()}
    return HeadParts.sharing(model, shape_of(recipe, model), MtpNetwork, tensors)


def outputs(parts: HeadParts, text: list[int], states: torch.Tensor) -> torch.Tensor:
    """The row of every pair of `text`, each from a cache of its own: [n, d]."""
    features = Features(32, states.shape[1], torch.float32, CPU)
    features.follow([LAST])
    features.write(len(states), {LAST: states})
    ends = range(2, len(text) + 1)
    return torch.cat(
        [AutoregressiveHead(parts, 32).start(text[:end], features).forward() for end in ends]
    )


def folder_with(tmp_path: Path, model: Decoder) -> Path:
    make_recipe("mtp", teacher_of(model), SMALL, 0).save(tmp_path / "head")
    return tmp_path / "head"


def test_drafting_computes_what_training_computed() -> None:
    """Every step of every draft that a text allows, each from a cache caught up to its start."""
    torch.manual_seed(3)
    model = target()
    recipe, teacher = recipe_for(model), teacher_of(model)
    text = random_texts(VOCAB_SIZE, 4, 1, 12)[0]
    batch = batch_of(model, [text])
    with torch.no_grad():
        trained = recipe.states(teacher, batch, 4)
    features = model.follow([LAST])
    model.forward(text)
    for start in range(1, len(text) - 4):
        head = AutoregressiveHead(in_full(recipe, model), 16)
        state = head.start(text[: start + 1], features).forward()
        for step in range(4):
            place = start - 1 + step
            assert torch.allclose(state[0], trained[step][0, place], atol=1e-4), (start, step)
            state = head.extend(text[start + step + 1], state).forward()


def test_a_saved_module_is_read_back(tmp_path: Path) -> None:
    """In bf16, as files hold it."""
    torch.manual_seed(6)
    model = target()
    recipe = recipe_for(model)
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.copy_(weight.bfloat16())
    recipe.save(tmp_path)
    states, text = torch.randn(3, HIDDEN_SIZE), [1, 2, 3, 4]
    found = outputs(read_mtp(tmp_path, model), text, states)
    assert torch.equal(found, outputs(in_full(recipe, model), text, states))


def test_memory_covers_weights_cache_and_tables() -> None:
    model = target()
    parts = in_full(recipe_for(model), model)
    small, large = (AutoregressiveHead(parts, size) for size in (512, 1024))
    per_slot = 2 * 4 * HIDDEN_SIZE + 2 * 4 * 32  # keys and values, and two rows of the tables
    assert large.memory_bytes - small.memory_bytes == 512 * per_slot


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": "2"}, "num_heads is '2'"),
        ({"num_heads": 3, "num_kv_heads": 2}, "do not divide"),
        ({"head_dim": 7}, "do not divide"),
        ({"head_dim": 1 << 40}, "head_dim is 1099511627776"),
        ({"rotation_base": -1.0}, "rotation_base is -1.0"),
        ({"rotation_base": 10**400}, "rotation_base is 1000"),
        ({"norm_epsilon": None}, "norm_epsilon is None"),
        ({"has_bias": 1}, "has_bias is 1"),
    ],
)
def test_settings_no_module_has_are_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    folder = folder_with(tmp_path, target())
    change_config(folder, "settings", **settings)
    with pytest.raises(ModelError, match=said):
        read_mtp(folder, target())


def change(folder: Path, by: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    by(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Decoder, Any, Shipped]:
    model, module = shipped()
    return write(tmp_path, model, module), with_cache(model, 32), model, module


def test_the_shipped_module_computes_what_it_should(
    parts: tuple[Path, Decoder, Any, Shipped],
) -> None:
    folder, target, model, module = parts
    torch.manual_seed(8)
    states, text = torch.randn(6, SIZE), [7, 5, 9, 1, 2, 60, 3]
    embedded = target.embed(text[1:]).clone()
    with torch.no_grad():
        wanted = module(states, embedded, model.model.rotary_emb(states, torch.arange(6)[None]))
    assert torch.allclose(outputs(read_mtp(folder, target), text, states), wanted, atol=1e-4)


def test_a_folder_says_whether_it_ships_a_module(
    parts: tuple[Path, Decoder, Any, Shipped], tmp_path: Path
) -> None:
    folder = parts[0]
    assert ships_mtp(folder)
    change(folder, lambda t: [t.pop(name) for name in list(t) if "mtp" in name])
    assert not ships_mtp(folder)
    with pytest.raises(ModelError, match="ships no multi-token-prediction module"):
        read_mtp(folder, parts[1])
    assert not ships_mtp(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.61.eh_proj.weight", "DeepSeek-V3 or GLM-4.5"),
        ("mtp.fc_hidden.weight", "Qwen4"),
        ("mtp.layers.0.mlp.gate.weight", "another family"),
        ("model.mtp_block.0.mlp.gate.weight", "ERNIE 4.5"),
    ],
)
def test_other_layouts_are_refused_by_name(
    parts: tuple[Path, Decoder, Any, Shipped], name: str, said: str
) -> None:
    folder, target = parts[:2]
    change(folder, lambda t: [t.pop(key) for key in list(t) if "mtp_layers" in key])
    change(folder, lambda t: t.update({name: torch.zeros(1)}))
    assert ships_mtp(folder)
    with pytest.raises(ModelError, match=said):
        read_mtp(folder, target)


Tensors = dict[str, torch.Tensor]
FIRST = "model.mtp_layers.0."


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (lambda t: t.pop(f"{FIRST}input_proj.weight"), r"mtp_layers\.0"),
        (lambda t: t.pop(f"{FIRST}self_attn.k_proj.bias"), r"module lacks .* first .*k_proj\.bias"),
        (lambda t: t.update({f"{FIRST}mlp.gate.weight": torch.zeros(1)}), r"mlp\.gate\.weight"),
        (
            lambda t: t.update({f"{FIRST}self_attn.k_proj.weight": torch.zeros(8, 3)}),
            r"k_proj\.weight: \[8, 3\], not \[24, 48\]",
        ),
        (lambda t: t.update({f"{FIRST}mlp.down_proj.weight": torch.zeros(8, 3)}), "down_proj"),
        (lambda t: t[f"{FIRST}input_proj.weight"].fill_(float("inf")), "not finite"),
    ],
)
def test_native_tensors_that_do_not_fit_are_refused(
    parts: tuple[Path, Decoder, Any, Shipped], by: Callable[[Tensors], Any], said: str
) -> None:
    change(parts[0], by)
    with pytest.raises(ModelError, match=said):
        read_mtp(parts[0], parts[1])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hidden_act": "gelu"}, "native decoder only.* activation is gelu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        ({"use_sliding_window": True}, "a window only"),
        ({"num_attention_heads": 0}, "native decoder only"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"hidden_size": 96}, r"hidden_size 96; this one has 48"),
    ],
)
def test_settings_that_change_the_mathematics_are_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    model, module = shipped()
    with pytest.raises(ModelError, match=said):
        read_mtp(write(tmp_path, model, module, **settings), with_cache(model, 32))


def test_a_module_without_bias_is_read(parts: tuple[Path, Decoder, Any, Shipped]) -> None:
    folder, target = parts[:2]
    biased = read_mtp(folder, target).weight_bytes
    change(folder, lambda t: [t.pop(name) for name in list(t) if "mtp" in name and "bias" in name])
    assert read_mtp(folder, target).weight_bytes < biased


def test_the_model_itself_is_loaded_without_running_its_code(tmp_path: Path) -> None:
    """MiMo's config names code of its own and a family transformers does not know; it is Qwen2."""
    model, module = shipped()
    code = {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
    folder = write(tmp_path, model, module, auto_map=code)
    opened = load_model(folder, torch.float32, torch.device("cpu"), 32)
    assert opened.notice is None, "the native decoder runs it"
    tokens = [5, 9, 1, 2, 60, 3]
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([tokens])).logits[0]
    assert torch.allclose(opened.model.forward(tokens), wanted, atol=1e-4)
    drafter = MtpDrafter.build(Parts(opened.model, heads={"mtp": folder}))
    assert drafter.memory_bytes > 0
