"""The composition root: what a person asked for -> a backend that answers.

Contract: `open_local_backend` checks, plans memory, loads target, draft and drafters, and
restores what the controller learnt on this very combination. A drafter that cannot be had is a
status with its reason, never an error; only the target is indispensable.

Not here: the decisions themselves (planner), measuring (engine.calibrate), the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.backend import DrafterStatus
from localspec.chat.local import Loaded, LocalBackend
from localspec.chat.template import ChatTemplate
from localspec.core import Drafter
from localspec.errors import ConfigError, LocalspecError, MemoryShortage, ModelError
from localspec.machine.compatibility import require_compatible
from localspec.machine.hardware import (
    Hardware,
    confirmed_by_torch,
    free_bytes_now,
    gib,
    probe,
    torch_index,
)
from localspec.machine.nvml import NO_LIBRARY
from localspec.machine.options import LoadOptions
from localspec.machine.planning import FULL_PRECISIONS
from localspec.machine.remembered import identity
from localspec.machine.shapes import Precision, kv_precision, shape_from_folder
from localspec.machine.sources import Source, resolve

if TYPE_CHECKING:
    import torch

    from localspec.forward.model import LanguageModel
    from localspec.forward.pool import Capturing, GraphPool
    from localspec.forward.weights import Bits, Opened

Report = Callable[[str], None]
DEFAULT_CONTEXT = 4096
SHORTEST_CONTEXT = 64
QUANTISED: Mapping[str, Bits] = {"4-bit": 4, "8-bit": 8}  # as the planner names them
SPENT_ON_SPEED = 0.5  # of the memory that loading leaves free
MOST_STATES = 15  # combinations whose learnt state is kept beside the present one's


@dataclass(frozen=True)
class _Place:
    """Where and how models are loaded."""

    hardware: Hardware
    device: torch.device
    dtype: torch.dtype
    bits: Bits | None  # of the target's linear layers, None: dtype
    context_length: int

    @property
    def precision(self) -> str:
        """As the person names it."""
        return f"{self.bits}-bit" if self.bits else str(self.dtype).removeprefix("torch.")


def open_local_backend(
    options: LoadOptions, state: Mapping[str, Any] | None, report: Report
) -> LocalBackend:
    """Load what `options` ask for. Raises ConfigError, ModelError, MemoryShortage.

    state: a snapshot of an earlier run, by combination of target, draft, precision, device and
    torch; only this combination's is taken up. report: called with a phrase before each longer
    phase.
    """
    report("starting torch")
    import torch
    import transformers

    logging: Any = transformers.logging  # untyped there
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    from localspec.engine.acceptance import Acceptance
    from localspec.engine.controller import Controller
    from localspec.engine.costs import Costs
    from localspec.engine.engine import Engine
    from localspec.machine.threads import choose_threads

    source = resolve(options)
    hardware = confirmed_by_torch(probe(), torch)
    place = _place(options, source, hardware, torch)
    report(f"loading {source.target_name}")
    _refuse_shortage(source.target, place)
    opened = _load(source.target, place)
    target = opened.model
    if target.device.type == "cpu":
        report("choosing the number of threads")
        choose_threads(lambda: _one_step(target))
    pool = _pool(place)
    target = _capturable(target, pool)
    template = ChatTemplate.load(source.target)
    drafters, statuses = _drafters(source, place, target, pool, report)
    controller = Controller(drafters, Costs(), Acceptance(), Costs())
    combination = _identity(source, place, torch)
    # A computer without an NVIDIA card is not at fault; `doctor` still says it.
    notices = [notice for notice in hardware.notices if notice != NO_LIBRARY]
    if opened.notice is not None:
        notices.append(f"transformers' own forward is used, which is slower. {opened.notice}")
    states = dict(state or {})
    own = states.pop(combination, None)
    if own is not None and not controller.restore(own):
        notices.append("What was learnt earlier could not be read, so it is learnt anew.")
    return LocalBackend(
        Loaded(
            engine=Engine(target, drafters),
            controller=controller,
            template=template,
            statuses=statuses,
            target=source.target_name,
            draft=source.draft_name if "draft_model" in drafters else None,
            device=hardware.device_name,
            dtype=place.precision,
            context_length=place.context_length,
            identity=combination,
            other_states=dict(list(states.items())[-MOST_STATES:]),
            notices=tuple(notices),
            captures=_captures(target, drafters),
        )
    )


def _place(options: LoadOptions, source: Source, hardware: Hardware, torch: Any) -> _Place:
    from localspec.forward.weights import check_folder

    longest = check_folder(source.target).get("max_position_embeddings")
    wanted = options.context or min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    if wanted < SHORTEST_CONTEXT or (longest and wanted > longest):
        limit = f" to {longest}" if longest else " or more"
        raise ConfigError(
            f"A context of {wanted} tokens was asked for, but {source.target_name} can use "
            f"{SHORTEST_CONTEXT}{limit}. Choose another --context."
        )
    device = _device(hardware, torch)
    bits = QUANTISED.get(options.dtype or "")
    dtype = _dtype(None if bits else options.dtype, hardware, torch)
    return _Place(hardware, device, dtype, bits, wanted)


def _device(hardware: Hardware, torch: Any) -> Any:
    """Torch's device for the GPU that was chosen; torch may number GPUs in another order."""
    index = torch_index(hardware.gpu, torch) if hardware.gpu is not None else None
    return torch.device(hardware.device) if index is None else torch.device("cuda", index)


def _dtype(name: str | None, hardware: Hardware, torch: Any) -> Any:
    """The precision asked for; else bf16 where the device computes in it, fp32 elsewhere."""
    from localspec.forward.weights import DTYPES

    if name is not None:
        if name not in DTYPES:
            known = ", ".join((*DTYPES, *QUANTISED))
            raise ConfigError(f"{name!r} is no precision. Choose one of: {known}.")
        return DTYPES[name]
    if hardware.device == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if hardware.device == "mps":
        return torch.float16
    return torch.bfloat16 if hardware.host.multiplies_bf16 else torch.float32


def _refuse_shortage(folder: Path, place: _Place) -> None:
    """Compare what weights and KV cache need with what is free at this moment."""
    needed = _needed_bytes(folder, place)
    free = free_bytes_now(place.hardware)
    if needed > free:
        raise MemoryShortage(
            f"{folder.name} needs {gib(needed)} for its weights and {place.context_length} tokens "
            f"of context, and {gib(free)} is free on {place.hardware.device_name}. Close other "
            "programs, shorten --context, or choose a smaller model."
        )


def _needed_bytes(folder: Path, place: _Place) -> int:
    from localspec.forward.weights import weight_files

    full = FULL_PRECISIONS[str(place.dtype).removeprefix("torch.")]
    try:
        shape = shape_from_folder(folder)
    except ModelError:  # a family the planner cannot count; its files say the least it needs
        return sum(file.stat().st_size for file in weight_files(folder))
    precision: Precision = full if place.bits is None else "4-bit" if place.bits == 4 else "8-bit"
    kept_in = kv_precision(full, place.device.type)
    return shape.weight_bytes(precision, full) + shape.kv_bytes(place.context_length, kept_in)


def _load(folder: Path, place: _Place) -> Opened:
    from localspec.forward.weights import load_model

    spare_bytes = free_bytes_now(place.hardware) - _needed_bytes(folder, place)
    return load_model(
        folder,
        place.dtype,
        place.device,
        place.context_length,
        place.bits,
        int(SPENT_ON_SPEED * max(0, spare_bytes)),
    )


def _one_step(model: LanguageModel) -> None:
    model.forward([1])
    model.cache.rollback(0)


def _pool(place: _Place) -> GraphPool | None:
    """Where forwards are captured; None on devices that have no graphs."""
    from localspec.forward.pool import CudaGraphPool

    return CudaGraphPool(place.device) if place.device.type == "cuda" else None


def _capturable(model: LanguageModel, pool: GraphPool | None) -> LanguageModel:
    from localspec.forward.decoder import Decoder
    from localspec.forward.graphs import CapturedDecoder

    if pool is None or not isinstance(model, Decoder):
        return model
    return CapturedDecoder(model, pool)


def _captures(target: LanguageModel, drafters: Mapping[str, Drafter]) -> tuple[Capturing, ...]:
    """Everything that captures graphs, the target first: plain decoding gains from it at once."""
    from localspec.drafters.draft_model import DraftModelDrafter
    from localspec.drafters.self_quant import SelfQuantDrafter
    from localspec.forward.graphs import CapturedDecoder

    found: list[Capturing] = [target] if isinstance(target, CapturedDecoder) else []
    for drafter in drafters.values():
        if isinstance(drafter, DraftModelDrafter | SelfQuantDrafter):
            found += [drafter.chunks] if drafter.chunks is not None else []
            found += [drafter.model] if isinstance(drafter.model, CapturedDecoder) else []
    return tuple(found)


def _drafters(
    source: Source,
    place: _Place,
    target: LanguageModel,
    pool: GraphPool | None,
    report: Report,
) -> tuple[dict[str, Drafter], tuple[DrafterStatus, ...]]:
    """Every registered drafter that can be built, and a status for each that is known."""
    from localspec.drafters import REGISTRY, drafter_class
    from localspec.drafters.parts import Parts

    draft, refusal = _draft(source, place, report)
    free = free_bytes_now(place.hardware)
    captured = None if draft is None else _capturable(draft, pool)
    parts = Parts(target, captured, refusal, free, pool)
    built, statuses = dict[str, Drafter](), list[DrafterStatus]()
    for name in REGISTRY:
        report(f"preparing {name}")
        try:
            built[name] = drafter_class(name).build(parts)
        except (LocalspecError, RuntimeError, MemoryError) as error:
            statuses.append(DrafterStatus(name, False, str(error)))
        else:
            memory = built[name].memory_bytes
            statuses.append(DrafterStatus(name, True, f"ready, {gib(memory)}", memory))
    return built, tuple(statuses)


def _draft(source: Source, place: _Place, report: Report) -> tuple[LanguageModel | None, str]:
    """The draft model, or why there is none."""
    if source.draft is None:
        return None, source.draft_refusal
    try:
        require_compatible(source.target, source.draft)
        report(f"loading {source.draft_name}")
        _refuse_shortage(source.draft, place)
        context = _draft_context(source, place)
        # A draft stays in full precision: it is small, and its steps are what must be cheap.
        draft = _load(source.draft, replace(place, context_length=context, bits=None))
        return draft.model, ""
    except (ModelError, MemoryShortage) as error:
        return None, str(error)


def _draft_context(source: Source, place: _Place) -> int:
    """The target's context, or less where the draft knows less."""
    from localspec.forward.weights import check_folder

    assert source.draft is not None, "there is a draft to load"
    longest = check_folder(source.draft).get("max_position_embeddings")
    return min(place.context_length, longest or place.context_length)


def _identity(source: Source, place: _Place, torch: Any) -> str:
    """What learnt costs and acceptances belong to."""
    return identity(
        source.target_name,
        source.draft_name,
        place.precision,
        place.hardware.device_name,
        f"torch {torch.__version__}",
        f"{torch.get_num_threads()} threads",
    )
