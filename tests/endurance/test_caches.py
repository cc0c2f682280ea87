"""Whatever a cache was told before, a text reads as it does afresh: the same bits of every row and
of every hidden state that is kept beside the cache.

A case is a row of operations at random: texts that share beginnings, drafts that are rejected
anywhere, branches, returns to any length, copies held for later, texts kept and brought back,
drafts by the first layers in the same cache, forwards that fail or that other sequences share.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch

from localspec.drafters.early_exit import EarlyExit
from localspec.forward import decoder as decoder_module
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST
from localspec.forward.passes import Rows, forward_together
from localspec.forward.prefix_store import PrefixStore
from localspec.forward.prefixes import Prefixes
from tests.kit.families import SHAPE, small
from tests.kit.tally import Tally
from tests.kit.tiny import with_cache

pytestmark = pytest.mark.slow

FAMILIES = (
    "qwen3_5",
    "qwen3_5_moe",
    "gemma4, keys of earlier layers",
    "gpt_oss",
)
FP32, BF16 = torch.float32, torch.bfloat16
CASES = [*((family, FP32) for family in FAMILIES), ("qwen3_5", BF16), ("gpt_oss", BF16)]
ROOM = 96
# Tokens that every text of a family begins with, so that the rest stands around the end of a ring.
LEADING = {"gpt_oss": 470}
NUM_OPERATIONS = 24
NUM_TEXTS = 4
VOCAB_SIZE = SHAPE["vocab_size"]
FOLLOWED = (0, LAST)
TREE = (-1, -1, 0, 1, 1, 2, 3)
PATHS = ((0, 2, 5), (1, 3, 6), (1, 4), (0,), (1,))  # of TREE


@cache
def weights_of(family: str, dtype: torch.dtype) -> Decoder:
    model = with_cache(small(family).to(dtype), LEADING.get(family, 0) + ROOM)
    assert bool(model.cache.key_values.rings) == (family in LEADING)
    return model


def decoder(family: str, dtype: torch.dtype) -> Decoder:
    """Over an empty cache that keeps hidden states as well."""
    made = weights_of(family, dtype).beside()
    made.follow(FOLLOWED)
    return made


def texts_of(rng: random.Random, num_leading: int) -> list[list[int]]:
    """Texts that share beginnings with others."""
    size = num_leading + ROOM
    found = [[rng.randrange(VOCAB_SIZE) for _ in range(size)]]
    while len(found) < NUM_TEXTS:
        shared = num_leading + rng.choice((0, 1, 9, 17, 30, 60))
        rest = [rng.randrange(VOCAB_SIZE) for _ in range(size - shared)]
        found.append([*rng.choice(found)[:shared], *rest])
    return found


class Case:
    """A model, and operations on its cache by their names."""

    def __init__(self, family: str, dtype: torch.dtype, rng: random.Random) -> None:
        self.model = decoder(family, dtype)
        self.model.cache.prefixes = Prefixes(PrefixStore(2**26), family)
        self.other = self.model.beside()
        self._fresh: Callable[[], Decoder] = lambda: decoder(family, dtype)
        self._rng = rng
        self._num_leading = LEADING.get(family, 0)
        self._texts = texts_of(rng, self._num_leading)
        self._text = self._texts[0]
        if self._num_leading:
            self.model.forward(self._text[: self._num_leading], num_logits=1)

    @property
    def length(self) -> int:
        return self.model.cache.length

    def size(self) -> int:
        """Rows of a forward, as many as there is room for."""
        wanted = self._rng.choice((1, 1, 2, 3, 5, 8, 15, 16, 17, 24, 40))
        return min(wanted, self.room)

    @property
    def room(self) -> int:
        return self.model.cache.shape.capacity - self.length

    def check(self, rows: torch.Tensor, text: list[int]) -> None:
        wanted = self._fresh().forward(text)[-len(rows) :]
        assert torch.equal(rows, wanted), f"other bits after {len(text)} tokens"

    def read_on(self) -> None:
        tokens = self._text[self.length : self.length + self.size()]
        if tokens:
            rows = self.model.forward(tokens, num_logits=self._rng.choice((None, 1)))
            self.check(rows, self.model.cache.tokens)

    def reject(self) -> None:
        """A draft of which a part is kept."""
        base, size = self.length, min(self.size(), 16)
        if not size:
            return
        kept = self._rng.randint(1, size)
        right = self._text[base : base + kept]
        tokens = [*right, *(self._rng.randrange(VOCAB_SIZE) for _ in range(size - len(right)))]
        rows = self.model.forward(tokens)
        self.check(rows, self.model.cache.tokens)
        self.model.cache.keep(base, range(kept))

    def branch(self) -> None:
        base = self.length
        if not self.model.cache.takes_trees or self.room < len(TREE):
            return
        path = self._rng.choice(PATHS)
        tokens = [self._rng.randrange(VOCAB_SIZE) for _ in TREE]
        rows = self.model.forward(tokens, TREE)
        self.model.cache.keep(base, path)
        self.check(rows[list(path)], self.model.cache.tokens)

    def go_back(self) -> None:
        """A little, anywhere, or about as far as needs no token to be read again."""
        few = self.length - self._rng.randint(0, min(self.length, 20))
        about = self.model.cache.earliest + self._rng.randint(-4, 4)
        anywhere = self._rng.randint(0, self.length)
        length = self._rng.choice((few, about, anywhere))
        self.model.cache.rollback(min(max(length, 0), self.length))

    def another_text(self) -> None:
        """As the next turn does, of a prompt of any length."""
        self._text = self._rng.choice(self._texts)
        wanted = self._text[: self._num_leading + self._rng.randint(1, ROOM)]
        held = self.model.cache.reuse_read(wanted)
        assert self.model.cache.tokens == wanted[:held]
        for first in range(held, len(wanted), 32):
            rows = self.model.forward(wanted[first : first + 32], num_logits=1)
        if held < len(wanted):
            self.check(rows, wanted)

    def hold(self) -> None:
        self.model.cache.hold()

    def keep(self) -> None:
        """Keep the text, a part of it where a message comes meanwhile."""
        assert self.model.cache.prefixes is not None
        for _ in self.model.cache.prefixes.save(self.model.cache):
            if self._rng.random() < 0.1:
                break

    def scribble(self) -> None:
        """Draft with the first layers, in the same cache."""
        base = self.length
        for _ in range(min(self._rng.randint(1, 15), self.room)):
            EarlyExit(self.model, 1).forward([self._rng.randrange(VOCAB_SIZE)])
        self.model.cache.rollback(base)

    def fail(self) -> None:
        """A forward for which the memory does not suffice, after it has written."""
        tokens = self._text[self.length : self.length + self.size()]
        before = [*self.model.cache.tokens]
        if not tokens:
            return
        with pytest.MonkeyPatch.context() as patched, suppress(MemoryError):
            patched.setattr(decoder_module, "last_of", _run_short)
            self.model.forward(tokens)
        assert self.model.cache.tokens == before[: self.length]

    def together(self) -> None:
        """One forward for two sequences, each of any width."""
        other = self.other.cache
        other.rollback(self._rng.randint(0, other.length))
        size = self._rng.choice((1, 3, 16, 20))
        own = self._text[self.length : self.length + self.size()]
        beside = self._texts[-1][other.length : other.length + size]
        if own and beside:
            first, second = forward_together([Rows(self.model, own), Rows(self.other, beside)])
            self.check(first, self.model.cache.tokens)
            self.check(second, other.tokens)

    def check_features(self) -> None:
        """Hidden states of the whole text, as drafters with a head read them."""
        text, fresh = self.model.cache.tokens, self._fresh()
        if text:
            fresh.forward(text)
        for layer in FOLLOWED:
            found, wanted = (
                each.follow(FOLLOWED).rows(layer, 0, len(text)) for each in (self.model, fresh)
            )
            assert torch.equal(found, wanted), f"other states of layer {layer}"


def _run_short(*_: Any) -> None:
    raise MemoryError


OPERATIONS = (
    Case.read_on, Case.read_on, Case.reject, Case.reject, Case.branch, Case.go_back,
    Case.another_text, Case.hold, Case.keep, Case.scribble, Case.fail, Case.together,
)  # fmt: skip


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_a_text_reads_as_afresh_after_any_operations(
    family: str, dtype: torch.dtype, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.forward.cache.SNAPSHOT_EVERY", 20)
    monkeypatch.setattr("localspec.forward.cache.LEAST_SHARED", 6)
    monkeypatch.setattr("localspec.forward.prefixes.BLOCK", 16)
    monkeypatch.setattr("localspec.forward.snapshots.MOST_SNAPSHOTS", 3)
    for seed in range(tally.size(2, 200)):
        rng, names = random.Random(seed), list[str]()
        with tally.case(f"seed {seed}"):
            case = Case(family, dtype, rng)
            for _ in range(NUM_OPERATIONS):
                operation = rng.choice(OPERATIONS)
                names.append(operation.__name__)
                try:
                    operation(case)
                except AssertionError as error:
                    raise AssertionError(f"{error}; {', '.join(names)}") from error
            case.check_features()
