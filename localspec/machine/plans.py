"""The nouns of planning: what is asked, and what comes back.

Contract: frozen and complete; `as_dict` gives exactly what `plan --json` prints. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localspec.core import OFF
from localspec.drafters.registry import planned
from localspec.machine.budget import PlanBytes, Room
from localspec.machine.compatibility import UNKNOWN, Compatibility
from localspec.machine.shapes import ModelShape, Precision
from localspec.machine.speedup import Measurement

# Drafters that need memory of a kind the planner counts, by their names in drafters.registry.
DRAFT_MODEL, SELF_QUANT = "draft_model", "self_quant"

DEFAULT_CONTEXT = 4096


def preference() -> tuple[str, ...]:
    """The drafters there are plans for, in the order of preference before any measurement."""
    return (*(info.name for info in planned()), OFF)


@dataclass(frozen=True)
class DraftCandidate:
    shape: ModelShape
    compatibility: Compatibility = UNKNOWN


@dataclass(frozen=True)
class PlanRequest:
    """drafts: best first. full: what unquantised weights and caches are kept in.
    precisions: None plans for all that the device and the model allow."""

    target: ModelShape
    room: Room
    context_length: int | None = None
    drafts: tuple[DraftCandidate, ...] = ()
    full: Precision = "bf16"
    precisions: tuple[Precision, ...] | None = None
    measurements: tuple[Measurement, ...] = ()

    @property
    def wanted_context(self) -> int:
        return min(self.context_length or DEFAULT_CONTEXT, self.target.context_length)


@dataclass(frozen=True)
class Plan:
    target: str
    precision: Precision
    drafter: str
    draft: str | None
    context_length: int
    bytes: PlanBytes
    fits: bool
    expected_speedup: float | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "precision": self.precision,
            "drafter": self.drafter,
            "draft": self.draft,
            "context": self.context_length,
            "bytes": self.bytes.as_dict(),
            "fits": self.fits,
            "expected_speedup": self.expected_speedup,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Refusal:
    drafter: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        return {"drafter": self.drafter, "reason": self.reason}


@dataclass(frozen=True)
class PlanReport:
    """plans: those that fit, best first."""

    device: str
    plans: tuple[Plan, ...]
    refused: tuple[Refusal, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "plans": [plan.as_dict() for plan in self.plans],
            "refused": [refusal.as_dict() for refusal in self.refused],
        }
