"""The computer around the GPU: system, CPU, RAM, and the installed torch as its files tell.

Contract: nothing heavy is imported. Inside a container its own memory limit counts, which
psutil does not see. Reads nothing about GPUs (nvml) and decides nothing (hardware).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

# As Linux spells the instruction sets in which a CPU multiplies bf16.
BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16"))


@dataclass(frozen=True)
class Host:
    """The computer around the GPU. system: "Linux", "Windows" or "Darwin".
    multiplies_bf16: the CPU does so itself; emulated, bf16 is slower than fp32."""

    system: str
    release: str
    architecture: str
    cpu_name: str
    num_cpu_cores: int
    ram_total_bytes: int
    ram_available_bytes: int
    multiplies_bf16: bool = False

    @property
    def is_wsl(self) -> bool:
        return "microsoft" in self.release.lower()

    @property
    def draws_with_gpu(self) -> bool:
        """Windows lends GPU memory to the desktop, also when seen from inside WSL."""
        return self.system == "Windows" or self.is_wsl


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch, read from its files. cuda: its CUDA version, None for a CPU build."""

    version: str
    cuda: str | None


def read_host() -> Host:
    import psutil

    memory = psutil.virtual_memory()
    system = platform.uname()
    return Host(
        system=system.system,
        release=system.release,
        architecture=system.machine,
        cpu_name=_cpu_name() or system.machine,
        num_cpu_cores=_usable_cores(),
        ram_total_bytes=min(memory.total, _container_limit() or memory.total),
        ram_available_bytes=min(memory.available, _container_room() or memory.available),
        multiplies_bf16=not BF16_FLAGS.isdisjoint((_cpu_info("flags") or "").split()),
    )


def _cpu_name() -> str | None:
    return _cpu_info("model name") or platform.processor() or None


def _cpu_info(key: str) -> str | None:
    """A line of the first core in /proc/cpuinfo, where there is one."""
    try:
        source = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{key}\s*:\s*(.+)$", source, re.M)
    return found.group(1).strip() if found else None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # containers are often given fewer than there are
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _container_limit() -> int | None:
    return _number_in(Path("/sys/fs/cgroup/memory.max"))


def _container_room() -> int | None:
    """Bytes left under a container's memory limit, which psutil does not see. Cached file pages
    count as used there, but give way on demand."""
    group = Path("/sys/fs/cgroup")
    limit, used = _container_limit(), _number_in(group / "memory.current")
    if limit is None or used is None:
        return None
    try:
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.M)
    except OSError:
        cached = None
    return max(1, limit - used + (int(cached.group(1)) if cached else 0))


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such container, or "max": no limit
        return None


def read_torch_build() -> TorchBuild | None:
    """Version and CUDA of the installed torch without importing it; None if there is none."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        source = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return None
    version = re.search(r"^__version__ = '([^']+)'", source, re.M)
    cuda = re.search(r"^cuda[^=]*= '([^']+)'", source, re.M)
    return TorchBuild(version.group(1) if version else "unknown", cuda.group(1) if cuda else None)
