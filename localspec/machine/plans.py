"""What is asked of the planner and what it answers.

Contract: pure. `PlanReport.as_dict` is what `plan --json` prints.

Not here: ranking and refusing (planner), the bytes (memory).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from localspec.core.options import AUTO_EXPERTS
from localspec.core.precisions import Precision
from localspec.core.speculation import Measurement
from localspec.machine.memory import Arrangement, OtherDevice, PlanBytes, Room
from localspec.machine.model import Model

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class PlanRequest:
    """target: with the drafts to plan for, and with its copy in 4 bits where that may be fetched
    instead. full: what unquantised weights and caches are kept in. only_precision: None plans for
    all that the device and the model allow. other: a second device, for a draft. experts: where
    those of a mixture are to be, one of core.options.EXPERTS."""

    target: Model
    room: Room
    context_length: int | None = None
    full: Precision = "bf16"
    only_precision: Precision | None = None
    measurements: tuple[Measurement, ...] = ()
    other: OtherDevice | None = None
    experts: str = AUTO_EXPERTS

    def files_for(self, precision: Precision) -> Model:
        """The copy of the target to fetch for a precision: the one in 4 bits where these stay as
        they are, since it is a third of the download and is not quantised here."""
        packed, device = self.target.packed, self.room.device
        if packed is None or precision not in ("4-bit", "4-bit-head"):
            return self.target
        return packed if packed.shape.count_in_groups(device, self.full) else self.target

    def arranged(self, precision: Precision) -> Arrangement:
        """The target alone in a precision, at the wanted context."""
        return Arrangement(self.files_for(precision), precision, self.wanted_context, self.full)

    @property
    def wanted_context(self) -> int:
        return min(self.context_length or DEFAULT_CONTEXT, self.target.shape.context_length)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Of the target, fullest first."""
        shape = self.target.shape
        if shape.kept_as is not None:
            return (shape.kept_as,)
        if self.only_precision is not None:
            return (self.only_precision,)
        is_whole = bool(shape.num_experts) and not shape.has_4_bit_experts
        if self.room.device == "mps" or is_whole:
            # bitsandbytes has no proven path on Apple GPUs, and transformers holds experts in
            # fused tensors that it leaves as they are.
            return (self.full,)
        # 8 bits take more memory than 4, so they are planned where they are asked for. On CUDA
        # LLM.int8 asks the host in every layer whether there are outliers: hundreds of waits a
        # step, which no graph can record.
        return (self.full, "4-bit")


@dataclass(frozen=True, kw_only=True)
class Plan(Arrangement):
    """An arrangement that fits. draft_bytes: on a device that the draft has to itself.
    expected_speedup: None where it was not measured."""

    bytes: PlanBytes
    draft_bytes: PlanBytes | None
    expected_speedup: float | None
    reason: str

    @property
    def draft_name(self) -> str | None:
        return None if self.draft is None else self.draft.name

    @property
    def draft_weights(self) -> int:
        return (self.draft_bytes or self.bytes).draft_weights

    @property
    def draft_device(self) -> str | None:
        """None: beside the target."""
        return None if self.draft_on is None else self.draft_on.name

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target.name,
            "precision": self.precision,
            "drafter": self.drafter,
            "draft": self.draft_name,
            "draft_device": self.draft_device,
            "experts_in_ram": self.experts_in_ram,
            "context": self.context_length,
            "bytes": self.bytes.as_dict(),
            "draft_bytes": None if self.draft_bytes is None else self.draft_bytes.as_dict(),
            "further_reply_bytes": self.bytes.further_reply,
            "fits": True,
            "expected_speedup": self.expected_speedup,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Refusal:
    drafter: str
    reason: str


@dataclass(frozen=True)
class PlanReport:
    """plans: best first."""

    device: str
    plans: tuple[Plan, ...]
    refused: tuple[Refusal, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "plans": [plan.as_dict() for plan in self.plans],
            "refused": [asdict(refusal) for refusal in self.refused],
        }
