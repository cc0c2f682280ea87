"""The energy a GPU has used, from the counter of the NVIDIA driver.

Contract: `energy_counter` gives a function that answers in joules since the driver was loaded;
only differences mean something. It answers None where the GPU has no such counter (before
Volta, in MIG instances), NVML is missing, or reading fails. The driver renews the counter
every few tens of milliseconds, so a difference over less says little. The whole card counts,
whoever uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Joules = Callable[[], float | None]


def energy_counter(uuid: str | None, nvml: Any = None) -> Joules:
    """The counter of the GPU with this UUID, None: no GPU. nvml: the module `pynvml`, handed in
    by tests."""
    if uuid is None:
        return _unknown
    if nvml is None:
        try:
            import pynvml  # the module of nvidia-ml-py
        except ImportError:
            return _unknown
        nvml = pynvml
    try:
        nvml.nvmlInit()  # held for as long as the process runs
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return _unknown
    return lambda: _joules(nvml, handle)


def _joules(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000.0  # millijoules
    except nvml.NVMLError:
        return None


def _unknown() -> float | None:
    return None
