"""A decoder on a GPU that gives a token the same bits whatever runs beside it.

Contract: a Decoder whose forward of up to WIDEST tokens always runs WIDEST rows, so that every
product has one shape and a library one kernel for it. Attention takes keys STRETCH at a time and
adds the stretches up in one order (attention.split_attention), so a longer window changes nothing.
A prompt is read in pieces of PREFILL_CHUNK from its start (KVCache.reuse_read), each sequence by
itself. Drafts are chains: a branch of a tree would add its keys up in another order than the chain
that it is. What has no graph yet runs the same code uncaptured.

It costs time: a step of one token runs WIDEST rows, the end of a prompt is read again in the next
turn, and sequences do not share a forward.

That a library's kernels do give a row of such a forward the same bits, whatever is in the other
rows, no GPU has shown yet. On a processor tests show it for this code.

Source: why the number of rows changes bits, and fixed reductions against it: He et al., "Defeating
Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025).
"""

from __future__ import annotations

import torch

from localspec.forward.cache import STRETCH, WIDEST
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import CapturedDecoder, GraphPool, Recording, Shape, buckets
from localspec.forward.model import PREFILL_CHUNK
from localspec.forward.static import StaticForward, Window


class OneWidthDecoder(CapturedDecoder):
    """See the module. decoder: over a cache with WIDEST spare slots."""

    shares_forwards = False

    def __init__(self, decoder: Decoder, pool: GraphPool) -> None:
        super().__init__(decoder, pool)
        self.cache.piece = PREFILL_CHUNK
        self._windows_of = lambda bucket: (
            Window(self, bucket, lambda num_keys: num_keys // STRETCH),
        )

    def beside(self) -> Decoder:
        """See Decoder.beside; nothing is captured for it."""
        return OneWidthDecoder(super().beside(), self._pool)

    def _shapes(self) -> tuple[Shape, ...]:
        return tuple((WIDEST, bucket) for bucket in buckets(self.cache.num_slots))

    def _recording_for(self, num_tokens: int) -> Recording[StaticForward] | None:
        if not 0 < num_tokens <= WIDEST:
            return None
        needed = self.cache.length + WIDEST
        shape = next(each for each in self._shapes() if each[1] >= needed)
        return self._store.captured_or(shape, lambda: self._as_it_is(shape))

    @torch.inference_mode()
    def _as_it_is(self, shape: Shape) -> StaticForward:
        (window,) = self._windows_of(shape[1])
        return StaticForward(window, WIDEST, self._buffer())
