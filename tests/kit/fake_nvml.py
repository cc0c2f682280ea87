"""A stand-in for the module `pynvml`, at the library's own boundary: same names, same errors.

`failing` maps a function's name to the error code it raises. Errors are the real classes, so
that the code under test catches what it would catch on a real driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pynvml

from localspec.machine.hardware import Host, TorchBuild

GIB = 2**30
ALL_ERRORS = (*range(1, 30), 999)
LINUX = Host("Linux", "6.8.0", "x86_64", "A CPU", 8, 32 * GIB, 20 * GIB, True)
CUDA_BUILD = TorchBuild("2.13.0", "13.0")
CPU_BUILD = TorchBuild("2.13.0+cpu", None)


class FakeNvml:
    NVMLError = pynvml.NVMLError
    NVML_DRIVER_WDDM = pynvml.NVML_DRIVER_WDDM
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(
        self,
        free_gib: float = 10.0,
        total_gib: float = 12.0,
        failing: Mapping[str, int] | None = None,
        processes: tuple[tuple[int, int | None], ...] = (),
        driver_model: int | None = None,
        num_gpus: int = 1,
        num_mig: int = 0,
        capability: tuple[int, int] = (8, 9),
    ) -> None:
        self.free, self.total = int(free_gib * GIB), int(total_gib * GIB)
        self.failing = dict(failing or {})
        self.processes = processes
        self.driver_model = driver_model
        self.num_gpus = num_gpus
        self.num_mig = num_mig
        self.capability = capability
        self.is_open = False
        self.millijoules = 2_500

    def _maybe_fail(self, name: str) -> None:
        if name in self.failing:
            raise pynvml.NVMLError(self.failing[name])
        assert self.is_open or name == "nvmlInit", f"{name} was called on a closed library"

    def nvmlInit(self) -> None:
        self._maybe_fail("nvmlInit")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self._maybe_fail("nvmlShutdown")
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        self._maybe_fail("nvmlSystemGetDriverVersion")
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        self._maybe_fail("nvmlDeviceGetCount")
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self._maybe_fail("nvmlDeviceGetHandleByIndex")
        return f"gpu{index}"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        self._maybe_fail("nvmlDeviceGetMigMode")
        return [1 if self.num_mig else 0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        self._maybe_fail("nvmlDeviceGetMaxMigDeviceCount")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        self._maybe_fail("nvmlDeviceGetMigDeviceHandleByIndex")
        if index >= self.num_mig:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"{handle}/mig{index}"

    def nvmlDeviceGetName(self, handle: str) -> str:
        self._maybe_fail("nvmlDeviceGetName")
        return "NVIDIA GeForce RTX 4070"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        self._maybe_fail("nvmlDeviceGetUUID")
        return ("MIG-" if "mig" in handle else "GPU-") + f"0000-{handle}"

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        self._maybe_fail("nvmlDeviceGetPciInfo")
        assert "mig" not in handle, "a MIG instance has no PCI address of its own"
        return SimpleNamespace(busId=f"00000000:0{1 + int(handle[3:])}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        self._maybe_fail("nvmlDeviceGetMemoryInfo")
        if version is not None:
            self._maybe_fail("nvmlDeviceGetMemoryInfo_v2")
        share = 4 if "mig" in handle else 1
        return SimpleNamespace(total=self.total // share, free=self.free // share)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._maybe_fail("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        self._maybe_fail("nvmlDeviceGetGraphicsRunningProcesses")
        return []

    def nvmlDeviceGetNumGpuCores(self, handle: str) -> int:
        self._maybe_fail("nvmlDeviceGetNumGpuCores")
        return 5888

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        self._maybe_fail("nvmlDeviceGetCudaComputeCapability")
        return self.capability

    def nvmlDeviceGetDisplayActive(self, handle: str) -> int:
        self._maybe_fail("nvmlDeviceGetDisplayActive")
        return 0

    def nvmlDeviceGetCurrentDriverModel(self, handle: str) -> int:
        self._maybe_fail("nvmlDeviceGetCurrentDriverModel")
        if self.driver_model is None:  # as on Linux
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.driver_model

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._maybe_fail("nvmlDeviceGetHandleByUUID")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._maybe_fail("nvmlDeviceGetTotalEnergyConsumption")
        self.millijoules += 2_500
        return self.millijoules


FUNCTIONS = tuple(
    name
    for name in vars(FakeNvml)
    if name.startswith("nvml") and name[4].isupper() and callable(getattr(FakeNvml, name))
)
