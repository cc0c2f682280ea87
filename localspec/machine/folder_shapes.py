"""The shape of the model in a folder, counted from its files where its family is not known.

Contract: `shape_from_folder` reads config.json and, for families that shapes.py does not know, the
parameters from the headers of the .safetensors files; ModelError where these do not say enough.
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
from localspec.formats.attention import attention_fault, count_attention_layers, is_recurrent
from localspec.formats.lengths import longest_of
from localspec.formats.safetensors_file import tensor_shapes
from localspec.formats.stored import stored_of
from localspec.machine.shapes import (
    FAMILIES,
    Counted,
    ModelShape,
    longest_context,
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
    files = sorted(folder.glob("*.safetensors"))
    name = name or folder.name
    if str(config.get("model_type", "unknown")) in FAMILIES or not files:
        shape = shape_from_config(config, name)
    else:
        shape = counted_shape(config, files, name)
    if shape.kept_as is None:
        return shape
    return replace(shape, kept_bytes=sum(file.stat().st_size for file in files))


def counted_shape(config: Mapping[str, Any], files: Sequence[Path], name: str) -> ModelShape:
    """config: of config.json. files: the weights. Raises ModelError."""
    text = {**config, **(config.get("text_config") or {})}
    family = str(config.get("model_type", "unknown"))
    fault = attention_fault(text)
    if fault is not None and not is_recurrent(text):
        raise ModelError(fault)
    sizes = {key: _first(text, names) for key, names in NAMES.items()}
    longest, stored = longest_of(config), stored_of(config, name)
    lacking = [NAMES[key][0] for key, size in sizes.items() if size is None]
    lacking += ["max_position_embeddings"] * (longest is None)
    lacking += ["number of weights before packing"] * (stored is not None and stored.is_unpacked)
    if lacking:
        raise ModelError(
            f"{name} is a '{family}' model whose files do not say its {' and '.join(lacking)}, so "
            "the memory it needs is not known. Choose a model of another family."
        )
    tensors = {key: shape for file in files for key, shape in tensor_shapes(file).items()}
    layers, width, heads = (int(sizes[key] or 0) for key in NAMES)
    linear = sum(prod(shape) for key, shape in tensors.items() if _is_linear(key, shape))
    return ModelShape(
        name=name,
        family=family,
        num_layers=layers,
        is_recurrent=is_recurrent(text),
        num_state_layers=layers - count_attention_layers(text, layers),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or width // heads),
        intermediate_size=int(text.get("intermediate_size") or 4 * width),
        vocab_size=int(text.get("vocab_size") or 0),
        context_length=longest_context(text, int(longest or 0)),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        stored_as="" if stored is None else stored.title,
        kept_as=None if stored is None else stored.stays,
        counted=Counted(sum(prod(shape) for shape in tensors.values()), linear),
    )


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    found = (config.get(name) for name in names)
    return next((each for each in found if isinstance(each, int) and each > 0), None)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not any(part in name for part in OUTER)
