"""The shape of the model in a folder: sizes by its config.json, parameters by its files' headers.

`counted_shape` is the one count of parameters, for every family and every format of weights. Of a
family that config_shapes knows and whose weights are not all here, `shape_from_folder` estimates
them by the sizes; ModelError where these do not say enough. `shape_to_load` is what plans and the
Models tab ask, so that they refuse what loading refuses. What a layer's activations need is taken
as of a Llama of the same width.

Not here: the arithmetic (shapes), whether the model can run (forward.model).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from localspec.core.errors import ModelError
from localspec.formats.attention import (
    attention_fault,
    is_recurrent,
    layer_kinds,
)
from localspec.formats.folder_files import (
    check_folder,
    first_size,
    gguf_file,
    longest_of,
    name_of,
    read_config_json,
    require_tokenizer,
    weight_files,
    with_true_head,
)
from localspec.formats.gguf_file import GGUFHeader, read_header
from localspec.formats.gguf_module import module_near
from localspec.formats.gguf_settings import config_of, tensor_names
from localspec.formats.native import SIZED, TOWERS, why_not_native
from localspec.formats.native_config import native_fault
from localspec.formats.published_tensors import (
    ingredient_bytes,
    is_listed,
    published_tensors,
    qwen_kinds,
    state_numbers,
)
from localspec.formats.safetensors_file import PACKED_PARTS, tensor_bytes, tensor_shapes
from localspec.formats.stored import stored_of
from localspec.machine.config_shapes import decoder_shape, shape_from_config
from localspec.machine.shapes import Counted, ModelShape

NAMES: Mapping[str, Sequence[str]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
}
Shapes = Mapping[str, tuple[int, ...]]
BESIDE_PACKED = frozenset(
    ("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point",
     "weight_shape", "weight_g_idx", "input_scale", "activation_scale", "absmax", "quant_map",
     "nested_absmax", "nested_quant_map", "SCB", "weight_format")
)  # fmt: skip
BITSANDBYTES = "bitsandbytes__"  # begins the last part of the name of a layer's settings
OUTER = ("embed", "wte", "wpe", "lm_head", "output.weight")  # in names outside of the layers
# In names of layers that a mixture of experts has; transformers keeps neither in linear layers.
OF_MIXTURES = (".experts.", ".gate.weight", "router")
OF_MTP = re.compile(r"(^|\.)mtp(_layers)?\.")  # In names of a module that only drafts.
CONVOLUTION = "conv1d"  # of two axes in GGUF files


def shape_from_folder(folder: Path, name: str | None = None) -> ModelShape:
    """The shape of the model in `folder`. Raises ModelError when its config cannot be read."""
    config = with_true_head(read_config_json(folder), [*folder.glob("model*.safetensors")])
    try:
        return _shape_of(config, folder, name or name_of(folder))
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelError(
            f"{folder / 'config.json'} holds a value that cannot be understood ({error}). Fetch "
            "the folder again."
        ) from error


def shape_to_load(folder: Path, name: str | None = None) -> ModelShape:
    """The same of a whole model. Raises ModelError also for what loading refuses by its files."""
    check_folder(folder)
    require_tokenizer(folder)
    return shape_from_folder(folder, name)


def _shape_of(config: Mapping[str, Any], folder: Path, name: str) -> ModelShape:
    file = gguf_file(folder)
    if file is not None:
        return shape_of_gguf(file, name)
    is_sized = str(config.get("model_type")) in SIZED or is_listed(config)
    files = _weight_files(folder, is_sized)
    if not files:
        return shape_of_config(config, name)
    tensors = {key: shape for file in files for key, shape in tensor_shapes(file).items()}
    sizes = {key: size for file in files for key, size in tensor_bytes(file).items()}
    stored = stored_of(config, name)
    shapes = tensors if stored is None else _unpacked(tensors, stored.per_word)
    shape = counted_shape(config, shapes, name)
    is_wide = sum(sizes.values()) > 3 * shape.num_params  # 4 bytes a weight, not 2
    shape = replace(shape, is_published_wide=shape.is_published_wide or is_wide)
    return shape if shape.kept_as is None else replace(shape, kept_bytes=_kept_bytes(sizes))


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a model whose files are not here. Raises ModelError for a family whose
    config.json does not give it, and LookupError or ValueError for a size that is lacking."""
    if not is_listed(config):
        return replace(shape_from_config(config, name), not_native=native_fault(config))
    return counted_shape(config, published_tensors(config), name)


def _weight_files(folder: Path, is_sized: bool) -> list[Path]:
    """The files whose headers are counted; none where a model without all its weights can be
    estimated by its sizes. Raises ModelError."""
    if not any(folder.glob("*.safetensors")):
        return []
    try:
        return weight_files(folder)
    except ModelError:
        if is_sized:
            return []
        raise


def _kept_bytes(sizes: Mapping[str, int]) -> int:
    """Of weights that stay as bitsandbytes wrote them. Scales that are quantised themselves are
    held in fp32, which is four times as much."""
    scales = [key for key in sizes if f"{key.removesuffix('absmax')}nested_absmax" in sizes]
    own = [key for key in sizes if not _is_beside(key) and not OF_MTP.search(key)]
    held = sum(sizes[key] for key in own)
    return held + 3 * sum(sizes[key] for key in scales if key.endswith(".absmax"))


def shape_of_gguf(file: Path, name: str) -> ModelShape:
    """The shape of the model in a GGUF file, with a module in a file beside it. Raises
    ModelError."""
    header, near = read_header(file), module_near(file)
    module = {} if near is None else _tensors_of(read_header(near))
    drafting = {key: size for key, size in module.items() if OF_MTP.search(key)}
    return counted_shape(config_of(header), {**_tensors_of(header), **drafting}, name)


def _tensors_of(header: GGUFHeader) -> dict[str, tuple[int, ...]]:
    """Raises ModelError."""
    named = tensor_names(header)
    return {named[each.name]: each.shape for each in header.tensors if each.name in named}


def _unpacked(tensors: Shapes, per_word: int) -> Shapes:
    """The shapes of the weights that packed tensors stand for, but for the order of their axes, and
    those of the others; without the scales beside them."""
    found = dict[str, tuple[int, ...]]()
    for name, shape in tensors.items():
        layer, _, part = name.rpartition(".")
        if f"{name}.absmax" in tensors:  # two weights of 4 bits in each byte
            found[name] = (2 * prod(shape), 1)
            continue
        if part in PACKED_PARTS or part.endswith("_blocks"):
            part = "weight" if part in PACKED_PARTS else part.removesuffix("_blocks")
            found[f"{layer}.{part}"] = (*shape[:-1], shape[-1] * per_word)
        elif not _is_beside_packed(part):
            found[name] = shape
    return found


def _is_beside_packed(part: str) -> bool:
    return part in BESIDE_PACKED or part.endswith("_scales") or part.startswith(BITSANDBYTES)


def counted_shape(config: Mapping[str, Any], tensors: Shapes, name: str) -> ModelShape:
    """config: of config.json. tensors: the shapes of the weights that a model computes with, by
    their names. Raises ModelError."""
    is_sized = str(config.get("model_type", "unknown")) in SIZED
    sized = shape_from_config if is_sized else partial(_shape_of_other, tensors=tensors)
    shape = sized(config, name)
    drafting = {key: size for key, size in tensors.items() if OF_MTP.search(key)}
    beside = {key for key in tensors if _is_beside(key)} | drafting.keys()
    # Some write a tied head all the same.
    twice = {key for key in tensors if shape.is_tied and "lm_head" in key}
    counted = _counted({key: tensors[key] for key in tensors.keys() - beside - twice})
    num_params = sum(prod(tensors[key]) for key in tensors.keys() - twice)
    return replace(
        shape,
        not_native=shape.not_native or native_fault(config),
        extra_params=sum(prod(tensors[key]) for key in beside),
        counted=replace(counted, num_params=num_params),
        mtp=_module_of(shape, drafting),
    )


def _counted(tensors: Shapes) -> Counted:
    """The parameters of these tensors."""
    sizes = tensors.items()
    return Counted(
        num_params=sum(prod(size) for _, size in sizes),
        linear_params=sum(prod(size) for key, size in sizes if _is_linear(key, size)),
        expert_params=sum(
            prod(size) for key, size in sizes if ".experts." in key and len(size) > 1
        ),
        table_params=sum(prod(size) for key, size in sizes if "embed_tokens_per_layer" in key),
    )


def _module_of(shape: ModelShape, tensors: Shapes) -> ModelShape | None:
    """The module for multi-token prediction that these tensors are; None where there are none."""
    if not tensors:
        return None
    return replace(
        shape,
        num_layers=1,
        vocab_size=0,
        num_dense_layers=0,
        is_recurrent=False,
        state_numbers=(0, 0),
        ingredient_bytes=0,
        kept_as=None,
        all_kv_width=None,
        num_in_groups=None,
        counted=_counted(tensors),
    )


def _shape_of_other(config: Mapping[str, Any], name: str, tensors: Shapes) -> ModelShape:
    """The sizes of a family that config_shapes does not know, and what its layers hold."""
    text = {**config, **(config.get("text_config") or {})}
    fault = attention_fault(text)
    if fault is not None and not is_recurrent(text):
        raise ModelError(fault)
    family = str(config.get("model_type", "unknown"))
    sizes = _sizes_of(text, longest_of(config), f"{name} is a '{family}' model")
    # Gemma 3n says it of each layer.
    inner = text.get("intermediate_size") or 4 * sizes["hidden_size"]
    known = {
        **text,
        **({"layer_types": qwen_kinds(text)} if "linear_key_head_dim" in text else {}),
        **sizes,
        "intermediate_size": max(inner) if isinstance(inner, list) else inner,
        "vocab_size": text.get("vocab_size") or 0,
        "tie_word_embeddings": text.get(
            "tie_word_embeddings", not any("lm_head" in key for key in tensors)
        ),
    }
    shape = decoder_shape(known, name, family)
    named = [key for key in tensors if not _is_beside(key)]
    return replace(
        shape,
        is_recurrent=is_recurrent(text),
        not_native=why_not_native(text, named) or "",
        state_numbers=state_numbers(text),
        ingredient_bytes=ingredient_bytes(text),
    )


def _sizes_of(text: Mapping[str, Any], longest: int | None, subject: str) -> dict[str, int]:
    """By Llama's names. subject: of the sentence where one is lacking. Raises ModelError."""
    found = {ours: first_size(text, names) for ours, names in NAMES.items()}
    found["num_hidden_layers"] = found["num_hidden_layers"] or len(layer_kinds(text)) or None
    found["max_position_embeddings"] = longest
    lacking = [ours for ours, size in found.items() if size is None]
    if lacking:
        raise ModelError(
            f"{subject} whose files do not say its {' and '.join(lacking)}, so the memory it needs "
            "is not known. Choose a model of another family."
        )
    return {ours: size for ours, size in found.items() if size is not None}


def _is_beside(name: str) -> bool:
    """Whether a weight is of what a model has for images and sound, which is not kept."""
    return not set(TOWERS).isdisjoint(name.split("."))


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not any(part in name for part in (*OUTER, *OF_MIXTURES, CONVOLUTION))
