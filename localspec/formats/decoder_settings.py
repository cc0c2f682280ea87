"""The settings of a native family, read from its config.json.

`settings_of` notes every key that it reads. A key that nothing reads and that says something sends
the model to transformers' own forward, with the key in the reason: the decoder here would leave out
what it stands for. A config.json that lacks a key of its family is incomplete (`Incomplete`); what
transformers takes for it is then asked of transformers' own class, which costs seconds.

Not here: the layout of a family (native), rotation angles (forward.rotation).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.core.errors import ModelError
from localspec.formats.attention import STATE_KINDS, WINDOWED, layer_kinds
from localspec.formats.delta_settings import DeltaSettings, delta_of
from localspec.formats.layer_settings import (
    LayerSettings,
    PerLayerSettings,
    gemma4_layers,
    per_layer_inputs,
    require_known_gemma4,
)
from localspec.formats.mixture_settings import MixtureSettings, mixture_of
from localspec.formats.native import ACTIVATIONS, LAYOUTS, SCORE_CAP, Layout
from localspec.formats.noted_settings import NotedSettings
from localspec.formats.rotation_settings import (
    Incomplete,
    NotNative,
    Rotation,
    older_settings,
    rotation_with,
)

# Names of the same setting, and the usual one.
ALIASES = {"num_experts": "num_local_experts", "qkv_bias": "attention_bias", "bias": "mlp_bias"}
# Families whose heads are as wide as the model allows where head_dim is not said.
DERIVED_HEADS = frozenset(
    ("llama", "mistral", "qwen2", "mixtral", "olmoe", "phi3", "granite", "granitemoehybrid",
     "olmo2", "olmo3", "smollm3", "starcoder2", "stablelm", "phi", "cohere", "exaone4",
     "qwen2_vl_text", "qwen2_5_vl_text", "flex_olmo", "ministral", "qwen3_moe")
)  # fmt: skip
_WINDOW, _SWITCH, _BIAS = "sliding_window", "use_sliding_window", "attention_bias"
# Keys whose absence means something other than "no" in a family.
MUST_SAY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("mistral", "exaone4", "cwm", "ministral", "olmo3", "gemma3_text"), (_WINDOW,)),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", "smollm3"), (_SWITCH,)),
    **dict.fromkeys(("seed_oss", "glm", "glm4"), (_BIAS,)),
    **dict.fromkeys(("olmoe", "flex_olmo"), ("norm_topk_prob",)),
    "gpt_oss": (_WINDOW, _BIAS),
    "phi3": ("original_max_position_embeddings",),
    "qwen3_moe": ("norm_topk_prob", "moe_intermediate_size", _SWITCH),
    **dict.fromkeys(
        ("qwen3_vl_moe_text", "qwen3_5_moe_text", "qwen3_next"), ("moe_intermediate_size",)
    ),
    "mellum": (_WINDOW, "moe_intermediate_size", "norm_topk_prob"),
    "cohere": ("logit_scale",),
    "cohere2": ("logit_scale", _WINDOW),
    "jais2": (_BIAS, "mlp_bias"),
    "starcoder2": ("use_bias",),
    "granite": ("attention_multiplier",),
    "granitemoehybrid": ("attention_multiplier", "num_local_experts", "layer_types"),
    "gemma4_text": (_WINDOW, "layer_types", "hidden_size_per_layer_input"),
    "gemma4_unified_text": (_WINDOW, "layer_types"),
}
HEAD_NORMS = ("use_qk_norm", "qk_layernorm")  # Settings for norms of query and key heads.
# Keys that change no logit: of training, of generation, of the file, of what is not loaded here
# (images, further heads, layers without attention), and those that `layer_types` replaces.
HARMLESS = re.compile(
    r"_.*|architectures|model_type|auto_map|name_or_path|transformers_version|torch_dtype|dtype"
    r"|\w*(dropout|_pdrop|_drop)\w*|\w*token_id\w*|\w*token_index|initializer_range|use_cache"
    r"|pretraining_tp|output_\w+|return_dict\w*|id2label|label2id|problem_type|num_labels"
    r"|chunk_size_feed_forward|is_decoder|is_encoder_decoder|add_cross_attention"
    r"|quantization(_config)?|router_\w+|max_window_layers|sliding_window_pattern"
    r"|no_rope_layer_interval|layer_switch|order_of_interleaved_layers|cache_implementation"
    r"|decoder_sparse_step|tokenizer_class|task_specific_params|finetuning_task|prefix"
    r"|unsloth\w*|attn_implementation|num_(nextn_predict|mtp)_layers|mtp_\w+|mamba_\w+|time_step_limit"
    r"|max_length|min_length|do_sample|temperature|top_k|top_p|typical_p|repetition_penalty"
    r"|num_beams|num_return_sequences|early_stopping|length_penalty|no_repeat_ngram_size"
    r"|rope_interleaved|rotary_pct|rotary_emb_base|use_embedding_sharing|use_gated_activation"
    r"|use_parallel_(block|embedding)|use_flash_attn\w*|model_max_length|seq_length|attn_type"
    r"|rope_local_base_freq|rms_norm|norm_type|vision_\w+|image_\w+|video_\w+|mm_\w+|spatial_\w+"
    r"|projector_\w+|multimodal_\w+|max_sequence_length|initial_context_length"
)


@dataclass(frozen=True)
class DecoderSettings:
    """What builds a decoder, beside its weights.

    windows: of each layer, how many positions up to its own a token sees, None for all. turns: of
    each layer, which of `rotations` turns its queries and keys, None for none. query_scale: what
    scores are multiplied by, None for the root of the head size. logit_cap: the largest logit."""

    family: str
    layout: Layout
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    layers: tuple[LayerSettings, ...]
    longest: int
    norm_epsilon: float
    activation: str
    is_tied: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_ffn_bias: bool
    windows: tuple[int | None, ...]
    rotations: tuple[Rotation, ...]
    turns: tuple[int | None, ...]
    mixture: MixtureSettings | None
    delta: DeltaSettings | None
    query_scale: float | None
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_cap: float | None = None
    per_layer_inputs: PerLayerSettings | None = None

    def require_length(self, context_length: int) -> None:
        """Raise NotNative for a context in which a rotation is not as it is here."""
        for rotation in self.rotations:
            longest = int(rotation.settings["original_max_position_embeddings"])
            if longest >= context_length:
                continue
            if rotation.kind == "longrope":
                raise NotNative("its rotation is longrope, which changes with the length")
            if rotation.settings.get("llama_4_scaling_beta"):
                raise NotNative(
                    f"it scales its queries beyond {longest} tokens; a --context of that many runs "
                    "natively"
                )


def settings_of(
    config: Mapping[str, Any], complete: Mapping[str, Any] | None = None
) -> DecoderSettings:
    """Return the settings of the part of a config that reads text.

    config: as its file says it. complete: the same with every key of its family, as transformers
    writes it; None where the file is to say all. Raises Incomplete, NotNative, ModelError."""
    family = str(config.get("model_type"))
    if family not in LAYOUTS:
        raise NotNative(f"its family, {family}, is not native")
    text = NotedSettings(_usual(config if complete is None else complete))
    reader = _Reader(family, LAYOUTS[family], text, complete is not None)
    try:
        settings = reader.settings()
    except (Incomplete, NotNative):
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise Incomplete(f"its config.json has a value of another kind ({error})") from error
    _require_known_keys(_usual(config), text.read, family)
    return settings


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    return {ALIASES.get(name, name): value for name, value in config.items()}


def _require_known_keys(config: Mapping[str, Any], read: Collection[str], family: str) -> None:
    """Raise NotNative for a key that says something and that nothing has read."""
    unread = sorted(config.keys() - read)
    unknown = [key for key in unread if config[key] and not HARMLESS.fullmatch(key)]
    if unknown:
        raise NotNative(
            f"its config.json says {unknown[0]}, a setting that is not known for {family}"
        )


@dataclass(frozen=True)
class _Reader:
    """Reads one config. text: notes what is read."""

    family: str
    layout: Layout
    text: NotedSettings
    is_complete: bool

    def settings(self) -> DecoderSettings:
        for key in () if self.is_complete else MUST_SAY.get(self.family, ()):
            if key not in self.text:
                raise Incomplete(f"its config.json does not say {key}")
        layout, num_layers = self.layout, int(self._need("num_hidden_layers"))
        num_heads = int(self._need("num_attention_heads"))
        hidden_size = int(self._need("hidden_size"))
        num_kv_heads = self.text.get("num_key_value_heads")
        if num_kv_heads is None and not self.is_complete:
            raise Incomplete("its config.json does not say num_key_value_heads")
        num_kv_heads = int(num_kv_heads or num_heads)
        head_dim = self._head_dim(hidden_size, num_heads)
        if min(num_layers, num_kv_heads, head_dim) < 1:
            raise ModelError(
                f"The config of this {self.family} model names {num_layers} layers of "
                f"{num_kv_heads} heads of {head_dim}, which no model has. Fetch it again."
            )
        if num_heads % num_kv_heads:
            raise NotNative("its query heads do not divide among its key heads")
        self._require_known_blocks(num_layers)
        windows = self._windows(num_layers)
        layers = self._layers(num_layers, num_kv_heads, head_dim)
        rotations, turns = self._rotations(layers, windows)
        scale = float(self.text.get("logit_scale") or 1.0)
        return DecoderSettings(
            family=self.family,
            layout=layout,
            vocab_size=int(self._need("vocab_size")),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            layers=layers,
            longest=int(self._need("max_position_embeddings")),
            norm_epsilon=float(self._need(layout.norm_epsilon)),
            activation=self._activation(),
            is_tied=bool(self._need("tie_word_embeddings")),
            has_qkv_bias=self._has_bias(layout.qkv_bias),
            has_output_bias=self._has_bias(layout.output_bias),
            has_ffn_bias=self._has_bias(layout.ffn_bias),
            windows=windows,
            rotations=rotations,
            turns=turns,
            mixture=mixture_of(self.text, self.family, num_layers, self.is_complete)
            if layout.has_experts
            else None,
            delta=delta_of(self.text, num_layers, self.is_complete) if layout.has_states else None,
            query_scale=self._query_scale(),
            embedding_scale=hidden_size**0.5
            if layout.scales_embedding
            else float(self.text.get("embedding_multiplier") or 1.0),
            residual_scale=float(self.text.get("residual_multiplier") or 1.0),
            logit_scale=scale / float(self.text.get("logits_scaling") or 1.0),
            logit_cap=self._logit_cap(),
            per_layer_inputs=per_layer_inputs(self.text) if layout.has_own_sizes else None,
        )

    def _need(self, key: str) -> Any:
        value = self.text.get(key)
        if value is None:
            raise Incomplete(f"its config.json does not say {key}")
        return value

    def _head_dim(self, hidden_size: int, num_heads: int) -> int:
        given = self.text.get("head_dim")
        if given is None and not self.is_complete and self.family not in DERIVED_HEADS:
            raise Incomplete("its config.json does not say head_dim")
        return int(given or hidden_size // num_heads)

    def _has_bias(self, said: bool | str) -> bool:
        if isinstance(said, bool):
            return said
        return bool(self.text.get(said))

    def _ffn_size(self) -> int:
        self.text.get("intermediate_size")  # of experts where the layout names another setting
        return int(self._need(self.layout.ffn_size))

    def _activation(self) -> str:
        name = str(self.text.get("hidden_act") or self._need("hidden_activation"))
        self.text.get("hidden_activation")  # Gemma names it twice
        if name not in ACTIVATIONS:
            raise NotNative(f"its activation is {name}, not {' or '.join(ACTIVATIONS)}")
        return name

    def _layers(
        self, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> tuple[LayerSettings, ...]:
        usual = LayerSettings(num_kv_heads, head_dim, self._ffn_size())
        if not self.layout.has_own_sizes:
            return (usual,) * num_layers
        return gemma4_layers(self.text, usual, layer_kinds(self.text))

    def _logit_cap(self) -> float | None:
        cap = self.text.get("final_logit_softcapping")
        if cap and not self.layout.has_logit_cap:
            raise NotNative(f"its final_logit_softcapping is {cap}")
        return float(cap) if cap else None

    def _query_scale(self) -> float | None:
        if self.layout.has_own_sizes:
            return 1.0
        scalar = self.text.get("query_pre_attn_scalar")
        if self.family == "gemma3_text":
            return 1.0 / math.sqrt(float(self._need("query_pre_attn_scalar")))
        if scalar is not None:
            raise NotNative("it scales its scores by query_pre_attn_scalar")
        factor = self.text.get("attention_multiplier")
        return None if factor is None else float(factor)

    def _require_known_blocks(self, num_layers: int) -> None:
        """Raise NotNative for a setting that the blocks here do not follow."""
        if any(self.text.get(name) for name in HEAD_NORMS) and self.layout.head_norms is None:
            raise NotNative("its query and key heads have norms of their own")
        if self.text.get("use_parallel_residual"):
            raise NotNative("both parts of a block read the same rows")
        if self.family == "granitemoehybrid":
            self._require_attention_alone()
        if STATE_KINDS & {*layer_kinds(self.text)} and not self.layout.has_states:
            raise NotNative("some of its layers keep a state in place of keys and values")
        if self.text.get(SCORE_CAP):
            raise NotNative(f"its {SCORE_CAP} is {self.text[SCORE_CAP]}")
        if self.layout.has_own_sizes:
            require_known_gemma4(self.text)

    def _require_attention_alone(self) -> None:
        """Of Granite 4, whose models with other layers run on transformers."""
        if self.text.get("num_local_experts"):
            raise NotNative("it has experts beside a part that every token goes through")
        self.text.get("num_experts_per_tok")
        if self.text.get("position_embedding_type") != "rope":
            raise NotNative("it has no positions")

    def _windows(self, num_layers: int) -> tuple[int | None, ...]:
        window, kinds = self.text.get("sliding_window"), layer_kinds(self.text)
        switch = self.text.get("use_sliding_window")
        if window is None and switch and not self.is_complete:
            raise Incomplete("its config.json does not say sliding_window")
        if window is None or switch is False:
            return (None,) * num_layers
        if kinds:
            seen = [kind == "sliding_attention" for kind in kinds]
            return tuple(int(window) if is_window else None for is_window in seen)
        if not self.is_complete and self.family not in WINDOWED:
            raise Incomplete("its config.json does not say layer_types")
        return (int(window),) * num_layers

    def _rotations(
        self, layers: Sequence[LayerSettings], windows: Sequence[int | None]
    ) -> tuple[tuple[Rotation, ...], tuple[int | None, ...]]:
        """The tables of angles, and which of them turns each layer."""
        num_layers, head_dim = len(layers), layers[0].head_dim
        kinds = layer_kinds(self.text) or ["full_attention"] * num_layers
        if self.layout.num_rotations > 1 and not self.text.get("rope_parameters"):
            raise Incomplete("its config.json does not say rope_parameters")
        given = dict(self.text.get("rope_parameters") or {})
        names = list(dict.fromkeys(kinds))
        if any(isinstance(each, Mapping) for each in given.values()):
            sizes = [layers[kinds.index(name)].head_dim for name in names]
            rotations = tuple(
                rotation_with(given[name], self.text, size)
                for name, size in zip(names, sizes, strict=True)
            )
            turns: list[int | None] = [names.index(kind) for kind in kinds]
        else:
            rotations = (rotation_with(given or older_settings(self.text), self.text, head_dim),)
            turns = [0] * num_layers
        is_turned = self.text.get("no_rope_layers") or [True] * num_layers
        if self.layout.rotates_windows and any(window is not None for window in windows):
            is_turned = [window is not None for window in windows]
        pairs = zip(turns, is_turned, strict=True)
        return rotations, tuple(turn if turned else None for turn, turned in pairs)
