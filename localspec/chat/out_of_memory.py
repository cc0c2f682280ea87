"""Classifies the fault of a turn: memory ran out, the device was lost, or anything else.

Contract: `fault_of` reads an exception while it is handled and keeps text only, since its traceback
holds the tensors that are to be freed.

Not here: unloading drafters (local), a shorter context or a smaller model (worker).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from localspec.core.backend import DrafterStatus
from localspec.core.errors import LocalspecError, MemoryShortage, first_line

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

UNLOADED = "unloaded when memory ran out. Load the model again to use it."


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
    line = first_line(error).rstrip(".")
    if type(error).__name__ == "AcceleratorError" or any(each in words for each in DEVICE_LOST):
        return TurnFault("device", f"The device stopped computing: {line}.")
    return TurnFault(
        "other",
        f"The engine stopped: {line}. What was written is kept. Send again; if it happens "
        "again, shorten the context or choose a smaller model.",
    )


def unloaded(status: DrafterStatus) -> DrafterStatus:
    """Return what is said of a drafter whose memory was freed."""
    return replace(status, is_available=False, reason=UNLOADED, memory_bytes=None, code="no_memory")
