"""The families that are read from GGUF files, and in what their files differ from transformers.

Not here: the settings of a file (gguf_settings).
Source: gguf-py's tensor_mapping.py and llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Family:
    """A family of GGUF files as transformers knows it. is_interleaved: whether llama.cpp keeps the
    rows of queries and keys in another order (each pair that is rotated stands together).
    renamed: its names that differ from LAYER_NAMES. settings: config.json's names of numbers that
    the file holds under another name. fixed: what the file leaves unsaid. norm_shift: what is added
    to the weights of norms in the file; unshifted: the end of the path of norms that are left as
    they are. parts: names of single tensors of a layer, with their last part; outer: of tensors
    outside of the layers."""

    model_type: str
    architecture: str
    is_interleaved: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    norm_shift: float = 0.0
    unshifted: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)


POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN2 = Family("qwen2", "Qwen2ForCausalLM")
_QWEN3 = Family("qwen3", "Qwen3ForCausalLM")
_QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    renamed={
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    },
    settings={
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    fixed={"norm_topk_prob": True},
)
_QWEN35 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    renamed={
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    settings={
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
    },
    norm_shift=1.0,
    unshifted="linear_attn.norm",
    parts={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
)
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_QWEN35_MOE = replace(
    _QWEN35,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    renamed={
        **_QWEN35.renamed,
        **_QWEN3_MOE.renamed,
        **_SHARED,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    },
    parts={
        **_QWEN35.parts,
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    },
    settings={
        **_QWEN35.settings,
        **_QWEN3_MOE.settings,
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
)
_GEMMA4 = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    renamed={
        **POST_NORMS,
        "ffn_norm": "pre_feedforward_layernorm",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    settings={"sliding_window": "attention.sliding_window"},
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    parts={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    outer={
        "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    },
)
_GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    renamed={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    },
    settings={
        "sliding_window": "attention.sliding_window",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "intermediate_size": "expert_feed_forward_length",
    },
    parts={"attn_sinks.weight": "self_attn.sinks"},
)
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", is_interleaved=True),  # Mistral's too
    "mistral3": Family("ministral3", "Ministral3ForCausalLM", is_interleaved=True),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3moe": _QWEN3_MOE,
    # Of models for images, whose text part is the plain model: all positions of text are alike.
    "qwen2vl": _QWEN2,
    "qwen3vl": _QWEN3,
    "qwen3vlmoe": _QWEN3_MOE,
    "seed_oss": Family(
        "seed_oss",
        "SeedOssForCausalLM",
        renamed={"post_attention_norm": "post_attention_layernorm"},
    ),
    "arcee": Family(
        "arcee", "ArceeForCausalLM", is_interleaved=True, fixed={"hidden_act": "relu2"}
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        renamed={**POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
        settings={
            "sliding_window": "attention.sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        norm_shift=1.0,
    ),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", is_interleaved=True),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        renamed={**POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
        settings={"sliding_window": "attention.sliding_window"},
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        norm_shift=1.0,
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        renamed={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        settings={
            "original_max_position_embeddings": "rope.scaling.original_context_length",
            "sliding_window": "attention.sliding_window",
        },
    ),
    "glm4": Family(
        "glm4",
        "Glm4ForCausalLM",
        renamed={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "gemma4": _GEMMA4,
    "gpt-oss": _GPT_OSS,
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", renamed=POST_NORMS),
    "granite": Family(
        "granite",
        "GraniteForCausalLM",
        is_interleaved=True,
        settings={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        },
    ),
}
