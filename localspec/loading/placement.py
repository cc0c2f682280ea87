"""Where models are loaded and how: the device, the precision and the context of each.

Whether a model fits there, and loading it, is in `fitting`; planning ahead in machine.planner.
`return_memory` gives back what nothing uses any more.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.core.errors import ConfigError, ModelError
from localspec.core.options import LoadOptions
from localspec.core.precisions import PRECISIONS, TORCH_NAMES, Precision
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
    hardware_for,
    torch_index,
)
from localspec.machine.memory import (
    full_precision,
)
from localspec.machine.model import Model
from localspec.machine.plans import DEFAULT_CONTEXT

if TYPE_CHECKING:
    import torch

    from localspec.weights.precision import Bits

SHORTEST_CONTEXT = 64
HEAD_TOO: Precision = "4-bit-head"
BITS: Mapping[str, Bits] = {"8-bit": 8, "4-bit": 4, HEAD_TOO: 4}


@dataclass(frozen=True)
class Place:
    """Where and how models are loaded."""

    hardware: Hardware
    device: torch.device
    dtype: torch.dtype
    bits: Bits | None  # of the target's linear layers, None: dtype
    context_length: int
    quantises_head: bool = False  # of a 4-bit target, the output head as well
    experts_in_ram: bool = False  # of a mixture beside a GPU: the processor computes them

    @property
    def experts_device(self) -> torch.device | None:
        """Where the processor computes the experts; None for where everything is."""
        import torch  # heavy: only where a model is loaded

        return torch.device("cpu") if self.experts_in_ram else None

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
    shape = model_in(folder).known_shape
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
    beside = replace(place, bits=None, quantises_head=False, experts_in_ram=False)
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


def model_in(folder: Path) -> Model:
    """Return the model in a folder; with the size of its files if its family is not counted."""
    name = name_of(folder)
    try:
        return Model(name, path=folder, known_shape=shape_from_folder(folder))
    except ModelError:
        num_bytes = sum(file.stat().st_size for file in weight_files(folder))
        return Model(name, path=folder, num_bytes=num_bytes)


def return_memory(device: torch.device) -> None:
    """Free what only a cycle of references or torch's own cache still holds."""
    from localspec.forward.builder import return_cached

    gc.unfreeze()  # what was set aside when it was loaded
    gc.collect()
    gc.freeze()
    return_cached(device)
