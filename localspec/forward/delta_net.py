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

import torch
import torch.nn.functional as F

from localspec.formats.delta_settings import DeltaSettings
from localspec.forward.activations import sigmoid, silu, softplus
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
    token first. head_norm: of query and key heads, with their scales. log_decay: -exp(A_log),
    [value_heads] fp32. decay_bias: [value_heads] fp32. output_norm: of the numbers of a head."""

    projection: Linear
    output: Linear
    shape: DeltaSettings
    convolution: torch.Tensor
    head_norm: Norm
    log_decay: torch.Tensor
    decay_bias: torch.Tensor
    output_norm: Norm

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
            return filled(found.flatten(1).to(channels.dtype), channels.shape[0])

        return attend

    def inputs(self, window: torch.Tensor, gates: torch.Tensor) -> RowInputs:
        """See StateNet."""
        shape, num_rows = self.shape, gates.shape[0]
        mixed = F.silu(self._mixed(window.float(), num_rows))
        num_keyed = 2 * shape.num_key_heads * shape.key_size
        keyed = self.head_norm(mixed[:, :num_keyed].view(num_rows, -1, shape.key_size))
        shares, steps = gates.float().chunk(2, -1)
        return RowInputs(
            keyed.view(num_rows, 2, -1, shape.key_size),
            mixed[:, num_keyed:].view(num_rows, -1, shape.value_size),
            torch.sigmoid(shares),
            F.softplus(steps + self.decay_bias) * self.log_decay,
        )

    def in_order(
        self, states: OrderedStates, layer: int, channels: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """See StateNet."""
        shape, num_rows = self.shape, channels.shape[0]
        mixed = silu(self._convolved(states, layer, channels))  # [n, channels]
        num_keyed = 2 * shape.num_key_heads * shape.key_size
        keyed = self.head_norm(mixed[:, :num_keyed].view(num_rows, -1, shape.key_size))
        keys = keyed[:, shape.num_key_heads :]
        values = mixed[:, num_keyed:].view(num_rows, -1, shape.value_size)
        decays, shares = self._gates(gates)
        inputs = _Inputs(
            by_value_head(keyed[:, : shape.num_key_heads], shape.num_value_heads)[:, :, None],
            by_value_head(keys, shape.num_value_heads),
            (values * shares[..., None])[:, :, None],
            (-shares * decays)[..., None, None],
            decays[..., None, None],
        )
        first, pending = max(0, num_rows - WIDEST), states.num_pending
        if num_rows > WIDEST:
            pending = 0
        at = slice(pending, pending + num_rows - first)
        states.keys[layer, at] = keys[first:]
        states.decays[layer, at] = decays[first:]
        outputs = torch.empty_like(values)
        state = states.running[layer]
        if first:
            spare = torch.empty_like(inputs.values[0])
            _move(states.settled[layer], inputs, range(first), [spare] * first, outputs)
            state.copy_(states.settled[layer])
        deltas = states.deltas[layer, at, :, None].unbind()
        _move(state, inputs, range(first, num_rows), deltas, outputs)
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

    def _gates(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decays and shares of the correction, [n, value_heads] fp32 each."""
        num_heads = self.shape.num_value_heads
        missing = -num_heads % GATE_MULTIPLE
        shares, steps = (F.pad(part.float(), (0, missing)) for part in gates.chunk(2, -1))
        steps = softplus(steps + F.pad(self.decay_bias, (0, missing)))
        decays = torch.exp(steps * F.pad(self.log_decay, (0, missing)))
        return decays[:, :num_heads], sigmoid(shares)[:, :num_heads]


def unit_heads(num_heads: int, size: int, device: torch.device) -> Norm:
    """The norm of as many query as key heads: x / sqrt(sum of squares + epsilon), queries divided
    by the root of their size as well. A sum of squares is `size` times their mean."""
    weight = torch.full((2 * num_heads, size), size**-0.5, device=device)
    weight[:num_heads] /= size**0.5
    return RootMeanSquareNorm(weight, UNIT_EPSILON / size)


@dataclass(frozen=True)
class _Inputs:
    """What rows bring to a state. queries: [n, value_heads, 1, key_size]. keys: [n, value_heads,
    key_size]. values: times the share of the correction, [n, value_heads, 1, value_size]. losses:
    what the state's own answer counts for in the correction, [n, value_heads, 1, 1]. decays: the
    same shape."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    losses: torch.Tensor
    decays: torch.Tensor


def _move(
    state: torch.Tensor,
    inputs: _Inputs,
    rows: range,
    deltas: Sequence[torch.Tensor],
    outputs: torch.Tensor,
) -> None:
    """Move a state, [value_heads, key_size, value_size], over rows one by one.

    deltas: where the correction of each row is written. outputs: written to, [n, value_heads,
    value_size], of all rows."""
    taken = slice(rows.start, rows.stop)
    by_row = zip(
        inputs.queries[taken].unbind(),
        inputs.keys[taken, :, None].unbind(),
        inputs.keys[taken, :, :, None].unbind(),
        inputs.values[taken].unbind(),
        inputs.losses[taken].unbind(),
        inputs.decays[taken].unbind(),
        deltas,
        outputs[taken, :, None].unbind(),
        strict=True,
    )
    for query, key, column, value, loss, decay, delta, output in by_row:
        torch.addcmul(value, torch.bmm(key, state), loss, out=delta)
        advance(state, column, delta, decay)
        torch.bmm(query, state, out=output)
