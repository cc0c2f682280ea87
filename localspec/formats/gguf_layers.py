"""Settings of GGUF families whose layers are of several kinds: Qwen3.5 to 3.8 and Gemma 4.

What their files say layer by layer, or leave to the names of the tensors, becomes the keys of a
config.json of transformers.
Source: the conversion and model files of llama.cpp, in our words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.formats.gguf_file import GGUFTensor

Tensors = Mapping[str, GGUFTensor]
MTP_COUNT = "nextn_predict_layers"  # Blocks at the end that only draft; block_count has them.
# Begins the name of a file that holds such blocks alone, as llama.cpp's converter writes it.
MTP_ALONE = "mtp-"
# Parts of a block that only drafts, by the names of the published MTP head.
MTP_PARTS = {
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
    "nextn.shared_head_head.weight": "head.weight",
    "nextn.embed_tokens.weight": "embed_tokens.weight",
}


def count_layers(own: Mapping[str, Any]) -> int:
    """Return the layers of the model itself. own: the settings, without the family's name."""
    return int(own["block_count"]) - int(own.get(MTP_COUNT) or 0)


def usual_of(value: Any) -> int:
    """Return a number of the first layer, whether the file says it once or of each layer."""
    return int(value[0] if isinstance(value, list) else value)


def qwen35_settings(own: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the keys of a gated delta net and of the layers' kinds."""
    every, count = int(own["full_attention_interval"]), count_layers(own)
    value_heads = int(own["ssm.time_step_rank"])
    return {
        "layer_types": [
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(count)
        ],
        "linear_value_head_dim": int(own["ssm.inner_size"]) // value_heads,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": int(own.get(MTP_COUNT) or 0),
    }


def gpt_oss_settings(own: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the kinds of layers, which files leave unsaid: every other one has a window."""
    kinds = ("sliding_attention", "full_attention")
    return {"layer_types": [kinds[layer % 2] for layer in range(count_layers(own))]}


def gemma4_settings(own: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the keys of what layers that see everything have of their own."""
    count = count_layers(own)
    pattern = [bool(each) for each in own["attention.sliding_window_pattern"]]
    if len(pattern) != count:
        raise ValueError("attention.sliding_window_pattern of each layer")
    narrow = int(own["attention.key_length_swa"])
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if int(own.get(key) or narrow) != narrow:
            raise ValueError(f"one size of heads with a window, but {key} {own[key]}")
    kv_heads, widths = own["attention.head_count_kv"], own["feed_forward_length"]
    of_layers = kv_heads if isinstance(kv_heads, list) else [kv_heads] * count
    window, full = pattern.index(True), pattern.index(False)
    is_wide = isinstance(widths, list) and widths[-1] == 2 * widths[0]
    experts = int(own.get("expert_count") or 0)
    table = tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern],
        "head_dim": narrow,
        "global_head_dim": int(own["attention.key_length"]),
        "num_key_value_heads": int(of_layers[window]),
        "num_global_key_value_heads": int(of_layers[full]),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": int(own.get("attention.shared_kv_layers") or 0),
        "use_double_wide_mlp": is_wide,
        "final_logit_softcapping": own.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": int(own.get("embedding_length_per_layer_input") or 0),
        "vocab_size_per_layer_input": tensors["token_embd.weight"].shape[0]
        if table is None
        else table.shape[0],
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": own.get("expert_used_count") if experts else None,
        "moe_intermediate_size": own.get("expert_feed_forward_length") if experts else None,
    }
