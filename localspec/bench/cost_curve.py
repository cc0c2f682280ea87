"""What a round costs on this machine: by the number of tokens it checks, and in bytes read.

Contract: a round of a width costs what the controller would measure of it (engine.calibrate), here
at more widths; `relative` is in plain steps. Costs of drafting are those the controller measured,
None where it did not. JSON data; the target's cache is empty afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from localspec.bench.runs import BenchEngine
from localspec.core.decoding import SamplingParams
from localspec.core.precisions import FULL_BYTES, PRECISIONS, Precision
from localspec.engine.calibrate import StandIn, verify_ms_of, width_turns
from localspec.engine.engine import Engine
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.shapes import ModelShape

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
CONTEXTS = (128, 1024)
ARRAY_BYTES = 512 * 2**20  # caches of consumer machines end at 128 MB
NUM_READS = 8


def cost_curve(
    bench: BenchEngine, widths: tuple[int, ...] = WIDTHS, contexts: tuple[int, ...] = CONTEXTS
) -> dict[str, Any]:
    """The curve at each context that fits, and each drafter's step against a plain one."""
    target = bench.engine.target
    bare = Engine(target, {StandIn.name: StandIn()})
    curves = {
        str(context): _curve(bare, widths, context)
        for context in contexts
        # Every token of a round may be accepted, so a turn of the widths needs room for all.
        if context + sum(widths) + 3 <= target.cache.shape.capacity
    }
    target.cache.rollback(0)
    return {"by_context": curves, "draft": _draft_steps(bench, contexts[0], curves)}


def _curve(engine: Engine, widths: tuple[int, ...], context: int) -> dict[str, Any]:
    turns = [*width_turns(engine, [*widths], context, SamplingParams())]
    verify_ms = verify_ms_of([*widths], turns)
    relative = [ms / verify_ms[1] for ms in verify_ms.values()]
    return {"widths": list(widths), "verify_ms": list(verify_ms.values()), "relative": relative}


def _draft_steps(bench: BenchEngine, context: int, curves: dict[str, Any]) -> dict[str, Any]:
    """Each drafter's cost of one drafted token, in ms and in plain steps, None where unknown."""
    costs, curve = bench.controller.costs, curves.get(str(context))
    found = dict[str, Any]()
    for name in bench.engine.drafters:
        step_ms = costs.draft_ms(name, 1, context)
        relative = step_ms / curve["verify_ms"][0] if curve and step_ms is not None else None
        found[name] = {"step_ms": step_ms, "relative": relative}
    return found


def read_bandwidth(
    device: torch.device, num_bytes: int = ARRAY_BYTES, now: Callable[[], float] = perf_counter
) -> float | None:
    """Bytes a second in reading an array that no cache holds, the best of several reads with
    torch's own threads; None where there is no room for the array."""
    try:
        array = torch.ones(num_bytes // 4, device=device)  # fp32
    except (torch.OutOfMemoryError, MemoryError, RuntimeError):
        return None
    # Which of the two kernels comes closer to the limit depends on the machine.
    reads: tuple[Callable[[], torch.Tensor], ...] = (array.sum, lambda: torch.dot(array, array))
    times_s = list[float]()
    for read in reads * NUM_READS:
        started = now()
        read().item()  # waits for a GPU
        times_s.append(now() - started)
    return num_bytes / min(times_s) if min(times_s) > 0.0 else None


def bytes_per_token(bench: BenchEngine) -> dict[str, float] | None:
    """What one plain step reads: weights, and KV for each token of context. None where the
    target's folder or its precision is not known."""
    if bench.target_folder is None:
        return None
    cache = bench.engine.target.cache
    shape = shape_from_folder(bench.target_folder)
    # Of what is not quantised; the cache may be kept in another precision.
    full: Precision = "fp32" if bench.precision == "float32" else "bf16"
    precision = PRECISIONS.get(bench.precision)
    if precision is None:
        return None
    return {
        "weight_bytes": float(weight_bytes_read(shape, precision, full)),
        "kv_bytes_per_context_token": cache.kv_bytes / cache.shape.capacity,
    }


def weight_bytes_read(shape: ModelShape, precision: Precision, full: Precision) -> int:
    """Bytes of the weights that one token passes through: not the input embedding unless it is
    the output head too, and not the experts that are not chosen."""
    held = shape.weight_bytes(precision, full)
    table = 0 if shape.is_tied else shape.vocab_size * shape.hidden_size
    chosen = shape.num_experts_per_token / shape.num_experts if shape.num_experts else 1.0
    not_chosen = int(shape.expert_params * (1.0 - chosen))
    return held - (table + not_chosen) * FULL_BYTES[full]
