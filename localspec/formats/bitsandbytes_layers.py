"""What bitsandbytes wrote of each layer, compared with the sizes of the tensors.

Contract: `check_bitsandbytes` raises ModelError for a layer whose tensors do not have the sizes
that its settings say. The library's kernels take these for true: they would read memory that is
not theirs, which ends the process or gives a model that answers wrongly.
Source: QuantState.as_dict of bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from localspec.core.errors import ModelError
from localspec.core.files import parsed
from localspec.formats.safetensors_file import tensor_bytes, tensor_shapes

STATE = ".quant_state.bitsandbytes__"  # in the name of a layer's settings, before their kind
SCALES = ".SCB"  # at the end of the name of an 8-bit layer's scales
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # weights with one scale
UNPACKED_AT_ONCE = 2**25  # 4-bit weights that a GPU unpacks together to multiply many rows
NUM_VALUES, NUM_NESTED_VALUES = 16, 256  # entries of the code tables of weights and of scales


def check_bitsandbytes(files: Sequence[Path], name: str) -> None:
    """files: of a model that was checked. name: of the model. Raises ModelError."""
    shapes = {key: each for file in files for key, each in tensor_shapes(file).items()}
    sizes = {key: each for file in files for key, each in tensor_bytes(file).items()}
    states = {key: state for file in files for key, state in _states(file).items()}
    try:
        for key in shapes:
            layer = key.removesuffix(SCALES)
            if layer != key and shapes[key] != shapes[f"{layer}.weight"][:1]:
                raise ValueError(f"{layer} has {list(shapes[key])} scales")
        for key, state in states.items():
            layer, _, kind = key.partition(STATE)
            num_bytes, wanted = _wanted(parsed(state), kind)
            found = {part: prod(shapes[f"{layer}.{part}"]) for part in wanted}
            if found != wanted or sizes[layer] != num_bytes:
                raise ValueError(f"{layer} is of another size")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(
            f"{name} has a layer that is not laid out as bitsandbytes says ({error}). Fetch the "
            "model again, or choose another copy of it."
        ) from error


def _states(file: Path) -> dict[str, bytes]:
    with safe_open(file, framework="np") as opened:
        names = [name for name in opened.keys() if STATE in name]  # noqa: SIM118  (no mapping)
        return {name: opened.get_tensor(name).tobytes() for name in names}


def _wanted(state: Mapping[str, Any], kind: str) -> tuple[int, dict[str, int]]:
    """The bytes of the packed weight, and how many values stand in each part beside it.
    Raises ValueError, KeyError, TypeError."""
    shape, block = state["shape"], state["blocksize"]
    if kind not in ("nf4", "fp4") or state["quant_type"] != kind or block not in BLOCKS:
        raise ValueError(f"{state['quant_type']} in blocks of {block}")
    if not shape or any(type(size) is not int or size < 1 for size in shape):
        raise ValueError(f"a shape of {shape}")
    count = prod(shape)
    num_blocks = -(-count // block)
    wanted = {"absmax": num_blocks, "quant_map": NUM_VALUES}
    if "nested_blocksize" not in state:
        return -(-count // 2), wanted
    if state["nested_blocksize"] not in BLOCKS:
        raise ValueError(f"scales in blocks of {state['nested_blocksize']}")
    num_nested = -(-num_blocks // state["nested_blocksize"])
    wanted |= {"nested_absmax": num_nested, "nested_quant_map": NUM_NESTED_VALUES}
    return -(-count // 2), wanted
