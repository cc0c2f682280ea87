"""Forwards over a cache that leave it as it was: recordings of graphs, and second looks at a text.

What such a forward writes is put back from copies on the device, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from localspec.forward.cache import KVCache


@contextmanager
def restored(cache: KVCache, start: int, end: int) -> Iterator[None]:
    """Put keys, values and hidden states of these positions back afterwards, whatever was written
    inside."""
    copies, features = cache.key_values.copied(start, end), cache.features
    layers = () if features is None else features.layers
    slots = [features.slots(layer)[start:end] for layer in layers] if features else []
    rows = [part.clone() for part in slots]
    try:
        yield
    finally:
        cache.key_values.put_back(start, end, copies)
        for part, old in zip(slots, rows, strict=True):
            part.copy_(old)


@contextmanager
def undisturbed(cache: KVCache, num_slots: int) -> Iterator[None]:
    """Restore the first `num_slots` slots and features afterwards, and the ingredients of as many
    tokens after the settled states, whatever was written inside."""
    held = () if cache.states is None else cache.states.held(num_slots)
    copies = [part.clone() for part in held]
    try:
        with restored(cache, 0, num_slots):
            yield
    finally:
        for part, old in zip(held, copies, strict=True):
            part.copy_(old)


@contextmanager
def looking_back(cache: KVCache, start: int) -> Iterator[list[int]]:
    """Let a forward run the tokens from `start` on once more, which are yielded. Keys, values and
    hidden states are put back afterwards, and nothing made inside is held for later texts. States
    read the tokens again, in order."""
    tokens = cache.tokens[start:]
    with restored(cache, start, cache.length):
        cache.is_rerun = True
        try:
            del cache.tokens[start:]  # No rollback: what was read in whole pieces still was.
            yield tokens
        finally:
            cache.is_rerun = False
