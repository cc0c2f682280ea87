"""Classifies the fault of a turn, and finds the drafters to unload when memory ran out.

Contract: `fault_of` reads an exception while it is handled and keeps text only, since its traceback
holds the tensors that are to be freed. `without_weights` selects the drafters that hold no memory
of their own.

Not here: unloading (local), a shorter context or a smaller model (worker).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from localspec.backend import DrafterStatus
from localspec.core import Drafter
from localspec.errors import LocalspecError, MemoryShortage

UNLOADED = "unloaded when memory ran out. Load the model again to use it."

# Messages of torch and its libraries, in lower case.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
DEVICE_LOST = (
    "cuda error",
    "hip error",
    "device-side assert",
    "illegal memory access",
    "launch failure",
    "gpu is lost",
    "execution_failed",
)


@dataclass(frozen=True)
class TurnFault:
    """kind: memory ran out, the device stopped computing, or anything else. message: the sentence
    to show; for memory and device without a remedy."""

    kind: Literal["memory", "device", "other"]
    message: str


def fault_of(error: Exception) -> TurnFault:
    words = str(error).lower()
    if (
        isinstance(error, MemoryError | MemoryShortage)
        or type(error).__name__ == "OutOfMemoryError"
        or any(each in words for each in OUT_OF_MEMORY)
    ):
        return TurnFault("memory", "Memory ran out.")
    if isinstance(error, LocalspecError):
        return TurnFault("other", str(error))
    first_line = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    if type(error).__name__ == "AcceleratorError" or any(each in words for each in DEVICE_LOST):
        return TurnFault("device", f"The device stopped computing: {first_line}.")
    return TurnFault(
        "other",
        f"The engine stopped: {first_line}. What was written is kept. Send again; if it happens "
        "again, shorten the context or choose a smaller model.",
    )


def without_weights(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """The drafters that hold no memory beside the target's."""
    return {name: each for name, each in drafters.items() if not each.memory_bytes}


def unloaded_statuses(
    statuses: Sequence[DrafterStatus], kept: Mapping[str, Drafter]
) -> tuple[DrafterStatus, ...]:
    """The statuses when only `kept` can draft."""
    return tuple(
        replace(status, is_available=False, reason=UNLOADED, memory_bytes=None, code="no_memory")
        if status.is_available and status.name not in kept
        else status
        for status in statuses
    )
