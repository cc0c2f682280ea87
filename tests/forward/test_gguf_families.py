"""A GGUF file of each family gives the logits of the same model from safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from transformers import AutoConfig, AutoModelForCausalLM

from localspec.core.errors import ModelError
from localspec.formats.folder_files import check_folder, notices_of
from localspec.formats.gguf_families import FAMILIES
from localspec.formats.gguf_file import read_header
from localspec.formats.gguf_settings import config_of, tensor_names
from localspec.forward.by_transformers import load_module
from localspec.forward.decoder import Decoder
from localspec.forward.load import load_model
from localspec.machine.folder_shapes import shape_from_folder, shape_of_gguf
from localspec.machine.gguf_models import opened_gguf
from localspec.weights.gguf import GGUFSource
from localspec.weights.mxfp4 import Mxfp4Linear
from localspec.weights.stored import Mxfp4
from tests.kit.gguf_files import VOCABULARY, write_gguf
from tests.kit.tiny import CPU

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 32,
}  # fmt: skip
GEMMA_ROTATIONS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
Describe = Callable[[GGUFWriter], None]


def of_phi(writer: GGUFWriter) -> None:
    writer.add_rope_dimension_count(12)
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_sliding_window(6)
    for name in ("short", "long"):
        factors = torch.tensor(LONG[f"{name}_factor"])
        writer.add_tensor(f"rope_factors_{name}.weight", factors.numpy())


def of_gemma(writer: GGUFWriter) -> None:
    writer.add_sliding_window(8)
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def of_qwen(writer: GGUFWriter, ffn_size: int = 24) -> None:
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(ffn_size)


def of_gemma_2(writer: GGUFWriter) -> None:
    writer.add_sliding_window(8)
    writer.add_attn_logit_softcapping(5.0)
    writer.add_final_logit_softcapping(3.0)


def of_ministral(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(8)
    writer.add_rope_scaling_yarn_beta_fast(16.0)
    writer.add_rope_scaling_yarn_log_mul(1.0)
    writer.add_attn_temperature_scale(0.1)


def of_granite(writer: GGUFWriter) -> None:
    writer.add_attention_scale(0.2)
    writer.add_embedding_scale(6.0)
    writer.add_residual_scale(0.3)
    writer.add_logit_scale(4.0)


def of_glm(writer: GGUFWriter) -> None:
    writer.add_rope_dimension_count(8)


def of_qwen35(writer: GGUFWriter) -> None:
    writer.add_uint32(f"{writer.arch}.full_attention_interval", 2)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(16)
    writer.add_ssm_group_count(2)
    writer.add_ssm_time_step_rank(6)
    writer.add_ssm_inner_size(6 * 16)
    writer.add_rope_dimension_count(8)


def of_qwen35_moe(writer: GGUFWriter) -> None:
    of_qwen35(writer)
    of_qwen(writer)
    writer.add_expert_shared_feed_forward_length(20)


def of_gemma_4(writer: GGUFWriter) -> None:
    writer.add_final_logit_softcapping(3.0)
    writer.add_float32("gemma4.rope.freq_base_swa", 1e4)
    writer.add_uint32("gemma4.rope.dimension_count_swa", 16)


def of_gemma_4_small(writer: GGUFWriter) -> None:
    of_gemma_4(writer)
    writer.add_uint32("gemma4.attention.shared_kv_layers", 2)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", 8)


def of_gemma_4_moe(writer: GGUFWriter) -> None:
    of_gemma_4(writer)
    of_qwen(writer)


def of_gpt_oss(writer: GGUFWriter) -> None:
    of_qwen(writer, 32)
    writer.add_sliding_window(6)
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


QWEN35: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 6, "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
GEMMA4_WIDE = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
QWEN_MOE: dict[str, Any] = {
    "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}  # fmt: skip
# By the family's name in GGUF: transformers' name, its settings, what the converter writes of them.
MODELS: dict[str, tuple[str, dict[str, Any], Describe]] = {
    "gemma3": ("gemma3_text", {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8,
        "num_hidden_layers": 7, "rope_parameters": GEMMA_ROTATIONS, "tie_word_embeddings": True,
    }, of_gemma),
    "phi3": ("phi3", {
        "rope_parameters": LONG, "original_max_position_embeddings": 32, "sliding_window": 6,
    }, of_phi),
    "qwen3moe": ("qwen3_moe", QWEN_MOE, of_qwen),
    "qwen3vlmoe": ("qwen3_moe", QWEN_MOE, of_qwen),
    "qwen3vl": ("qwen3", {"head_dim": 16}, lambda writer: None),
    "qwen2vl": ("qwen2", {}, lambda writer: None),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_bias": True}, lambda writer: None),
    "arcee": ("arcee", {"head_dim": 16}, lambda writer: None),
    "gemma2": ("gemma2", {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    }, of_gemma_2),
    "mistral3": ("ministral3", {"head_dim": 16, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 16.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8,
    }}, of_ministral),
    "glm4": ("glm4", {
        "head_dim": 16, "attention_bias": True,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }, of_glm),
    "olmo2": ("olmo2", {}, lambda writer: None),
    "granite": ("granite", {
        "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    }, of_granite),
    "qwen35": ("qwen3_5_text", QWEN35, of_qwen35),
    "qwen35moe": ("qwen3_5_moe_text", {
        **QWEN35, **QWEN_MOE, "shared_expert_intermediate_size": 20,
    }, of_qwen35_moe),
    "gemma4": ("gemma4_text", GEMMA4_WIDE, of_gemma_4),
    "gemma4, keys shared": ("gemma4_text", {
        **GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    }, of_gemma_4_small),
    "gemma4, experts": ("gemma4_text", {
        **GEMMA4_WIDE, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 24,
    }, of_gemma_4_moe),
    "gpt-oss": ("gpt_oss", {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
        "sliding_window": 6, "attention_bias": True, "num_hidden_layers": 4, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16,
        },
    }, of_gpt_oss),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1]}, lambda writer: None),
}  # fmt: skip


def module_of(family: str) -> Any:
    name, settings, _ = MODELS[family]
    config = AutoConfig.for_model(name, **SIZES | settings)
    module: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(tensor + torch.rand(tensor.shape, generator=generator) - 0.5)
    return module.eval().requires_grad_(False)


def written(family: str, file: Path, module: Any, kind: str = "F32") -> dict[str, torch.Tensor]:
    def describe(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        MODELS[family][2](writer)

    return write_gguf(file, module, kind, family.partition(",")[0], describe)


def test_every_family_is_compared() -> None:
    compared_elsewhere = {"llama", "qwen2", "qwen3"}  # tests/forward/test_stored.py
    names = {name.partition(",")[0] for name in MODELS}
    assert names | compared_elsewhere == FAMILIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_a_file_gives_the_logits_of_the_folder(family: str, tmp_path: Path) -> None:
    module = module_of(family)
    module.save_pretrained(str(tmp_path / "folder"))
    written(family, tmp_path / "tiny.gguf", module)
    folders = (tmp_path / "folder", opened_gguf(tmp_path / "tiny.gguf", tmp_path))
    modules = [load_module(folder, torch.float32, CPU) for folder in folders]
    with torch.inference_mode():
        wanted, found = (each(input_ids=torch.tensor([TOKENS])).logits for each in modules)
    assert torch.allclose(found, wanted, atol=1e-5 * float(wanted.abs().max()))
    opened = load_model(folders[1], torch.float32, CPU, 64)
    if opened.notice is None:  # it runs natively
        rows = opened.model.forward(TOKENS)
        assert torch.allclose(rows, wanted[0], atol=1e-4 * float(wanted.abs().max()))
    shape = shape_of_gguf(tmp_path / "tiny.gguf", "tiny")
    factors = [name for name, _ in module.named_buffers() if name.endswith("layer_scalar")]
    assert shape.num_params == sum(each.numel() for each in module.parameters()) + len(factors)
    assert shape_from_folder(folders[1]).num_params == shape.num_params
    assert notices_of(folders[1]) == [], "every setting is read"
    assert shape.kv_width == shape_from_folder(folders[0]).kv_width


def test_a_block_that_only_drafts_is_no_layer_and_its_tensors_are_those_of_an_mtp_head(
    tmp_path: Path,
) -> None:
    def with_mtp(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        of_qwen35(writer)
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
        for name, shape in (("nextn.eh_proj", (64, 128)), ("nextn.enorm", (64,)),
                            ("nextn.hnorm", (64,)), ("nextn.shared_head_norm", (64,)),
                            ("attn_k", (32, 64)), ("attn_norm", (64,))):  # fmt: skip
            writer.add_tensor(f"blk.4.{name}.weight", torch.ones(shape).numpy())

    file = tmp_path / "tiny.gguf"
    write_gguf(file, module_of("qwen35"), "F32", "qwen35", with_mtp, num_drafting=1)
    header = read_header(file)
    config, names = config_of(header), tensor_names(header)
    assert (config["num_hidden_layers"], config["mtp_num_hidden_layers"]) == (4, 1)
    assert {name for name in names.values() if name.startswith("mtp.")} == {
        "mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
        "mtp.norm.weight", "mtp.layers.0.self_attn.k_proj.weight",
        "mtp.layers.0.input_layernorm.weight",
    }  # fmt: skip
    source = GGUFSource(check_folder(opened_gguf(file, tmp_path)), torch.float32)
    for name in ("mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"):
        assert not source.read(name).dense(torch.float32).any(), "the 1 in the file is taken off"


def test_factors_that_are_no_proportional_rotation_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    written("gemma4", file, module_of("gemma4"))
    data = file.read_bytes()
    huge = np.float32(1e30).tobytes()
    assert data.count(huge) == 12
    file.write_bytes(data.replace(huge, np.float32(8.0).tobytes(), 1))
    with pytest.raises(ModelError, match="factors of its own"):
        config_of(read_header(file))


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path) -> None:
    """A file orders the weights of a block otherwise than a folder."""

    def describe(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        of_gpt_oss(writer)

    file, module = tmp_path / "tiny.gguf", module_of("gpt-oss")
    in_blocks = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "MXFP4")
    held = write_gguf(file, module, "F32", "gpt-oss", describe, in_blocks)
    folder = opened_gguf(file, tmp_path)
    assert read_header(file).kinds["MXFP4"] == 4 * 3 * 4 * 32 * 64
    source = GGUFSource(check_folder(folder), torch.float32)
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{part}.weight"
        matrices = list(source.entries(name))
        assert {type(matrix) for matrix in matrices} == {Mxfp4}
        values = torch.stack([matrix.dense(torch.float32) for matrix in matrices])
        assert torch.equal(values, held[name])
    opened = load_model(folder, torch.float32, CPU, 64)
    assert isinstance(opened.model, Decoder)
    experts = opened.model.weights.blocks[0].feed_forward.linears[1:]
    assert {type(linear) for linear in experts} == {Mxfp4Linear}
    dense = load_module(folder, torch.float32, CPU)
    with torch.inference_mode():
        wanted = dense(input_ids=torch.tensor([TOKENS])).logits[0]
    rows = opened.model.forward(TOKENS)
    assert torch.allclose(rows, wanted, atol=1e-5 * float(wanted.abs().max()))


def test_a_mistral_3_that_scales_no_queries_is_a_llama(tmp_path: Path) -> None:
    """Mistral Small 3 is written under the same name."""
    module = module_of("arcee")
    write_gguf(tmp_path / "tiny.gguf", module, "F32", "mistral3", VOCABULARY)
    assert config_of(read_header(tmp_path / "tiny.gguf"))["model_type"] == "llama"


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
def test_a_factor_without_a_kind_scales_the_rotation_linearly(key: str, tmp_path: Path) -> None:
    """As llama.cpp takes it; the first key is the older one."""

    def describe(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        writer.add_float32(f"qwen2.{key}", 4.0)

    write_gguf(tmp_path / "tiny.gguf", module_of("qwen2vl"), "F32", "qwen2", describe)
    rotation = config_of(read_header(tmp_path / "tiny.gguf"))["rope_parameters"]
    assert (rotation["rope_type"], rotation["factor"]) == ("linear", 4.0)


def test_a_window_of_none_is_no_window(tmp_path: Path) -> None:
    def of_phi_4(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_sliding_window(0)

    write_gguf(tmp_path / "tiny.gguf", module_of("phi3"), "F32", "phi3", of_phi_4)
    assert config_of(read_header(tmp_path / "tiny.gguf"))["sliding_window"] is None


def test_what_a_family_does_not_have_in_a_file_is_named(tmp_path: Path) -> None:
    def of_olmo_3(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        writer.add_sliding_window(8)

    file = tmp_path / "odd.gguf"
    write_gguf(file, module_of("olmo2"), "F32", "olmo2", of_olmo_3)
    with pytest.raises(ModelError, match=r"odd.gguf is an OLMo 3.*windows.*safetensors"):
        shape_of_gguf(file, "odd")
    write_gguf(file, module_of("granite"), "F32", "granite", VOCABULARY)
    with pytest.raises(ModelError, match=r"does not say 'granite.embedding_scale'"):
        shape_of_gguf(file, "odd")

    def of_narrow_values(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        writer.add_value_length(8)

    write_gguf(file, module_of("olmo2"), "F32", "olmo2", of_narrow_values)
    with pytest.raises(ModelError, match=r"values of another width than its keys"):
        shape_of_gguf(file, "odd")
