"""The command of vLLM or SGLang for a target that outgrows one GPU, from what is known here.

Contract: pure. `layout_for` divides a target, and what drafts for it, among GPUs: on as few as hold
it, split by heads where those divide, else by layers; MemoryShortage with the figures where all
together are too small. `command_for` is the whole command with its environment, and a sentence for
each choice. Nothing is started here.

Sources: the documentation and the code of vLLM 0.32.0 (its draft_model method refuses a draft that
is split otherwise than the target; n-gram and heads it takes) and of SGLang 0.5.23 (which splits
the draft as the target).

Not here: what drafts how well (speculation), the command line (cli.cluster).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Any, Literal

from localspec.core.errors import ConfigError, MemoryShortage
from localspec.core.precisions import TORCH_NAMES, Precision
from localspec.core.units import gib
from localspec.machine.model import Model
from localspec.machine.nvml import Gpu
from localspec.machine.shapes import ModelShape

Program = Literal["vllm", "sglang"]
Method = Literal["off", "ngram", "draft_model", "eagle", "eagle3"]
WITH_MODEL = ("draft_model", "eagle", "eagle3")
# Of one GPU beside weights and caches: CUDA's context, captured graphs, activations.
OVERHEAD_BYTES = 3 * 2**29
KEPT_FREE_BYTES = 2**29
MOST_SHARE = 0.95
FOR_ACTIVATIONS = 0.08  # of a GPU, which SGLang wants outside of its share
SGLANG_METHODS = {
    "ngram": "NGRAM",
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
}
LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}


@dataclass(frozen=True)
class Wanted:
    """What is to be served. drafter: a draft model or a head, where the method has one.
    num_draft_tokens: γ. num_sequences: at full context at the same time. python: of the environment
    that has the program."""

    program: Program
    target: Model
    method: Method
    num_draft_tokens: int
    context_length: int
    precision: Precision = "bf16"
    drafter: Model | None = None
    num_sequences: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    python: str = "python"

    def __post_init__(self) -> None:
        if (self.method in WITH_MODEL) is (self.drafter is None):
            raise ConfigError(
                f"The method {self.method} "
                + ("needs a draft model or head: name it with --draft." if self.drafter is None
                   else "uses no draft model. Leave --draft out.")
            )  # fmt: skip
        if self.method == "off" and self.num_draft_tokens:
            raise ConfigError("The method off drafts nothing. Leave --num-draft-tokens out.")


@dataclass(frozen=True)
class GpuLayout:
    """How target and draft lie on GPUs. gpus: those used, most free memory first; empty: on the
    processor. memory_share: of each GPU's whole memory, for the program."""

    gpus: tuple[Gpu, ...] = ()
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    draft_tensor_parallel: int = 1
    memory_share: float | None = None
    reason: str = "No GPU was found, so it runs on the processor."


@dataclass(frozen=True)
class ClusterCommand:
    """arguments: of the process. environment: beside the one it is started in. notes: a sentence
    for each choice."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    url: str
    layout: GpuLayout
    notes: tuple[str, ...] = field(default=())

    @property
    def line(self) -> str:
        """As a shell takes it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.arguments)])


def layout_for(wanted: Wanted, gpus: Sequence[Gpu]) -> GpuLayout:
    """On as few GPUs as hold it. Raises MemoryShortage."""
    usable = [gpu for gpu in gpus if gpu.free_bytes is not None and gpu.total_bytes]
    usable.sort(key=lambda gpu: -(gpu.free_bytes or 0))
    if not usable:
        return GpuLayout()
    for tensor, pipeline in _splits(wanted.target.shape, len(usable)):
        chosen = usable[: tensor * pipeline]
        needed, draft_split = _needed_bytes(wanted, tensor, pipeline)
        free = min(gpu.free_bytes or 0 for gpu in chosen) - KEPT_FREE_BYTES
        if needed <= free:
            return GpuLayout(
                tuple(chosen),
                tensor,
                pipeline,
                draft_split,
                min(MOST_SHARE, *map(_share, chosen)),
                f"{wanted.target.name} and what drafts need {gib(needed)} on each of "
                f"{len(chosen)}, and {gib(free)} is free on the fullest.",
            )
    all_free = sum(gpu.free_bytes or 0 for gpu in usable)
    raise MemoryShortage(
        f"{wanted.target.name} with a context of {wanted.context_length:,} does not fit on "
        f"{len(usable)} GPUs with {gib(all_free, floor)} free together, however it is split. "
        "Shorten --context, ask for fewer --sequences, or choose a smaller or quantised model."
    )


def _splits(shape: ModelShape, num_gpus: int) -> Iterator[tuple[int, int]]:
    """(tensor, pipeline) by number of GPUs; of as many the one with most heads split first: layers
    that wait for each other are slower for one reply."""
    for count in range(1, num_gpus + 1):
        for tensor in range(count, 0, -1):
            pipeline = count // tensor
            is_whole = tensor * pipeline == count and pipeline <= shape.num_layers
            if is_whole and _divides_heads(shape, tensor):
                yield tensor, pipeline


def _divides_heads(shape: ModelShape, count: int) -> bool:
    kv = shape.num_kv_heads
    return shape.num_heads % count == 0 and (kv % count == 0 or count % kv == 0)


def _needed_bytes(wanted: Wanted, tensor: int, pipeline: int) -> tuple[int, int]:
    """On the GPU that holds most, and among how many the draft is split."""
    split_by_target = wanted.program == "sglang" or wanted.method == "draft_model"
    draft_split = tensor if split_by_target else 1
    needed = _held_bytes(wanted, wanted.target.shape) // (tensor * pipeline) + OVERHEAD_BYTES
    if wanted.drafter is not None:
        needed += _held_bytes(wanted, wanted.drafter.shape) // draft_split
    return needed, draft_split


def _held_bytes(wanted: Wanted, shape: ModelShape) -> int:
    """Weights, and the caches of all sequences."""
    return shape.weight_bytes(wanted.precision, wanted.precision) + _kv_bytes(wanted, shape)


def _kv_bytes(wanted: Wanted, shape: ModelShape) -> int:
    return shape.kv_bytes(wanted.context_length, wanted.precision) * wanted.num_sequences


def _share(gpu: Gpu) -> float:
    free = (gpu.free_bytes or 0) - KEPT_FREE_BYTES
    return floor(100 * free / (gpu.total_bytes or 1)) / 100


def command_for(wanted: Wanted, gpus: Sequence[Gpu]) -> ClusterCommand:
    """Raises ConfigError, MemoryShortage."""
    layout = layout_for(wanted, gpus)
    if wanted.program == "sglang" and not layout.gpus:
        raise ConfigError(
            "SGLang is written for GPUs here, and none was found. Use --program vllm, whose CPU "
            "build runs on a processor."
        )
    make = _vllm if wanted.program == "vllm" else _sglang
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in layout.gpus)}
    if not layout.gpus:
        caches = [wanted.target, *([] if wanted.drafter is None else [wanted.drafter])]
        kv = sum(_kv_bytes(wanted, each.shape) for each in caches)
        environment = {"VLLM_CPU_KVCACHE_SPACE": str(1 + kv // 2**30)}
    url = f"http://{wanted.host}:{wanted.port}"
    notes = (layout.reason, *_notes(wanted, layout))
    return ClusterCommand(tuple(make(wanted, layout)), environment, url, layout, notes)


def _notes(wanted: Wanted, layout: GpuLayout) -> Iterator[str]:
    if layout.tensor_parallel > 1 and wanted.drafter is not None:
        alone = layout.draft_tensor_parallel == 1
        yield (
            "The head lies on one GPU: splitting a small model costs more than it saves."
            if alone
            else f"{wanted.program} splits the draft as the target: it takes no other split."
        )
    if layout.pipeline_parallel > 1:
        yield "Its heads do not divide further, so layers are split as well, which adds waiting."


def _vllm(wanted: Wanted, layout: GpuLayout) -> Iterator[str]:
    yield from (wanted.python, "-m", "vllm.entrypoints.openai.api_server")
    yield from ("--model", wanted.target.place, "--served-model-name", wanted.target.name)
    yield from ("--host", wanted.host, "--port", str(wanted.port))
    yield from ("--dtype", TORCH_NAMES[wanted.precision])
    yield from ("--max-model-len", str(wanted.context_length))
    if layout.gpus:
        yield from ("--tensor-parallel-size", str(layout.tensor_parallel))
        yield from ("--pipeline-parallel-size", str(layout.pipeline_parallel))
        yield from ("--gpu-memory-utilization", f"{layout.memory_share:.2f}")
    else:
        yield "--enforce-eager"  # on a processor compiling takes minutes and gains nothing
    if wanted.method == "off":
        return
    settings: dict[str, Any] = {
        "method": wanted.method,
        "num_speculative_tokens": wanted.num_draft_tokens,
    }
    if wanted.drafter is not None:
        settings["model"] = wanted.drafter.place
        settings["draft_tensor_parallel_size"] = layout.draft_tensor_parallel
    else:
        settings |= LOOKUP
    yield from ("--speculative-config", json.dumps(settings))


def _sglang(wanted: Wanted, layout: GpuLayout) -> Iterator[str]:
    yield from (wanted.python, "-m", "sglang.launch_server")
    yield from (
        "--model-path",
        wanted.target.place,
        "--served-model-name",
        wanted.target.name,
    )
    yield from ("--host", wanted.host, "--port", str(wanted.port), "--enable-metrics")
    yield from ("--dtype", TORCH_NAMES[wanted.precision])
    yield from ("--context-length", str(wanted.context_length))
    yield from ("--tp-size", str(layout.tensor_parallel))
    yield from ("--pp-size", str(layout.pipeline_parallel))
    yield from ("--mem-fraction-static", f"{(layout.memory_share or 0) - FOR_ACTIVATIONS:.2f}")
    if wanted.method == "off":
        return
    yield from ("--speculative-algorithm", SGLANG_METHODS[wanted.method])
    if wanted.drafter is not None:
        yield from ("--speculative-draft-model-path", wanted.drafter.place)
        yield from ("--speculative-num-steps", str(wanted.num_draft_tokens))
        yield from ("--speculative-eagle-topk", "1")
        yield from ("--speculative-num-draft-tokens", str(wanted.num_draft_tokens + 1))
    else:
        yield from ("--speculative-num-draft-tokens", str(wanted.num_draft_tokens))
