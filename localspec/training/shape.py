"""The sizes of what is to be trained, known and checked from the target's config alone.

Contract: a shape that cannot be is a ConfigError that names the flag and its limits, before a
target is loaded or asked anything. The limits are those of the readers in forward.heads: what is
trained here can be loaded.

Not here: the weights of a kind (medusa, eagle, mtp, draft), what fits the memory (run).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from localspec.errors import ConfigError
from localspec.forward.heads.files import TargetSizes
from localspec.forward.heads.mtp import MAX_SIZE

MAX_STEPS = 16  # gone through in training; attention grows with their square


@dataclass(frozen=True)
class LayerSizes:
    """The one decoder layer of a head. head_dim: width of each attention head, even."""

    ffn_size: int
    num_heads: int
    head_dim: int


def layer_sizes(sizes: TargetSizes, options: Mapping[str, int]) -> LayerSizes:
    """options: ffn_size, num_heads; by default what the target's width suggests. Raises
    ConfigError."""
    width = sizes.hidden_size
    usual = max(1, width // 64)
    num_heads = within("--heads", options.get("num_heads", usual), width // 2)
    if (width // num_heads) % 2:
        raise ConfigError(
            f"{num_heads} attention heads on a target of width {width} would be "
            f"{width // num_heads} wide each, but that must be an even number. Choose other "
            f"--heads; without the flag it is {usual}."
        )
    ffn_size = options.get("ffn_size", 16 * (13 * width // 64))
    return LayerSizes(
        within("--ffn-size", ffn_size, MAX_SIZE), num_heads, head_dim=width // num_heads
    )


def within(flag: str, value: int, most: int) -> int:
    """The value. Raises ConfigError unless it lies between 1 and `most`."""
    if not 1 <= value <= most:
        raise ConfigError(f"{flag} is {value}, but must lie between 1 and {most} here.")
    return value
