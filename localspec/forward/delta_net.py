"""Gated delta nets: layers whose memory of the text is a state of fixed size.

Each value head has a state, a matrix from keys to values. A token lets it decay, corrects what it
says of the token's key by the difference to the token's value, and reads it with the token's query.
On a processor rows are computed one after the other, so that a row has the same bits whatever rows
stand beside it. On other devices `delta_chunks` computes them at once.

Source: Gated DeltaNet (arXiv 2412.06464), Qwen3-Next and Qwen3.5 in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from localspec.formats.delta_settings import DeltaSettings
from localspec.forward.activations import silu, softplus
from localspec.forward.block import Norm
from localspec.forward.mixer import LayerAttend, Swap, Table
from localspec.forward.norm import RootMeanSquareNorm
from localspec.forward.states import (
    WIDEST,
    OrderedStates,
    RowInputs,
    StateRows,
    advance,
    by_value_head,
)
from localspec.weights.linear import GATE_MULTIPLE, Linear, bytes_of, filled

UNIT_EPSILON = 1e-6  # Added to the sum of squares of a head.


@dataclass(frozen=True)
class DeltaNet:
    """The mixer of one layer. shape: sizes, whose `layers` say nothing here.

    projection: queries, keys and values before the convolution, then output gates, then the numbers
    of correction and decay, all of one input. convolution: [kernel, channels] fp32, the oldest
    token first. head_norm: of query and key heads. log_decay: -exp(A_log),
    [value_heads] fp32. decay_bias: [value_heads] fp32. output_norm: of the numbers of a head."""

    projection: Linear
    output: Linear
    shape: DeltaSettings
    convolution: torch.Tensor
    head_norm: Norm
    log_decay: torch.Tensor
    decay_bias: torch.Tensor
    output_norm: Norm

    def __post_init__(self) -> None:
        _ = self._gate_parts  # Made now: what is first made in a graph belongs to its memory.

    @property
    def kind(self) -> tuple[object, ...]:
        return ()

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.projection, self.output)

    @property
    def weight_bytes(self) -> int:
        held = bytes_of(self.convolution, self.log_decay, self.decay_bias)
        held += self.head_norm.weight_bytes + self.output_norm.weight_bytes
        return held + sum(linear.weight_bytes for linear in self.linears)

    def with_linears(self, change: Callable[[Linear], Linear]) -> DeltaNet:
        return replace(self, projection=change(self.projection), output=change(self.output))

    def mix(
        self, rows: torch.Tensor, tables: Sequence[Table], swapped: Swap, attend: LayerAttend
    ) -> torch.Tensor:
        """Return what `output` reads, [n, value_heads * value_size]. rows: [n, d]. attend: `steps`
        of the states of the rows' sequences."""
        shape = self.shape
        num_heads, num_values = shape.num_value_heads, shape.num_value_heads * shape.value_size
        sizes = [shape.num_channels, num_values, 2 * num_heads]
        parts = torch.split(self.projection(rows), sizes, -1)
        heads = attend(parts[0], parts[2]).view(rows.shape[0], num_heads, -1)
        return (self.output_norm(heads) * silu(parts[1]).view(heads.shape)).flatten(1)

    def steps(self, state_rows: StateRows, layer: int, num_rows: int) -> LayerAttend:
        """Return what moves the states of `layer` over rows. What it returns takes rows before the
        convolution, [n, channels], and gates, [n, 2 * value_heads]; rows beyond `num_rows` are
        padding."""

        def attend(channels: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
            found = state_rows.outputs(self, layer, channels[:num_rows], gates[:num_rows])
            return filled(found.to(channels.dtype), channels.shape[0])

        return attend

    def inputs(self, window: torch.Tensor, gates: torch.Tensor) -> RowInputs:
        """See StateNet."""
        shape, num_rows = self.shape, gates.shape[0]
        mixed = silu(self._mixed(window.float(), num_rows))
        num_keyed = 2 * shape.num_key_heads * shape.key_size
        keyed = self.head_norm(mixed[:, :num_keyed].view(num_rows, -1, shape.key_size))
        of_gates, num_heads = self._gate_logs(gates), shape.num_value_heads
        return RowInputs(
            keyed.view(num_rows, 2, -1, shape.key_size),
            mixed[:, num_keyed:].view(num_rows, -1, shape.value_size),
            torch.exp(of_gates[:, :num_heads]),
            of_gates[:, num_heads : 2 * num_heads],
        )

    def in_order(
        self, states: OrderedStates, layer: int, channels: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """See StateNet."""
        shape, num_rows = self.shape, channels.shape[0]
        mixed = silu(self._convolved(states, layer, channels))  # [n, channels]
        num_keyed = 2 * shape.num_key_heads * shape.key_size
        keyed = self.head_norm(mixed[:, :num_keyed].view(num_rows, -1, shape.key_size))
        keyed = keyed.view(num_rows, 2, shape.num_key_heads, shape.key_size)
        values = mixed[:, num_keyed:].view(num_rows, -1, 1, shape.value_size)
        of_gates, num_heads = self._gate_logs(gates).exp_(), shape.num_value_heads
        shares, decays = of_gates[:, :num_heads], of_gates[:, num_heads : 2 * num_heads]
        first, pending = max(0, num_rows - WIDEST), states.num_pending
        if num_rows > WIDEST:
            pending = 0
        at = slice(pending, pending + num_rows - first)
        states.keys[layer, at] = keyed[first:, 1]
        states.decays[layer, at] = decays[first:]
        outputs = torch.empty_like(values)
        queries, keys = by_value_head(keyed, shape.num_value_heads).unbind(1)
        decays, shares = decays[..., None, None], shares[..., None, None]
        by_row = _Rows(
            queries[:, :, None].unbind(),
            keys[:, :, None].unbind(),
            keys[..., None].unbind(),
            (values * shares).unbind(),
            (shares * decays).unbind(),
            decays.unbind(),
            outputs.unbind(),
        )
        source, state = states.source(layer), states.running[layer]
        if first:
            source = settled = states.settled[layer]
            by_row.move(range(first), settled, settled, [torch.empty_like(values[0])] * first)
        deltas = states.deltas[layer, at, :, None].unbind()
        by_row.move(range(first, num_rows), source, state, deltas)
        return outputs

    def _convolved(self, states: OrderedStates, layer: int, channels: torch.Tensor) -> torch.Tensor:
        """Each row with the rows before it, in fp32, [n, channels]; the last inputs are held."""
        before, num_rows, held = self.shape.kernel - 1, channels.shape[0], states.columns[layer]
        if num_rows <= WIDEST:
            first = states.num_pending
            held[first + before : first + before + num_rows] = channels
            window = held[first : first + before + num_rows]
        else:
            window = torch.cat((held[:before], channels.to(held.dtype)))
            held[: before + WIDEST] = window[num_rows - WIDEST :]
        return self._mixed(window.float(), num_rows)

    def _mixed(self, window: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The convolution, [n, channels]. window: [kernel - 1 + n, channels] fp32."""
        mixed = window[:num_rows] * self.convolution[0]
        for place in range(1, self.shape.kernel):
            mixed.addcmul_(window[place : place + num_rows], self.convolution[place])
        return mixed

    def _gate_logs(self, gates: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of the shares of the correction, then of the decays, fp32, filled
        up to whole steps of kernels. A sigmoid is exp(-softplus(-x)), so both are the same
        functions."""
        signs, biases, factors = self._gate_parts
        gates, missing = gates.float(), -2 * self.shape.num_value_heads % GATE_MULTIPLE
        gates = F.pad(gates, (0, missing)) if missing else gates
        return softplus(torch.addcmul(biases, gates, signs)).mul_(factors)

    @cached_property
    def _gate_parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Signs and biases of gates, and factors of their softplus, filled up with zeros."""
        ones = torch.ones_like(self.log_decay)
        parts = ((-ones, ones), (0.0 * ones, self.decay_bias), (-ones, self.log_decay))
        missing = -2 * len(ones) % GATE_MULTIPLE
        signs, biases, factors = (F.pad(torch.cat(part), (0, missing)) for part in parts)
        return signs, biases, factors


def unit_heads(size: int, device: torch.device) -> Norm:
    """Return the norm of query and key heads: x / sqrt(sum of squares + epsilon). A sum of squares
    is `size` times their mean. Queries are not divided by the root of their size, see
    `unscaled_norm`."""
    return RootMeanSquareNorm(torch.full((size,), size**-0.5, device=device), UNIT_EPSILON / size)


def unscaled_norm(weight: torch.Tensor, epsilon: float, key_size: int) -> Norm:
    """Return the norm of what queries read that are not divided by the root of `key_size`. The
    factor is lost in a norm but for the epsilon, which takes its square."""
    return RootMeanSquareNorm(weight, epsilon * key_size)


class _Rows(NamedTuple):
    """What rows bring to a state, a tensor for each row. queries, keys: [value_heads, 1, key_size].
    columns: the keys as [value_heads, key_size, 1].
    values: times the share of the correction, [value_heads, 1, value_size]. losses: what the
    state's own answer counts for in the correction, [value_heads, 1, 1]. decays: the same shape.
    outputs: written to, [value_heads, 1, value_size]."""

    queries: Sequence[torch.Tensor]
    keys: Sequence[torch.Tensor]
    columns: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    losses: Sequence[torch.Tensor]
    decays: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]

    def move(
        self,
        rows: range,
        source: torch.Tensor,
        state: torch.Tensor,
        deltas: Sequence[torch.Tensor],
    ) -> None:
        """Write the state after these rows, [value_heads, key_size, value_size]. source: the state
        before them. deltas: where the correction of each row is written."""
        for row, delta in zip(rows, deltas, strict=True):
            answer = torch.bmm(self.keys[row], source)
            torch.addcmul(self.values[row], answer, self.losses[row], value=-1, out=delta)
            advance(source, state, self.columns[row], delta, self.decays[row])
            torch.bmm(self.queries[row], state, out=self.outputs[row])
            source = state
