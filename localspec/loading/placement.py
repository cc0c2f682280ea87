"""Where models are loaded, how, and whether one more fits there.

Contract: `Place` says device, precision and context; `load_at` opens a folder there after
`check_target` or `refuse_shortage` compared what it needs with what is free at that moment.
`return_memory` gives back what nothing uses any more.

Not here: planning ahead (machine.planner), opening the files (forward.load).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.core.errors import ConfigError, MemoryShortage, ModelError
from localspec.core.options import LoadOptions
from localspec.core.precisions import PRECISIONS, TORCH_NAMES, Precision
from localspec.core.units import gib
from localspec.formats.folder_files import (
    check_folder,
    longest_of,
    name_of,
    require_tokenizer,
    weight_files,
)
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.hardware import (
    Hardware,
    confirmed_by_torch,
    free_bytes_now,
    hardware_for,
    torch_index,
)
from localspec.machine.memory import (
    Arrangement,
    Room,
    bytes_of,
    full_precision,
    longest_fitting,
    module_bytes,
    shortage_of,
)
from localspec.machine.model import Model
from localspec.machine.plans import DEFAULT_CONTEXT, PlanRequest

if TYPE_CHECKING:
    import torch

    from localspec.forward.load import Opened
    from localspec.forward.model import LanguageModel
    from localspec.weights.precision import Bits

SHORTEST_CONTEXT = 64
HEAD_TOO: Precision = "4-bit-head"
BITS: Mapping[str, Bits] = {"8-bit": 8, "4-bit": 4, HEAD_TOO: 4}
WITHOUT_UNPACKING = (
    "Close other programs, or choose the model with 16-bit weights in .safetensors, which go "
    "straight to the GPU; --dtype 4-bit quantises them there."
)
SPENT_ON_SPEED = 0.5  # of the memory that loading leaves free


@dataclass(frozen=True)
class Place:
    """Where and how models are loaded."""

    hardware: Hardware
    device: torch.device
    dtype: torch.dtype
    bits: Bits | None  # of the target's linear layers, None: dtype
    context_length: int
    quantises_head: bool = False  # of a 4-bit target, the output head as well

    @property
    def precision(self) -> str:
        """As the person names it."""
        if self.quantises_head:
            return HEAD_TOO
        return f"{self.bits}-bit" if self.bits else TORCH_NAMES[self.full]

    @property
    def full(self) -> Precision:
        """Of what is not quantised."""
        return PRECISIONS[str(self.dtype).removeprefix("torch.")]


def place_for(options: LoadOptions, source: Model, hardware: Hardware, torch: Any) -> Place:
    found = check_folder(source.folder)
    require_tokenizer(source.folder)
    longest, stored = longest_of(found.config), found.stored
    wanted = options.context
    if wanted is None:
        wanted = min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    if not SHORTEST_CONTEXT <= wanted <= (longest or wanted):
        limit = f" to {longest}" if longest else " or more"
        raise ConfigError(
            f"A context of {wanted} tokens was asked for, but {source.name} can use "
            f"{SHORTEST_CONTEXT}{limit}. Choose another --context."
        )
    device = device_of(hardware, torch)
    asked = BITS.get(options.dtype or "")
    is_packed = stored is not None and not (stored.is_unpacked or stored.stays)
    if asked and stored is not None and is_packed and not _keeps_mxfp4(source.folder):
        raise ConfigError(
            f"{source.name} keeps its weights as {stored.title}, which are not quantised a "
            f"second time. Leave --dtype {options.dtype} out."
        )
    dtype = dtype_of(None if asked else options.dtype, hardware)
    bits = BITS.get((stored and stored.stays) or "") or asked
    return Place(hardware, device, dtype, bits, wanted, options.dtype == HEAD_TOO)


def _keeps_mxfp4(folder: Path) -> bool:
    """True if the native decoder keeps experts in MXFP4 and quantises the other layers alone."""
    shape = _model(folder).known_shape
    return shape is not None and shape.keeps_mxfp4


def require_movable_draft(options: LoadOptions, source: Model) -> None:
    """Raises ConfigError where a device was asked for a draft model and there is none."""
    if options.draft_device is None or source.draft or source.foreign:
        return
    stays = ""
    if source.heads:
        stays = " A head reads the target's hidden states, so it stays on the target's device."
    raise ConfigError(
        f"--draft-device {options.draft_device} is for a draft model, and there is none for "
        f"{source.name}.{stays} Name one with --draft, or leave --draft-device out."
    )


def draft_places(
    options: LoadOptions, place: Place, machine: Hardware, torch: Any
) -> tuple[Place, ...]:
    """Where a draft model may be loaded, the preferred first: where it is asked for; else beside
    the target, which costs no more time and leaves the other GPU free, then on the other GPU with
    the most free memory. place: the target's. machine: as it was probed. Raises ConfigError.

    A draft stays in full precision: it is small, and its steps are what must be cheap."""
    beside = replace(place, bits=None, quantises_head=False)
    if options.draft_device is not None:
        asked = hardware_for(machine, options.draft_device, torch, "--draft-device")
        there = _moved(beside, asked, torch)
        return (beside if there.device == place.device else there,)
    if place.device.type != "cuda":
        return (beside,)
    others = replace(machine, gpu=place.hardware.gpu).other_gpus.values()
    largest = sorted(others, key=lambda gpu: -(gpu.free_bytes or 0))[:1]
    found = (confirmed_by_torch(replace(machine, gpu=gpu), torch) for gpu in largest)
    moved = (_moved(beside, each, torch) for each in found if each.gpu in largest)
    return (beside, *moved)


def _moved(place: Place, hardware: Hardware, torch: Any) -> Place:
    """The same on another device, in the precision in which that one computes."""
    device, dtype = device_of(hardware, torch), dtype_of(None, hardware)
    return replace(place, hardware=hardware, device=device, dtype=dtype)


def device_of(hardware: Hardware, torch: Any) -> Any:
    """Torch's device for the GPU that was chosen; torch may number GPUs in another order."""
    index = torch_index(hardware.gpu, torch) if hardware.gpu is not None else None
    return torch.device(hardware.device) if index is None else torch.device("cuda", index)


def dtype_of(name: str | None, hardware: Hardware) -> torch.dtype:
    """The precision asked for; else the one that is planned for the device."""
    from localspec.forward.load import DTYPES

    return DTYPES[TORCH_NAMES[full_precision(name, hardware)]]


def refuse_shortage(folder: Path, place: Place) -> None:
    """Compare what weights and KV cache need with what is free at this moment."""
    said = _shortage(folder, place, free_bytes_now(place.hardware))
    if said is not None:
        raise MemoryShortage(
            f"{said} Close other programs, shorten --context, or choose a smaller model."
        )
    if (in_ram := _shortage_of_ram(folder, place)) is not None:
        raise MemoryShortage(in_ram.sentences)


def check_target(folder: Path, place: Place, anyway: bool) -> str | None:
    """The same for the target, with what would fit. anyway: the shortage becomes the notice that
    is returned, for the person chose to load it all the same."""
    free = free_bytes_now(place.hardware)
    said, in_ram = _shortage(folder, place, free), _shortage_of_ram(folder, place)
    if said is None and in_ram is None:
        return None
    if not anyway:
        on_device = said and f"{said} {_would_fit(folder, place, free)}"
        raise MemoryShortage(on_device or (in_ram.sentences if in_ram else ""))
    said = said or (in_ram.fact if in_ram else "")
    return (
        f"{said} It was loaded all the same, as you chose: the computer may become very slow, "
        "the system may end this engine or other programs, and replies may break off."
    )


def _shortage(folder: Path, place: Place, free: int) -> str | None:
    """The fact as a sentence, None where it fits."""
    lacking = shortage_of(_arrangement(folder, place), _room(place, free))
    if lacking is None or lacking.is_of_ram:
        return None
    needed = gib(lacking.needed_bytes, ceil)
    return (
        f"{name_of(folder)} needs {needed} for its weights and {place.context_length} tokens of "
        f"context, and {gib(free, floor)} is free on {place.hardware.device_name}."
    )


@dataclass(frozen=True)
class _RamShortage:
    """Too little RAM beside a GPU, as a sentence, and the remedy as another."""

    fact: str
    remedy: str

    @property
    def sentences(self) -> str:
        return f"{self.fact} {self.remedy}"


def _shortage_of_ram(folder: Path, place: Place) -> _RamShortage | None:
    """Return what the RAM lacks beside a GPU; None where it suffices."""
    if place.device.type != "cuda":
        return None
    return _shortage_to_unpack(folder, place) or _shortage_to_keep(folder, place)


def _shortage_to_unpack(folder: Path, place: Place) -> _RamShortage | None:
    """Of quantised weights that transformers unpacks as a whole before they go to the GPU. The
    native decoder is built block by block."""
    stored, shape = check_folder(folder).stored, _model(folder).known_shape
    if stored is None or not stored.is_unpacked or shape is None or shape.is_native:
        return None
    needed = shape.num_params * place.dtype.itemsize
    free = place.hardware.host.ram_available_bytes
    if needed <= free:
        return None
    fact = (
        f"{name_of(folder)} keeps its weights as {stored.title}, which are unpacked in the RAM "
        f"before they go to the GPU: that takes {gib(needed, ceil)}, and {gib(free, floor)} is "
        "free."
    )
    return _RamShortage(fact, WITHOUT_UNPACKING)


def _shortage_to_keep(folder: Path, place: Place) -> _RamShortage | None:
    """Of weights that stay in the RAM while the GPU computes."""
    lacking = shortage_of(_arrangement(folder, place), _room(place, 2**62))
    if lacking is None:
        return None
    needed, free = gib(lacking.needed_bytes, ceil), gib(lacking.free_bytes, floor)
    fact = (
        f"{name_of(folder)} keeps {needed} of its weights in the RAM while "
        f"{place.hardware.device_name} computes, and {free} of RAM is free."
    )
    return _RamShortage(fact, "Close other programs, or choose a smaller model.")


def _would_fit(folder: Path, place: Place, free: int) -> str:
    """The remedies as a sentence."""
    plan, room, remedies = _arrangement(folder, place), _room(place, free), list[str]()
    shorter = longest_fitting(plan, room)
    if shorter is not None:
        remedies.append(f"a context of {shorter.context_length} tokens")
    fits_in_4_bits = shortage_of(replace(plan, precision="4-bit"), room) is None
    if fits_in_4_bits and "4-bit" in PlanRequest(plan.target, room).precisions:
        remedies.append("4-bit weights")
    if remedies:
        return f"{' or '.join(remedies).capitalize()} would fit. Or close other programs."
    return "Neither a shorter context nor fewer bits would fit: choose a smaller model."


def _model(folder: Path) -> Model:
    """The model in a folder; of a family that cannot be counted with the size of its files."""
    name = name_of(folder)
    try:
        return Model(name, path=folder, known_shape=shape_from_folder(folder))
    except ModelError:
        num_bytes = sum(file.stat().st_size for file in weight_files(folder))
        return Model(name, path=folder, num_bytes=num_bytes)


def _arrangement(folder: Path, place: Place) -> Arrangement:
    precision = PRECISIONS[place.precision]
    return Arrangement(_model(folder), precision, place.context_length, place.full)


def _room(place: Place, free: int) -> Room:
    device: Any = place.device.type
    return Room(device, free, is_loading=True, ram_bytes=place.hardware.ram_beside_bytes)


def refuse_module(folder: Path, place: Place) -> None:
    """Compare what the module for multi-token prediction in a loaded target's files needs with what
    is free at this moment. Raises MemoryShortage."""
    plan, free = _arrangement(folder, place), free_bytes_now(place.hardware)
    if plan.target.known_shape is None:
        return
    needed = sum(module_bytes(plan, place.hardware.device))
    if needed > free:
        raise MemoryShortage(
            f"The module for multi-token prediction of {name_of(folder)} needs {gib(needed, ceil)} "
            f"beside the model, and {gib(free, floor)} is free on {place.hardware.device_name}. "
            "With a shorter --context there is room for it."
        )


def needed_bytes(folder: Path, place: Place) -> int:
    """Of weights and KV cache, as the planner counts them; else what the files say at the least."""
    return bytes_of(_arrangement(folder, place), _room(place, 0)).total


def load_at(folder: Path, place: Place, is_fastest: bool = False) -> Opened[LanguageModel]:
    from localspec.forward.builder import return_cached
    from localspec.forward.load import load_model

    spare_bytes = max(0, free_bytes_now(place.hardware) - needed_bytes(folder, place))
    spent_bytes = int(SPENT_ON_SPEED * spare_bytes)
    wanted = (place.dtype, place.device, place.context_length, place.bits)
    opened = load_model(folder, *wanted, spent_bytes, is_fastest, place.quantises_head)
    return_cached(place.device)  # or the next model is judged by less than is free
    return opened


def keep_out_of_ram(place: Place) -> None:
    """Where Windows would go on in the RAM once a GPU is full, some ten times slower and without a
    word, let torch's allocations fail instead."""
    import torch  # heavy: only where it is loaded anyway

    if place.device.type != "cuda" or not place.hardware.host.draws_with_gpu:
        return
    _, total = torch.cuda.mem_get_info(place.device)
    held = torch.cuda.memory_reserved(place.device)
    share = (free_bytes_now(place.hardware) + held) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), place.device)


def return_memory(device: torch.device) -> None:
    """Free what only a cycle of references or torch's own cache still holds."""
    from localspec.forward.builder import return_cached

    gc.unfreeze()  # what was set aside when it was loaded
    gc.collect()
    gc.freeze()
    return_cached(device)
