"""Recurrent states of one sequence, which can go back a few tokens.

A state exists at one length of the text. So that a rejected draft can be taken back, the `settled`
states stay at an earlier length, and the ingredients of each token after it are held (key, delta,
decay and the row before the convolution), out of which the state after any of these tokens is made.
Every length from the settled one on can therefore be returned to; at least the last WIDEST tokens
where so many were read since a state was restored.

`OrderedStates` take token after token, by the very operations that made a state first: the same
bits. `forward.delta_chunks` takes many at once, for devices that promise no bits.

`snapshots` holds copies at earlier lengths of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from localspec.formats.attention import NUM_PENDING
from localspec.formats.delta_settings import DeltaSettings
from localspec.forward.snapshots import Saved
from localspec.forward.upload import put_by

WIDEST = 16  # Rows of a forward that checks a draft.
assert NUM_PENDING == 2 * WIDEST, "one forward's rows, and as many before them"


@dataclass(frozen=True)
class RowInputs:
    """What rows bring to the states of a layer. heads: queries, then keys, normalised,
    [n, 2, key_heads, key_size]. values: [n, value_heads, value_size]. shares: of the correction,
    [n, value_heads]. log_decays: the logarithm of what stays of a state, [n, value_heads]. fp32
    all."""

    heads: torch.Tensor
    values: torch.Tensor
    shares: torch.Tensor
    log_decays: torch.Tensor


class StateNet(Protocol):
    """A layer that reads a text into a state."""

    def inputs(self, window: torch.Tensor, gates: torch.Tensor) -> RowInputs:
        """Return what rows bring. window: rows before the convolution and the kernel - 1 rows
        before them, [kernel - 1 + n, channels]. gates: [n, 2 * value_heads]."""
        ...

    def in_order(
        self, states: OrderedStates, layer: int, channels: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """As `StateRows.outputs`, row after row."""
        ...


class StateRows(Protocol):
    """The rows of one forward, which follow what the states hold."""

    def outputs(
        self, net: StateNet, layer: int, channels: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """Return what the rows read in the states of a layer, [n, value_heads, value_size] fp32,
        and hold their ingredients. channels: before the convolution, [n, channels]. gates:
        [n, 2 * value_heads]."""
        ...


class States:
    """See the module. Every tensor has a row for each layer with a state.

    settled: [layers, value_heads, key_size, value_size] fp32. columns: inputs of the
    convolutions, [layers, kernel - 1 + NUM_PENDING, channels]: of the last tokens before the
    settled length, then of the tokens after it. keys: [layers, NUM_PENDING, key_heads, key_size];
    deltas: [layers, NUM_PENDING, value_heads, value_size]; decays: [layers, NUM_PENDING,
    value_heads]; fp32 all."""

    is_capturable = False  # True if a graph can hold what a few rows do.

    def __init__(self, shape: DeltaSettings, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of `columns`, which hold rows as the model computes them."""
        self.shape = shape
        layers, heads = shape.num_layers, shape.num_value_heads

        def zeros(*sizes: int) -> torch.Tensor:
            return torch.zeros(layers, *sizes, device=device)

        self.settled = zeros(heads, shape.key_size, shape.value_size)
        self.keys = zeros(NUM_PENDING, shape.num_key_heads, shape.key_size)
        self.deltas = zeros(NUM_PENDING, heads, shape.value_size)
        self.decays = zeros(NUM_PENDING, heads)
        size = (layers, shape.kernel - 1 + NUM_PENDING, shape.num_channels)
        self.columns = torch.zeros(size, dtype=dtype, device=device)
        self._length: int | None = 0  # of the settled states; None after a failed forward
        self._num_pending = 0

    @property
    def nbytes(self) -> int:
        return self.settled.nbytes + sum(part.nbytes for part in self.held(NUM_PENDING))

    @property
    def reach(self) -> range:
        """The lengths that can be gone to without a snapshot."""
        if self._length is None:
            return range(0)
        return range(self._length, self._length + self._num_pending + 1)

    @property
    def most_rows(self) -> int:
        """Rows of one forward that can all be taken back."""
        return WIDEST

    @property
    def num_pending(self) -> int:
        """Tokens after the settled length whose ingredients stand: where the next forward's go."""
        return self._num_pending

    @property
    def num_settled(self) -> int:
        """The length of the settled states."""
        assert self._length is not None, "no forward has failed"
        return self._length

    def held(self, count: int) -> tuple[torch.Tensor, ...]:
        """Return the ingredients of the first `count` pending tokens."""
        parts = (part[:, :count] for part in (self.keys, self.deltas, self.decays))
        return (*parts, self.columns[:, : self.shape.kernel - 1 + count])

    def clear(self) -> None:
        """Go to the start of a text."""
        self.settled.zero_()
        self.columns.zero_()
        self._length, self._num_pending = 0, 0

    def begin(self, start: int, num_rows: int, num_padding: int = 0) -> None:
        """Go to `start`, which is in `reach`, and make room for the ingredients of so many rows and
        of padding behind them."""
        assert self._length is not None and start in self.reach, "states reach the text's end"
        self._num_pending = start - self._length
        self._prepare(start, num_rows)
        room = NUM_PENDING - num_rows - num_padding
        if num_rows <= WIDEST and self._num_pending > room:
            self._settle(self._num_pending - min(room, WIDEST))
        if num_rows > WIDEST:
            self._length = None  # until `finish`: the settled states move as well

    def finish(self, end: int, num_rows: int) -> None:
        """Note that a forward of `num_rows` rows has ended at `end`."""
        if num_rows > WIDEST:
            self._length, self._num_pending = end - WIDEST, WIDEST
        else:
            self._num_pending += num_rows

    def rows(self, num_rows: int) -> StateRows:
        """Return the rows of a forward that has begun."""
        raise NotImplementedError

    def rows_at(self, slots: torch.Tensor) -> StateRows:
        """Return the rows whose ingredients go to `slots`, [n] int64, which ascend without a gap
        from the number of pending tokens on. Only of states that a graph can hold."""
        raise NotImplementedError

    def zero_beyond(self) -> None:
        """Zero the slots after the pending tokens. See KVCache."""
        spent = self._num_pending
        for part in (self.keys, self.deltas, self.decays):
            part[:, spent:].zero_()
        self.columns[:, self.shape.kernel - 1 + spent :].zero_()

    def saved(self, length: int) -> Saved:
        """Return a copy for `length`, which is in `reach`."""
        assert self._length is not None and length in self.reach
        count = length - self._length
        parts = (self.settled, *self.held(count))
        return Saved(self._length, count, tuple(put_by(part) for part in parts))

    def restore(self, saved: Saved) -> None:
        held = (self.settled, *self.held(saved.num_pending))
        for part, copied in zip(held, saved.parts, strict=True):
            part.copy_(copied, non_blocking=True)
        self._length, self._num_pending = saved.length, saved.num_pending

    def _prepare(self, start: int, num_rows: int) -> None:
        """Make the states ready for rows from `start` on. Before more than WIDEST rows all pending
        tokens are settled."""
        raise NotImplementedError

    def _advance(self, count: int) -> None:
        """Move the settled states, and nothing else, over the first `count` pending tokens."""
        raise NotImplementedError

    def _settle(self, count: int) -> None:
        """Settle the first `count` pending tokens."""
        assert self._length is not None
        if not count:
            return
        self._advance(count)
        left, before = self._num_pending - count, self.shape.kernel - 1
        for part in (self.keys, self.deltas, self.decays):
            part[:, :left] = part[:, count : count + left].clone()
        moved = self.columns[:, count : count + before + left].clone()
        self.columns[:, : before + left] = moved
        self._length += count
        self._num_pending = left


class OrderedStates(States):
    """States that are moved token after token. running: the states at the end of the text, as
    `settled`."""

    def __init__(self, shape: DeltaSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self.running = torch.zeros_like(self.settled)
        self._is_running_at: int | None = 0  # The length of the running states, None for none.
        self._source = self.running

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.running.nbytes

    def clear(self) -> None:
        super().clear()
        self.running.zero_()
        self._is_running_at = 0

    def finish(self, end: int, num_rows: int) -> None:
        super().finish(end, num_rows)
        self._is_running_at = end

    def restore(self, saved: Saved) -> None:
        super().restore(saved)
        self._is_running_at = None

    def rows(self, num_rows: int) -> StateRows:
        return self

    def source(self, layer: int) -> torch.Tensor:
        """Return the state of a layer before the rows of a forward of at most WIDEST rows; after
        them the running one is there."""
        return self._source[layer]

    def outputs(
        self, net: StateNet, layer: int, channels: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """See StateRows."""
        return net.in_order(self, layer, channels, gates)

    def _prepare(self, start: int, num_rows: int) -> None:
        is_running = self._is_running_at == start
        if num_rows > WIDEST or not is_running:
            self._settle(self._num_pending)
        self._source = self.running if is_running else self.settled
        self._is_running_at = None  # until `finish`

    def _advance(self, count: int) -> None:
        assert self._length is not None
        if self._is_running_at == self._length + count:
            self.settled.copy_(self.running)
        else:
            self._replay(count)

    def _replay(self, count: int) -> None:
        """Layer by layer in the shapes of a forward, so that a library takes the same kernels."""
        keys = by_value_head(self.keys[:, :count], self.shape.num_value_heads)[..., None]
        deltas, decays = self.deltas[:, :count, :, None], self.decays[:, :count, :, None, None]
        of_layers = (part.unbind() for part in (self.settled, keys, deltas, decays))
        for state, *parts in zip(*of_layers, strict=True):
            for token in zip(*(part.unbind() for part in parts), strict=True):
                advance(state, state, *token)


def by_value_head(rows: torch.Tensor, num_value_heads: int) -> torch.Tensor:
    """Return rows of key heads, [..., key_heads, size], for each value head,
    [..., value_heads, size]. Value heads that share a key head stand side by side."""
    return rows.repeat_interleave(num_value_heads // rows.shape[-2], dim=-2)


def advance(
    source: torch.Tensor,
    state: torch.Tensor,
    key: torch.Tensor,
    delta: torch.Tensor,
    decay: torch.Tensor,
) -> None:
    """Write the state of a layer after one token, e^g S + k delta^T.

    source: the state S before it, [value_heads, key_size, value_size]. state: written to, which may
    be the source. key: [value_heads, key_size, 1]. delta: [value_heads, 1, value_size]. decay:
    [value_heads, 1, 1]."""
    torch.mul(source, decay, out=state).addcmul_(key, delta)
