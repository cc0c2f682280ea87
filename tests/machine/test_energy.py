"""The energy counter, on a stand-in for the driver's library."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from localspec.machine.nvml import energy_counter


class FakeCounter:
    """As much of `pynvml` as a counter needs. failing: functions that raise, with their code."""

    NVMLError = pynvml.NVMLError

    def __init__(self, **failing: int) -> None:
        self.failing = failing
        self.millijoules = 5_000

    def _maybe_fail(self, name: str) -> None:
        if name in self.failing:
            raise pynvml.NVMLError(self.failing[name])

    def nvmlInit(self) -> None:
        self._maybe_fail("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._maybe_fail("nvmlDeviceGetHandleByUUID")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._maybe_fail("nvmlDeviceGetTotalEnergyConsumption")
        assert handle == "GPU-1"
        return self.millijoules


def test_the_counter_answers_in_joules_each_time_anew() -> None:
    nvml = FakeCounter()
    joules = energy_counter("GPU-1", nvml)
    assert joules() == 5.0
    nvml.millijoules = 7_500
    assert joules() == 7.5


def test_without_a_gpu_nothing_is_asked() -> None:
    untouchable: Any = None
    assert energy_counter(None, untouchable)() is None


@pytest.mark.parametrize(
    "name",
    ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"],
)
@pytest.mark.parametrize("code", [3, 12, 15, 999])
def test_whatever_the_driver_refuses_is_unknown(name: str, code: int) -> None:
    assert energy_counter("GPU-1", FakeCounter(**{name: code}))() is None
