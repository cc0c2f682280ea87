"""Tiny models with states, a text for them, and ways to read it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from localspec.forward.decoder import Decoder
from tests.kit.families import SHAPE, small

VOCAB_SIZE = SHAPE["vocab_size"]
TEXT = tuple((7 * place + place * place + 3) % VOCAB_SIZE for place in range(80))


@cache
def module(family: str = "qwen3_5") -> Any:
    made = small(family)
    made.set_attn_implementation("eager")
    return made


def by_transformers(family: str = "qwen3_5", text: Sequence[int] = TEXT) -> torch.Tensor:
    """The logits of a text, [n, V]."""
    with torch.no_grad():
        ids = torch.tensor([text])
        logits: torch.Tensor = module(family)(input_ids=ids, use_cache=False).logits[0]
    return logits


def read(model: Decoder, tokens: Sequence[int], widths: Sequence[int]) -> torch.Tensor:
    rows, first = list[torch.Tensor](), 0
    for width in widths:
        rows.append(model.forward(tokens[first : first + width]))
        first += width
    return torch.cat(rows)


def num_rows_read(monkeypatch: pytest.MonkeyPatch, model: Decoder) -> list[int]:
    """The rows of each forward from now on."""
    sizes, embed = list[int](), model.embed
    monkeypatch.setattr(model, "embed", lambda ids: sizes.append(len(ids)) or embed(ids))
    return sizes
