"""How many tokens a config.json says that a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The families' names for it, the usual one first.
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len",
                "seq_length", "n_ctx")  # fmt: skip


def longest_of(config: Mapping[str, Any]) -> int | None:
    """The most positions, of the part that reads text; None where the config does not say."""
    for part in (config, config.get("text_config") or {}):
        found = (part.get(name) for name in LENGTH_NAMES)
        length = next((each for each in found if isinstance(each, int) and each > 0), None)
        if length is not None:
            return length
    return None
