"""Builds the experts of one layer from the tensors of its files, which hold them in many forms.

Matrices are read, quantised and laid out expert by expert, so that a layer takes little more memory
while it is built than it does afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from localspec.formats.decoder_settings import DecoderSettings
from localspec.formats.mixture_settings import MixtureSettings
from localspec.forward.activations import Activation, steep_silu
from localspec.forward.block import (
    ClampedFeedForward,
    Experts,
    GatedFeedForward,
    Mixture,
    clamped,
    gated,
)
from localspec.forward.completeness import shape_error
from localspec.forward.gathered_experts import GatheredExperts
from localspec.forward.host_experts import HostExperts
from localspec.forward.router import Router
from localspec.forward.tensor_names import TensorNames
from localspec.weights.linear import Linear
from localspec.weights.precision import Precision, linear_for, stack_for
from localspec.weights.source import WeightSource
from localspec.weights.stored import Dense, Weight

Biases = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
HALVES = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class ExpertBuilder:
    """Reads the experts of one layer. activation: of the family. read: a tensor by its name."""

    settings: DecoderSettings
    mixture: MixtureSettings
    names: TensorNames
    source: WeightSource
    precision: Precision
    activation: Activation
    read: Callable[[str], Weight]

    @property
    def _kept(self) -> Precision:
        """How experts are kept, and where."""
        is_stored = self.settings.layout.experts_kept == "stored"
        return self.precision.of_experts.whole if is_stored else self.precision.of_experts

    def experts(self, begin: str, router: str, scales: torch.Tensor | None = None) -> Mixture:
        """Return the experts of a layer. begin, router: of their names. scales: see Router. Raises
        ModelError."""
        mixture, has_bias, kept = self.mixture, self.settings.layout.has_expert_bias, self._kept
        bias = self._dense(f"{router}.bias") if has_bias else None
        linear = linear_for([self.read(f"{router}.weight")], [bias], kept.whole)
        scales = None if scales is None else scales.to(kept.device, kept.dtype)
        chooses = Router(linear, mixture.num_chosen, mixture.is_normalised, scales)
        biases = self._biases(begin) if has_bias else (None, None)
        if kept.stacks_experts:
            return self._gathered(begin, chooses, biases)
        experts = Experts(chooses, tuple(self._one_by_one(begin, biases)))
        is_elsewhere = kept.device != self.precision.device
        return HostExperts(experts, kept.dtype) if is_elsewhere else experts

    def _gathered(self, begin: str, router: Router, biases: Biases) -> GatheredExperts:
        limit, count = self.mixture.limit, self.mixture.num_experts
        activation = partial(gated, activation=self._activation)
        if limit is not None:
            activation = partial(clamped, activation=self._activation, limit=limit)
        gate_up = stack_for(self._gate_up(begin), count, self._kept, is_summed=False)
        down = stack_for(self._down(begin), count, self._kept, is_summed=True)
        return GatheredExperts(router, gate_up, down, activation, *biases)

    def _one_by_one(self, begin: str, biases: Biases) -> Iterator[GatedFeedForward]:
        make, kept = self._maker(), self._kept
        matrices = zip(self._gate_up(begin), self._down(begin), strict=True)
        for expert, (gate_up, down) in enumerate(matrices):
            gate_up_bias, down_bias = (None if each is None else each[expert] for each in biases)
            split: Sequence[torch.Tensor | None] = [None] * len(gate_up)
            split = split if gate_up_bias is None else gate_up_bias.chunk(len(gate_up))
            is_first = expert == 0
            up = linear_for(gate_up, split, kept, is_measured=is_first)
            yield make(up, linear_for(down, [down_bias], kept, is_measured=is_first))

    def _maker(self) -> Callable[[Linear, Linear], GatedFeedForward]:
        if self.mixture.limit is None:
            return partial(GatedFeedForward, activation=self._activation)
        return partial(ClampedFeedForward, activation=self._activation, limit=self.mixture.limit)

    @property
    def _activation(self) -> Activation:
        if self.mixture.limit is None:
            return self.activation
        return partial(steep_silu, steepness=self.mixture.steepness)

    def _gate_up(self, begin: str) -> Iterator[Sequence[Weight]]:
        """Gate and up of each expert, as one weight or as two: files hold them joined, of all
        experts or one by one."""
        width, inner = self.settings.hidden_size, self.mixture.ffn_size
        joined = f"{begin}gate_up_proj"
        if self.names.has(joined) and self.settings.layout.has_expert_columns:
            turns = torch.arange(2 * inner).view(inner, 2).T.flatten()  # all of gate, then of up
            for weight in self._in_columns(joined, 2 * inner, width):
                yield [weight.rows(turns)]
        elif self.names.has(joined):
            yield from ([weight] for weight in self._entries(joined, 2 * inner, width))
        else:
            halves = [self._of_each(begin, half, inner, width) for half in HALVES]
            yield from (list(pair) for pair in zip(*halves, strict=True))

    def _down(self, begin: str) -> Iterator[Sequence[Weight]]:
        width, inner, joined = self.settings.hidden_size, self.mixture.ffn_size, f"{begin}down_proj"
        if not self.names.has(joined):
            weights = self._of_each(begin, "down_proj", width, inner)
        elif self.settings.layout.has_expert_columns:
            weights = self._in_columns(joined, width, inner)
        else:
            weights = self._entries(joined, width, inner)
        yield from ([weight] for weight in weights)

    def _of_each(self, begin: str, part: str, num_out: int, num_in: int) -> Iterator[Weight]:
        """One matrix of each expert, of a stack or by names of its own."""
        name, wanted = f"{begin}{part}.weight", (num_out, num_in)
        if self.names.has(name):
            yield from self._entries(name, num_out, num_in)
            return
        for expert in range(self.mixture.num_experts):
            name = f"{begin}{expert}.{part}.weight"
            yield self._require(name, self.read(name), wanted)

    def _in_columns(self, name: str, num_out: int, num_in: int) -> Iterator[Weight]:
        """Of a stack that is kept as [experts, in, out], in MXFP4 as [experts, out, in]."""
        for weight in self._entries(name, num_out, num_in, has_columns=True):
            yield Dense(weight.values.T.contiguous()) if isinstance(weight, Dense) else weight

    def _entries(
        self, name: str, num_out: int, num_in: int, has_columns: bool = False
    ) -> Iterator[Weight]:
        """Raises ModelError for a stack of another shape."""
        held, count = 0, self.mixture.num_experts
        for held, weight in enumerate(self.source.entries(self.names.actual[name]), 1):
            is_turned = has_columns and isinstance(weight, Dense)
            wanted = (num_in, num_out) if is_turned else (num_out, num_in)
            yield self._require(name, weight, wanted)
            if held == count:
                break
        if held < count:
            shapes = ((each, num_out, num_in) for each in (held, count))
            raise shape_error(self.names.model, name, *shapes)

    def _require(self, name: str, weight: Weight, wanted: tuple[int, ...]) -> Weight:
        if weight.shape != wanted:
            raise shape_error(self.names.model, name, weight.shape, wanted)
        return weight

    def _biases(self, begin: str) -> Biases:
        """Those of gate and up as one, [experts, 2 f], and of down, [experts, d]."""
        count, width, inner = (
            self.mixture.num_experts, self.settings.hidden_size, self.mixture.ffn_size
        )  # fmt: skip
        if self.names.has(f"{begin}gate_up_proj_bias"):
            turns = self._bias(f"{begin}gate_up_proj_bias", 2 * inner).view(count, -1, 2)
            return turns.mT.flatten(1), self._bias(f"{begin}down_proj_bias", width)
        halves = [self._bias(f"{begin}{half}.bias", inner) for half in HALVES]
        return torch.cat(halves, 1), self._bias(f"{begin}down_proj.bias", width)

    def _bias(self, name: str, size: int) -> torch.Tensor:
        values, wanted = self._dense(name), (self.mixture.num_experts, size)
        if values.shape != wanted:
            raise shape_error(self.names.model, name, tuple(values.shape), wanted)
        return values

    def _dense(self, name: str) -> torch.Tensor:
        return self.read(name).dense(self._kept.dtype).to(self._kept.device)
