"""Whether a model fits where it is to be loaded: on its device, and in the RAM beside it.

`check_target` and `refuse_shortage` compare what a model needs with what is free at that moment,
and `with_experts` chooses where the experts of a mixture are. `load_at` opens a folder there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.core.errors import ConfigError, MemoryShortage, ModelError
from localspec.core.options import AUTO_EXPERTS, EXPERTS_IN_RAM, EXPERTS_ON_GPU, LoadOptions
from localspec.core.precisions import PRECISIONS
from localspec.core.units import gib
from localspec.formats.folder_files import (
    check_folder,
    name_of,
)
from localspec.formats.head_folder import is_published
from localspec.loading.placement import Place, model_in
from localspec.machine.hardware import (
    free_bytes_now,
)
from localspec.machine.head_shapes import head_shape_in
from localspec.machine.memory import (
    Arrangement,
    Room,
    bytes_of,
    longest_fitting,
    module_bytes,
    shortage_of,
)
from localspec.machine.model import Model
from localspec.machine.plans import PlanRequest

if TYPE_CHECKING:
    from localspec.forward.load import Opened
    from localspec.forward.model import LanguageModel

WITHOUT_UNPACKING = (
    "Close other programs, or choose the model with 16-bit weights in .safetensors, which go "
    "straight to the GPU; --dtype 4-bit quantises them there."
)
# Share of the memory that loading leaves free, which is spent on speed.
SPENT_ON_SPEED = 0.5


def with_experts(options: LoadOptions, source: Model, place: Place) -> Place:
    """Return the place with the experts of a mixture where they are asked for; unasked they are in
    the RAM where the GPU does not hold them and the RAM does. Raises ConfigError."""
    shape, wanted = model_in(source.folder).known_shape, options.experts or AUTO_EXPERTS
    is_asked = wanted == EXPERTS_IN_RAM
    has_ram = place.device.type == "cuda" and place.hardware.ram_beside_bytes is not None
    precision = PRECISIONS[place.precision]
    may_split = has_ram and shape is not None and shape.may_split(precision, is_asked)
    if is_asked and not may_split:
        raise ConfigError(
            f"--experts {wanted} is for a mixture of experts that the native decoder runs on a GPU "
            f"with memory of its own. {source.name} on {place.hardware.device_name} is none. Leave "
            "--experts out."
        )
    if wanted == EXPERTS_ON_GPU or not may_split:
        return place
    split, free = replace(place, experts_in_ram=True), free_bytes_now(place.hardware)
    if is_asked or (_lacks(source.folder, place, free) and not _lacks(source.folder, split, free)):
        return split
    return place


def experts_notice(folder: Path, place: Place) -> str | None:
    """Return where the experts of a loaded target are, None where everything is on its device."""
    shape = model_in(folder).known_shape
    if shape is None or not place.experts_in_ram:
        return None
    sizes = (PRECISIONS[place.precision], place.full)
    held = shape.host_bytes(*sizes, has_experts=True) - shape.host_bytes(*sizes)
    return (
        f"The experts of {name_of(folder)}, {gib(held)}, are in the RAM and computed by the "
        f"processor; everything else is on {place.hardware.device_name}."
    )


def _lacks(folder: Path, place: Place, free: int) -> bool:
    return shortage_of(_arrangement(folder, place), _room(place, free)) is not None


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


def heads_without_room(
    target: Path, heads: Mapping[str, Path], place: Place
) -> dict[str, MemoryShortage]:
    """Return why there is no room beside a loaded target, by the kind of a head. The target keeps
    its context, and each head is counted beside those before it. heads: folders by kind; the
    target's own holds a module that it ships."""
    refused, free = dict[str, MemoryShortage](), free_bytes_now(place.hardware)
    for kind, folder in heads.items():
        needed = 0
        with suppress(ModelError):  # of a damaged head, which says so when it is read
            needed = _module_need(folder, place) if folder == target else _head_need(folder, place)
        if needed <= free:
            free -= needed
            continue
        is_own = folder == target
        name = "module for multi-token prediction of" if is_own else "head"
        refused[kind] = MemoryShortage(
            f"The {name} {name_of(folder)} needs {gib(needed, ceil)} beside the model, and "
            f"{gib(free, floor)} is free on {place.hardware.device_name}, so it is left out: the "
            f"context of {place.context_length} tokens stays. With a shorter --context there is "
            "room for it."
        )
    return refused


def _module_need(folder: Path, place: Place) -> int:
    """Return the bytes of the module for multi-token prediction in a loaded target's files."""
    plan = _arrangement(folder, place)
    if plan.target.known_shape is None:
        return 0
    return sum(module_bytes(plan, place.hardware.device))


def _head_need(folder: Path, place: Place) -> int:
    """Return the bytes of a head beside a loaded target. Raises ModelError."""
    if not is_published(folder):
        return 0
    return sum(head_shape_in(folder).held_bytes(place.context_length, place.dtype.itemsize))


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
    stored, shape = check_folder(folder).stored, model_in(folder).known_shape
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


def _arrangement(folder: Path, place: Place) -> Arrangement:
    return Arrangement(
        model_in(folder),
        PRECISIONS[place.precision],
        place.context_length,
        place.full,
        experts_in_ram=place.experts_in_ram,
    )


def _room(place: Place, free: int) -> Room:
    device: Any = place.device.type
    return Room(device, free, is_loading=True, ram_bytes=place.hardware.ram_beside_bytes)


def needed_bytes(folder: Path, place: Place) -> int:
    """Of weights and KV cache, as the planner counts them; else what the files say at the least."""
    return bytes_of(_arrangement(folder, place), _room(place, 0)).total


def load_at(folder: Path, place: Place, is_fastest: bool = False) -> Opened[LanguageModel]:
    from localspec.forward.builder import return_cached
    from localspec.forward.load import load_model

    spare_bytes = max(0, free_bytes_now(place.hardware) - needed_bytes(folder, place))
    spent_bytes = int(SPENT_ON_SPEED * spare_bytes)
    wanted = (place.dtype, place.device, place.context_length, place.bits)
    more = (spent_bytes, is_fastest, place.quantises_head, place.experts_device)
    opened = load_model(folder, *wanted, *more)
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
