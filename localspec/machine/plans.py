"""What is asked of the planner, what it answers, and the bytes that an arrangement needs.

Contract: pure. Weights and caches are exact arithmetic on shapes; logits, activations, runtime and
margin are estimates on the careful side, each constant with its source beside it (sources "6.1"
are the project's notes on other engines' code). `PlanReport.as_dict` is what `plan --json` prints.

Not here: ranking and refusing (planner).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from localspec.core.decoding import OFF
from localspec.core.errors import ConfigError
from localspec.core.precisions import FULL_BYTES, PRECISIONS, Precision
from localspec.core.speculation import Measurement
from localspec.formats.bitsandbytes_layers import UNPACKED_AT_ONCE
from localspec.formats.native import NATIVE
from localspec.machine.compatibility import UNKNOWN, Compatibility
from localspec.machine.hardware import (
    Device,
    Hardware,
    confirmed_by_torch,
    margin_for,
    on_device,
)
from localspec.machine.shapes import ModelShape

# Drafters that need memory of a kind the planner counts, by their names in drafters.registry.
DRAFT_MODEL, SELF_QUANT = "draft_model", "self_quant"

DEFAULT_CONTEXT = 8192
MIB = 2**20
GIB = 2**30

# The widest verification in the cost table: 16 rows, 15 of them drafted.
MAX_VERIFY_WIDTH = 16
# fp32 rows held at once while verifying: logits, a graph's own, two of noise, scores, a temporary.
LOGITS_COPIES = 6
# Captured graphs of the target, the draft and its chunks, as far as the native decoder runs them.
# An upper bound: capturing stops there.
GRAPHS_BYTES = 512 * MIB
# The prompt is read in chunks of this many tokens (6.1: 512 to 1,024).
PREFILL_CHUNK = 512
# One handle and stream; 8 to 32 MB by GPU (6.1).
CUBLAS_WORKSPACE_BYTES = 32 * MIB
# A CUDA context took 107 MiB on an RTX 4060 Ti (4,352 cores) and 555 MiB on an RTX PRO 6000
# (24,064 cores), llama.cpp issue 23604: a straight line between them, the larger when unknown.
CONTEXT_SMALL = (4_352, 107 * MIB)
CONTEXT_LARGE = (24_064, 555 * MIB)
# torch, transformers and the page's libraries in memory, measured on Linux: 0.4 GiB.
LIBRARIES_BYTES = 400 * MIB


# -- the memory to plan for -------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """The memory to plan for. total_bytes, num_cuda_cores: None when unknown."""

    device: Device
    free_bytes: int
    total_bytes: int | None = None
    num_cuda_cores: int | None = None
    has_display: bool = False

    @property
    def margin_bytes(self) -> int:
        return margin_for(self.device, self.total_bytes or self.free_bytes, self.has_display)

    @property
    def runtime_bytes(self) -> int:
        """CUDA's own context; on a CPU or Apple GPU the libraries, which share the RAM."""
        if self.device != "cuda":
            return LIBRARIES_BYTES
        (few, small), (many, large) = CONTEXT_SMALL, CONTEXT_LARGE
        if self.num_cuda_cores is None:
            return large
        slope = (large - small) / (many - few)
        return max(small, int(small + slope * (self.num_cuda_cores - few)))


def room_for(hardware: Hardware) -> Room:
    """What is free of a machine's memory."""
    if hardware.free_bytes is None:  # the driver hides it; torch may know
        hardware = confirmed_by_torch(hardware)
    return Room(
        device=hardware.device,
        free_bytes=hardware.free_bytes or 0,
        total_bytes=hardware.total_bytes,
        num_cuda_cores=hardware.gpu.num_cuda_cores if hardware.gpu else None,
        has_display=hardware.has_display,
    )


@dataclass(frozen=True)
class OtherDevice:
    """A second device, for a draft. name: as --draft-device takes it. full: what it computes in.
    is_asked: the draft is to be there and nowhere else."""

    name: str
    room: Room
    full: Precision
    is_asked: bool = False


def other_device(hardware: Hardware, name: str | None = None) -> OtherDevice | None:
    """Where a draft may be besides the target's device: `name`, else the GPU with the most free
    memory after the target's; None without one. Raises ConfigError."""
    others, asked = hardware.other_gpus, name
    if name is None:
        if hardware.device != "cuda" or not others:
            return None
        name = max(others, key=lambda each: others[each].without_us_bytes)
    found = on_device(hardware, name, "--draft-device")
    if (found.device, found.gpu) == (hardware.device, hardware.gpu):
        return None
    return OtherDevice(name, room_for(found), full_precision(None, found), asked is not None)


def full_precision(dtype: str | None, hardware: Hardware) -> Precision:
    """What unquantised weights are kept in: as asked, else what the device computes in."""
    if dtype is not None:
        named = PRECISIONS.get(dtype)
        if named is None or named not in FULL_BYTES:
            known = ", ".join(get_args(Precision))
            raise ConfigError(f"{dtype!r} is no precision. Choose one of: {known}.")
        return named
    if hardware.device == "cuda":
        return "bf16" if hardware.gpu is None or hardware.gpu.computes_bf16 else "fp16"
    if hardware.device == "mps":
        return "bf16"
    return "bf16" if hardware.host.multiplies_bf16 else "fp32"


# -- what an arrangement needs ------------------------------------------------------------------


@dataclass(frozen=True)
class PlanBytes:
    """Every part of one plan. activations: or what only a load holds, if that is more. graphs:
    captured forwards, on CUDA. runtime: the CUDA context, or the libraries in RAM."""

    target_weights: int
    draft_weights: int
    target_kv: int
    draft_kv: int
    logits: int
    activations: int
    graphs: int
    runtime: int
    margin: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def further_reply(self) -> int:
        """For each reply beside the first: weights are shared, contexts are not."""
        return self.target_kv + self.draft_kv

    def as_dict(self) -> dict[str, int]:
        return {**vars(self), "total": self.total}


@dataclass(frozen=True)
class Arrangement:
    """One thing to load: a target in a precision at a context, and what drafts for it.

    full: what unquantised parts are kept in. draft: the model behind DRAFT_MODEL. self_draft:
    precision of the target's own quantised copy behind SELF_QUANT. draft_on: where the draft is,
    None: beside the target.
    """

    target: ModelShape
    precision: Precision
    context_length: int
    full: Precision = "bf16"
    drafter: str = OFF
    draft: ModelShape | None = None
    self_draft: Precision | None = None
    draft_on: OtherDevice | None = None


def bytes_of(plan: Arrangement, room: Room) -> PlanBytes:
    """The bytes of an arrangement on the target's device. A self-draft shares embeddings, norms and
    the cache."""
    target, full = plan.target, plan.full
    draft = plan.draft if plan.draft_on is None else None
    weights, cache = target.loaded_bytes(plan.precision, full, plan.context_length, room.device)
    draft_weights, draft_cache = 0, 0
    if draft is not None:
        sizes = draft.loaded_bytes(full, full, plan.context_length, room.device)
        draft_weights, draft_cache = sizes
    if plan.self_draft is not None:
        draft_weights = target.copy_bytes(plan.self_draft)
    activations = max(
        _activation_bytes(each, plan.context_length, full) for each in (target, draft) if each
    )
    if room.device == "cuda" and plan.precision not in FULL_BYTES:
        activations += UNPACKED_AT_ONCE * FULL_BYTES[full]
    native = [each for each in (target, draft) if each and each.family in NATIVE]
    is_captured = not all(each.is_recurrent for each in native)
    logits = MAX_VERIFY_WIDTH * target.vocab_size * 4 * LOGITS_COPIES
    graphs = GRAPHS_BYTES if room.device == "cuda" and is_captured else 0
    # While the target is loaded there is no draft, no cache, no logits and no graph.
    later = draft_weights + draft_cache + cache + logits + graphs
    loading = target.loading_bytes(plan.precision, full, room.device) - later
    activations += CUBLAS_WORKSPACE_BYTES if room.device == "cuda" else 0
    return PlanBytes(
        target_weights=weights,
        draft_weights=draft_weights,
        target_kv=cache,
        draft_kv=draft_cache,
        logits=logits,
        activations=max(activations, loading),
        graphs=graphs,
        runtime=room.runtime_bytes,
        margin=room.margin_bytes,
    )


def draft_bytes_of(plan: Arrangement) -> PlanBytes | None:
    """The bytes on the device that a draft has to itself; None where it has none."""
    draft, other = plan.draft, plan.draft_on
    if draft is None or other is None:
        return None
    alone = bytes_of(Arrangement(draft, other.full, plan.context_length, other.full), other.room)
    return replace(
        alone,
        target_weights=0,
        target_kv=0,
        draft_weights=alone.target_weights,
        draft_kv=alone.target_kv,
    )


def _activation_bytes(shape: ModelShape, context_length: int, full: Precision) -> int:
    """The most one forward holds besides weights and caches: a chunk passing one layer."""
    chunk = min(PREFILL_CHUNK, context_length)
    values = chunk * (2 * shape.active_width + 6 * shape.hidden_size)  # 6.1
    values += chunk * context_length  # the attention mask
    if shape.num_kv_heads < shape.num_heads and shape.family not in NATIVE:
        # With a mask transformers widens one layer's keys and values to all query heads.
        values += 2 * context_length * shape.query_width
    return values * FULL_BYTES[full]


# -- question and answer ------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftCandidate:
    shape: ModelShape
    compatibility: Compatibility = UNKNOWN


@dataclass(frozen=True)
class PlanRequest:
    """drafts: best first. full: what unquantised weights and caches are kept in.
    only_precision: None plans for all that the device and the model allow. other: a second device,
    for a draft. packed: the target's copy in 4 bits, where its own files are not here. is_here:
    whether they are."""

    target: ModelShape
    room: Room
    context_length: int | None = None
    drafts: tuple[DraftCandidate, ...] = ()
    full: Precision = "bf16"
    only_precision: Precision | None = None
    measurements: tuple[Measurement, ...] = ()
    other: OtherDevice | None = None
    packed: ModelShape | None = None
    is_here: bool = False

    def files_for(self, precision: Precision) -> ModelShape:
        """The copy of the target to fetch for a precision: the one in 4 bits where these stay as
        they are, since it is a third of the download and is not quantised here."""
        is_packed = precision in ("4-bit", "4-bit-head") and self.packed is not None
        if is_packed and self.packed and self.packed.count_in_groups(self.room.device, self.full):
            return self.packed
        return self.target

    def arranged(self, precision: Precision) -> Arrangement:
        """The target alone in a precision, at the wanted context."""
        return Arrangement(self.files_for(precision), precision, self.wanted_context, self.full)

    @property
    def wanted_context(self) -> int:
        return min(self.context_length or DEFAULT_CONTEXT, self.target.context_length)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Of the target, fullest first."""
        if self.target.kept_as is not None:
            return (self.target.kept_as,)
        if self.only_precision is not None:
            return (self.only_precision,)
        if self.room.device == "mps" or self.target.num_experts:
            # bitsandbytes has no proven path on Apple GPUs and leaves fused experts as they are.
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
