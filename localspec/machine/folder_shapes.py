"""The shape of the model in a folder, counted from its files where its family is not known.

Contract: `shape_from_folder` reads config.json and, for families that shapes.py does not know, the
parameters from the headers of the weight files; ModelError where these do not say enough.
What a layer's activations need is then taken as of a Llama of the same width.

Not here: the arithmetic (shapes), whether the model can run (forward.model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from localspec.errors import ModelError
from localspec.files import read_json
from localspec.formats.attention import (
    attention_fault,
    count_attention_layers,
    count_key_width,
    is_recurrent,
)
from localspec.formats.gguf_file import POINTER, read_header
from localspec.formats.gguf_settings import config_of, tensor_names
from localspec.formats.lengths import longest_of
from localspec.formats.native import TOWERS, why_not_native
from localspec.formats.safetensors_file import tensor_shapes
from localspec.formats.stored import stored_of
from localspec.machine.shapes import (
    FAMILIES,
    Counted,
    ModelShape,
    decoder_shape,
    shape_from_config,
)

NAMES: Mapping[str, Sequence[str]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
}
OUTER = ("embed", "wte", "wpe", "lm_head", "output.weight")  # in the names of what never shrinks


def shape_from_folder(folder: Path, name: str | None = None) -> ModelShape:
    """The shape of the model in `folder`. Raises ModelError when its config cannot be read."""
    path = folder / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no config.json, so it is not a model folder. "
            "Give the folder that holds config.json and the .safetensors files."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}). Fetch the folder again.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object. Fetch the folder again.")
    try:
        return _shape_of(config, folder, name or folder.name)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelError(
            f"{path} holds a value that cannot be understood ({error}). Fetch the folder again."
        ) from error


def _shape_of(config: Mapping[str, Any], folder: Path, name: str) -> ModelShape:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / POINTER).is_file():
        return shape_of_gguf(Path(str(read_json(folder / POINTER)["file"])), name)
    if str(config.get("model_type", "unknown")) in FAMILIES or not files:
        shape = shape_from_config(config, name)
    else:
        tensors = {key: shape for file in files for key, shape in tensor_shapes(file).items()}
        stored = stored_of(config, name)
        is_packed = stored is not None and stored.is_unpacked
        shape = counted_shape(config, tensors, name, is_packed)
    if shape.kept_as is None:
        return shape
    return replace(shape, kept_bytes=sum(file.stat().st_size for file in files))


def shape_of_gguf(file: Path, name: str) -> ModelShape:
    """The shape of the model in a GGUF file. Raises ModelError."""
    header = read_header(file)
    config = config_of(header)
    if config["model_type"] in FAMILIES:
        return shape_from_config(config, name)
    named = tensor_names(header)
    tensors = {named[each.name]: each.shape for each in header.tensors if each.name in named}
    return counted_shape(config, tensors, name)


def counted_shape(
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    name: str,
    is_packed: bool = False,
) -> ModelShape:
    """config: of config.json. tensors: the shapes of the weights by their names. is_packed: whether
    those are not the shapes that a model computes with. Raises ModelError."""
    text = {**config, **(config.get("text_config") or {})}
    family = str(config.get("model_type", "unknown"))
    fault = attention_fault(text)
    if fault is not None and not is_recurrent(text):
        raise ModelError(fault)
    sizes = {key: _first(text, names) for key, names in NAMES.items()}
    longest = longest_of(config)
    lacking = [NAMES[key][0] for key, size in sizes.items() if size is None]
    lacking += ["max_position_embeddings"] * (longest is None)
    lacking += ["number of weights before packing"] * is_packed
    if lacking:
        raise ModelError(
            f"{name} is a '{family}' model whose files do not say its {' and '.join(lacking)}, so "
            "the memory it needs is not known. Choose a model of another family."
        )
    layers, width, heads = (int(sizes[key] or 0) for key in NAMES)
    beside = {key for key in tensors if not set(TOWERS).isdisjoint(key.split("."))}
    own = {key: shape for key, shape in tensors.items() if key not in beside}
    linear = sum(prod(shape) for key, shape in own.items() if _is_linear(key, shape))
    known = {
        **text,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": text.get("intermediate_size") or 4 * width,
        "vocab_size": text.get("vocab_size") or 0,
        "max_position_embeddings": longest,
    }
    shape = decoder_shape(known, name, family)
    return replace(
        shape,
        all_kv_width=count_key_width(text, layers, shape.kv_width),
        is_recurrent=is_recurrent(text),
        not_native="" if is_recurrent(text) else why_not_native(text, own) or "",
        extra_params=sum(prod(tensors[key]) for key in beside),
        num_state_layers=layers - count_attention_layers(text, layers),
        counted=Counted(sum(prod(shape) for shape in tensors.values()), linear),
    )


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    found = (config.get(name) for name in names)
    return next((each for each in found if isinstance(each, int) and each > 0), None)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not any(part in name for part in OUTER)
