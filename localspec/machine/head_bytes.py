"""What a published head takes beside its target: weights, keys and values, states that it reads.

Counted by the names and shapes in its files, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from localspec.formats.attention import RING_SPARE
from localspec.formats.folder_files import read_object, weight_files
from localspec.formats.head_folder import PUBLISHED_CONFIG
from localspec.formats.safetensors_file import tensor_shapes

# Copies of the target's own tensors, or tensors of training, which are not held.
BORROWED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
FUSE, KEYS, OUTPUT = "fc.weight", "k_proj.weight", "lm_head.weight"
UNREADABLE, REMEDY = "{} cannot be read. Check the folder's permissions.", "Fetch the head again."


def head_bytes(folder: Path, context_length: int, number_bytes: int) -> int:
    """Return the bytes of a published head beside a target with such a context.

    number_bytes: of a number in the target's precision. Raises ModelError."""
    path = folder / PUBLISHED_CONFIG
    config = read_object(path, UNREADABLE.format(path), REMEDY)
    layer: Mapping[str, Any] = config.get("transformer_layer_config") or config
    shapes = {n: size for file in weight_files(folder) for n, size in tensor_shapes(file).items()}
    numbers = 0
    for name, size in shapes.items():
        is_copy = name.endswith(OUTPUT) and size[0] == layer.get("vocab_size")
        if not is_copy and not name.endswith(BORROWED):
            numbers += prod(size)
        if name.endswith(FUSE):  # the states of every token in all layers that it reads
            numbers += size[1] * context_length
        if name.endswith(KEYS):
            numbers += 2 * size[0] * _num_positions(layer, name, context_length)
    return numbers * number_bytes


def _num_positions(config: Mapping[str, Any], name: str, context_length: int) -> int:
    """The positions that the layer of a weight keeps."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    index = next((int(part) for part in name.split(".") if part.isdigit()), 0)
    if not isinstance(kinds, list) or index >= len(kinds) or not isinstance(window, int):
        return context_length
    is_window = kinds[index] == "sliding_attention"
    return min(context_length, window + RING_SPARE) if is_window else context_length
