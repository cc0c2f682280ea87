"""Opens a model folder that was checked (formats.folder_files).

Contract: code in a model's folder is never run. Each failure is a ModelError that names what failed
and the remedy. The native decoder takes over the models
it can run, and is used only if its logits agree with those of transformers.

Not here: which model, whether it fits (machine), fetching it (machine.sources).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch

from localspec.errors import MemoryShortage, ModelError, first_line
from localspec.formats.bitsandbytes_layers import check_bitsandbytes
from localspec.formats.folder_files import (
    check_folder,
    name_of,
    read_config_json,
    weight_files,
)
from localspec.formats.native import KNOWN_AS, LAYOUTS, TOWERS
from localspec.formats.stored import stored_of
from localspec.forward.cache import KVCache, native_cache
from localspec.forward.decoder import Decoder
from localspec.forward.from_transformers import take_over
from localspec.forward.grouped import Int4Linear
from localspec.forward.layer_files import LayerFiles, opened_by_layers
from localspec.forward.model import AGREEMENT, CausalLM, LanguageModel, has_state, kv_shape
from localspec.forward.own_bits import in_groups, left_whole, weights_missing
from localspec.forward.recurrent import RecurrentLM
from localspec.forward.stored import stored_weights
from localspec.forward.weight_layout import tune

Bits = Literal[4, 8]
PROBED = (6, 1)  # tokens at once and one after them, compared with transformers
CHECKED = (6, 3)  # tokens at once and several after them, as a draft is checked
COMPARED_WIDTHS = (1, 2, 5, 9)
NO_ATTENTION = "scaled_dot_product_attention"  # in transformers' message for a family without it
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Opened:
    """A loaded model. notice: why the native decoder does not run it, None where it does.
    has_invariant_rows: whether a row's logits have the same bits whatever rows run beside it, as
    compared while loading; elsewhere one row and several are equal within rounding.
    repacking_error: of the file's own 4-bit weights, how far a layer's output lies off at most, by
    its norm; None where there are none."""

    model: LanguageModel
    notice: str | None
    has_invariant_rows: bool
    repacking_error: float | None = None


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    bits: Bits | None = None,
    spare_bytes: int | None = None,
    is_fastest: bool = False,
) -> Opened:
    """The model of a checked folder on `device`, with a cache of `context_length` slots.

    It runs natively where the decoder knows the family and its logits agree, else on transformers.
    bits: quantise the linear layers while loading, by bitsandbytes (NF4 or LLM.int8) or in groups
    (own_bits). spare_bytes: memory that may be spent on speed, None for no limit. is_fastest: the
    fastest linear layers for one row, as timed, at the cost of has_invariant_rows. Raises
    ModelError, MemoryShortage.
    """
    try:
        by_layers = None if bits or device.type != "cpu" else _by_layers(folder, dtype)
        module = by_layers.module if by_layers else load_module(folder, dtype, device, bits)
        if has_state(module.config):
            with _saying_what_cannot_run(folder):
                recurrent = RecurrentLM(module, context_length)
            return Opened(recurrent, recurrent.refusal, False)
        dtype = module.dtype  # what is loaded as it is kept has one of its own
        shape, repacked = kv_shape(module.config, context_length), _repacking_error(folder, module)
        small = KVCache(replace(shape, capacity=sum(PROBED)), dtype, device)
        with _saying_what_cannot_run(folder):
            wanted = _answers(CausalLM(module, small), *PROBED)
        refusal = None
        if bool(torch.isfinite(wanted).all()):  # else nothing to compare; the engine will say
            cache = native_cache(shape, dtype, device)
            try:
                lent: Any = by_layers.lent if by_layers else nullcontext
                native = take_over(module, cache, True, lent)
            except ModelError as error:
                refusal = str(error)
            else:
                native = _fastest(native, spare_bytes) if is_fastest else native
                off = float((_answers(native, *PROBED) - wanted).norm() / wanted.norm())
                if off <= AGREEMENT[torch.bfloat16 if bits else dtype]:  # its rows are rounded
                    return Opened(native, None, _has_invariant_rows(native), repacked)
                refusal = f"The native decoder answered {off:.1%} off and is not used."
                del native  # before the weights are read a second time
                module = None
        if by_layers or module is None:
            module = load_module(folder, dtype, device, bits)
        model = CausalLM(module, KVCache(shape, dtype, device))
        with _saying_what_cannot_run(folder):
            _require_checking(model, folder)
        return Opened(model, refusal, False, repacked)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _does_not_fit(folder) from error


def _repacking_error(folder: Path, module: Any) -> float | None:
    """See Opened."""
    if stored_of(read_config_json(folder), name_of(folder)) is None:
        return None
    layers = (each for each in module.modules() if isinstance(each, Int4Linear))
    return max((layer.error for layer in layers), default=None)


def _fastest(native: Decoder, spare_bytes: int | None) -> Decoder:
    tune(native.weights.linears, native.weights.embedding, spare_bytes)
    return Decoder(native.weights, native.cache, is_fastest=True)


def _by_layers(folder: Path, dtype: torch.dtype) -> LayerFiles | None:
    """None for a folder that only transformers' own loading understands."""
    config = check_folder(folder)
    if stored_of(config, name_of(folder)) is not None:
        return None
    known = read_config(folder)
    if known.model_type not in LAYOUTS or has_state(known):
        return None
    return opened_by_layers(known, weight_files(folder), dtype)


def _require_checking(model: CausalLM, folder: Path) -> None:
    """Raise ModelError unless a text read in pieces gives the logits of the same read at once, and
    its last token the same as a branch: drafts could not be checked. What quantised kernels make of
    one row and of several differs by as much as bf16 rounds."""
    ids = _probe(model, sum(CHECKED))
    model.forward(ids[:-1])
    branch = model.forward([ids[0], ids[-1]], parents=(-1, -1))[-1:]
    model.cache.rollback(0)
    whole, pieces = _answers(model, len(ids)), _answers(model, *CHECKED)
    off = torch.cat((pieces, branch)) - torch.cat((whole, whole[-1:]))
    if float(off.norm() / whole.norm()) > AGREEMENT[torch.bfloat16]:
        raise _cannot_check(folder, model.module.config.model_type)


@contextmanager
def _saying_what_cannot_run(folder: Path) -> Iterator[None]:
    """Around a first forward of transformers' code, in which any error is possible."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, ModelError):
        raise
    except Exception as error:
        raise ModelError(
            f"The model in {folder} was read, but transformers cannot run it: "
            f"{first_line(error).rstrip('.')}. Fetch it again, or choose its copy with 16-bit "
            "weights or a model of another family, such as Llama, Qwen or Gemma."
        ) from error


def _cannot_check(folder: Path, family: Any) -> ModelError:
    return ModelError(
        f"The family of {name_of(folder)} ({family}) has an attention of its own that cannot check "
        "several tokens at once here. Choose a model of another family, such as Llama, Qwen or "
        "Gemma."
    )


def _probe(model: LanguageModel, length: int) -> list[int]:
    return [(7 * place + 1) % model.vocab_size for place in range(length)]


def _answers(model: LanguageModel, *widths: int) -> torch.Tensor:
    """Logits of tokens read in pieces of such widths, [sum, V]; leaves the cache empty."""
    ids = _probe(model, sum(widths))
    ends = accumulate(widths)
    pieces = [ids[end - width : end] for end, width in zip(ends, widths, strict=True)]
    logits = torch.cat([model.forward(piece) for piece in pieces])
    model.cache.rollback(0)
    return logits


def _has_invariant_rows(model: Decoder) -> bool:
    """On a processor the shapes are chosen for it, and compared here. On a GPU another width may
    take another kernel at any context, so nothing is promised."""
    if model.device.type != "cpu" or model.is_fastest:
        return False
    at_once = _answers(model, sum(COMPARED_WIDTHS))
    return torch.equal(at_once, _answers(model, *COMPARED_WIDTHS))


def load_module(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    bits: Bits | None = None,
    attention: Literal["sdpa", "eager"] = "sdpa",
) -> Any:
    """The transformers module of a checked folder, in evaluation mode. attention: transformers'
    implementation; eager where a family has no other. Raises ModelError."""
    config = check_folder(folder)
    stored = stored_of(config, name_of(folder))
    is_kept = stored is not None and stored.stays is not None
    if is_kept:
        check_bitsandbytes(weight_files(folder), name_of(folder))
    try:
        known = _config_of(folder, config)
        if not has_state(known):
            kv_shape(known, 1)  # before gigabytes are read
        own = None
        if bits == 4:
            files = weight_files(folder)
            own = in_groups(name_of(folder), config, known, files, dtype, device)
        if own is not None:
            return own
        opener, source = _opener(folder, config, known, dtype)
        with _weights_allocated_apart():
            opened: Any = opener.from_pretrained(
                **source,
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                **_quantised_by(bits, dtype, device, is_kept, known),
            )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _does_not_fit(folder) from error
    except ModelError:
        raise
    except Exception as error:  # unknown files in transformers' code: any type is possible
        if NO_ATTENTION in first_line(error):
            # A mask describes all of an attention only where positions are told apart by rotation.
            if getattr(known.get_text_config(), "rope_parameters", None) or has_state(known):
                return load_module(folder, dtype, device, bits, "eager")
            raise _cannot_check(folder, config.get("model_type")) from error
        raise _cannot_be_loaded(folder, error) from error
    module, info = opened
    if missing := sorted(info["missing_keys"]):  # transformers would fill them with noise
        raise weights_missing(name_of(folder), missing)
    if unlike := sorted(info["mismatched_keys"]):
        name, found, wanted = unlike[0]
        raise ModelError(
            f"{len(unlike)} weights of {name_of(folder)} have another shape than its config.json "
            f"says, first {name}: {list(found)}, not {list(wanted)}. Fetch the model again."
        )
    drop_towers(module)
    if bits is not None or is_kept:  # placed while loading; bitsandbytes refuses to be moved again
        return module.eval().requires_grad_(False)
    try:
        return module.to(device).eval().requires_grad_(False)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _does_not_fit(folder) from error


@contextmanager
def _weights_allocated_apart() -> Iterator[None]:
    """transformers takes memory of a GPU for all weights in one piece. Of that nothing goes back to
    the driver while a weight is in use, and fused layers come on top of what they are made of."""
    from transformers import modeling_utils

    untyped: Any = modeling_utils
    in_one_piece = untyped.caching_allocator_warmup
    untyped.caching_allocator_warmup = lambda *_: None
    try:
        yield
    finally:
        untyped.caching_allocator_warmup = in_one_piece


def drop_towers(module: Any) -> None:
    """Free what a model has for images and sound, which nothing here gives it."""
    for name in TOWERS:
        if getattr(module.base_model, name, None) is not None:
            setattr(module.base_model, name, None)


def _opener(
    folder: Path, config: dict[str, Any], known: Any, dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
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
        raise ModelError(
            f"{name_of(folder)} is a {known.model_type} model, which does not continue a text. "
            "Choose a model that chats, such as one of Llama, Qwen or Gemma."
        )
    weights = stored_weights(config, weight_files(folder), dtype)
    if weights is None:
        files = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        name = {"pretrained_model_name_or_path": str(folder)}
        return auto, {**name, **files, **_renamed(config)}
    del known.quantization_config  # they are dense now
    made = {"pretrained_model_name_or_path": None, "config": known, "state_dict": weights.dense}
    return classes[type(known)], made


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

    from localspec.forward.nf4 import library

    library()  # before transformers imports it: it would look for kernels on a model hub
    untyped: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    is_checked = bits == 4 and device.type == "cpu" and type(known) in untyped
    untyped = BitsAndBytesConfig
    config = untyped(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=left_whole(known, dtype) if is_checked else None,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def _config_of(folder: Path, config: dict[str, Any]) -> Any:
    """What transformers makes of config.json."""
    from transformers import AutoConfig

    given = _renamed(config).get("config")
    return given or AutoConfig.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments that make from_pretrained load a family of KNOWN_AS; none for the others."""
    family = KNOWN_AS.get(str(config.get("model_type")))
    if family is None:
        return {}
    from transformers import AutoConfig

    names = ("model_type", "architectures", "auto_map")
    settings = {name: value for name, value in config.items() if name not in names}
    return {"config": AutoConfig.for_model(family, **settings)}


def read_config(folder: Path) -> Any:
    """The config of a checked folder, as transformers reads it. Raises ModelError."""
    config = check_folder(folder)
    try:
        return _config_of(folder, config)
    except Exception as error:  # as above
        raise _cannot_be_loaded(folder, error) from error


def _cannot_be_loaded(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"The model in {folder} cannot be loaded: {first_line(error).rstrip('.')}. Fetch it again, "
        "or choose a model of a family that this version of transformers knows."
    )


def _does_not_fit(folder: Path) -> MemoryShortage:
    return MemoryShortage(
        f"{name_of(folder)} does not fit into the memory that is free. Close other programs, or "
        "choose a smaller model or a shorter context."
    )
