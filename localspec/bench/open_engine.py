"""Open what a comparison measures, the way the chat opens it.

Contract: the same loader, template and saved state as the chat uses, and the facts of the machine
that a figure must carry. Of the log only what was learnt is read.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from localspec import __version__
from localspec.backend import Message
from localspec.bench.arms import Report
from localspec.bench.runs import BenchEngine
from localspec.chat.local import Loaded
from localspec.load import open_local_backend
from localspec.machine.hardware import probe
from localspec.machine.sources import Source, resolve
from localspec.options import LoadOptions
from localspec.record.log_file import learnt_states


def open_bench_engine(options: LoadOptions, home: Path | None, report: Report) -> BenchEngine:
    """Load target, draft and drafters. Raises LocalspecError."""
    backend = open_local_backend(options, learnt_states(home), report)
    for notice in backend.describe().notices:
        report(notice)
    return bench_engine_of(backend.loaded, resolve(options))


def bench_engine_of(loaded: Loaded, source: Source) -> BenchEngine:
    """What was loaded, ready to be measured. source: the folders it came from."""
    template = loaded.template
    return BenchEngine(
        engine=loaded.engine,
        controller=loaded.controller,
        render=lambda text: template.render((Message("user", text),)),
        end_ids=template.end_ids,
        statuses=loaded.statuses,
        context_length=loaded.context_length,
        precision=loaded.dtype,
        machine=machine_facts(loaded),
        target_folder=source.target,
        draft_folder=source.draft if loaded.draft is not None else None,
        joules=loaded.joules,
    )


def machine_facts(loaded: Loaded) -> dict[str, Any]:
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
