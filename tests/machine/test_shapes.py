"""Parameter and KV-cache counts, against values worked out by hand and published totals."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from localspec.core.config import SHIPPED_PROFILES
from localspec.core.errors import ModelError
from localspec.formats.native import LAYOUTS, SIZED
from localspec.formats.published_tensors import is_listed
from localspec.forward.model import kv_shape
from localspec.machine.config_shapes import shape_from_config
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.profiles import load_profiles
from localspec.machine.shapes import PACKS_BF16, ModelShape
from tests.kit.model_folders import llama_shapes, save_header
from tests.kit.shapes import LLAMA_8B

KIB = 1024

# A config small enough to count on paper.
SMALL = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# A layer of it: q 8x8, k and v 8x4 each, o 8x8, three MLP matrices of 8x16, two norms of 8.
SMALL_LINEAR = 64 + 32 + 32 + 64 + 3 * 128
SMALL_TOTAL = 2 * (SMALL_LINEAR + 16) + 8 + 2 * 80


def test_parameters_of_a_small_model_are_those_counted_by_hand() -> None:
    shape = shape_from_config(SMALL, "small")
    assert shape.head_dim == 2
    assert shape.num_params == SMALL_TOTAL
    assert shape.linear_params == 2 * SMALL_LINEAR


def test_a_tied_head_is_counted_once() -> None:
    tied = shape_from_config({**SMALL, "tie_word_embeddings": True}, "tied")
    assert tied.num_params == SMALL_TOTAL - 80


def test_an_estimate_leaves_out_biases_and_the_norms_of_heads_and_the_header_does_not(
    tmp_path: Path,
) -> None:
    config = {**SMALL, "model_type": "qwen3", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_from_folder(tmp_path).num_params == SMALL_TOTAL - 80
    attention = [f"model.layers.{number}.self_attn." for number in (0, 1)]
    norms = {f"{name}{part}_norm.weight": (2,) for name in attention for part in "qk"}
    save_header(tmp_path / "model.safetensors", {**llama_shapes(SMALL), **norms})
    shape = shape_from_folder(tmp_path)
    assert shape.num_params == SMALL_TOTAL - 80 + 4 * 2
    assert shape.linear_params == 2 * SMALL_LINEAR


def test_all_experts_are_counted_and_the_router() -> None:
    config = {
        **SMALL,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "mlp_only_layers": [0],
    }
    shape = shape_from_config(config, "mixture")
    experts, router = 4 * 3 * 8 * 6, 8 * 4
    assert shape.expert_params == experts
    assert shape.num_params == SMALL_TOTAL - 3 * 128 + experts + router


def counted_as_published(folder: Path, config: Mapping[str, Any], model: Any) -> ModelShape:
    """The shape of a folder with a model of transformers that has no weights in memory."""
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {name: each.shape for name, each in model.state_dict().items()}
    save_header(folder / "model.safetensors", shapes)
    return shape_from_folder(folder)


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("family", sorted(name for name in SIZED if name in LAYOUTS))
def test_the_counts_are_those_of_transformers_own_models(family: str, tmp_path: Path) -> None:
    """Of every family whose sizes its config.json says, the unsaid left out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    said = {**SMALL, **IDS, "head_dim": 2, "moe_intermediate_size": 6, **experts}
    unsaid = {name: each for name, each in said.items() if name != "tie_word_embeddings"}
    known = AutoConfig.for_model(family).to_dict()
    for given in (said, unsaid):
        sizes = {name: each for name, each in given.items() if name in {*known, "head_dim"}}
        config = {**sizes, "model_type": family}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        shape = counted_as_published(tmp_path, config, model)
        assert shape.num_params == sum(parameter.numel() for parameter in model.parameters())
        linear = [
            each
            for name, each in model.named_modules()
            if isinstance(each, torch.nn.Linear) and name != "lm_head"
        ]
        assert shape.linear_params == sum(each.weight.numel() for each in linear)


SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 896,
    "vision_use_head": False,
    "model_type": "siglip_vision_model",
}
GEMMA_4B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": SIGLIP,
}


@pytest.mark.slow  # imports transformers
def test_the_counts_of_gemma_3_are_those_of_transformers_tower_included(tmp_path: Path) -> None:
    """The tower is fetched with the model; what stays loaded is the text model alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from localspec.forward.by_transformers import drop_towers

    config = AutoConfig.for_model(**GEMMA_4B)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = counted_as_published(tmp_path, GEMMA_4B, model)
    held = {id(each): each.numel() for each in model.parameters()}
    assert shape.num_params == sum(held.values())
    drop_towers(model)
    kept = sum({id(each): each.numel() for each in model.parameters()}.values())
    assert shape.weight_bytes("bf16") == 2 * kept < 0.95 * 2 * shape.num_params
    profile = load_profiles((SHIPPED_PROFILES,))["gemma3"].models["google/gemma-3-4b-it"]
    assert shape == profile.shape, "its ready numbers are these"
    assert shape.num_params == 4_300_079_472  # as the hub counts it


@pytest.mark.parametrize(
    ("said", "longest"),
    [
        ({"sliding_window": 16}, 64),
        ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}, 64),
        ({"rope_scaling": {"type": "yarn"}, "original_max_position_embeddings": 32}, 64),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 32}, 32),
    ],
)
def test_the_context_is_the_longest_at_which_plain_and_drafted_text_agree(
    said: dict[str, object], longest: int
) -> None:
    assert shape_from_config({**SMALL, **said}, "windowed").context_length == longest


def test_experts_and_routers_of_a_mixture_are_no_linear_layers_in_any_layout(
    tmp_path: Path,
) -> None:
    """Published one by one, or fused as transformers keeps them."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 6}
    config = {**SMALL, **experts, "model_type": "qwen3_moe", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mlp, attention = "model.layers.0.mlp.", "model.layers.0.self_attn.q_proj.weight"
    single = {f"{mlp}experts.{n}.{part}_proj.weight": (6, 8) for n in (0, 1)
              for part in ("gate", "up", "down")}  # fmt: skip
    fused = {f"{mlp}experts.gate_up_proj": (2, 12, 8), f"{mlp}experts.down_proj": (2, 8, 6)}
    for layout in (single, fused):
        shapes = {attention: (8, 8), f"{mlp}gate.weight": (2, 8), **layout}
        save_header(tmp_path / "model.safetensors", shapes)
        shape = shape_from_folder(tmp_path)
        assert (shape.num_params, shape.linear_params) == (64 + 16 + 6 * 48, 64)


def test_kv_bytes_of_known_models() -> None:
    profiles = load_profiles((SHIPPED_PROFILES,))
    assert LLAMA_8B.kv_bytes_per_token() == 128 * KIB
    qwen = profiles["qwen3"].models["Qwen/Qwen3-0.6B"].shape
    assert qwen.kv_bytes_per_token() == 112 * KIB
    assert qwen.kv_bytes(32768) == int(3.5 * 2**30)
    assert qwen.kv_bytes_per_token("fp32") == 224 * KIB


def test_weight_bytes_by_precision() -> None:
    kept = LLAMA_8B.num_params - LLAMA_8B.linear_params
    assert LLAMA_8B.num_params == 8_030_261_248
    assert LLAMA_8B.weight_bytes("bf16") == 2 * LLAMA_8B.num_params
    assert LLAMA_8B.weight_bytes("fp32") == 4 * LLAMA_8B.num_params
    tables = 32 * 7 * 4 * (16 + 256)
    four = 2 * kept + int(0.5625 * LLAMA_8B.linear_params) + tables
    assert LLAMA_8B.weight_bytes("4-bit") == four
    eight = LLAMA_8B.weight_bytes("8-bit") - 2 * kept - LLAMA_8B.linear_params
    assert 0 < eight < 0.01 * LLAMA_8B.linear_params  # the scales of the rows


def test_with_a_quantised_output_head_a_gpu_holds_no_table_in_full_precision() -> None:
    """A processor keeps the embedding, so there it saves memory only beside another matrix."""
    for is_tied in (False, True):
        shape = replace(LLAMA_8B, is_tied=is_tied)
        head = shape.vocab_size * shape.hidden_size
        tables, in_4_bits = 1 if is_tied else 2, int(0.5625 * head)
        change = shape.weight_bytes("4-bit-head") - shape.weight_bytes("4-bit")
        assert change == tables * (in_4_bits - 2 * head)
        on_cpu = [shape.weight_bytes(each, "bf16", "cpu") for each in ("4-bit", "4-bit-head")]
        is_single = is_tied and not PACKS_BF16
        assert on_cpu[1] - on_cpu[0] == in_4_bits - (0 if is_single else 2 * head)


def test_what_a_load_holds_for_a_while_is_counted_where_bitsandbytes_loads() -> None:
    head = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    assert LLAMA_8B.loading_bytes("4-bit-head", "bf16", "cuda") == 4 * head - int(0.5625 * head)
    assert replace(LLAMA_8B, is_tied=True).loading_bytes("4-bit-head", "bf16", "cuda") == 2 * head
    for precision, device in (("4-bit", "cuda"), ("bf16", "cuda"), ("4-bit-head", "cpu")):
        assert not LLAMA_8B.loading_bytes(precision, "bf16", device)
    assert not replace(LLAMA_8B, group_size=128).loading_bytes("4-bit-head", "bf16", "cuda")


def test_embeddings_and_head_stay_wide_under_4_bit() -> None:
    tied = replace(LLAMA_8B, is_tied=True)
    one_embedding = 128256 * 4096
    saved = LLAMA_8B.weight_bytes("4-bit") - tied.weight_bytes("4-bit")
    assert saved == 2 * one_embedding


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'mamba'"):
        shape_from_config({**SMALL, "model_type": "mamba"}, "other")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_size_is_named(key: str) -> None:
    config = {name: value for name, value in SMALL.items() if name != key}
    with pytest.raises(ModelError, match=key):
        shape_from_config(config, "incomplete")


@pytest.mark.parametrize("rotation", [[1], "yarn", 5])
def test_a_rotation_that_is_no_object_is_refused(rotation: object) -> None:
    with pytest.raises(ModelError, match="not a size"):
        shape_from_config({**SMALL, "rope_parameters": rotation}, "damaged")


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        shape_from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        shape_from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        shape_from_folder(tmp_path)


# -- against the published table ------------------------------------------------------------

FAMILY_BY_NAME = (
    ("meta-llama/", "llama"),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama", "llama"),
    ("codellama/", "llama"),
    ("TinyLlama/", "llama"),
    ("HuggingFaceTB/SmolLM2", "llama"),
    ("HuggingFaceTB/SmolLM3", "smollm3"),
    ("microsoft/Phi-4", "phi3"),
    ("microsoft/phi-4", "phi3"),
    ("google/gemma-3", "gemma3_text"),
    ("Qwen/Qwen2.5", "qwen2"),
    ("Qwen/QwQ", "qwen2"),
    ("Qwen/Qwen3-30B", "qwen3_moe"),
    ("Qwen/Qwen3-235B", "qwen3_moe"),
    ("Qwen/Qwen3", "qwen3"),
    ("mistralai/Mixtral", "mixtral"),
    ("mistralai/Mistral", "mistral"),
)


# A tower's sizes are not in the table, and its text is laid out alike.
TABLE_FAMILY = {"gemma3": "gemma3_text"}


def _family(name: str) -> str | None:
    return next((family for start, family in FAMILY_BY_NAME if name.startswith(start)), None)


def _config(row: dict[str, str], family: str) -> dict[str, object]:
    return {
        "model_type": family,
        "num_hidden_layers": row["layers"],
        "hidden_size": row["hidden"],
        "num_attention_heads": row["heads"],
        "num_key_value_heads": row["kv_heads"],
        "head_dim": row["head_dim"],
        "intermediate_size": row["intermediate"],
        "vocab_size": row["vocab"],
        "max_position_embeddings": row["ctx"],
        "tie_word_embeddings": row["tied_embeddings"] == "True",
        "num_experts": int(row["n_expert"]),
        "num_experts_per_tok": int(row["experts_per_token"]),
        "moe_intermediate_size": int(row["moe_intermediate"] or 0),
    }


@pytest.fixture(scope="module")
def published(shared_data: Path) -> dict[str, dict[str, str]]:
    with (shared_data / "model_shapes.csv").open(encoding="utf-8") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def test_totals_agree_with_the_published_table(published: dict[str, dict[str, str]]) -> None:
    compared = 0
    for name, row in published.items():
        family = _family(name)
        if family is None:
            continue
        shape = shape_from_config(_config(row, family), name)
        millions = shape.num_params / 1e6
        assert millions == pytest.approx(float(row["params_est_M"]), rel=1e-3, abs=1.0), name
        assert shape.kv_bytes_per_token() == int(row["kv_bytes_per_token_fp16"]), name
        compared += 1
    assert compared >= 45


def test_the_profiles_agree_with_the_published_table(
    published: dict[str, dict[str, str]],
) -> None:
    spelt = {
        "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B-Instruct",
    }
    missing = []
    for profile in load_profiles((SHIPPED_PROFILES,)).values():
        for entry in profile.models.values():
            if entry.path is not None or is_listed({"model_type": entry.shape.family}):
                continue  # test_published_sizes
            row = published.get(spelt.get(entry.id, entry.id))
            if row is None:  # the table has not every model of the profiles
                missing.append(entry.id)
                continue
            shape = entry.shape
            wanted = shape_from_config(_config(row, TABLE_FAMILY.get(shape.family, shape.family)),
                                       entry.id)  # fmt: skip
            # The table counts Gemma's text without its tower and the rows that pad its embedding,
            # and says no windows.
            unlike = {"context_length": 0, "extra_params": 0, "vocab_size": 0, "family": "",
                      "counted": None, "window": 0, "window_kv_width": 0}  # fmt: skip
            in_text = shape.num_params - shape.extra_params
            assert in_text == pytest.approx(wanted.num_params, rel=1e-3), entry.id
            assert replace(shape, **unlike) == replace(wanted, **unlike), entry.id
            assert 0 <= shape.vocab_size - wanted.vocab_size <= 64, entry.id
            assert shape.context_length <= wanted.context_length, entry.id
    assert missing == ["google/gemma-3-270m-it", "mistralai/Mistral-Nemo-Instruct-2407"]


def test_real_configs_give_the_table_s_totals(
    shared_data: Path, published: dict[str, dict[str, str]]
) -> None:
    folders = sorted(path.parent for path in (shared_data / "configs").glob("*/config.json"))
    assert len(folders) >= 10
    for folder in folders:
        row = published[f"{folder.name} [real config.json]"]
        shape = shape_from_folder(folder)
        assert shape.num_params / 1e6 == pytest.approx(float(row["params_est_M"]), rel=1e-3, abs=1)
        assert shape.kv_bytes_per_token() == int(row["kv_bytes_per_token_fp16"])


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def test_a_family_that_is_not_known_is_counted_from_its_files(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128,
              "vocab_size": 100, "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "transformer.wte.weight": torch.zeros(100, 64),
        "transformer.h.0.attn.c_attn.weight": torch.zeros(64, 192),
        "transformer.h.0.ln_1.weight": torch.zeros(64),
    }
    save_file(tensors, str(tmp_path / "model.safetensors"))
    shape = shape_from_folder(tmp_path)
    assert shape.num_params == 100 * 64 + 64 * 192 + 64
    assert shape.linear_params == 64 * 192
    assert "learnt positions" not in shape.not_native and "mixed in one weight" in shape.not_native
    assert shape.weight_bytes("fp32") == 4 * shape.num_params
    assert (shape.context_length, shape.kv_bytes_per_token("fp32")) == (128, 2 * 2 * 64 * 4)


def test_a_family_that_says_a_size_of_each_layer_is_counted(tmp_path: Path) -> None:
    """Gemma 3n."""
    config = {**SMALL, "model_type": "of_its_own", "intermediate_size": [16, 32]}
    saved(tmp_path, config, {"model.norm.weight": torch.zeros(8)})
    assert shape_from_folder(tmp_path).intermediate_size == 32


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo_v2_flash", "xlstm", "hrm_text", "bert"])
def test_a_plan_refuses_what_loading_refuses(family: str, tmp_path: Path) -> None:
    config: Any = AutoConfig.for_model(family)
    saved(tmp_path, config.to_dict(), {"model.norm.weight": torch.zeros(8)})
    with pytest.raises(ModelError) as planned:
        shape_from_folder(tmp_path)
    with pytest.raises(ModelError) as loaded:
        kv_shape(config, 64)
    assert str(planned.value) == str(loaded.value)


def test_packed_weights_are_counted_as_they_are_computed_with(tmp_path: Path) -> None:
    """Of a family that is counted from its files: Mistral Small, GLM-4 or Granite as AWQ."""
    config = {**SMALL, "model_type": "of_its_own", "hidden_size": 64, "dtype": "bfloat16"}
    whole, packed = tmp_path / "whole", tmp_path / "packed"
    norm = {"model.norm.weight": torch.zeros(64)}
    layer = "model.layers.0.self_attn.q_proj."
    saved(whole, config, {**norm, f"{layer}weight": torch.zeros(32, 64)})
    parts = {"qweight": torch.zeros(64, 4, dtype=torch.int32), "scales": torch.zeros(2, 32),
             "qzeros": torch.zeros(2, 4, dtype=torch.int32)}  # fmt: skip
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    quantised = {**config, "quantization_config": awq}
    saved(packed, quantised, {**norm, **{layer + name: each for name, each in parts.items()}})
    found, wanted = shape_from_folder(packed), shape_from_folder(whole)
    assert found.counted == wanted.counted and wanted.linear_params == 32 * 64
    assert found.not_native == wanted.not_native


def test_weights_in_mxfp4_are_counted_unpacked(tmp_path: Path) -> None:
    """Without the kernels of a hub transformers unpacks them while loading."""
    layer = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{layer}_blocks": torch.zeros(2, 6, 1, 16, dtype=torch.uint8),
               f"{layer}_scales": torch.zeros(2, 6, 1, dtype=torch.uint8),
               f"{layer}_bias": torch.zeros(2, 6)}  # fmt: skip
    config = {**SMALL, "model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    saved(tmp_path, config, tensors)
    assert shape_from_folder(tmp_path).num_params == 2 * 6 * 32 + 2 * 6


def test_only_the_files_of_the_index_are_counted(tmp_path: Path) -> None:
    """Mistral publishes the same weights a second time, by other names."""
    saved(tmp_path, {**SMALL, "model_type": "of_its_own"}, {"model.norm.weight": torch.zeros(8)})
    save_file({"norm.weight": torch.zeros(8)}, tmp_path / "consolidated.safetensors")
    assert shape_from_folder(tmp_path).num_params == 8


def test_what_bitsandbytes_quantised_is_counted_without_a_tower_and_with_whole_scales(
    tmp_path: Path,
) -> None:
    layer = "language_model.model.layers.0.mlp.up_proj.weight"
    tensors = {layer: torch.zeros(2048, 1, dtype=torch.uint8),
               f"{layer}.absmax": torch.zeros(64, dtype=torch.uint8),
               f"{layer}.nested_absmax": torch.zeros(1),
               "vision_tower.patch.weight": torch.zeros(100, 100)}  # fmt: skip
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    saved(tmp_path, {**GEMMA_4B, "quantization_config": quantised}, tensors)
    shape = shape_from_folder(tmp_path)
    assert shape.weight_bytes("4-bit") == 2048 + 4 * 64 + 4


def test_a_family_whose_config_says_too_little_is_refused_with_what_is_missing(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "odd", "n_layer": 2, "n_head": 1}')
    save_file({"a": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match="say its hidden_size and max_position_embeddings"):
        shape_from_folder(tmp_path)


@pytest.mark.parametrize("value", [float("inf"), 1e308, 10**12, "many", [1]])
@pytest.mark.parametrize("name", ["hidden_size", "head_dim", "vocab_size", "num_key_value_heads"])
def test_a_size_that_no_model_has_is_named(name: str, value: object) -> None:
    config = {**GEMMA_4B["text_config"], "model_type": "gemma3_text", name: value}
    with pytest.raises(ModelError, match="not a size"):
        shape_from_config(config, "damaged")


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_types": 5},
        {"global_head_dim": "x"},
        {"global_head_dim": [1]},
        {"per_layer_config": [1]},
        {"per_layer_config": {"0": 1}},
    ],
)
def test_a_value_that_cannot_be_understood_is_said(changed: dict[str, Any], tmp_path: Path) -> None:
    text = {**GEMMA_4B["text_config"], "layer_types": ["full_attention"], "global_head_dim": 8}
    config = {**text, "model_type": "of_its_own", "num_attention_heads": 2}
    config |= {"max_position_embeddings": 64, **changed}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"cannot be understood|is not a size"):
        shape_from_folder(tmp_path)
