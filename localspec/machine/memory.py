"""The memory there is, what a model and its draft need of it, and whether they fit.

`shortage_of` is the one test of whether something fits: the planner asks it before anything is
loaded, the loader with what is free at that moment. Weights and caches are exact arithmetic on
shapes; logits, activations, runtime and margin are estimates on the careful side, each constant
with its source beside it (sources "6.1" are the project's notes on other engines' code).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from localspec.core.decoding import OFF
from localspec.core.draft_window import draft_context
from localspec.core.errors import ConfigError
from localspec.core.precisions import FULL_BYTES, PRECISIONS, Precision
from localspec.formats.attention import MOST_SNAPSHOT_BYTES, MOST_SNAPSHOTS
from localspec.formats.bitsandbytes_layers import UNPACKED_AT_ONCE
from localspec.formats.native import NATIVE
from localspec.machine.hardware import (
    Device,
    Hardware,
    confirmed_by_torch,
    margin_for,
    on_device,
)
from localspec.machine.model import Model
from localspec.machine.shapes import ModelShape

# Drafters that need memory of a kind the planner counts, by their names in drafters.registry.
DRAFT_MODEL, SELF_QUANT, MTP = "draft_model", "self_quant", "mtp"
# Context lengths that are tried below the wanted one: powers of two, and halfway between long ones.
CONTEXTS = (
    131072, 98304, 65536, 49152, 32768, 24576, 16384, 12288, 8192, 6144, 4096, 2048, 1024,
)  # fmt: skip
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
# What a layer with a state holds of each row of a prompt, in units of the row's ingredients, as
# traced with the sizes of Qwen3.5 27B on tensors without memory. The number is for every layer,
# although only three of four have a state.
STATE_COPIES = 8
# One handle and stream; 8 to 32 MB by GPU (6.1).
CUBLAS_WORKSPACE_BYTES = 32 * MIB
# A CUDA context took 107 MiB on an RTX 4060 Ti (4,352 cores) and 555 MiB on an RTX PRO 6000
# (24,064 cores), llama.cpp issue 23604: a straight line between them, the larger when unknown.
CONTEXT_SMALL = (4_352, 107 * MIB)
CONTEXT_LARGE = (24_064, 555 * MIB)
# torch, transformers and the page's libraries in memory, measured on Linux: 0.4 GiB.
LIBRARIES_BYTES = 400 * MIB
# The share of the RAM that is free after loading which keeps what was read of chats.
PREFIX_SHARE = 0.25
# The most bytes of RAM that keep what was read of chats: 58,000 tokens of Qwen3 8B.
MOST_PREFIX_BYTES = 8 * GIB


# -- the memory to plan for -------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """The memory to plan for. total_bytes, num_cuda_cores: None when unknown. ram_bytes: RAM that
    models may take besides; None where the RAM is the memory of the device itself. is_loading: True
    where the program runs already, so that only weights and caches are still to come: its runtime
    is in use, and an estimate is no reason to refuse a load."""

    device: Device
    free_bytes: int
    total_bytes: int | None = None
    num_cuda_cores: int | None = None
    has_display: bool = False
    is_loading: bool = False
    ram_bytes: int | None = None

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
        ram_bytes=hardware.ram_beside_bytes,
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
    captured forwards, on CUDA. runtime: the CUDA context, or the libraries in RAM. in_ram: weights
    in the RAM beside a GPU with memory of its own, which are no part of the total."""

    target_weights: int
    draft_weights: int
    target_kv: int
    draft_kv: int
    logits: int = 0
    activations: int = 0
    graphs: int = 0
    runtime: int = 0
    margin: int = 0
    in_ram: int = 0

    @property
    def total(self) -> int:
        parts: int = sum(vars(self).values())
        return parts - self.in_ram

    @property
    def further_reply(self) -> int:
        """For each reply beside the first: weights are shared, contexts are not."""
        return self.target_kv + self.draft_kv

    def as_dict(self) -> dict[str, int]:
        return {**vars(self), "total": self.total}


@dataclass(frozen=True)
class Arrangement:
    """One thing to load: a target in a precision at a context, and what drafts for it.

    full: what unquantised parts are kept in. draft: the model or the published head behind the
    drafter. self_draft:
    precision of the target's own quantised copy behind SELF_QUANT. draft_on: where the draft is,
    None: beside the target. experts_in_ram: the processor computes the target's experts.
    """

    target: Model
    precision: Precision
    context_length: int
    full: Precision = "bf16"
    drafter: str = OFF
    draft: Model | None = None
    self_draft: Precision | None = None
    draft_on: OtherDevice | None = None
    experts_in_ram: bool = False


def bytes_of(plan: Arrangement, room: Room) -> PlanBytes:
    """Return the bytes of an arrangement on the target's device. A self-draft shares embeddings,
    norms and the cache."""
    if plan.target.known_shape is None:  # at the least what its files take
        return PlanBytes(plan.target.stored_bytes, 0, 0, 0)
    target, full = plan.target.shape, plan.full
    beside = plan.draft if plan.draft_on is None else None
    draft = None if beside is None or beside.head is not None else beside.shape
    weights, cache = target.loaded_bytes(
        plan.precision, full, plan.context_length, room.device, not plan.experts_in_ram
    )
    in_ram = _in_ram(plan, room)
    if room.ram_bytes is None:  # all memory is one
        weights, in_ram = weights + in_ram, 0
        # They come with the chats, and are no reason to refuse a load.
        copies = snapshot_bytes(target, plan.context_length, full)
        cache += 0 if room.is_loading else copies
    draft_weights, draft_cache = 0, 0
    if draft is not None:
        context = draft_context(plan.context_length, draft.context_length)
        draft_weights, draft_cache = draft.loaded_bytes(full, full, context, room.device)
    if beside is not None and beside.head is not None:
        sizes = beside.head.held_bytes(plan.context_length, FULL_BYTES[full])
        draft_weights, draft_cache = sizes
    if plan.self_draft is not None:
        draft_weights = target.copy_bytes(plan.self_draft)
    if plan.drafter == MTP:
        draft_weights, draft_cache = module_bytes(plan, room.device)
    if room.is_loading:
        return PlanBytes(weights, draft_weights, cache, draft_cache, in_ram=in_ram)
    activations = max(
        _activation_bytes(each, plan.context_length, full) for each in (target, draft) if each
    )
    if room.device == "cuda" and plan.precision not in FULL_BYTES:
        activations += UNPACKED_AT_ONCE * FULL_BYTES[full]
    on_device = (None if plan.experts_in_ram else target, draft)
    native = [each for each in on_device if each and each.family in NATIVE]
    is_captured = any(each.is_native or not each.is_recurrent for each in native)
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
        in_ram=in_ram,
    )


def module_bytes(plan: Arrangement, device: Device) -> tuple[int, int]:
    """Return the bytes of the target's module for multi-token prediction: of its weights, and of
    its keys and values with the states of the target that it reads. None of both without one."""
    module = plan.target.shape.mtp
    if module is None:
        return 0, 0
    weights, cache = module.loaded_bytes(plan.precision, plan.full, plan.context_length, device)
    return weights, cache + plan.context_length * module.hidden_size * FULL_BYTES[plan.full]


def snapshot_bytes(shape: ModelShape, num_tokens: int, full: Precision) -> int:
    """Return the most bytes that copies of a model's states and windows at earlier lengths of a
    text take in the RAM, by which a chat goes back."""
    if not shape.is_native:
        return 0
    windows = 2 * shape.window_kv_width * FULL_BYTES[full] * min(shape.window, num_tokens)
    each = shape.state_bytes + windows
    return min(MOST_SNAPSHOTS * each, max(each, MOST_SNAPSHOT_BYTES))


def prefix_bytes(hardware: Hardware) -> int:
    """Return the bytes of RAM that keep what was read of chats, after everything is loaded."""
    return min(MOST_PREFIX_BYTES, int(PREFIX_SHARE * hardware.host.ram_available_bytes))


def _in_ram(plan: Arrangement, room: Room) -> int:
    """Bytes of the weights that stay in host memory while a GPU computes."""
    if room.device == "cpu":
        return 0
    held = plan.target.shape.host_bytes(plan.precision, plan.full, plan.experts_in_ram)
    if plan.draft is not None and plan.draft.head is None:
        full = plan.full if plan.draft_on is None else plan.draft_on.full
        is_on_cpu = plan.draft_on is not None and plan.draft_on.room.device == "cpu"
        held += 0 if is_on_cpu else plan.draft.shape.host_bytes(full, full)
    return held


def draft_bytes_of(plan: Arrangement) -> PlanBytes | None:
    """The bytes on the device that a draft has to itself; None where it has none."""
    draft, other = plan.draft, plan.draft_on
    if draft is None or other is None:
        return None
    context = draft_context(plan.context_length)
    alone = bytes_of(Arrangement(draft, other.full, context, other.full), other.room)
    return replace(
        alone,
        target_weights=0,
        target_kv=0,
        draft_weights=alone.target_weights,
        draft_kv=alone.target_kv,
        in_ram=0,  # counted with the target's
    )


@dataclass(frozen=True)
class Shortage:
    """More bytes are needed than are free. device: the name of the draft's own one; None for the
    target's. is_of_ram: the RAM beside the target's device is short."""

    needed_bytes: int
    free_bytes: int
    device: str | None = None
    is_of_ram: bool = False


def shortage_of(plan: Arrangement, room: Room) -> Shortage | None:
    """Return what an arrangement lacks, on the draft's own device first; None where it fits."""
    apart, other = draft_bytes_of(plan), plan.draft_on
    if apart is not None and other is not None and apart.total > other.room.free_bytes:
        return Shortage(apart.total, other.room.free_bytes, other.name)
    needed = bytes_of(plan, room)
    if needed.total > room.free_bytes:
        return Shortage(needed.total, room.free_bytes)
    if room.ram_bytes is None or needed.in_ram <= room.ram_bytes:
        return None
    return Shortage(needed.in_ram, room.ram_bytes, is_of_ram=True)


def longest_fitting(plan: Arrangement, room: Room) -> Arrangement | None:
    """Return the arrangement at its own context, or at the longest shorter one that fits."""
    wanted = plan.context_length
    contexts = (wanted, *(length for length in CONTEXTS if length < wanted))
    shortened = (replace(plan, context_length=length) for length in contexts)
    return next((each for each in shortened if shortage_of(each, room) is None), None)


def _activation_bytes(shape: ModelShape, context_length: int, full: Precision) -> int:
    """The most one forward holds besides weights and caches: a chunk passing one layer."""
    chunk = min(PREFILL_CHUNK, context_length)
    values = chunk * (2 * shape.active_width + 6 * shape.hidden_size)  # 6.1
    values += chunk * context_length  # the attention mask
    of_states = STATE_COPIES * chunk * shape.ingredient_bytes // shape.num_layers
    if shape.num_kv_heads < shape.num_heads and shape.family not in NATIVE:
        # With a mask transformers widens one layer's keys and values to all query heads.
        values += 2 * context_length * shape.query_width
    return values * FULL_BYTES[full] + of_states
