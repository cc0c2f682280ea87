"""The nouns of planning: what is asked, and what comes back.

Contract: frozen and complete; `as_dict` gives exactly what `plan --json` prints. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localspec.machine.budget import PlanBytes, Room
from localspec.machine.compatibility import UNKNOWN, Compatibility
from localspec.machine.shapes import ModelShape, Precision
from localspec.machine.speedup import Measurement

# The names the drafters' registry uses; the order is that of preference before any measurement:
# a fitted draft guesses most text well, a self-draft is costly, a lookup waits for repetition.
DRAFT_MODEL, SELF_QUANT, NGRAM, OFF = "draft_model", "self_quant", "ngram", "off"
PREFERENCE = (DRAFT_MODEL, NGRAM, SELF_QUANT, OFF)

DEFAULT_CONTEXT = 4096


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
