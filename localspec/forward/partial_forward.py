"""The first layers of a decoder as a model of their own: what an early exit drafts with.

Contract: `EarlyExit` is a Decoder of the whole one's first `depth` blocks, its final norm and its
head, over the same KV cache, without a weight of its own. It writes keys and values of these
layers only, so its tokens must be rolled back before the whole decoder runs; their slots stay as
they are. The rows it computed are kept in `cache.partial`, and a chain that the whole decoder runs
next over the same tokens from the same position continues from them (Decoder.run). The cache drops
them as soon as anything else is written.

It writes no features: it cannot compute those of upper layers, and verification writes them all.

Not here: which depth, and drafting (drafters.early_exit).
Source: LayerSkip (arXiv 2404.16710), whose verification reuses the exit's keys and values too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from localspec.forward.cache import PartialForward
from localspec.forward.decoder import Decoder, last_of
from localspec.forward.model import Rows


class EarlyExit(Decoder):
    """The first `depth` blocks of `whole`."""

    def __init__(self, whole: Decoder, depth: int) -> None:
        assert 0 < depth < len(whole.weights.blocks), "an exit lies between first and last block"
        weights = replace(whole.weights, blocks=whole.weights.blocks[:depth])
        super().__init__(weights, whole.cache, whole.is_fastest)
        self.depth = depth
        self._whole = whole.weights

    @property
    def written_features(self) -> None:
        """None: see the module."""
        return None

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> torch.Tensor:
        """See Decoder.forward; the logits are the exit's."""
        earlier = self.cache.partial  # opening the cache drops it
        with self.cache.append(tokens) as start:
            cos, sin = self._rotations(len(tokens), parents, start)
            attend = self._attention(len(tokens), parents, start)
            inputs = (self.embed(tokens), cos, sin, attend)
            rows, hidden = self.layers(*inputs, self._kept())
            shown = last_of(Rows(self, tokens, parents, num_logits), len(tokens))
            logits = self.logits(rows, [shown], {}, False)
        if parents is None:
            made = PartialForward(self._whole, start, self.depth, tuple(tokens), hidden)
            self.cache.partial = made if earlier is None else earlier.followed_by(made)
        return logits

    def _kept(self) -> frozenset[int]:
        """The last layer, from which the whole decoder continues, and those below it that are
        followed."""
        features = self.cache.features
        followed = () if features is None else features.layers
        return frozenset((self.depth - 1, *(i for i in followed if 0 <= i < self.depth)))
