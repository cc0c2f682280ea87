"""Builds the experts of one layer from the tensors of its files, which hold them in many forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from localspec.formats.decoder_settings import DecoderSettings
from localspec.formats.mixture_settings import MixtureSettings
from localspec.forward.activations import Activation, steep_silu
from localspec.forward.block import ClampedFeedForward, Experts, GatedFeedForward
from localspec.forward.completeness import shape_error
from localspec.forward.router import Router
from localspec.forward.tensor_names import TensorNames
from localspec.weights.linear import Linear
from localspec.weights.precision import Precision, linear_for
from localspec.weights.stored import Dense, Mxfp4, Weight

Biases = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class ExpertBuilder:
    """Reads the experts of one layer. activation: of the family. read: a tensor by its name."""

    settings: DecoderSettings
    mixture: MixtureSettings
    names: TensorNames
    precision: Precision
    activation: Activation
    read: Callable[[str], Weight]

    def experts(self, begin: str, router: str, scales: torch.Tensor | None = None) -> Experts:
        """Return experts in full precision or as the files hold them, whatever the other layers are
        kept in. begin, router: of their names. scales: see Router. Raises ModelError."""
        mixture, whole, make = self.mixture, self.precision.whole, self._maker()
        experts = tuple(
            make(linear_for([gate_up], [up_bias], whole), linear_for([down], [down_bias], whole))
            for (gate_up, down), (up_bias, down_bias) in zip(
                self._weights(begin), self._biases(begin), strict=True
            )
        )
        bias = self._dense(f"{router}.bias") if self.settings.layout.has_expert_bias else None
        layer = linear_for([self.read(f"{router}.weight")], [bias], whole)
        return Experts(Router(layer, mixture.num_chosen, mixture.is_normalised, scales), experts)

    def _maker(self) -> Callable[[Linear, Linear], GatedFeedForward]:
        if self.mixture.limit is None:
            return partial(GatedFeedForward, activation=self.activation)
        steep = partial(steep_silu, steepness=self.mixture.steepness)
        return partial(ClampedFeedForward, activation=steep, limit=self.mixture.limit)

    def _weights(self, begin: str) -> Iterator[tuple[Weight, Weight]]:
        """Gate and up as one, and down, of each expert: files hold them joined, of all experts or
        one by one."""
        if self.settings.layout.has_expert_columns:
            yield from self._in_columns(begin)
            return
        if self.names.has(f"{begin}gate_up_proj"):
            joined = (self._of_all(f"{begin}{part}") for part in ("gate_up_proj", "down_proj"))
            for gate_up, down in zip(*joined, strict=True):
                yield Dense(gate_up), Dense(down)
            return
        parts = ("gate_proj", "up_proj", "down_proj")
        if self.names.has(f"{begin}gate_proj.weight"):
            apart = (self._of_all(f"{begin}{part}.weight") for part in parts)
            for gate, up, down in zip(*apart, strict=True):
                yield Dense(torch.cat((gate, up))), Dense(down)
            return
        for expert in range(self.mixture.num_experts):
            gate, up, down = (self._of_all(f"{begin}{expert}.{part}.weight") for part in parts)
            yield Dense(torch.cat((gate, up))), Dense(down)

    def _in_columns(self, begin: str) -> Iterator[tuple[Weight, Weight]]:
        """Of experts that are kept as [experts, in, out], in MXFP4 as [experts, out, in], gate and
        up in turn."""
        width, inner = self.settings.hidden_size, self.mixture.ffn_size
        turns = torch.arange(2 * inner).view(inner, 2).T.flatten()  # all of gate, then all of up
        gate_up = self._stack(f"{begin}gate_up_proj", 2 * inner, width)
        down = self._stack(f"{begin}down_proj", width, inner)
        for expert in range(self.mixture.num_experts):
            yield _of_expert(gate_up, expert).rows(turns), _of_expert(down, expert)

    def _stack(self, name: str, num_out: int, num_in: int) -> Dense | Mxfp4:
        """Raises ModelError for a stack of another shape."""
        weight, count = self.read(name), self.mixture.num_experts
        is_packed = isinstance(weight, Mxfp4)
        wanted = (count, num_out, num_in) if is_packed else (count, num_in, num_out)
        if weight.shape != wanted or not isinstance(weight, Dense | Mxfp4):
            raise shape_error(self.names.model, name, weight.shape, wanted)
        return weight

    def _biases(self, begin: str) -> Iterator[Biases]:
        """Those of gate and up as one, and of down, of each expert."""
        count = self.mixture.num_experts
        if not self.settings.layout.has_expert_bias:
            yield from [(None, None)] * count
            return
        gate_up, down = (self._dense(f"{begin}{part}_proj_bias") for part in ("gate_up", "down"))
        yield from zip(gate_up.view(count, -1, 2).mT.flatten(1), down, strict=True)

    def _of_all(self, name: str) -> torch.Tensor:
        """A weight of experts on the host, [out, in] or [experts, out, in]."""
        return self.read(name).dense(self.precision.dtype)

    def _dense(self, name: str) -> torch.Tensor:
        return self._of_all(name).to(self.precision.device)


def _of_expert(stack: Dense | Mxfp4, expert: int) -> Dense | Mxfp4:
    """[out, in]."""
    weight = stack.rows(expert)
    return weight if isinstance(weight, Mxfp4) else Dense(weight.values.T.contiguous())
