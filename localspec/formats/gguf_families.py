"""The families that are read from GGUF files, and in what their files differ from transformers.

Not here: the settings of a file (gguf_settings).
Source: gguf-py's tensor_mapping.py and llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A family of GGUF files as transformers knows it. is_interleaved: whether llama.cpp keeps the
    rows of queries and keys in another order (each pair that is rotated stands together).
    renamed: its names that differ from LAYER_NAMES. settings: config.json's names of numbers that
    the file holds under another name. fixed: what the file leaves unsaid. norm_shift: what is added
    to the weights of norms in the file."""

    model_type: str
    architecture: str
    is_interleaved: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    norm_shift: float = 0.0


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
