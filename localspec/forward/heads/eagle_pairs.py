"""The pairs of one text as an EAGLE head has read them, and the rows of a tree after them.

Contract: slot i of the cache is pair i, (the target's feature of token i, token i + 1), and bears
the name of token i + 1: `reuse` keeps the pairs that belong to a text by their longest common
prefix, `read` appends those that are missing from the target's own features. Rows of a draft come
after them by `branch`, with features of the head's own making; they are erased by the next `reuse`
or `forget`, so no pair of a text was ever guessed.

Not here: the function itself (eagle), which rows to add (drafters.eagle).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from localspec.forward.cache import KVCache
from localspec.forward.features import Features
from localspec.forward.heads.eagle import EagleParts
from localspec.forward.heads.layer import Rotation, cached_attention, layer_cache
from localspec.forward.model import PREFILL_CHUNK
from localspec.forward.tree import additive_mask

DRAFT_SLOTS = 256  # for rows of a tree, beyond the text


class EagleHead:
    """One head, one text at a time. capacity: tokens of the target's context."""

    def __init__(self, parts: EagleParts, capacity: int) -> None:
        slots, device = capacity + DRAFT_SLOTS, parts.frequencies.device
        self._parts = parts
        self._rotation = Rotation.of(parts.frequencies, slots, parts.dtype, parts.rope_scale)
        self._first = -1  # the text's first token, of which no slot tells
        self._num_pairs = 0  # slots beyond these hold rows of a draft
        self.cache: KVCache = layer_cache(parts.network.layer.shape, slots, parts.dtype, device)

    @property
    def layers(self) -> tuple[int, ...]:
        return self._parts.layers

    @property
    def memory_bytes(self) -> int:
        return self._parts.held_bytes + self._rotation.table_bytes + self.cache.kv_bytes

    @property
    def room(self) -> int:
        """Rows that still fit."""
        return self.cache.shape.capacity - self.cache.length

    def reuse(self, tokens: Sequence[int]) -> int:
        """Keep the pairs that belong to `tokens` alone; returns how many."""
        # Rows of a draft may bear the right names, but their features were guessed.
        self.forget(0 if self._first != tokens[0] else self._num_pairs)
        self._first = tokens[0]
        self._num_pairs = self.cache.reuse(tokens[1:])
        return self._num_pairs

    def forget(self, num_pairs: int) -> None:
        """Erase everything after so many pairs."""
        self.cache.rollback(num_pairs)
        self._num_pairs = min(self._num_pairs, num_pairs)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], features: Features) -> torch.Tensor:
        """Append the missing pairs of `tokens`, the last but one of which the target has read;
        returns the last pair's output, [1, d]. `reuse` came before, and one pair is missing."""
        num_pairs = len(tokens) - 1
        assert self.cache.length == self._num_pairs, "rows of a draft were left behind"
        assert self.cache.length < num_pairs, "there is no pair to read"
        for start in range(self.cache.length, num_pairs, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, num_pairs)
            rows = [features.rows(layer, start, end) for layer in self.layers]  # [n, d] each
            hidden = self._parts.network.enter(rows)
            mask = additive_mask(end - start, None, start, self.cache.dtype, self.cache.device)
            cos, sin = self._rotation.at(slice(start, end))
            out = self._run(tokens[start + 1 : end + 1], hidden, cos, sin, mask)
        self._num_pairs = num_pairs
        return out[-1:]

    @torch.inference_mode()
    def branch(
        self,
        tokens: Sequence[int],
        hidden: torch.Tensor,
        places: Sequence[int],
        blocked: torch.Tensor,
    ) -> torch.Tensor:
        """Append rows of a tree: tokens, their parents' outputs [n, d], their positions.

        blocked: [n, m] bool on the host, which of the last m rows, these n the last among them, a
        row does not see. Returns their outputs, [n, d].
        """
        device, mask = hidden.device, None
        if bool(blocked.any()):
            scores = torch.zeros(blocked.shape, dtype=self.cache.dtype)
            scores.masked_fill_(blocked, float("-inf"))
            ahead = self.cache.length + len(tokens) - blocked.shape[1]
            mask = F.pad(scores.to(device), (ahead, 0))[None, None]  # [1, 1, n, all]
        cos, sin = self._rotation.at(torch.tensor(places, device=device))
        return self._run(tokens, hidden, cos, sin, mask)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs [n, d] -> [n, V] fp32."""
        return self._parts.speech(self._parts.network.leave(hidden))

    def _run(
        self,
        tokens: Sequence[int],
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        with self.cache.append(tokens) as start:
            attend = cached_attention(self.cache, start, mask)
            embedded = self._parts.embed(tokens)  # [n, d]
            return self._parts.network.step(hidden, embedded, cos, sin, attend)
