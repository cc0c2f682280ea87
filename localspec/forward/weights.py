"""Opens a model folder, checked by formats.folder_files.

Contract: code in a model's folder is never run. Each failure is a ModelError that names what failed
and the remedy. The native decoder takes over the models it can run, and is used only if its logits
agree with those of transformers.

Not here: which model, whether it fits (machine), fetching it (machine.sources).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch

from localspec.core.errors import MemoryShortage, ModelError, first_line
from localspec.formats.attention import cannot_check, does_not_continue
from localspec.formats.bitsandbytes_layers import check_bitsandbytes
from localspec.formats.folder_files import ModelFolder, check_folder
from localspec.formats.native import KNOWN_AS, LAYOUTS, TOWERS
from localspec.forward import nf4
from localspec.forward.cache import KVCache, KVShape, native_cache
from localspec.forward.completeness import require_every_weight, unread_notice
from localspec.forward.decoder import Decoder
from localspec.forward.from_transformers import take_over
from localspec.forward.grouped import Int4Linear
from localspec.forward.layer_files import lent, opened_by_layers
from localspec.forward.model import AGREEMENT, CausalLM, LanguageModel, has_state, kv_shape
from localspec.forward.own_bits import in_groups, left_whole
from localspec.forward.quantise import ends_refused, quantise_ends
from localspec.forward.recurrent import RecurrentLM
from localspec.forward.row_check import has_invariant_rows
from localspec.forward.stored import stored_weights
from localspec.forward.weight_layout import tune

Bits = Literal[4, 8]
Lent = Callable[[torch.nn.Module], AbstractContextManager[Any]]  # see take_over
PROBED = (6, 1)  # tokens at once and one after them, compared with transformers
CHECKED = (6, 3)  # tokens at once and several after them, as a draft is checked
NO_ATTENTION = "scaled_dot_product_attention"  # in transformers' message for a family without it
CANNOT_LOAD = (
    "cannot be loaded",
    "choose a model of a family that this version of transformers knows.",
)
CANNOT_RUN = (
    "was read, but transformers cannot run it",
    "choose its copy with 16-bit weights or a model of another family, such as Llama or Qwen.",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Opened:
    """A loaded model. notice: why the native decoder does not run it, None where it does.
    has_invariant_rows: whether a row's logits have the same bits whatever rows run beside it, as
    compared while loading; elsewhere one row and several are equal within rounding.
    repacking_error: of the file's own 4-bit weights, how far a layer's output lies off at most, by
    its norm; None where there are none. unread: which tensors of its files nothing reads, as a
    sentence; None where all are read or known to be needless."""

    model: LanguageModel
    notice: str | None
    has_invariant_rows: bool
    repacking_error: float | None = None
    unread: str | None = None


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    bits: Bits | None = None,
    spare_bytes: int | None = None,
    is_fastest: bool = False,
    quantises_head: bool = False,
) -> Opened:
    """The model of a folder on `device`, with a cache of `context_length` slots.

    It runs natively where the decoder knows it and its logits agree, else on transformers. bits:
    quantise the linear layers while loading, by bitsandbytes (NF4 or LLM.int8) or in groups
    (own_bits). spare_bytes: for speed, None for no limit. is_fastest: the fastest linear layers for
    one row, as timed, at the cost of has_invariant_rows. quantises_head: as quantise_ends. Raises
    ModelError, MemoryShortage.
    """
    found = check_folder(folder)
    with _saying_what_does_not_fit(found):
        module, lent = _to_take_over(found, dtype, device, bits, quantises_head)
        unread = unread_notice(module)
        if quantises_head:
            quantise_ends(module, device)
        if has_state(module.config):
            with _saying(found, *CANNOT_RUN):
                recurrent = RecurrentLM(module, context_length)
            return Opened(recurrent, recurrent.refusal, False, unread=unread)
        shape, repacked = kv_shape(module.config, context_length), _repacking_error(found, module)
        wanted = _reference(found, module, shape, device)
        cache = native_cache(shape, module.dtype, device)
        bound = AGREEMENT[torch.bfloat16 if bits else module.dtype]  # quantised, rows are rounded
        tuned = partial(_fastest, spare_bytes=spare_bytes) if is_fastest else None
        native, refusal = _taken_over(module, lent, cache, wanted, bound, tuned)
        if native is not None:
            return Opened(native, None, has_invariant_rows(native), repacked, unread)
        del cache, lent
        if quantises_head:
            raise ends_refused()
        if not _is_whole(module):
            del module  # before the weights are read a second time
            module = load_module(folder, dtype, device, bits)
        model = CausalLM(module, KVCache(shape, module.dtype, device))
        with _saying(found, *CANNOT_RUN):
            _require_checking(model)
        return Opened(model, refusal, False, repacked, unread)


def _to_take_over(
    found: ModelFolder,
    dtype: torch.dtype,
    device: torch.device,
    bits: Bits | None,
    quantises_head: bool,
) -> tuple[Any, Lent]:
    """A module, and what gives a part of it its weights while it is read."""
    if not bits and device.type == "cpu" and found.stored is None:
        known = _config_of(found)
        if known.model_type in LAYOUTS and not has_state(known):
            module = opened_by_layers(found, known, dtype)
            if module is not None:
                return module, lent
    return load_module(found.path, dtype, device, bits, quantises_head), nullcontext


def _reference(
    found: ModelFolder, module: Any, shape: KVShape, device: torch.device
) -> torch.Tensor:
    """What transformers' own forward answers to the probe."""
    small = KVCache(replace(shape, capacity=sum(PROBED)), module.dtype, device)
    with _saying(found, *CANNOT_RUN):
        return _answers(CausalLM(module, small), *PROBED)


def _taken_over(
    module: Any,
    lent: Lent,
    cache: KVCache,
    wanted: torch.Tensor,
    bound: float,
    tuned: Callable[[Decoder], Decoder] | None,
) -> tuple[Decoder | None, str | None]:
    """The native decoder of a module, which is emptied; else None, and why: it does not know the
    module, or its logits lie further from those wanted than `bound`."""
    if not bool(torch.isfinite(wanted).all()):
        return None, None  # nothing to compare; the engine will say
    try:
        native = take_over(module, cache, True, lent)
    except ModelError as error:
        return None, str(error)
    native = native if tuned is None else tuned(native)
    off = float((_answers(native, *PROBED) - wanted).norm() / wanted.norm())
    if off <= bound:
        return native, None
    return None, f"The native decoder answered {off:.1%} off and is not used."


def _is_whole(module: Any) -> bool:
    """Whether it was neither opened by layers nor emptied."""
    return all(each.numel() and not each.is_meta for each in module.parameters())


def _repacking_error(found: ModelFolder, module: Any) -> float | None:
    """See Opened."""
    if found.stored is None or not found.stored.group_size:
        return None
    layers = (each for each in module.modules() if isinstance(each, Int4Linear))
    return max((layer.error for layer in layers), default=None)


def _fastest(native: Decoder, spare_bytes: int | None) -> Decoder:
    tune(native.weights.linears, native.weights.embedding, spare_bytes)
    return Decoder(native.weights, native.cache, is_fastest=True)


def _require_checking(model: CausalLM) -> None:
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
        raise ModelError(cannot_check(model.module.config.model_type))


@contextmanager
def _saying_what_does_not_fit(found: ModelFolder) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MemoryShortage(
            f"{found.name} does not fit into the memory that is free. Close other programs, or "
            "choose a smaller model or a shorter context."
        ) from error


@contextmanager
def _saying(found: ModelFolder, fault: str, remedy: str) -> Iterator[None]:
    """Around transformers' code at work on unknown files, in which any error is possible."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, ModelError):
        raise
    except Exception as error:
        reason = first_line(error).rstrip(".")
        raise ModelError(f"{found.name} {fault}: {reason}. Fetch it again, or {remedy}") from error


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


def load_module(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    bits: Bits | None = None,
    ends_may_stay: bool = False,
) -> Any:
    """The transformers module of a folder. ends_may_stay: see in_groups. Raises as load_model."""
    found = check_folder(folder)
    if found.is_kept:
        check_bitsandbytes(found.files, found.name)
    with _saying_what_does_not_fit(found), _saying(found, *CANNOT_LOAD):
        known = _config_of(found)
        if not has_state(known):
            kv_shape(known, 1)  # before gigabytes are read
        own = in_groups(found, known, dtype, device, ends_may_stay) if bits == 4 else None
        if own is not None:
            return own
        module = _by_transformers(found, known, dtype, device, bits)
        if bits is None and not found.is_kept:
            module = module.to(device)  # bitsandbytes placed its own, and refuses to move them
        return module.eval().requires_grad_(False)


def _by_transformers(
    found: ModelFolder, known: Any, dtype: torch.dtype, device: torch.device, bits: Bits | None
) -> Any:
    """By from_pretrained, without what images and sound need. Raises ModelError."""
    opener, source = _opener(found, known, dtype)
    arguments = {**source, **_quantised_by(bits, dtype, device, found.is_kept, known)}

    def opened(attention: Literal["sdpa", "eager"]) -> Any:
        with _weights_allocated_apart():
            return opener.from_pretrained(
                **arguments,
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # require_every_weight names them
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
    require_every_weight(found, module, info)
    drop_towers(module)
    return module


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
    weights = stored_weights(found, dtype)
    if weights is None:
        files = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        return auto, {"pretrained_model_name_or_path": str(found.path), "config": known, **files}
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

    nf4.library()  # before transformers imports it: it would look for kernels on a model hub
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


def read_config(folder: Path) -> Any:
    """The config of a folder, as transformers reads it. Raises ModelError."""
    return _config_of(check_folder(folder))


def _config_of(found: ModelFolder) -> Any:
    """Of a family of KNOWN_AS under its name there. The head is as the files hold it."""
    from transformers import AutoConfig

    family = KNOWN_AS.get(str(found.config.get("model_type")))
    names = ("model_type", "architectures", "auto_map")
    settings = {name: value for name, value in found.config.items() if name not in names}
    with _saying(found, *CANNOT_LOAD):
        if family is not None:
            return AutoConfig.for_model(family, **settings)
        where = {"local_files_only": True, "trust_remote_code": False}
        known: Any = AutoConfig.from_pretrained(str(found.path), **where)
        if found.config.get("tie_word_embeddings") is False:
            for part in (known, known.get_text_config()):
                part.tie_word_embeddings = False
        return known
