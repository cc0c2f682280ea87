"""Batches from packs on disk, in an order that a checkpoint can resume.

Contract: a `Pack` is memory-mapped; `BatchStream.next` draws a pack by weight and takes its rows
in order (they were shuffled when written), starting again at the end. The stream's state is its
step and one position per pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Token rows [B, n + 1] and loss weights of the predicted tokens [B, n]. number: its place
    in the stream."""

    tokens: Tensor
    weights: Tensor
    number: int = 0

    @property
    def num_tokens(self) -> int:
        return self.weights.numel()


class Pack:
    """Rows of one length, read from disk as needed."""

    def __init__(self, folder: Path) -> None:
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.weights = np.load(folder / "weights.npy", mmap_mode="r")

    @property
    def length(self) -> int:
        """Predicted tokens in a row."""
        return int(self.tokens.shape[1]) - 1

    def rows(self, places: Sequence[int], device: torch.device, number: int = 0) -> PackedBatch:
        """Read rows; places past the end start again."""
        wrapped = [place % len(self.tokens) for place in places]
        tokens = torch.from_numpy(self.tokens[wrapped].astype(np.int64))
        weights = torch.from_numpy(self.weights[wrapped][:, 1:].astype(np.float32) / 100)
        return PackedBatch(tokens.to(device), weights.to(device), number)


@dataclass(frozen=True)
class TextSource:
    """A pack and how often it is drawn: `early` before the last phase, `late` in it."""

    pack: Pack
    early: float
    late: float


class BatchStream:
    """Draw batches of about `tokens_per_batch` tokens."""

    def __init__(
        self, sources: Sequence[TextSource], tokens_per_batch: int, seed: int, device: torch.device
    ):
        self.sources = tuple(sources)
        self.tokens_per_batch = tokens_per_batch
        self.seed = seed
        self.device = device
        self.num_drawn = 0
        self.positions = [0] * len(self.sources)

    def next(self, is_late: bool) -> PackedBatch:
        """Return the next batch; is_late: whether the last phase has begun."""
        rng = Random(self.seed * 1_000_003 + self.num_drawn)
        shares = [source.late if is_late else source.early for source in self.sources]
        chosen = rng.choices(range(len(self.sources)), weights=shares)[0]
        pack = self.sources[chosen].pack
        count = max(1, self.tokens_per_batch // pack.length)
        start = self.positions[chosen]
        self.positions[chosen] = start + count
        self.num_drawn += 1
        return pack.rows(range(start, start + count), self.device, self.num_drawn - 1)

    def state(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn, "positions": list(self.positions)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_drawn = int(state["num_drawn"])
        self.positions = list(state["positions"])
