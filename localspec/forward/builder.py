"""Builds the native decoder of a family from its settings and the tensors of its files.

One block is made at a time on its device, and queries, keys and values, and gate and up, become one
layer each. What a family's layers are called and in what they differ is said by formats.native;
what is in the files is compared with the settings before a weight is read.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from localspec.core.errors import ModelError
from localspec.formats.decoder_settings import DecoderSettings
from localspec.formats.delta_settings import DeltaSettings
from localspec.formats.layer_settings import LayerSettings
from localspec.formats.mixture_settings import MixtureSettings
from localspec.forward.activations import ACTIVATIONS
from localspec.forward.block import (
    Attention,
    Block,
    FeedForward,
    GatedFeedForward,
    HeadNorm,
    Mixture,
    Norm,
    PlainFeedForward,
    Scale,
    WholeNorm,
)
from localspec.forward.completeness import shape_error
from localspec.forward.decoder_weights import Weights
from localspec.forward.delta_net import DeltaNet, unit_heads, unscaled_norm
from localspec.forward.expert_builder import ExpertBuilder
from localspec.forward.experts_beside import ExpertsBeside, Normed, SharedExpert
from localspec.forward.gated_attention import GatedAttention
from localspec.forward.mixer import Mixer, halves_swapped, pairs_swapped
from localspec.forward.norm import LayerNorm, RootMeanSquareNorm
from localspec.forward.per_layer_inputs import PerLayerGate, PerLayerInputs
from localspec.forward.rotation import rotation_table
from localspec.forward.tensor_names import TensorNames, experts_path, qkv_sizes
from localspec.weights import nf4
from localspec.weights.dense import dense_linear
from localspec.weights.linear import Linear
from localspec.weights.nf4 import Nf4Embedding, Nf4Linear
from localspec.weights.precision import GROUP, ROWS, Precision, linear_for, suits
from localspec.weights.source import WeightSource
from localspec.weights.stored import Dense, Weight


def build_weights(
    settings: DecoderSettings,
    source: WeightSource,
    names: TensorNames,
    precision: Precision,
    capacity: int,
    quantises_ends: bool = False,
) -> Weights:
    """Return the weights of a decoder, on the device of `precision`.

    names: of the source's tensors. capacity: positions of the context. quantises_ends: the output
    head in 4 bits, and on a GPU the embedding. Raises ModelError."""
    builder = Builder(settings, source, names, precision, capacity)
    # The head first: it is the largest weight, and for a while held twice.
    embedding, head = builder.ends(quantises_ends)
    like = (capacity, settings.layout.is_interleaved, precision.dtype, precision.device)
    return Weights(
        embedding=embedding,
        blocks=tuple(builder.blocks()),
        final_norm=builder.norm(settings.layout.final_norm),
        head=head,
        tables=tuple(rotation_table(rotation, *like) for rotation in settings.rotations),
        swapped=pairs_swapped if settings.layout.is_interleaved else halves_swapped,
        embedding_scale=_rounded(settings.embedding_scale, settings, precision.dtype),
        logit_scale=settings.logit_scale,
        logit_cap=settings.logit_cap,
        per_layer_inputs=builder.per_layer_inputs(),
    )


def ends_refused() -> ModelError:
    return ModelError(
        "The output head of this model cannot be kept in 4 bits: that takes a model that the "
        f"native decoder runs, and a head of {GROUP} x n inputs and {ROWS} x n tokens. Use "
        "--dtype 4-bit."
    )


def experts_refused() -> ModelError:
    return ModelError(
        "The experts of this model cannot stay in the RAM while a GPU computes the rest: that "
        "takes a model that the native decoder runs. Leave them on the GPU, or run it on the CPU."
    )


def return_cached(device: torch.device) -> None:
    """Free what torch, or on Linux the C library, keeps on a device for later. The latter keeps
    what was freed between blocks in use: after loading a packed model, more than the model."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _rounded(factor: float, settings: DecoderSettings, dtype: torch.dtype) -> float:
    """Gemma's factor as it is rounded in transformers."""
    if not settings.layout.scales_embedding:
        return factor
    return float(torch.tensor(factor).to(dtype))


@dataclass(frozen=True)
class Builder:
    """Reads the parts of one model."""

    settings: DecoderSettings
    source: WeightSource
    names: TensorNames
    precision: Precision
    capacity: int

    def ends(self, quantises: bool) -> tuple[torch.Tensor | Nf4Embedding, Linear]:
        """The embedding and the output head."""
        whole, device = self.precision.whole, self.precision.device
        if quantises:
            return self._quantised_ends()
        embedding = self._dense("embed_tokens.weight")
        if self.settings.is_tied:
            return embedding, dense_linear(embedding, None)
        head = linear_for([self._weight("lm_head.weight")], [self._head_bias()], whole)
        return_cached(device)
        return embedding, head

    def blocks(self) -> Iterator[Block]:
        for layer in range(self.settings.num_layers):
            yield self.block(layer)
            # Fused weights need larger pieces of memory than those that were freed.
            for device in {self.precision.device, self.precision.of_experts.device}:
                return_cached(device)

    def norm(self, path: str) -> Norm:
        weight, epsilon = self._norm_weight(path), self.settings.norm_epsilon
        if not self.settings.layout.has_layer_norms:
            return RootMeanSquareNorm(weight, epsilon)
        bias = self._dense(f"{path}.bias") if self.settings.layout.has_norm_bias else None
        return LayerNorm(weight, epsilon, bias)

    def product(self, path: str) -> Linear:
        """Return a layer that stands alone, without a bias."""
        return self._linear([path], has_bias=False)

    def block(self, layer: int) -> Block:
        layout, begin, mixture = self.settings.layout, f"layers.{layer}.", self.settings.mixture
        return Block(
            attention_norm=self._norm_of(begin, layout.attention_norm),
            mixer=self._mixer(layer),
            # Experts beside a dense part have norms of their own.
            feed_forward_norm=None
            if mixture is not None and mixture.is_beside
            else self._norm_of(begin, layout.feed_forward_norm),
            feed_forward=self._feed_forward(layer),
            after_attention=self._after(begin, layout.after_attention),
            after_feed_forward=self._after(begin, layout.after_feed_forward),
            is_parallel=layout.is_parallel,
            per_layer_gate=self._per_layer_gate(begin),
            scale=float(self._dense(f"{begin}layer_scalar")) if layout.scales_layers else 1.0,
        )

    def _mixer(self, layer: int) -> Mixer:
        delta, begin = self.settings.delta, f"layers.{layer}."
        if delta is not None and delta.layers[layer]:
            return self._delta_net(f"{begin}linear_attn.", delta)
        return self._attention(f"{begin}self_attn.", layer)

    def _attention(self, begin: str, layer: int) -> Attention:
        settings, layout = self.settings, self.settings.layout
        window, own, scale = settings.windows[layer], settings.layers[layer], settings.query_scale
        parts = [f"{begin}{part}" for part in qkv_sizes(settings, layer)]
        kind = GatedAttention if layout.has_output_gate else Attention
        return kind(
            qkv=self._linear(parts, settings.has_qkv_bias),
            output=self._linear([f"{begin}{layout.output}"], settings.has_output_bias),
            num_heads=settings.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            head_norm=self._head_norm(begin, own),
            rotation=settings.turns[layer],
            window=window if window is not None and window < self.capacity else None,
            query_scale=1.0 if scale is None else scale * own.head_dim**0.5,
            norms_values=layout.norms_values,
            repeats_keys=not own.has_values,
            source=own.source,
            sinks=self._dense(f"{begin}sinks").float() if layout.has_sinks else None,
        )

    def _delta_net(self, begin: str, delta: DeltaSettings) -> DeltaNet:
        """Its own norm adds nothing to its weight, whatever the other norms do."""
        inputs = [self._weight(f"{begin}{part}.weight") for part in self._state_inputs]
        if self.settings.layout.joins_state_inputs:
            orders = _rows_by_part(delta)
            inputs = [weight.rows(rows) for weight, rows in zip(inputs, orders, strict=True)]
        return DeltaNet(
            projection=linear_for(inputs, [None] * len(inputs), self.precision),
            output=self._linear([f"{begin}out_proj"], has_bias=False),
            shape=delta,
            convolution=self._whole(f"{begin}conv1d.weight")[:, 0].T.contiguous(),
            head_norm=unit_heads(delta.key_size, self.precision.device),
            log_decay=-torch.exp(self._whole(f"{begin}A_log")),
            decay_bias=self._whole(f"{begin}dt_bias"),
            output_norm=unscaled_norm(
                self._dense(f"{begin}norm.weight"), self.settings.norm_epsilon, delta.key_size
            ),
        )

    @property
    def _state_inputs(self) -> tuple[str, ...]:
        """The names of a gated delta net's layers of one input."""
        if self.settings.layout.joins_state_inputs:
            return ("in_proj_qkvz", "in_proj_ba")
        return ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def _whole(self, name: str) -> torch.Tensor:
        """In fp32, as recurrences are computed."""
        return self._weight(name).dense(torch.float32).to(self.precision.device)

    def per_layer_inputs(self) -> PerLayerInputs | None:
        settings = self.settings
        if settings.per_layer_inputs is None:
            return None
        table = self._weight("embed_tokens_per_layer.weight")
        width, dtype = settings.per_layer_inputs.width, self.precision.dtype
        return PerLayerInputs(
            table=(table.values if isinstance(table, Dense) else table.dense(dtype)).cpu(),
            projection=self._linear(["per_layer_model_projection"], has_bias=False),
            norm=self._rows_norm("per_layer_projection_norm"),
            width=width,
            hidden_size=settings.hidden_size,
        )

    def _per_layer_gate(self, begin: str) -> PerLayerGate | None:
        if self.settings.per_layer_inputs is None:
            return None
        return PerLayerGate(
            gate=self._linear([f"{begin}per_layer_input_gate"], has_bias=False),
            projection=self._linear([f"{begin}per_layer_projection"], has_bias=False),
            norm=self._rows_norm(f"{begin}post_per_layer_input_norm"),
            activation=ACTIVATIONS[self.settings.activation],
        )

    def _rows_norm(self, path: str) -> RootMeanSquareNorm:
        return RootMeanSquareNorm(self._norm_weight(path), self.settings.norm_epsilon)

    def _norm_of(self, begin: str, name: str | None) -> Norm | None:
        return None if name is None else self.norm(f"{begin}{name}")

    def _after(self, begin: str, name: str | None) -> Norm | None:
        factor = self.settings.residual_scale
        return self._norm_of(begin, name) if factor == 1.0 else Scale(factor)

    def _norm_weight(self, path: str) -> torch.Tensor:
        weight, offset = self._dense(f"{path}.weight"), self.settings.layout.norm_offset
        return weight + offset if offset else weight

    def _head_norm(self, attention: str, own: LayerSettings) -> HeadNorm | None:
        """The norms of query and key heads as one, and of those of values. own: of the layer."""
        settings = self.settings
        if settings.layout.head_norms is None:
            return None
        if settings.layout.head_norms == "whole":
            norms = [self.norm(f"{attention}{part}") for part in ("q_norm", "k_norm")]
            return WholeNorm(norms[0], norms[1], settings.num_heads)
        weights = [self._norm_weight(f"{attention}q_norm").expand(settings.num_heads, -1)]
        if own.source is None:
            keys = self._norm_weight(f"{attention}k_norm").expand(own.num_kv_heads, -1)
            weights += [keys, torch.ones_like(keys)] if settings.layout.norms_values else [keys]
        return RootMeanSquareNorm(torch.cat(weights), settings.norm_epsilon)

    def _feed_forward(self, layer: int) -> FeedForward:
        mixture = self.settings.mixture
        if mixture is None or not mixture.layers[layer]:
            return self._dense_part(layer)
        if mixture.is_beside:
            return self._experts_beside(f"layers.{layer}.", layer, mixture)
        router = f"layers.{layer}.{self.settings.layout.feed_forward}.gate"
        experts = self._experts(layer, router, mixture)
        if not self.settings.layout.has_shared_expert:
            return experts
        gate = self._whole(f"layers.{layer}.{self.settings.layout.dense_part}_gate.weight")[0]
        return SharedExpert(experts, self._dense_part(layer), gate)

    def _experts_beside(self, begin: str, layer: int, mixture: MixtureSettings) -> ExpertsBeside:
        scales = self._dense(f"{begin}router.per_expert_scale")
        experts = self._experts(layer, f"{begin}router.proj", mixture, scales)
        scale = RootMeanSquareNorm(self._dense(f"{begin}router.scale"), self.settings.norm_epsilon)
        before, after = "pre_feedforward_layernorm", "post_feedforward_layernorm"
        norms = [self.norm(f"{begin}{name}") for name in (before, f"{after}_1")]
        more = [self.norm(f"{begin}{name}") for name in (f"{before}_2", f"{after}_2")]
        return ExpertsBeside(
            dense=self._dense_part(layer),
            dense_norms=Normed(*norms),
            experts=experts,
            expert_norms=Normed(*more),
            router_norm=scale,
            router_scale=self.settings.hidden_size**-0.5,
        )

    def _dense_part(self, layer: int) -> FeedForward:
        settings, layout = self.settings, self.settings.layout
        begin = f"layers.{layer}.{layout.dense_part}."
        linear = partial(self._linear, has_bias=settings.has_ffn_bias)
        activation = ACTIVATIONS[settings.activation]
        if layout.plain_feed_forward is not None:
            up, down = (linear([f"{begin}{part}"]) for part in layout.plain_feed_forward)
            return PlainFeedForward(up, down, activation)
        parts = [layout.gate_up] if layout.is_gate_up_joined else ["gate_proj", "up_proj"]
        gate_up = linear([f"{begin}{part}" for part in parts])
        return GatedFeedForward(gate_up, linear([f"{begin}{layout.down}"]), activation)

    def _experts(
        self, layer: int, router: str, mixture: MixtureSettings, scales: torch.Tensor | None = None
    ) -> Mixture:
        """router: its name. scales: see Router."""
        activation = ACTIVATIONS[self.settings.activation]
        builder = ExpertBuilder(
            self.settings, mixture, self.names, self.source, self.precision, activation,
            self._weight,
        )  # fmt: skip
        return builder.experts(experts_path(self.settings, layer), router, scales)

    def _linear(self, paths: list[str], has_bias: bool) -> Linear:
        """Layers of one input as one."""
        weights = [self._weight(f"{path}.weight") for path in paths]
        biases = [self._dense(f"{path}.bias") if has_bias else None for path in paths]
        return linear_for(weights, biases, self.precision)

    def _head_bias(self) -> torch.Tensor | None:
        return self._dense("lm_head.bias") if self.settings.layout.has_head_bias else None

    def _quantised_ends(self) -> tuple[torch.Tensor | Nf4Embedding, Linear]:
        """The head in 4 bits; on a GPU, whose memory is the scarcer, the embedding as well. An
        embedding that is tied to the head needs no memory of its own."""
        settings, dtype, device = self.settings, self.precision.dtype, self.precision.device
        if not suits((settings.vocab_size, settings.hidden_size)):
            raise ends_refused()
        kind = replace(self.precision.whole, kind="nf4" if nf4.has_kernel(device) else "int4")
        at = "embed_tokens.weight" if settings.is_tied else "lm_head.weight"
        weight = Dense(self._weight(at).dense(dtype))
        head = linear_for([weight], [self._head_bias()], kind)
        del weight
        return_cached(device)
        if device.type != "cuda":
            return self._dense("embed_tokens.weight"), head
        table = (
            head
            if settings.is_tied
            else linear_for([Dense(self._weight("embed_tokens.weight").dense(dtype))], [None], kind)
        )
        assert isinstance(table, Nf4Linear), "a GPU has a kernel for NF4"
        return Nf4Embedding(table, dtype), head

    def _dense(self, name: str) -> torch.Tensor:
        values = self._weight(name).dense(self.precision.dtype)
        return values.to(self.precision.device)

    def _weight(self, name: str) -> Weight:
        """Raises ModelError for a weight of another shape than the settings say."""
        weight = self._read(name)
        wanted = self.names.shapes.get(name)
        if wanted is not None and weight.shape != wanted:
            raise shape_error(self.names.model, name, weight.shape, wanted)
        return weight

    def _read(self, name: str) -> Weight:
        return self.source.read(self.names.actual[name])


def _rows_by_part(delta: DeltaSettings) -> Iterator[torch.Tensor]:
    """Yield the rows of two layers whose outputs stand together by key head, in the order of parts:
    all queries, keys, values and output gates; all shares, then all decays."""
    of_key = delta.num_value_heads // delta.num_key_heads
    values = of_key * delta.value_size
    for sizes in ([delta.key_size, delta.key_size, values, values], [of_key, of_key]):
        rows = torch.arange(delta.num_key_heads * sum(sizes)).view(delta.num_key_heads, -1)
        yield torch.cat([part.flatten() for part in torch.split(rows, sizes, 1)])
