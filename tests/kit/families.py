"""A tiny random model of every family that the native decoder knows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import AutoModelForImageTextToText as OfImages

CLOSENESS = 1e-4  # of the largest logit


SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONG = {
    **PARTIAL, "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 64,
}  # fmt: skip
BY_PARTS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VISION = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
          "out_hidden_size": 32, "deepstack_visual_indexes": [0]}  # fmt: skip
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 64,
}
TWO_ROTATIONS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PROPORTIONAL = {
    "full_attention": {
        "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": PROPORTIONAL, "final_logit_softcapping": 3.0,
}  # fmt: skip
QUARTER = {**BY_PARTS, "partial_rotary_factor": 0.5, "mrope_interleaved": True}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 3.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 32,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied, head of its own size": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "head_dim": 16,
    },
    "llama, biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, stretched": {"model_type": "llama", "rope_parameters": LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "phi3": {"model_type": "phi3"},
    "phi3, a part of each head rotated": {"model_type": "phi3", "rope_parameters": PARTIAL},
    "phi3, within its first length": {
        "model_type": "phi3", "rope_parameters": LONG, "original_max_position_embeddings": 64,
    },
    "mistral, windowed": {"model_type": "mistral", "sliding_window": 6},
    "qwen2, windowed from a layer on": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    "qwen3_moe, shares as they are, a dense layer": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "norm_topk_prob": False, "mlp_only_layers": [1],
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "granite 4, attention alone": {
        "model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 40, "layer_types": ["attention"] * 3, "mamba_n_heads": 2,
        "position_embedding_type": "rope", "embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.2,
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16},
    "exaone4, one length": {
        "model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3,
    },
    "exaone4, positions in windows only": {
        "model_type": "exaone4", "sliding_window": 6, "sliding_window_pattern": 3,
    },
    "cohere2": {
        "model_type": "cohere2", "sliding_window": 6, "num_hidden_layers": 5, "logit_scale": 0.25,
    },
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "helium": {"model_type": "helium", "head_dim": 8},
    "cwm": {"model_type": "cwm", "sliding_window": 6, "num_hidden_layers": 5, "head_dim": 16},
    "ministral": {"model_type": "ministral", "sliding_window": 6, "head_dim": 16},
    "ministral3": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": SCALED},
    "internlm3": {"model_type": "internlm3", "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {"model_type": "iquestcoder", "head_dim": 16},
    "mellum": {
        "model_type": "mellum", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "sliding_window": 6, "rope_parameters": TWO_ROTATIONS,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "head_dim": 16, "sliding_window": 6, "num_local_experts": 4,
        "num_experts_per_tok": 2, "swiglu_limit": 0.5, "rope_parameters": YARN,
    },
    "flex_olmo": {"model_type": "flex_olmo", "num_experts": 4, "num_experts_per_tok": 2},
    "arcee": {"model_type": "arcee", "head_dim": 16, "mlp_bias": True},
    "jais2": {"model_type": "jais2", "head_dim": 8},
    "nemotron": {"model_type": "nemotron", "rope_parameters": PARTIAL},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 6},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True, "rope_parameters": PARTIAL},
    "phi": {"model_type": "phi", "rope_parameters": PARTIAL},
    "qwen2_vl": {"model_type": "qwen2_vl_text", "rope_parameters": BY_PARTS},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text", "rope_parameters": BY_PARTS},
    "qwen3_vl": {"model_type": "qwen3_vl_text", "head_dim": 8, "rope_parameters": BY_PARTS},
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe_text", "head_dim": 8, "rope_parameters": BY_PARTS,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    },
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "glm": {"model_type": "glm", "head_dim": 16, "rope_parameters": PARTIAL},
    "glm4": {"model_type": "glm4", "head_dim": 16, "rope_parameters": PARTIAL},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 6.0, "residual_multiplier": 0.3,
        "attention_multiplier": 0.2, "logits_scaling": 4.0,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": 6, "num_hidden_layers": 4},
    "gemma3_text": {
        "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 24,
        "sliding_window": 6, "num_hidden_layers": 7, "rope_parameters": TWO_ROTATIONS,
    },
    "gemma4, values from keys": {**GEMMA4, "model_type": "gemma4_unified_text",
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "gemma4": {**GEMMA4, "hidden_size_per_layer_input": 0},
    "gemma4, experts beside": {**GEMMA4, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 24, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "gemma4, keys of earlier layers": {
        **GEMMA4, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 48,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text", "head_dim": 16, "num_hidden_layers": 4, **DELTA,
        "rope_parameters": QUARTER,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text", "head_dim": 16, "num_hidden_layers": 4, **DELTA,
        "rope_parameters": QUARTER, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "head_dim": 16, "num_hidden_layers": 4, **DELTA,
        "rope_parameters": PARTIAL, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    },
}  # fmt: skip
WITH_STATES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # tests/forward/test_states.py compares them
ATTENTION_ALONE = tuple(name for name in SETTINGS if name not in WITH_STATES)


def scrambled(config: Any) -> Any:
    """A module whose every parameter is noise: norms and biases too, which start as 1 and 0."""
    auto: Any = AutoModelForCausalLM if config is config.get_text_config() else OfImages
    has_sdpa = config.model_type != "gpt_oss"
    attention = "sdpa" if has_sdpa else "eager"
    module: Any = auto.from_config(config, attn_implementation=attention).eval()
    scrambled_in_place(module)
    return module


def scrambled_in_place(module: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            noise = torch.rand(tensor.shape, generator=generator) - 0.5
            tensor.copy_(1.0 + noise if "norm" in name else 0.6 * noise)
        for name, tensor in module.named_buffers():
            if name.endswith("layer_scalar"):
                tensor.fill_(0.75)
    module.requires_grad_(False)


def small(name: str, **changed: Any) -> Any:
    settings = {**SHAPE, **SETTINGS[name], **changed}
    family = settings.pop("model_type")
    if "_vl_" in family:
        whole = family.removesuffix("_text")
        return scrambled(
            AutoConfig.for_model(whole, text_config=settings, vision_config=dict(VISION))
        )
    return scrambled(AutoConfig.for_model(family, **settings))


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= CLOSENESS * float(wanted.abs().max())
