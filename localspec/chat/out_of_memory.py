"""What a turn's fault means, and what can be given up when memory ran out.

Contract: `fault_of` reads an exception while it is handled and keeps words only, since its
traceback holds the tensors that are to be freed. `without_weights` says which drafters hold no
memory of their own and may stay.

Not here: doing it (local), what follows when that was not enough (worker).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from localspec.backend import DrafterStatus
from localspec.core import Drafter
from localspec.errors import LocalspecError, MemoryShortage

GIVEN_UP = "given up when memory ran out. Load the model again to have it back."

# What torch and its libraries say, in lower case.
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
    """kind: memory ran out, the device can compute no more, or anything else. said: the fact, as
    a sentence; whole with its remedy where it is one of our errors."""

    kind: Literal["memory", "device", "other"]
    said: str


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
    """The drafters that hold nothing beside the target."""
    return {name: each for name, each in drafters.items() if not each.memory_bytes}


def given_up(
    statuses: Sequence[DrafterStatus], kept: Mapping[str, Drafter]
) -> tuple[DrafterStatus, ...]:
    """The statuses once only `kept` can draft."""
    return tuple(
        replace(status, is_available=False, reason=GIVEN_UP, memory_bytes=None, code="no_memory")
        if status.is_available and status.name not in kept
        else status
        for status in statuses
    )
