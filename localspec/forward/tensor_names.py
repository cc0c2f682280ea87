"""The tensors that a model of a native family has, and their names in its files.

A name here has no beginning such as "model." or "model.language_model.", and no name of a family's
own for an expert. Files are compared with the settings: a weight that they lack is an error, and so
is a tensor of a layer that nothing reads (forward.completeness).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from localspec.formats.decoder_settings import DecoderSettings
from localspec.formats.native import TOWERS
from localspec.forward.completeness import NEEDLESS, weights_missing

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
EXPERT = ".experts."


@dataclass(frozen=True)
class TensorNames:
    """model: its name, for messages. actual: the name in the files of each name here. shapes: of
    the weights that stand alone, as the settings say. replaced: parts that files may hold although
    keys and values of another layer take their place."""

    model: str
    actual: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    replaced: frozenset[str] = frozenset()

    @classmethod
    def of(cls, settings: DecoderSettings, held: Collection[str], model: str) -> TensorNames:
        """held: the names in the files. Raises ModelError for a weight that they lack."""
        actual, shapes = dict(_actual(settings, held)), dict(_shapes(settings))
        _require_all(settings, actual, shapes, model)
        replaced = frozenset(
            f"layers.{layer}.self_attn.{part}"
            for layer, own in enumerate(settings.layers)
            if own.source is not None
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        )
        return cls(model, actual, shapes, replaced)

    @classmethod
    def of_layers(
        cls,
        settings: DecoderSettings,
        actual: Mapping[str, str],
        others: Mapping[str, tuple[int, ...]],
        model: str,
    ) -> TensorNames:
        """Return the names of layers that stand without a model, and of other parts.

        settings: of a decoder of these layers. actual: see TensorNames. others: the shapes of the
        other parts. Raises ModelError for a weight that `actual` lacks."""
        shapes = dict(others)
        for layer in range(settings.num_layers):
            shapes |= dict(_layer_shapes(settings, layer))
        _require_all(settings, actual, shapes, model)
        return cls(model, actual, shapes)

    def has(self, name: str) -> bool:
        return name in self.actual

    def unread(self, held: Collection[str]) -> list[str]:
        """The names in the files, `held`, of tensors that no part of the decoder reads. A tied head
        is the embedding."""
        is_read = {HEAD, *self.shapes}
        read = {
            actual
            for name, actual in self.actual.items()
            if name in is_read or EXPERT in name or name.rpartition(".")[0] in self.replaced
        }
        return [name for name in held if name not in read]

    def holds_layer_of(self, actual: str) -> bool:
        """True if a tensor of the files belongs to a part that the decoder has."""
        beginning = self.actual[EMBEDDING].removesuffix(EMBEDDING)
        path = actual.removeprefix(beginning).rpartition(".")[0]
        parts = {name.rpartition(".")[0] for name in self.shapes}
        return path in parts or any(part.isdigit() for part in path.split("."))


def _actual(settings: DecoderSettings, held: Collection[str]) -> Iterator[tuple[str, str]]:
    """The names here and in the files of every tensor that may belong to the decoder."""
    ours = [name for name in held if _may_be_ours(name)]
    embeddings = sorted((name for name in ours if name.endswith(EMBEDDING)), key=len)
    beginning = embeddings[0].removesuffix(EMBEDDING) if embeddings else "model."
    for name in ours:
        head = name.rpartition("lm_head.")
        if head[1]:
            yield f"lm_head.{head[2]}", name
        elif name.startswith(beginning):
            usual = name.removeprefix(beginning)
            for published, ours_is in settings.layout.renamed.items():
                usual = re.sub(published, ours_is, usual)
            yield usual, name


def _require_all(
    settings: DecoderSettings,
    actual: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    model: str,
) -> None:
    """Raise ModelError for a weight that the files lack."""
    missing = [name for name in shapes if name not in actual]
    missing += _missing_experts(settings, actual)
    if missing:
        raise weights_missing(model, missing)


def _may_be_ours(name: str) -> bool:
    return not NEEDLESS.search(name) and set(TOWERS).isdisjoint(name.split("."))


def _shapes(settings: DecoderSettings) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every weight but those of experts."""
    layout, width, vocabulary = settings.layout, settings.hidden_size, settings.vocab_size
    yield EMBEDDING, (vocabulary, width)
    if not settings.is_tied:
        yield HEAD, (vocabulary, width)
        if layout.has_head_bias:
            yield "lm_head.bias", (vocabulary,)
    yield from _norm_shapes(settings, layout.final_norm, width)
    for layer in range(settings.num_layers):
        yield from _layer_shapes(settings, layer)
    yield from _per_layer_shapes(settings)


def _layer_shapes(settings: DecoderSettings, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    layout, begin = settings.layout, f"layers.{layer}."
    for norm in dict.fromkeys(
        (layout.attention_norm, layout.after_attention, layout.feed_forward_norm,
         layout.after_feed_forward)
    ):  # fmt: skip
        if norm is not None:
            yield from _norm_shapes(settings, f"{begin}{norm}", settings.hidden_size)
    for name, shape in (*_mixer_shapes(settings, layer), *_ffn_shapes(settings, layer)):
        yield f"{begin}{name}", shape
    if layout.scales_layers:
        yield f"{begin}layer_scalar", (1,)


def _per_layer_shapes(settings: DecoderSettings) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of the inputs that every layer has of its own."""
    if settings.per_layer_inputs is None:
        return
    inputs, width = settings.per_layer_inputs, settings.hidden_size
    of_all = settings.num_layers * inputs.width
    yield "embed_tokens_per_layer.weight", (inputs.vocab_size, of_all)
    yield "per_layer_model_projection.weight", (of_all, width)
    yield "per_layer_projection_norm.weight", (inputs.width,)
    for layer in range(settings.num_layers):
        begin = f"layers.{layer}."
        yield f"{begin}per_layer_input_gate.weight", (inputs.width, width)
        yield f"{begin}per_layer_projection.weight", (width, inputs.width)
        yield f"{begin}post_per_layer_input_norm.weight", (width,)


def _norm_shapes(
    settings: DecoderSettings, path: str, width: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.weight", (width,)
    if settings.layout.has_norm_bias:
        yield f"{path}.bias", (width,)


def _linear_shapes(
    path: str, num_out: int, num_in: int, has_bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.weight", (num_out, num_in)
    if has_bias:
        yield f"{path}.bias", (num_out,)


def _mixer_shapes(settings: DecoderSettings, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    delta, width = settings.delta, settings.hidden_size
    if delta is None or not delta.layers[layer]:
        yield from _attention_shapes(settings, layer)
        return
    begin, heads = "linear_attn.", delta.num_value_heads
    values = heads * delta.value_size
    parts = {"in_proj_qkv": delta.num_channels, "in_proj_z": values}
    parts |= {"in_proj_b": heads, "in_proj_a": heads}
    if settings.layout.joins_state_inputs:
        parts = {"in_proj_qkvz": delta.num_channels + values, "in_proj_ba": 2 * heads}
    for part, num_out in parts.items():
        yield f"{begin}{part}.weight", (num_out, width)
    yield f"{begin}conv1d.weight", (delta.num_channels, 1, delta.kernel)
    yield f"{begin}A_log", (heads,)
    yield f"{begin}dt_bias", (heads,)
    yield f"{begin}norm.weight", (delta.value_size,)
    yield f"{begin}out_proj.weight", (width, values)


def qkv_sizes(settings: DecoderSettings, layer: int) -> dict[str, int]:
    """Return the layers that give queries, keys and values, in order, and their outputs."""
    own = settings.layers[layer]
    queries, keys = settings.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    if settings.layout.is_qkv_joined:
        return {"qkv_proj": queries + 2 * keys}
    if own.source is not None:
        return {"q_proj": queries}
    queries *= 2 if settings.layout.has_output_gate else 1
    return {"q_proj": queries, "k_proj": keys, **({"v_proj": keys} if own.has_values else {})}


def _attention_shapes(
    settings: DecoderSettings, layer: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    layout, own, parts = settings.layout, settings.layers[layer], qkv_sizes(settings, layer)
    queries, keys = settings.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    for part, num_out in parts.items():
        yield from _linear_shapes(
            f"self_attn.{part}", num_out, settings.hidden_size, settings.has_qkv_bias
        )
    yield from _linear_shapes(
        f"self_attn.{layout.output}", settings.hidden_size, queries, settings.has_output_bias
    )
    if layout.has_sinks:
        yield "self_attn.sinks", (settings.num_heads,)
    if layout.head_norms is not None:
        is_whole = layout.head_norms == "whole"
        yield "self_attn.q_norm.weight", (queries if is_whole else own.head_dim,)
        if own.source is None:
            yield "self_attn.k_norm.weight", (keys if is_whole else own.head_dim,)


def _ffn_shapes(settings: DecoderSettings, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    layout, mixture = settings.layout, settings.mixture
    begin, width = f"{layout.feed_forward}.", settings.hidden_size
    inner = settings.layers[layer].ffn_size
    if mixture is not None and mixture.is_beside:
        yield from _router_shapes(mixture.num_experts, width)
    elif mixture is not None and mixture.layers[layer]:
        yield from _linear_shapes(
            f"{begin}gate", mixture.num_experts, width, layout.has_expert_bias
        )
        if not layout.has_shared_expert:
            return
        yield f"{begin}shared_expert_gate.weight", (1, width)
        begin = f"{layout.dense_part}."
    up, down = layout.plain_feed_forward or (None, layout.down)
    ups = {up: inner} if up else {"gate_proj": inner, "up_proj": inner}
    if layout.is_gate_up_joined:
        ups = {layout.gate_up: 2 * inner}
    for part, num_out in ups.items():
        yield from _linear_shapes(f"{begin}{part}", num_out, width, settings.has_ffn_bias)
    yield from _linear_shapes(f"{begin}{down}", width, inner, settings.has_ffn_bias)


def _router_shapes(num_experts: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of a mixture beside a dense part, with the norms of both."""
    yield "router.proj.weight", (num_experts, width)
    yield "router.scale", (width,)
    yield "router.per_expert_scale", (num_experts,)
    for norm in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2",
                 "post_feedforward_layernorm_2"):  # fmt: skip
        yield f"{norm}.weight", (width,)


def experts_path(settings: DecoderSettings, layer: int) -> str:
    """Return how the names of a layer's experts begin."""
    is_beside = settings.mixture is not None and settings.mixture.is_beside
    return f"layers.{layer}.{'' if is_beside else f'{settings.layout.feed_forward}.'}experts."


def _missing_experts(settings: DecoderSettings, actual: Mapping[str, str]) -> list[str]:
    """Layers whose experts the files lack, by the name of their first weight."""
    if settings.mixture is None:
        return []
    parts = ("gate_proj", "up_proj", "down_proj")
    missing = list[str]()
    for layer, has_experts in enumerate(settings.mixture.layers):
        if not has_experts:
            continue
        begin = experts_path(settings, layer)
        joined = [f"{begin}gate_up_proj", f"{begin}down_proj"]
        of_all = [f"{begin}{part}.weight" for part in parts]
        apart = [
            f"{begin}{expert}.{part}.weight"
            for expert in range(settings.mixture.num_experts)
            for part in parts
        ]
        forms = [apart, joined, of_all]
        if settings.layout.has_expert_bias:
            biases = [f"{name}_bias" for name in joined]
            of_all += [f"{begin}{part}.bias" for part in parts]
            forms = [[*joined, *biases], of_all]
        if not any(all(name in actual for name in form) for form in forms):
            missing += [name for name in forms[0] if name not in actual][:1]
    return missing
