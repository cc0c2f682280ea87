"""Readings of the machine: the process's peak memory, and how fast memory can be read.

Contract: a `MemoryGauge` counts from when it is made. With CUDA in use it is torch's peak of
allocated GPU memory; else the process's resident memory, its true peak where the kernel lets us
restart the mark (Linux), elsewhere its size when asked. Everything loaded counts, not only what
one arm needs. `read_bandwidth` is the best of several reads of an array that no cache holds.

Not here: energy (machine.nvml), what a model reads a token (measures).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import psutil
import torch

ARRAY_BYTES = 512 * 2**20  # caches of consumer machines end at 128 MB
NUM_READS = 8
PROCESS = Path("/proc/self")
RESTART_PEAK = "5"  # what Linux wants written into clear_refs to restart the high-water mark


class MemoryGauge:
    """Peak memory since it was made."""

    def __init__(self, process: Path = PROCESS) -> None:
        self._process = process
        self._has_restarted = False
        self._is_cuda = torch.cuda.is_initialized()
        if self._is_cuda:
            for device in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(device)
        else:
            self._has_restarted = self._restart()

    def peak_bytes(self) -> int:
        if self._is_cuda:
            devices = range(torch.cuda.device_count())
            return sum(torch.cuda.max_memory_allocated(device) for device in devices)
        peak = self._high_water_bytes() if self._has_restarted else None
        return int(psutil.Process().memory_info().rss) if peak is None else peak

    def _restart(self) -> bool:
        try:
            (self._process / "clear_refs").write_text(RESTART_PEAK, encoding="ascii")
        except OSError:  # not Linux, or not allowed here
            return False
        return True

    def _high_water_bytes(self) -> int | None:
        status = (self._process / "status").read_text(encoding="utf-8")
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        return 1024 * int(found.group(1)) if found else None


def read_bandwidth(
    device: torch.device, num_bytes: int = ARRAY_BYTES, now: Callable[[], float] = perf_counter
) -> float | None:
    """Bytes a second in reading `num_bytes` on `device`, with torch's own threads; None where
    there is no room for the array."""
    try:
        array = torch.ones(num_bytes // 4, device=device)  # fp32
    except (torch.OutOfMemoryError, MemoryError, RuntimeError):
        return None
    reads: tuple[Callable[[], torch.Tensor], ...] = (
        array.sum,
        lambda: torch.dot(array, array),  # here one kernel, there the other comes closer
    )
    best_s = min(_seconds(read, now) for _ in range(NUM_READS) for read in reads)
    return num_bytes / best_s if best_s > 0.0 else None


def _seconds(read: Callable[[], torch.Tensor], now: Callable[[], float]) -> float:
    started = now()
    read().item()  # waits for a GPU
    return now() - started
