"""Recurrent states of one sequence, which can go back a few tokens.

A state exists at one length of the text. So that a rejected draft can be taken back, a `States`
holds two: the `settled` one stays at an earlier length and the `running` one is at the end. Between
them stand the ingredients of each token (key, delta, decay and the row before the convolution), out
of which the state after any of these tokens is made by the very operations that made it first: the
same bits. Every length from the settled one on can therefore be returned to; at least the last
WIDEST tokens where so many were read since a state was restored.

`snapshots` holds copies at earlier lengths of a text.
"""

from __future__ import annotations

import torch

from localspec.formats.attention import NUM_PENDING
from localspec.formats.delta_settings import DeltaSettings
from localspec.forward.snapshots import Saved

WIDEST = 16  # Rows of a forward that checks a draft.
assert NUM_PENDING == 2 * WIDEST, "one forward's rows, and as many before them"


class States:
    """See the module. Every tensor has a row for each layer with a state.

    settled, running: [layers, value_heads, key_size, value_size] fp32. columns: inputs of the
    convolutions, [layers, kernel - 1 + NUM_PENDING, channels]: of the last tokens before the
    settled length, then of the tokens after it. keys: [layers, NUM_PENDING, key_heads, key_size];
    deltas: [layers, NUM_PENDING, value_heads, value_size]; decays: [layers, NUM_PENDING,
    value_heads]; fp32 all."""

    def __init__(self, shape: DeltaSettings, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of `columns`, which hold rows as the model computes them."""
        self.shape = shape
        layers, heads = shape.num_layers, shape.num_value_heads

        def zeros(*sizes: int) -> torch.Tensor:
            return torch.zeros(layers, *sizes, device=device)

        self.settled = zeros(heads, shape.key_size, shape.value_size)
        self.running = torch.zeros_like(self.settled)
        self.keys = zeros(NUM_PENDING, shape.num_key_heads, shape.key_size)
        self.deltas = zeros(NUM_PENDING, heads, shape.value_size)
        self.decays = zeros(NUM_PENDING, heads)
        size = (layers, shape.kernel - 1 + NUM_PENDING, shape.num_channels)
        self.columns = torch.zeros(size, dtype=dtype, device=device)
        self._length: int | None = 0  # of the settled states; None after a failed forward
        self._num_pending = 0
        self._is_running_at: int | None = 0  # the length of the running states, None for none

    @property
    def nbytes(self) -> int:
        parts = (self.settled, self.running, self.keys, self.deltas, self.decays, self.columns)
        return sum(part.nbytes for part in parts)

    @property
    def reach(self) -> range:
        """The lengths that can be gone to without a snapshot."""
        if self._length is None:
            return range(0)
        return range(self._length, self._length + self._num_pending + 1)

    @property
    def num_pending(self) -> int:
        """Tokens after the settled length whose ingredients stand: where the next forward's go."""
        return self._num_pending

    def clear(self) -> None:
        """Go to the start of a text."""
        self.settled.zero_()
        self.running.zero_()
        self.columns.zero_()
        self._length, self._num_pending, self._is_running_at = 0, 0, 0

    def begin(self, start: int, num_rows: int) -> None:
        """Bring the running states to `start`, which is in `reach`, and make room for the
        ingredients of so many rows."""
        assert self._length is not None and start in self.reach, "states reach the text's end"
        num_kept = start - self._length
        is_running = self._is_running_at == start
        self._is_running_at = None  # until `finish`
        self._num_pending = num_kept
        if num_rows > WIDEST:
            self._settle(num_kept, is_running)
        elif not is_running:
            self._settle(num_kept)
        elif num_kept + num_rows > NUM_PENDING:
            self._settle(num_kept - WIDEST)
        if num_rows > WIDEST:
            self._length = None  # until `finish`: the settled states move as well
        elif not is_running:
            self.running.copy_(self.settled)

    def finish(self, end: int, num_rows: int) -> None:
        """Note that a forward of `num_rows` rows has ended at `end`."""
        if num_rows > WIDEST:
            self._length, self._num_pending = end - WIDEST, WIDEST
        else:
            self._num_pending += num_rows
        self._is_running_at = end

    def saved(self, length: int) -> Saved:
        """Return a copy for `length`, which is in `reach`."""
        assert self._length is not None and length in self.reach
        count, before = length - self._length, self.shape.kernel - 1
        parts = (
            self.settled,
            self.keys[:, :count],
            self.deltas[:, :count],
            self.decays[:, :count],
            self.columns[:, : before + count],
        )
        return Saved(self._length, count, tuple(part.to("cpu", copy=True) for part in parts))

    def restore(self, saved: Saved) -> None:
        count, before = saved.num_pending, self.shape.kernel - 1
        held = (
            self.settled,
            self.keys[:, :count],
            self.deltas[:, :count],
            self.decays[:, :count],
            self.columns[:, : before + count],
        )
        for part, copied in zip(held, saved.parts, strict=True):
            part.copy_(copied)
        self._length, self._num_pending, self._is_running_at = saved.length, count, None

    def _settle(self, count: int, is_running: bool = False) -> None:
        """Move the settled states over the first `count` pending tokens. is_running: the running
        states are already there."""
        assert self._length is not None
        if not count:
            return
        if is_running:
            self.settled.copy_(self.running)
        else:
            self._replay(count)
        left, before = self._num_pending - count, self.shape.kernel - 1
        for part in (self.keys, self.deltas, self.decays):
            part[:, :left] = part[:, count : count + left].clone()
        moved = self.columns[:, count : count + before + left].clone()
        self.columns[:, : before + left] = moved
        self._length += count
        self._num_pending = left

    def _replay(self, count: int) -> None:
        """Layer by layer in the shapes of a forward, so that a library takes the same kernels."""
        for layer in range(self.shape.num_layers):
            state = self.settled[layer]
            keys = by_value_head(self.keys[layer, :count], self.shape.num_value_heads)
            for key, delta, decay in zip(
                keys, self.deltas[layer, :count], self.decays[layer, :count], strict=True
            ):
                advance(state, key[:, :, None], delta[:, None], decay[:, None, None])


def by_value_head(rows: torch.Tensor, num_value_heads: int) -> torch.Tensor:
    """Rows of key heads, [n, key_heads, size], for each value head, [n, value_heads, size]. Value
    heads that share a key head stand side by side."""
    return rows.repeat_interleave(num_value_heads // rows.shape[1], dim=1)


def advance(
    state: torch.Tensor, key: torch.Tensor, delta: torch.Tensor, decay: torch.Tensor
) -> None:
    """Move the state of a layer over one token: S = e^g S + k delta^T.

    state: written to, [value_heads, key_size, value_size]. key: [value_heads, key_size, 1]. delta:
    [value_heads, 1, value_size]. decay: [value_heads, 1, 1]."""
    state.mul_(decay).addcmul_(key, delta)
