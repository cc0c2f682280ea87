"""A step of a head that drafts token after token, with fixed shapes and no work on the host.

A step reads the state before it and one token, writes their keys and values into the head's cache,
and leaves the next state and its logits in buffers. `CapturedHead` captures it for each stretch of
the cache in idle time; a step without a graph, and the reading of a text, run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from localspec.forward.attention import grouped_attention, grouped_mask
from localspec.forward.cache import KVCache
from localspec.forward.graphs import (
    GraphPool,
    GraphStore,
    Recording,
    buckets,
    require_agreement,
)
from localspec.forward.heads.autoregressive import NO_NAME, AutoregressiveHead, HeadParts
from localspec.forward.heads.layer import Rotation
from localspec.forward.passes import Pass, Ready
from localspec.forward.static import undisturbed
from localspec.forward.tree import slot_mask
from localspec.forward.upload import pinned


class StaticStep:
    """One step within the first `bucket` slots of a cache. state: [1, d], the state that is read
    and then the one that is made. logits: [1, V] fp32, where its logits are written."""

    def __init__(
        self,
        parts: HeadParts,
        rotation: Rotation,
        cache: KVCache,
        bucket: int,
        state: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        self._parts, self._rotation, self._state, self._logits = parts, rotation, state, logits
        keys, values = cache.slots[0]
        self._keys, self._values = keys[:, :, :bucket], values[:, :, :bucket]
        device = state.device
        self._inputs = torch.zeros(2, dtype=torch.int64, device=device)  # the token, its slot
        self._columns = torch.arange(bucket, device=device)
        self._seen = torch.zeros(1, 1, dtype=cache.dtype, device=device)  # a row sees itself

    @torch.inference_mode()
    def fill(self, token: int | torch.Tensor, slot: int) -> None:
        """Set what a call runs: a token, [1] where the device alone knows it, and its slot."""
        values = [0 if isinstance(token, torch.Tensor) else token, slot]
        self._inputs.copy_(pinned(values, torch.int64, self._inputs.device), non_blocking=True)
        if isinstance(token, torch.Tensor):
            self._inputs[:1].copy_(token)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Write the next state and its logits."""
        token, slot = self._inputs[:1], self._inputs[1:]
        network = self._parts.network
        mask = slot_mask(slot, slot, self._seen, self._columns)
        attend = partial(self._attend, slot, grouped_mask(mask, network.layer.heads.num_groups))
        embedded = self._parts.embed(token)
        cos, sin = self._rotation.at(slot)
        made = network.step(self._state, embedded, cos, sin, attend)
        self._logits.copy_(self._parts.output(network.leave(made)))
        self._state.copy_(made)

    def _attend(
        self,
        slot: torch.Tensor,
        mask: torch.Tensor | None,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
    ) -> torch.Tensor:
        rows = keys_values.view(1, 2, -1, queries.shape[-1]).permute(1, 2, 0, 3)
        rows = rows.to(self._keys.dtype)
        self._keys.index_copy_(2, slot, rows[:1])
        self._values.index_copy_(2, slot, rows[1:])
        return grouped_attention(queries, self._keys, self._values, mask)


class CapturedHead(AutoregressiveHead):
    """An AutoregressiveHead whose steps replay graphs where there are any: a graphs.Capturing."""

    def __init__(self, parts: HeadParts, capacity: int, width: int, pool: GraphPool) -> None:
        """width: of a state."""
        super().__init__(parts, capacity)
        device = parts.frequencies.device
        self._store = GraphStore[int, StaticStep](pool)
        self._state = torch.zeros(1, width, dtype=parts.dtype, device=device)
        self._logits = torch.zeros(1, parts.output.vocab_size, device=device)

    @property
    def notice(self) -> str | None:
        """See graphs.Capturing."""
        return self._store.notice

    @property
    def has_missing(self) -> bool:
        """See graphs.Capturing."""
        return self._store.lacks(buckets(self.cache.num_slots))

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + self._state.nbytes + self._logits.nbytes

    @torch.inference_mode()
    def extend(self, token: int | torch.Tensor, rows: torch.Tensor) -> Pass:
        """See AutoregressiveHead. A state that a graph has made holds until the next step."""
        slot, ready = self.cache.length, self._store.ready
        bucket = next((each for each in sorted(ready) if slot < each), None)
        if bucket is None:
            return super().extend(token, rows)
        if rows is not self._state:
            self._state.copy_(rows)
        with self.cache.append([NO_NAME]):
            ready[bucket].work.fill(token, slot)
            ready[bucket].replay()
        return Ready(self._state)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> Pass:
        """See AutoregressiveHead."""
        return Ready(self._logits.clone()) if rows is self._state else super().logits(rows)

    def capture(self) -> Iterator[str]:
        """See graphs.Capturing."""
        yield from self._store.fill(buckets(self.cache.num_slots), _phrase, self._captured)

    @torch.inference_mode()
    def _captured(self, bucket: int) -> list[Recording[StaticStep]]:
        """Record one graph and compare a replay with the step that was recorded."""
        step = StaticStep(
            self._parts, self._rotation, self.cache, bucket, self._state, self._logits
        )
        with undisturbed(self.cache, 1):
            self._probe(step, 1)
            replay = self._store.pool.capture(step)
            self._probe(step, 2)  # other inputs than recorded
            step()
            wanted = self._logits.clone()
            self._probe(step, 2)
            self._logits.zero_()
            replay()
            require_agreement(self._logits, wanted, "a head's step")
        return [Recording(step, replay)]

    def _probe(self, step: StaticStep, token: int) -> None:
        """Set a token at the first slot, and a state that differs with the token."""
        self._state.copy_(self._parts.embed([token]))
        step.fill(token, 0)


def _phrase(bucket: int) -> str:
    return f"preparing steps of the drafting head within {bucket} tokens of context"
