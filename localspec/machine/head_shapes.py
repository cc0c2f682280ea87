"""The shape of a published head, and what it takes beside its target.

A HeadShape is counted by the names and shapes in a head's files, before a weight is read, or is
written in a profile for a head that is not on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from localspec.core.errors import ModelError, first_line
from localspec.core.precisions import FULL_BYTES
from localspec.formats.attention import RING_SPARE
from localspec.formats.folder_files import read_object, weight_files
from localspec.formats.head_folder import PUBLISHED_CONFIG, head_kind
from localspec.formats.safetensors_file import tensor_shapes

# Copies of the target's own tensors, or tensors of training, which are not held.
BORROWED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
FUSE, KEYS, OUTPUT = "fc.weight", "k_proj.weight", "lm_head.weight"
# An assistant's embedding is its own: its rows are narrower than the target's.
ASSISTANT = "assistant"
UNREADABLE, REMEDY = "{} cannot be read. Check the folder's permissions.", "Fetch the head again."


@dataclass(frozen=True)
class HeadShape:
    """A head by its sizes.

    kind: the name of the drafter that runs it. num_params: weights that are held beside the target.
    num_copied: weights of its files that are the target's own, which are not held. state_width:
    numbers that are held of each token of the target's states. kv_width: of the keys, and of the
    values, of all its layers that hold every position; window_kv_width: of those that hold `window`
    positions. block_length: tokens that one forward drafts."""

    kind: str
    num_params: int
    num_copied: int = 0
    state_width: int = 0
    kv_width: int = 0
    window_kv_width: int = 0
    window: int = 0
    block_length: int = 1

    @property
    def published_bytes(self) -> int:
        """Bytes of its files on the hub, 16 bits a weight."""
        return FULL_BYTES["bf16"] * (self.num_params + self.num_copied)

    def held_bytes(self, context_length: int, number_bytes: int) -> tuple[int, int]:
        """Return the bytes beside a target with such a context: of its weights, and of the states,
        keys and values that it holds. number_bytes: of a number in the target's precision."""
        num_in_window = min(context_length, self.window + RING_SPARE)
        numbers = context_length * (self.state_width + 2 * self.kv_width)
        numbers += num_in_window * 2 * self.window_kv_width
        return number_bytes * self.num_params, number_bytes * numbers


def head_shape_in(folder: Path) -> HeadShape:
    """Return the shape of the published head in a folder. Raises ModelError."""
    try:
        return _counted(folder)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"The config of the head in {folder.name} holds a value that cannot be understood "
            f"({first_line(error)}). {REMEDY}"
        ) from error


def _counted(folder: Path) -> HeadShape:
    path = folder / PUBLISHED_CONFIG
    config = read_object(path, UNREADABLE.format(path), REMEDY)
    layer: Mapping[str, Any] = config.get("transformer_layer_config") or config
    shapes = {n: size for file in weight_files(folder) for n, size in tensor_shapes(file).items()}
    kind = head_kind(folder)
    copied = {name for name, size in shapes.items() if _is_copy(name, size, layer, kind)}
    keys = [(size[0], name) for name, size in shapes.items() if name.endswith(KEYS)]
    return HeadShape(
        kind=kind,
        num_params=sum(prod(shapes[name]) for name in shapes.keys() - copied),
        num_copied=sum(prod(shapes[name]) for name in copied),
        state_width=sum(size[1] for name, size in shapes.items() if name.endswith(FUSE)),
        kv_width=sum(width for width, name in keys if not _is_window(layer, name)),
        window_kv_width=sum(width for width, name in keys if _is_window(layer, name)),
        window=_window_of(layer),
        block_length=_block_length_of(config),
    )


def _is_copy(name: str, size: tuple[int, ...], layer: Mapping[str, Any], kind: str) -> bool:
    is_whole_output = name.endswith(OUTPUT) and size[0] == layer.get("vocab_size")
    return is_whole_output or (name.endswith(BORROWED) and kind != ASSISTANT)


def _window_of(config: Mapping[str, Any]) -> int:
    window = config.get("sliding_window")
    return window if isinstance(window, int) else 0


def _is_window(config: Mapping[str, Any], name: str) -> bool:
    """True if the layer of a weight holds the positions of a window alone."""
    kinds = config.get("layer_types")
    index = next((int(part) for part in name.split(".") if part.isdigit()), 0)
    if not isinstance(kinds, list) or index >= len(kinds) or not _window_of(config):
        return False
    return bool(kinds[index] == "sliding_attention")


def _block_length_of(config: Mapping[str, Any]) -> int:
    nested = config.get("dflash_config")
    length = config.get("block_size") or (nested or {}).get("block_size")
    return length if isinstance(length, int) and length > 0 else 1
