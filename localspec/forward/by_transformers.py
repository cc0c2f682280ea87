"""Opens a model folder with transformers: the families that the native decoder does not run, and
what is trained.

Code in a model's folder is never run. Each failure is a ModelError that names what failed and the
remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from localspec.core.errors import MemoryShortage, ModelError, first_line
from localspec.formats.attention import cannot_check, does_not_continue
from localspec.formats.bitsandbytes_layers import check_bitsandbytes
from localspec.formats.folder_files import ModelFolder, check_folder
from localspec.formats.native import KNOWN_AS, NATIVE, TOWERS
from localspec.forward.completeness import unread_of_module
from localspec.forward.model import has_state, kv_shape
from localspec.weights import nf4
from localspec.weights.library import bitsandbytes
from localspec.weights.precision import Bits, suits
from localspec.weights.source import WeightSource, open_source
from localspec.weights.stored import Dense, Weight

NO_ATTENTION = "scaled_dot_product_attention"  # in transformers' message for a family without it
CANNOT_LOAD = (
    "cannot be loaded",
    "choose a model of a family that this version of transformers knows.",
)


def load_module(
    folder: Path, dtype: torch.dtype, device: torch.device, bits: Bits | None = None
) -> Any:
    """Return the transformers module of a folder. bits: quantise the linear layers while loading,
    by bitsandbytes (NF4 or LLM.int8). Raises ModelError, MemoryShortage."""
    return opened_module(folder, dtype, device, bits)[0]


def opened_module(
    folder: Path, dtype: torch.dtype, device: torch.device, bits: Bits | None = None
) -> tuple[Any, str | None]:
    """Return the same, and a sentence on tensors of its files that nothing reads, None without
    any."""
    found = check_folder(folder)
    if found.is_kept:
        check_bitsandbytes(found.files, found.name)
    with saying_what_does_not_fit(found), saying(found, *CANNOT_LOAD):
        known = config_of(found)
        if not has_state(known):
            kv_shape(known, 1)  # before gigabytes are read
        module, unread = _opened(found, known, dtype, device, bits)
        if bits is None and not found.is_kept:
            module = module.to(device)  # bitsandbytes placed its own, and refuses to move them
        return module.eval().requires_grad_(False), unread


@contextmanager
def saying_what_does_not_fit(found: ModelFolder) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MemoryShortage(
            f"{found.name} does not fit into the memory that is free. Close other programs, or "
            "choose a smaller model or a shorter context."
        ) from error


@contextmanager
def saying(found: ModelFolder, fault: str, remedy: str) -> Iterator[None]:
    """Around transformers' code at work on unknown files, in which any error is possible."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, ModelError):
        raise
    except Exception as error:
        reason = first_line(error).rstrip(".")
        raise ModelError(f"{found.name} {fault}: {reason}. Fetch it again, or {remedy}") from error


def read_config(folder: Path) -> Any:
    """Return the config of a folder, as transformers reads it. Raises ModelError."""
    return config_of(check_folder(folder))


def config_of(found: ModelFolder) -> Any:
    """Return the same. A family of KNOWN_AS stands under its name there. The head is as the files
    hold it."""
    from transformers import AutoConfig

    family = KNOWN_AS.get(str(found.config.get("model_type")))
    names = ("model_type", "architectures", "auto_map")
    settings = {name: value for name, value in found.config.items() if name not in names}
    with saying(found, *CANNOT_LOAD):
        if family is not None:
            return AutoConfig.for_model(family, **settings)
        where = {"local_files_only": True, "trust_remote_code": False}
        known: Any = AutoConfig.from_pretrained(str(found.path), **where)
        if found.config.get("tie_word_embeddings") is False:
            for part in (known, known.get_text_config()):
                part.tie_word_embeddings = False
        return known


def drop_towers(module: Any) -> None:
    """Free what a model has for images and sound, which nothing here gives it."""
    for name in TOWERS:
        if getattr(module.base_model, name, None) is not None:
            setattr(module.base_model, name, None)


def _opened(
    found: ModelFolder, known: Any, dtype: torch.dtype, device: torch.device, bits: Bits | None
) -> tuple[Any, str | None]:
    """By from_pretrained, without what images and sound need. Raises ModelError."""
    opener, source = _opener(found, known, dtype)
    arguments = {**source, **_quantised_by(bits, dtype, device, found.is_kept, known)}

    def opened(attention: Literal["sdpa", "eager"]) -> Any:
        return opener.from_pretrained(
            **arguments,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # unread_of_module names them
        )

    try:
        module, info = opened("sdpa")
    except Exception as error:  # as for what cannot be loaded
        if NO_ATTENTION not in first_line(error):
            raise
        # A mask describes all of an attention only where positions are told apart by rotation.
        if not getattr(known.get_text_config(), "rope_parameters", None) and not has_state(known):
            raise ModelError(cannot_check(known.model_type)) from error
        module, info = opened("eager")
    unread = unread_of_module(found, module, info)
    drop_towers(module)
    return module, unread


def _opener(found: ModelFolder, known: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The class whose from_pretrained makes the module, and arguments that say of what."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    untyped: Any = AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING
    if type(known) not in untyped[1] and type(known) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        untyped = AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto, classes = untyped
    if type(known) not in classes:
        raise ModelError(does_not_continue(known.model_type))
    if found.stored is None or not found.stored.is_unpacked:
        files = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        return auto, {"pretrained_model_name_or_path": str(found.path), "config": known, **files}
    del known.quantization_config  # they are dense now
    layout = NATIVE.get(str(found.config.get("model_type")))
    has_columns = layout is not None and layout.has_expert_columns
    dense = dense_tensors(open_source(found, dtype), dtype, has_columns)
    arguments = {"pretrained_model_name_or_path": None, "config": known, "state_dict": dense}
    return classes[type(known)], arguments


def dense_tensors(
    source: WeightSource, dtype: torch.dtype, has_expert_columns: bool = False
) -> dict[str, torch.Tensor]:
    """Return all tensors in full precision, those of a layer's experts as transformers holds them:
    gate and up as one. has_expert_columns: see native.Layout."""
    dense, joined = dict[str, torch.Tensor](), _in_columns if has_expert_columns else _in_rows
    for name in sorted(source.names):
        layer, _, part = name.partition(".experts.")
        stem, _, kind = part.partition(".")
        if kind not in ("weight", "bias"):
            dense[name] = _values(source.read(name), dtype)
        elif stem != "up_proj":  # read with its gate
            halves = ("gate_proj", "up_proj") if stem == "gate_proj" else (stem,)
            names = [f"{layer}.experts.{half}.{kind}" for half in halves]
            whole = "gate_up_proj" if len(halves) == 2 else stem
            end = "_bias" if kind == "bias" else ""
            tensors = [source.read(each).dense(dtype) for each in names]
            dense[f"{layer}.experts.{whole}{end}"] = joined(tensors)
    return dense


def _in_rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[experts, 2 f, d], gate before up, or [experts, d, f]."""
    return torch.cat(tensors, 1)


def _in_columns(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[experts, d, 2 f], gate and up in turn, or [experts, f, d]; biases without the axis d."""
    turns = torch.stack(tensors, 2).flatten(1, 2)
    return turns.mT.contiguous() if turns.ndim == 3 else turns


def _values(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers stay as they are."""
    if isinstance(weight, Dense) and not weight.values.is_floating_point():
        return weight.values
    return weight.dense(dtype)


def _quantised_by(
    bits: Bits | None, dtype: torch.dtype, device: torch.device, is_kept: bool, known: Any
) -> dict[str, Any]:
    """Arguments that make from_pretrained quantise; none where nothing is to be quantised.
    is_kept: the files are quantised, and stay so. known: the config as transformers reads it."""
    if is_kept:
        return {"device_map": {"": device}}
    if bits is None:  # straight to a GPU: a computer may have less RAM than its card has memory
        return {"device_map": {"": device}} if device.type == "cuda" else {}
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, BitsAndBytesConfig

    bitsandbytes()  # before transformers imports it: it would look for kernels on a model hub
    untyped: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    is_checked = bits == 4 and device.type == "cpu" and type(known) in untyped
    is_checked = is_checked and nf4.has_kernel(device)
    untyped = BitsAndBytesConfig
    config = untyped(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=_left_whole(known, dtype) if is_checked else None,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def _left_whole(known: Any, dtype: torch.dtype) -> list[str]:
    """Linear layers that bitsandbytes cannot run in 4 bits on a processor with a kernel for NF4,
    such as Mamba's input; and the output head."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    untyped: Any = AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():
        module = untyped.from_config(known, dtype=dtype, attn_implementation="eager")
    head = module.get_output_embeddings()
    linears = ((path, each) for path, each in module.named_modules() if type(each) is nn.Linear)
    return sorted(path for path, each in linears if each is head or not suits(each.weight.shape))
