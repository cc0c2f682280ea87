"""A loaded engine under measurement, and one reply of it.

Contract: every reply starts from empty caches, the target's and the drafters' alike, so no arm
profits from what the one before it read. `decode_ms` is wall time around the whole decode loop:
planning, drafting, verification, learning and bookkeeping; prefill is apart. Memory and energy
are read before and after, never between two rounds. The engine is opened as the chat opens it, by
the same loader, template and saved state; of the log only what was learnt is read.
"""

from __future__ import annotations

import os
import platform
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import psutil
import torch
import transformers

from localspec import __version__
from localspec.bench.cases import Case
from localspec.chat.local import Loaded
from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import Costs
from localspec.controller.policy import policy_of
from localspec.core.backend import Description, DrafterStatus, Message
from localspec.core.decoding import DraftPlan, SamplingParams, Step
from localspec.core.decoding import Sequence as Turn
from localspec.core.options import LoadOptions
from localspec.engine.engine import Engine
from localspec.loading.local_backend import open_local_backend
from localspec.machine.hardware import probe
from localspec.machine.model import Model
from localspec.machine.sources import resolve
from localspec.record.log_file import learnt_states

PROCESS = Path("/proc/self")
RESTART_PEAK = "5"  # what Linux wants written into clear_refs to restart the high-water mark


@dataclass(frozen=True)
class BenchEngine:
    """One loaded target with its drafters. render: a person's message to prompt ids.
    controller: the costs and whatever was learnt before; arms learn in copies of it.
    target_folder, draft_folder: where the weights are, for engines that load them themselves.
    joules: the energy the GPU has used so far, None where nothing counts it."""

    engine: Engine
    controller: Controller
    render: Callable[[str], Sequence[int]]
    end_ids: frozenset[int]
    statuses: tuple[DrafterStatus, ...]
    context_length: int
    precision: str
    machine: Mapping[str, Any]
    target_folder: Path | None = None
    draft_folder: Path | None = None
    joules: Callable[[], float | None] = lambda: None

    def begin(self, case: Case, sampling: SamplingParams, max_tokens: int) -> Turn:
        """Return a turn whose prompt is read. First capture the graphs that earlier turns want, as
        the app does in idle time."""
        for _ in self.engine.capture():
            pass
        turn = self.engine.start(case.prompt, sampling, max_tokens, self.end_ids)
        self.engine.prefill(turn, threading.Event())
        return turn


def open_bench_engine(
    options: LoadOptions, home: Path | None, report: Callable[[str], None]
) -> BenchEngine:
    """Load target, draft and drafters. Raises LocalspecError."""
    backend = open_local_backend(options, learnt_states(home), report)
    for notice in backend.describe().notices:
        report(notice)
    return bench_engine_of(backend.loaded, resolve(options))


def bench_engine_of(loaded: Loaded, source: Model) -> BenchEngine:
    """What was loaded, ready to be measured. source: the folders it came from."""
    template, known = loaded.template, loaded.description
    return BenchEngine(
        engine=loaded.engine,
        controller=loaded.controller,
        render=lambda text: template.render((Message("user", text),)),
        end_ids=template.end_ids,
        statuses=known.drafters,
        context_length=loaded.context_length,
        precision=str(known.dtype),
        machine=machine_facts(known),
        target_folder=source.folder,
        draft_folder=source.draft.path if source.draft and known.draft is not None else None,
        joules=loaded.joules,
    )


def machine_facts(loaded: Description) -> dict[str, Any]:
    """What a figure must carry to be comparable. cpu_load: processes that waited for the CPU over
    the last minute, None where the system does not say."""
    hardware = probe()
    gpu = hardware.gpu
    return {
        "device": loaded.device,
        "cpu": hardware.host.cpu_name,
        "num_cpu_cores": hardware.host.num_cpu_cores,
        "num_threads": torch.get_num_threads(),
        "cpu_load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "ram_total_bytes": hardware.host.ram_total_bytes,
        "gpu": gpu.name if gpu else None,
        "gpu_total_bytes": gpu.total_bytes if gpu else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "localspec": __version__,
        "target": loaded.target,
        "draft": loaded.draft,
        "dtype": loaded.dtype,
        "kernels": loaded.kernels,
        "context_length": loaded.context_length,
        "measured_at_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@dataclass(frozen=True)
class MeasuredReply:
    """The reply of one arm to one prompt; what an arm cannot know is None.

    tokens: the output. decided: the same with the end-of-text token where the model wrote one.
    accepted_lengths: draft tokens accepted, for each round that drafted. draft_ms,
    drafted_verify_ms: what those rounds took for drafting, and for the rest.
    """

    tokens: tuple[int, ...]
    decided: tuple[int, ...]
    decode_ms: float | None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    peak_memory_bytes: int | None = None
    energy_joules: float | None = None
    accepted_lengths: tuple[int, ...] = ()
    draft_ms: float | None = None
    drafted_verify_ms: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        if not self.decode_ms or not self.tokens:
            return None
        return 1000.0 * len(self.tokens) / self.decode_ms


class Runner(Protocol):
    """What answers the prompts of one arm."""

    @property
    def note(self) -> str:
        """What a reader of its figures must know."""
        ...

    def run(self, case: Case, sampling: SamplingParams, max_tokens: int) -> MeasuredReply:
        """One reply. Raises LocalspecError, RuntimeError or MemoryError."""
        ...

    def close(self) -> None:
        """End what it started. May be called twice."""
        ...


@dataclass(frozen=True)
class EngineRunner:
    """Our engine. controller: learns from every reply. num_draft_tokens: None where the controller
    chooses."""

    bench: BenchEngine
    controller: Controller
    drafter: str
    num_draft_tokens: int | None = None
    note: str = "localspec"

    def run(self, case: Case, sampling: SamplingParams, max_tokens: int) -> MeasuredReply:
        engine, memory = self.bench.engine, MemoryGauge()
        empty_caches(engine, case.prompt)
        turn = self.bench.begin(case, sampling, max_tokens)
        policy = policy_of(
            self.controller, sampling, self.drafter, self.num_draft_tokens, kind=case.workload
        )
        before = self.bench.joules()
        started = perf_counter()
        rounds = list(engine.decode(turn, policy, threading.Event()))
        decode_ms = 1000.0 * (perf_counter() - started)
        joules = self.bench.joules()
        return replace(
            _of_rounds([each.step for each in rounds], decode_ms),
            tokens=tuple(token for each in rounds for token in each.tokens),
            decided=tuple(turn.tokens[turn.prompt_length :]),
            peak_memory_bytes=memory.peak_bytes(),
            energy_joules=None if joules is None or before is None else joules - before,
        )

    def close(self) -> None:
        """Nothing of its own is open."""


def _of_rounds(steps: Sequence[Step], decode_ms: float) -> MeasuredReply:
    """A reply with what its rounds know, without its tokens."""
    drafted = [step for step in steps if step.num_draft_tokens]
    return MeasuredReply(
        tokens=(),
        decided=(),
        decode_ms=decode_ms,
        num_drafts=len(drafted),
        num_draft_tokens=sum(step.num_draft_tokens for step in drafted),
        num_accepted_tokens=sum(step.num_accepted_tokens for step in drafted),
        accepted_lengths=tuple(step.num_accepted_tokens for step in drafted),
        draft_ms=sum(step.draft_ms for step in drafted),
        drafted_verify_ms=sum(step.verify_ms for step in drafted),
    )


def own_controller(bench: BenchEngine) -> Controller:
    """A controller that starts from the state of `bench` and learns apart from all others."""
    shipped, shared = bench.controller.shipped, bench.controller.shared
    controller = Controller(bench.engine.drafters, Costs(), Acceptance(), Costs(), shipped, shared)
    restored = controller.restore(bench.controller.snapshot())
    assert restored, "a controller must be able to restore its own snapshot"
    return controller


def empty_caches(engine: Engine, prompt: Sequence[int]) -> None:
    """Empty the caches of the target and of every drafter.

    A drafter drops its cache when it is shown a sequence that begins otherwise, so each is shown
    one. The target is brought to the root of that sequence first, as in every round.
    """
    engine.target.cache.rollback(0)
    other = (prompt[0] + 1) % engine.target.vocab_size
    for name, drafter in engine.drafters.items():
        turn = engine.start((other, other), SamplingParams(), 8, frozenset())
        engine.prefill(turn, threading.Event())
        drafter.propose(turn, DraftPlan(name, 1))
        engine.target.cache.rollback(0)  # a self-draft writes into it


class MemoryGauge:
    """Peak memory since it was made, of everything loaded and not only of one arm.

    With CUDA it is torch's peak of allocated GPU memory. Otherwise it is the resident memory of
    the process: its true peak where the kernel can restart the mark (Linux), else its present size.
    """

    def __init__(self, process: Path = PROCESS) -> None:
        self._process = process
        self._is_cuda = torch.cuda.is_initialized()
        self._has_restarted = False
        if self._is_cuda:
            for device in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):  # not Linux, or not permitted
            (process / "clear_refs").write_text(RESTART_PEAK, encoding="ascii")
            self._has_restarted = True

    def peak_bytes(self) -> int:
        if self._is_cuda:
            devices = range(torch.cuda.device_count())
            return sum(torch.cuda.max_memory_allocated(device) for device in devices)
        if self._has_restarted:
            status = (self._process / "status").read_text(encoding="utf-8")
            found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
            if found is not None:
                return 1024 * int(found[1])
        return int(psutil.Process().memory_info().rss)
