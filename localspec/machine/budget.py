"""What a plan needs in bytes, part by part, and what must stay free.

Contract: pure arithmetic on shapes. Weights and caches are exact; logits, activations, runtime
and margin are estimates on the careful side, each constant with its source beside it. Figures
from "6.1" to "6.3" are those of the project's reading of other engines' code and threads.

Does not rank or refuse (planner).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from localspec.machine.hardware import Device, margin_for
from localspec.machine.shapes import FULL_BYTES, ModelShape, Precision, kv_precision

MIB = 2**20
GIB = 2**30

# The widest draft the cost table knows: 16 rows in one verification, of them 15 drafted.
MAX_VERIFY_WIDTH = 16
# fp32 rows held at once while verifying: p, q, the residual and one temporary (6.1: three to four).
LOGITS_COPIES = 4
# The prompt is read in chunks of this many tokens (6.1: 512 to 1,024).
PREFILL_CHUNK = 512
# One handle and stream; 8 to 32 MB by GPU (6.1).
CUBLAS_WORKSPACE_BYTES = 32 * MIB

# A CUDA context took 107 MiB on an RTX 4060 Ti (4,352 cores) and 555 MiB on an RTX PRO 6000
# (24,064 cores), llama.cpp issue 23604: a straight line between them, the larger when unknown.
CONTEXT_SMALL = (4_352, 107 * MIB)
CONTEXT_LARGE = (24_064, 555 * MIB)
# torch, transformers and the page's libraries resident, measured on Linux: 0.4 GiB.
LIBRARIES_BYTES = 400 * MIB


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
        total_bytes = self.total_bytes or self.free_bytes
        return margin_for(self.device, total_bytes, self.has_display)

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


@dataclass(frozen=True)
class PlanBytes:
    """Every part of one plan. runtime: the CUDA context, or the libraries in RAM."""

    target_weights: int
    draft_weights: int
    target_kv: int
    draft_kv: int
    logits: int
    activations: int
    runtime: int
    margin: int

    @property
    def allocated(self) -> int:
        """What is really allocated once the runtime is up: compare it with `free_bytes_now`."""
        return self.total - self.runtime - self.margin

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Arrangement:
    """One thing to load: a target in a precision at a context, and what drafts for it.

    full: what 16-bit (or 32-bit) parts are kept in. self_draft: precision of the target's own
    quantised copy, None without one.
    """

    target: ModelShape
    precision: Precision
    context_length: int
    full: Precision = "bf16"
    draft: ModelShape | None = None
    self_draft: Precision | None = None


def bytes_of(plan: Arrangement, room: Room) -> PlanBytes:
    """The bytes of an arrangement. A self-draft shares embeddings, norms and the cache."""
    target, draft, full = plan.target, plan.draft, plan.full
    draft_weights = draft.weight_bytes(full) if draft else 0
    if plan.self_draft is not None:
        draft_weights = target.quantised_bytes(plan.self_draft)
    is_quantised = plan.precision not in FULL_BYTES or plan.self_draft is not None
    activations = _activation_bytes(target, plan.context_length, full, is_quantised)
    if draft is not None:
        used_by_draft = _activation_bytes(draft, plan.context_length, full, is_quantised=False)
        activations = max(activations, used_by_draft)
    return PlanBytes(
        target_weights=target.weight_bytes(plan.precision, full),
        draft_weights=draft_weights,
        target_kv=target.kv_bytes(plan.context_length, kv_precision(full, room.device)),
        draft_kv=draft.kv_bytes(plan.context_length, kv_precision(full, room.device))
        if draft
        else 0,
        logits=MAX_VERIFY_WIDTH * target.vocab_size * 4 * LOGITS_COPIES,
        activations=activations + (CUBLAS_WORKSPACE_BYTES if room.device == "cuda" else 0),
        runtime=room.runtime_bytes,
        margin=room.margin_bytes,
    )


def _activation_bytes(
    shape: ModelShape, context_length: int, full: Precision, is_quantised: bool
) -> int:
    """The most one forward holds besides weights and caches: a chunk passing one layer."""
    width = FULL_BYTES[full]
    chunk = min(PREFILL_CHUNK, context_length)
    values = chunk * (2 * shape.active_width + 6 * shape.hidden_size)  # 6.1
    values += chunk * context_length  # the attention mask
    if shape.num_kv_heads < shape.num_heads:
        # With a mask transformers widens one layer's keys and values to all query heads.
        values += 2 * context_length * shape.num_heads * shape.head_dim
    if is_quantised:
        values += shape.widest_linear_params  # a weight unpacked for a wide prefill (6.1)
    return values * width
