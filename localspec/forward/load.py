"""Opens a model folder: natively where the decoder runs its family, else on transformers.

Code in a model's folder is never run. Each failure is a ModelError that names what failed and the
remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Generic, TypeVar

import torch

from localspec.core.errors import ModelError
from localspec.formats.attention import cannot_check
from localspec.formats.decoder_settings import DecoderSettings, settings_of
from localspec.formats.folder_files import ModelFolder, check_folder
from localspec.formats.native import ASSISTANTS, LAYOUTS, NATIVE, why_not_native
from localspec.formats.native_config import text_settings, tying
from localspec.formats.rotation_settings import Incomplete, NotNative
from localspec.forward.builder import build_weights, ends_refused, experts_refused
from localspec.forward.by_transformers import (
    config_of,
    opened_module,
    saying,
    saying_what_does_not_fit,
)
from localspec.forward.cache import KVCache, native_cache
from localspec.forward.completeness import unread_notice
from localspec.forward.decoder import Decoder, kv_shape_of
from localspec.forward.model import AGREEMENT, CausalLM, LanguageModel, has_state, kv_shape
from localspec.forward.recurrent import RecurrentLM
from localspec.forward.row_check import has_invariant_rows
from localspec.forward.tensor_names import TensorNames
from localspec.weights.dense import tune
from localspec.weights.int4 import Int4Linear
from localspec.weights.linear import Linear
from localspec.weights.precision import Bits, Precision, precision_for
from localspec.weights.source import SOURCES, open_source
from localspec.weights.stacks import Stack

Model = TypeVar("Model", bound=LanguageModel, covariant=True)
CHECKED = (6, 3)  # tokens at once and several after them, as a draft is checked
CANNOT_RUN = (
    "was read, but transformers cannot run it",
    "choose its copy with 16-bit weights or a model of another family, such as Llama or Qwen.",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Opened(Generic[Model]):
    """A loaded model. notice: why the native decoder does not run it, None where it does.
    has_invariant_rows: whether a row's logits have the same bits whatever rows run beside it, as
    compared while loading; elsewhere one row and several are equal within rounding.
    repacking_error: of the file's own 4-bit weights, how far a layer's output lies off at most, by
    its norm; None where there are none. unread: which tensors of its files nothing reads, as a
    sentence; None where all are read or known to be needless."""

    model: Model
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
    experts_device: torch.device | None = None,
) -> Opened[LanguageModel]:
    """Return the model of a folder on `device`, with a cache of `context_length` slots.

    bits: quantise the linear layers while loading (weights.precision). spare_bytes: for speed, None
    for no limit. is_fastest: the fastest linear layers for one row, as timed, at the cost of
    has_invariant_rows. quantises_head: the output head in 4 bits, and on a GPU the embedding.
    experts_device: the processor, where the device does not hold the experts; None for `device`.
    Raises ModelError, MemoryShortage."""
    found = check_folder(folder)
    with saying_what_does_not_fit(found):
        try:
            settings = native_settings(found, context_length)
        except NotNative as reason:
            if quantises_head:
                raise ends_refused() from reason
            if experts_device is not None:
                raise experts_refused() from reason
            return _by_transformers(found, str(reason), dtype, device, context_length, bits)
        precision = precision_for(found.stored, bits, dtype, device, experts_device)
        opened = _native(found, settings, precision, context_length, quantises_head)
        if is_fastest:
            return replace(
                opened, model=_fastest(opened.model, spare_bytes), has_invariant_rows=False
            )
        return replace(opened, has_invariant_rows=has_invariant_rows(opened.model))


def require_rollback(folder: Path) -> None:
    """Raise ModelError for a model whose memory of a text cannot take back rejected tokens."""
    found = check_folder(folder)
    try:
        native_settings(found, 1)
    except NotNative:
        kv_shape(config_of(found), 1)


def native_settings(found: ModelFolder, context_length: int) -> DecoderSettings:
    """Return the settings of a model that the native decoder runs. Raises NotNative, ModelError."""
    family = str(found.config.get("model_type"))
    if family in ASSISTANTS:
        raise ModelError(
            f"{found.name} drafts for a Gemma 4 and writes nothing by itself. Choose the model "
            "that it was made for, and name this folder with --draft."
        )
    if family not in NATIVE:
        raise NotNative(f"its family, {family}, is not native")
    if found.stored is not None and found.stored.method not in SOURCES:
        raise NotNative(f"its weights are kept as {found.stored.title}")
    settings = _settings(found)
    settings.require_length(context_length)
    return settings


def _settings(found: ModelFolder) -> DecoderSettings:
    """From config.json alone where it is complete, else as transformers completes it, which takes
    seconds. Raises NotNative, ModelError."""
    text = text_settings(found.config)
    try:
        return settings_of(text)
    except Incomplete:
        known = config_of(found)
    complete = {**known.get_text_config().to_dict(), **tying(known.to_dict())}
    try:
        return settings_of(text, complete)
    except Incomplete as error:
        raise NotNative(str(error)) from error


def _native(
    found: ModelFolder,
    settings: DecoderSettings,
    precision: Precision,
    context_length: int,
    quantises_head: bool,
) -> Opened[Decoder]:
    """has_invariant_rows is not yet known. Raises ModelError."""
    source = open_source(found, precision.dtype)
    names = TensorNames.of(settings, source.names, found.name)
    unread = unread_notice(found, names.unread(source.names), names.holds_layer_of)
    weights = build_weights(settings, source, names, precision, context_length, quantises_head)
    shape = kv_shape_of(weights, context_length)
    cache = native_cache(shape, precision.dtype, precision.device)
    is_kept = precision.keeps_groups
    error = _repacking_error(weights.linears) if is_kept else None
    return Opened(Decoder(weights, cache), None, False, error, unread)


def _repacking_error(linears: Sequence[Linear]) -> float | None:
    """See Opened."""
    parts = [part for each in linears for part in getattr(each, "linears", (each,))]
    return max((part.error for part in parts if isinstance(part, Int4Linear | Stack)), default=None)


def _fastest(native: Decoder, spare_bytes: int | None) -> Decoder:
    tune(native.weights.linears, native.weights.embedding, spare_bytes)
    return Decoder(native.weights, native.cache, is_fastest=True)


def _by_transformers(
    found: ModelFolder,
    reason: str,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    bits: Bits | None,
) -> Opened[LanguageModel]:
    """On transformers' own forward. reason: why not natively. Raises ModelError."""
    module, unread = opened_module(found.path, dtype, device, bits)
    if has_state(module.config):
        with saying(found, *CANNOT_RUN):
            recurrent = RecurrentLM(module, context_length)
        return Opened(recurrent, recurrent.refusal, False, unread=unread)
    config = module.config.get_text_config()
    if config.model_type not in LAYOUTS:
        names = module.get_decoder().state_dict()
        lack = why_not_native(config.to_dict(), names)
        reason = f"The native decoder does not take this model, because {lack}."
    shape = kv_shape(module.config, context_length)
    model = CausalLM(module, KVCache(shape, module.dtype, device))
    with saying(found, *CANNOT_RUN):
        _require_checking(model)
    return Opened(model, reason, False, unread=unread)


def _require_checking(model: CausalLM) -> None:
    """Raise ModelError unless a text read in pieces gives the logits of the same read at once, and
    its last token the same as a branch: drafts could not be checked. What quantised kernels make of
    one row and of several differs by as much as bf16 rounds."""
    ids = [(7 * place + 1) % model.vocab_size for place in range(sum(CHECKED))]
    model.forward(ids[:-1])
    branch = model.forward([ids[0], ids[-1]], parents=(-1, -1))[-1:]
    model.cache.rollback(0)
    whole = _answers(model, ids, len(ids))
    pieces = _answers(model, ids, *CHECKED)
    off = torch.cat((pieces, branch)) - torch.cat((whole, whole[-1:]))
    if float(off.norm() / whole.norm()) > AGREEMENT[torch.bfloat16]:
        raise ModelError(cannot_check(model.module.config.model_type))


def _answers(model: CausalLM, ids: Sequence[int], *widths: int) -> torch.Tensor:
    """Logits of tokens read in pieces of such widths, [sum, V]; leaves the cache empty."""
    ends = accumulate(widths)
    pieces = [ids[end - width : end] for end, width in zip(ends, widths, strict=True)]
    logits = torch.cat([model.forward(piece) for piece in pieces])
    model.cache.rollback(0)
    return logits
