"""The families that the native decoder runs, and what it lacks of the others.

LAYOUTS says in what the blocks of a family differ; forward.builder builds those that stand there
and no others. `why_not_native` says what a model has that the decoder lacks, by its settings and
the names of its weights. The settings of a native family are read by formats.decoder_settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from localspec.core.units import enumerated


@dataclass(frozen=True)
class Layout:
    """How a family lays out a block: the module's names of its norms, None where it has none there.
    head_norms: of each query and key head, or of all together. is_qkv_joined, is_gate_up_joined:
    whether these are one layer already. norm_offset: what a norm adds to its weight.
    is_interleaved: whether numbers that are rotated together stand side by side. rotates_windows:
    whether, where some layers attend to a window, only those know positions. has_layer_norms: all
    its norms take the mean off. is_parallel: both parts of a block read the same rows. output,
    final_norm: names of the attention's last layer and the model's last norm. feed_forward, gate_up
    and down: names of that part, and of its layers where gate and up are joined.
    plain_feed_forward: names of the two layers of such a part without a gate.

    norm_epsilon: the setting of what norms add. has_norm_bias, has_head_bias: whether norms and the
    output head have a bias. qkv_bias, output_bias, ffn_bias: the setting that says whether these
    layers have one, or the answer itself. scales_embedding: rows of the embedding are multiplied by
    the root of their width. has_experts: some layers are a mixture; has_expert_bias:
    its router and all products of its experts have one; has_expert_columns: its experts are kept as
    [in, out], gate and up in turn. has_sinks: attention has a further score for each head. renamed:
    patterns of published names of weights, and transformers' names of the same.

    ffn_size: the setting of the width of that part. has_shared_expert: every token goes through a
    part of that width beside the experts.

    has_output_gate: attention's result is multiplied by a gate, whose rows stand behind those of
    each query head. has_states: layers of the kind "linear_attention" are gated delta nets.
    joins_state_inputs: their layers of one input are two, with the rows of each key head together.

    experts_kept: how experts are kept beside linear layers in 4 bits: in 4 bits as well, or, at
    every precision, as the files hold them.

    has_own_sizes: layers that see all positions have key heads of their own number and size
    (layer_settings). norms_values: heads of values are normed, without a weight. scales_layers: a
    layer ends with a factor, `layer_scalar`. has_logit_cap: the model follows
    `final_logit_softcapping`.

    num_rotations: tables of angles. says_sizes: whether the number of its weights can be estimated
    by the sizes in its config.json. is_tied: whether the head is tied where nothing is said."""

    attention_norm: str | None = "input_layernorm"
    after_attention: str | None = None
    feed_forward_norm: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None
    head_norms: Literal["each", "whole"] | None = None
    is_qkv_joined: bool = False
    is_gate_up_joined: bool = False
    norm_offset: float = 0.0
    is_interleaved: bool = False
    rotates_windows: bool = False
    has_layer_norms: bool = False
    is_parallel: bool = False
    output: str = "o_proj"
    final_norm: str = "norm"
    feed_forward: str = "mlp"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    plain_feed_forward: tuple[str, str] | None = None
    norm_epsilon: str = "rms_norm_eps"
    has_norm_bias: bool = False
    has_head_bias: bool = False
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    ffn_bias: bool | str = "mlp_bias"
    scales_embedding: bool = False
    has_experts: bool = False
    experts_kept: Literal["4-bit", "stored"] = "4-bit"
    ffn_size: str = "intermediate_size"
    has_shared_expert: bool = False
    has_output_gate: bool = False
    has_states: bool = False
    joins_state_inputs: bool = False
    has_expert_bias: bool = False
    has_expert_columns: bool = False
    has_sinks: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    has_own_sizes: bool = False
    norms_values: bool = False
    scales_layers: bool = False
    has_logit_cap: bool = False
    num_rotations: int = 1
    says_sizes: bool = False
    is_tied: bool = False

    @property
    def dense_part(self) -> str:
        """The path of the part that every token goes through."""
        return f"{self.feed_forward}.shared_expert" if self.has_shared_expert else self.feed_forward


_AFTER_ONLY = Layout(
    attention_norm=None,
    after_attention="post_attention_layernorm",
    feed_forward_norm=None,
    after_feed_forward="post_feedforward_layernorm",
    head_norms="whole",
    says_sizes=True,
)
_COHERE = Layout(
    feed_forward_norm="input_layernorm",
    is_interleaved=True,
    has_layer_norms=True,
    norm_epsilon="layer_norm_eps",
    is_parallel=True,
    says_sizes=True,
    is_tied=True,
)
_GEMMA3 = Layout(
    after_attention="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
    head_norms="each",
    norm_offset=1.0,
    scales_embedding=True,
    num_rotations=2,
    says_sizes=True,
    is_tied=True,
)
_GEMMA4 = replace(
    _GEMMA3,
    norm_offset=0.0,
    has_own_sizes=True,
    norms_values=True,
    scales_layers=True,
    has_logit_cap=True,
    says_sizes=False,
)
_LAYER_NORMS = Layout(has_layer_norms=True, has_norm_bias=True, norm_epsilon="layer_norm_eps")
_QWEN2 = Layout(qkv_bias=True, output_bias=False)
_QWEN3_MOE = Layout(head_norms="each", has_experts=True)
_QWEN3_5 = Layout(head_norms="each", norm_offset=1.0, has_output_gate=True, has_states=True)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    has_experts=True,
    has_shared_expert=True,
    ffn_size="shared_expert_intermediate_size",
)
_GLM = Layout(is_gate_up_joined=True, is_interleaved=True, output_bias=False)
# Of a mixture whose router and experts have other names in published folders.
_MIXTRAL_NAMES = {
    r"block_sparse_moe\.gate": "mlp.gate",
    r"block_sparse_moe\.experts\.(\d+)\.w1": r"mlp.experts.\1.gate_proj",
    r"block_sparse_moe\.experts\.(\d+)\.w3": r"mlp.experts.\1.up_proj",
    r"block_sparse_moe\.experts\.(\d+)\.w2": r"mlp.experts.\1.down_proj",
}
LAYOUTS: Mapping[str, Layout] = {
    "llama": Layout(says_sizes=True),
    "mistral": Layout(says_sizes=True),
    "qwen2": replace(_QWEN2, says_sizes=True),
    "qwen3": Layout(head_norms="each", says_sizes=True),
    "qwen3_moe": replace(_QWEN3_MOE, says_sizes=True),
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3_vl_text": Layout(head_norms="each"),
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "mixtral": Layout(has_experts=True, renamed=_MIXTRAL_NAMES, says_sizes=True),
    "olmoe": Layout(head_norms="whole", has_experts=True, says_sizes=True),
    "seed_oss": Layout(output_bias="attention_out_bias"),
    "ernie4_5": Layout(
        is_interleaved=True, qkv_bias="use_bias", output_bias="use_bias", ffn_bias="use_bias"
    ),
    "smollm3": Layout(says_sizes=True, is_tied=True),
    "phi3": Layout(is_qkv_joined=True, is_gate_up_joined=True, says_sizes=True),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        after_attention="post_self_attn_layernorm",
        after_feed_forward="post_mlp_layernorm",
    ),
    "granite": Layout(says_sizes=True),
    "granitemoehybrid": Layout(  # those with attention alone
        is_gate_up_joined=True,
        feed_forward="shared_mlp",
        ffn_size="shared_intermediate_size",
        gate_up="input_linear",
        down="output_linear",
    ),
    "olmo2": _AFTER_ONLY,
    "olmo3": replace(_AFTER_ONLY, num_rotations=2),
    "exaone4": replace(_AFTER_ONLY, head_norms="each", rotates_windows=True),
    "helium": Layout(is_interleaved=True, output_bias=False, says_sizes=True),
    "cwm": Layout(),
    "ministral": Layout(says_sizes=True),
    "ministral3": Layout(says_sizes=True),
    "internlm3": Layout(),
    "iquestcoder": Layout(),
    "gpt_oss": Layout(
        has_experts=True,
        experts_kept="stored",
        has_expert_bias=True,
        has_expert_columns=True,
        has_sinks=True,
        renamed={r"mlp\.router\.": "mlp.gate."},
    ),
    "mellum": Layout(head_norms="each", has_experts=True, num_rotations=2),
    "flex_olmo": replace(_AFTER_ONLY, has_experts=True),
    "arcee": Layout(plain_feed_forward=("up_proj", "down_proj")),
    "nemotron": replace(
        _LAYER_NORMS,
        norm_epsilon="norm_eps",
        norm_offset=1.0,
        plain_feed_forward=("up_proj", "down_proj"),
    ),
    "jais2": replace(_LAYER_NORMS, plain_feed_forward=("up_proj", "down_proj")),
    "starcoder2": replace(
        _LAYER_NORMS,
        norm_epsilon="norm_epsilon",
        plain_feed_forward=("c_fc", "c_proj"),
        qkv_bias="use_bias",
        output_bias="use_bias",
        ffn_bias="use_bias",
    ),
    "stablelm": replace(_LAYER_NORMS, qkv_bias="use_qkv_bias", output_bias=False),
    "phi": replace(
        _LAYER_NORMS,
        feed_forward_norm="input_layernorm",
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        has_head_bias=True,
        is_parallel=True,
        output="dense",
        final_norm="final_layernorm",
        plain_feed_forward=("fc1", "fc2"),
    ),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, rotates_windows=True),
    "gemma": Layout(norm_offset=1.0, scales_embedding=True, says_sizes=True, is_tied=True),
    "gemma3_text": _GEMMA3,
    "gemma4_text": replace(_GEMMA4, has_experts=True),
    "gemma4_unified_text": _GEMMA4,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_next": replace(_QWEN3_5_MOE, joins_state_inputs=True),
}
# Families whose published folders bring code that is not needed, by transformers' name of them.
KNOWN_AS = {
    "mimo": "qwen2",
    "phi3": "phi3",
    "phi": "phi",
    "phimoe": "phimoe",
    "falcon": "falcon",
    "internlm3": "internlm3",
    "iquestcoder": "iquestcoder",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5_moe",
}
# Models for images, by the family of the part that reads text.
OF_IMAGES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# model_type of an assistant, which drafts for a model of Gemma 4 -> that of its layers.
ASSISTANTS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
TOWERS = (
    "vision_tower",
    "audio_tower",
    "multi_modal_projector",
    "visual",
    "embed_vision",
    "embed_audio",
)  # what they have for images and sound
_NAMES = {family: family for family in LAYOUTS} | KNOWN_AS | OF_IMAGES
NATIVE: Mapping[str, Layout] = {
    name: LAYOUTS[family] for name, family in _NAMES.items() if family in LAYOUTS
}
# Those whose weights can be estimated by config.json alone; of Gemma 3 the part that reads text.
SIZED: Mapping[str, Layout] = {
    name: layout
    for name, layout in NATIVE.items()
    if layout.says_sizes and (name == "gemma3" or name not in OF_IMAGES)
}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu_new", "relu2")
ACTIVATION_NAMES = ("hidden_act", "hidden_activation", "activation_function", "activation")
SCORE_CAP = "attn_logit_softcapping"  # which no fused kernel of attention follows
# What a weight's name tells.
TOLD = (
    (r"\bsinks\b", "attention sinks"),
    (r"\b(wpe|embed_positions)\b", "learnt positions"),
    (r"\blambda_[qk]\d\b", "attention that is the difference of two"),
    (r"\b(query_key_value|Wqkv|c_attn)\b", "queries, keys and values mixed in one weight"),
    (r"\bshared_(experts?|mlp)\b", "experts that every token goes through"),
    (r"\b(e_score_correction_bias|expert_bias)$", "a router with a correction of its scores"),
    (r"\.experts\..*bias$", "experts with a bias"),
    (r"\bblock_sparse_moe\.router\b", "experts of another layout"),
    (r"\bquery_layernorm\b", "norms of queries after their rotation"),
    (r"\bself_attn\.A$", "attention that leaves out tokens by their values"),
    (r"\bpost_norm\d\b", "norms in other places"),
    (r"\bper_layer_\w+", "an input of its own for every layer"),
    (r"\blayer_scalar$", "a factor of its own for every layer"),
    (r"_sub_norm\b", "norms inside attention and feed-forward part"),
)
# What a layer of the native families holds.
KNOWN_PART = re.compile(
    r"(q|k|v|o|qkv|gate|up|down|gate_up)_proj|experts|gate|w[123]|block_sparse_moe|\d+"
    r"|c_fc|c_proj|fc[12]|dense|mlp|self_attn|weight|bias|\w*norm"
)


def why_not_native(text: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Why not natively, after "because"; None for a native family. text: the settings of the part
    that reads text. names: of its weights."""
    family, of_weights = str(text.get("model_type")), sorted(names)
    if family in NATIVE:
        return None
    found = ["soft-capped scores of attention"] if text.get(SCORE_CAP) else []
    found += ["positions by ALiBi"] if text.get("alibi") else []
    found += [what for told, what in TOLD if any(re.search(told, name) for name in of_weights)]
    activation = next((text[name] for name in ACTIVATION_NAMES if text.get(name)), None)
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        found.append(f"the activation {activation}")
    found = found or _unknown_parts(of_weights)
    if not found:
        return f"its family, {family}, was not compared with the native decoder"
    return f"it has {enumerated(found)}"


def _unknown_parts(names: Iterable[str]) -> list[str]:
    """What layers hold beside the parts of the native families."""
    in_layers = (re.split(r"(?:^|\.)layers\.\d+\.", name, maxsplit=1) for name in names)
    parts = {part for each in in_layers if len(each) == 2 for part in each[1].split(".")}
    unknown = sorted(part for part in parts if not KNOWN_PART.fullmatch(part))
    return [f"layers with {each}" for each in unknown[:1]]
