"""The line that says what was found, and who else uses the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from localspec.machine import nvml
from localspec.machine.found_line import found_line
from localspec.machine.hardware import Host, confirmed_by_torch, on_device, probe
from localspec.machine.memory import full_precision, room_for
from tests.kit.fake_nvml import CPU_BUILD, CUDA_BUILD, GIB, LINUX, FakeNvml

MAC = Host("Darwin", "25.0", "arm64", "Apple M4", 10, 32 * GIB, 20 * GIB, False)
NAMES = {11: "chrome", 12: "Xorg", 13: "gnome-shell", 14: "python3", 15: "firefox-bin"}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "process_name", NAMES.get)


def line(nvml: FakeNvml, host: Host = LINUX) -> str:
    return found_line(probe(nvml, host, CUDA_BUILD))


def mib(amount: int) -> int:
    return amount * 2**20


@pytest.mark.parametrize(
    ("processes", "said"),
    [
        ((), ""),
        (((11, mib(1024)), (12, mib(400)), (13, mib(300))), " (Chrome and the desktop use 1.7)"),
        (((14, mib(512)),), " (python3 uses 0.5)"),
        (((12, mib(512)),), " (the desktop uses 0.5)"),
        (((99, mib(512)),), " (another program uses 0.5)"),
        (((11, None), (12, None)), " (Chrome and the desktop use an unknown part)"),
        (((11, 1), (12, 1), (14, 1), (15, 1)), " (Chrome, python3 and 2 others use 0.0)"),
    ],
)
def test_the_line_names_the_gpu_its_memory_and_who_else_uses_it(
    processes: tuple[tuple[int, int | None], ...], said: str
) -> None:
    found = line(FakeNvml(free_gib=10.3, total_gib=12.0, processes=processes))
    assert found == f"Found RTX 4070, 12.0 GiB, 10.3 GiB free{said}."


def test_a_second_gpu_is_named_as_the_flags_count_it() -> None:
    found = line(FakeNvml(free_gib=10.0, total_gib=12.0, num_gpus=2))
    assert found.endswith("10.0 GiB free. Beside it: RTX 4070 (cuda:1, 10.0 GiB free).")


def test_what_the_driver_does_not_tell_is_unknown() -> None:
    silent = FakeNvml(failing={"nvmlDeviceGetComputeRunningProcesses": 3})
    assert line(silent).endswith("free (what other programs use is unknown).")
    blind = FakeNvml(failing={"nvmlDeviceGetMemoryInfo": 999, "nvmlDeviceGetMemoryInfo_v2": 999})
    assert line(blind) == "Found RTX 4070. The driver does not say how much memory it has."


def test_the_engine_this_program_started_is_not_another_program() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        processes = ((child.pid, mib(4096)), (os.getpid(), mib(100)), (14, mib(512)))
        gpu = probe(FakeNvml(processes=processes), LINUX, CUDA_BUILD).gpu
        assert gpu is not None and gpu.used_by_others_bytes == mib(512)
        assert [user.name for user in gpu.users or ()] == ["python3"]
    finally:
        child.communicate(b"\n")


def test_without_a_gpu_the_processor_is_named() -> None:
    found = line(FakeNvml(failing={"nvmlInit": 12}))
    assert found == "No GPU that can be used: A CPU, 8 cores, RAM 32.0 GiB, 20.0 GiB free."


def test_a_gpu_that_is_left_out_by_choice_can_be_used() -> None:
    machine = probe(FakeNvml(), LINUX, CUDA_BUILD)
    assert found_line(on_device(machine, "cpu")) == (
        "Found A CPU, 8 cores, RAM 32.0 GiB, 20.0 GiB free. Beside it: RTX 4070 (cuda:0, 10.0 GiB "
        "free)."
    )
    without_cuda = probe(FakeNvml(), LINUX, CPU_BUILD)
    assert found_line(without_cuda).startswith("No GPU that can be used: A CPU")


# -- a Mac, faked: nothing here has run on one ----------------------------------------------


def a_mac() -> Any:
    return probe(FakeNvml(failing={"nvmlInit": 12}), MAC, CPU_BUILD)


def test_a_mac_plans_for_its_gpu_in_shared_memory_and_half_precision() -> None:
    hardware = a_mac()
    assert (hardware.device, hardware.notices) == ("mps", ())
    said = "Found an Apple GPU (Apple M4), which shares the RAM: 32.0 GiB, 20.0 GiB free."
    assert found_line(hardware) == said
    assert full_precision(None, hardware) == "bf16"
    room = room_for(hardware)
    assert (room.device, room.free_bytes) == ("mps", 20 * GIB)


def test_an_intel_mac_has_no_such_gpu() -> None:
    intel = Host("Darwin", "25.0", "x86_64", "Intel", 4, 16 * GIB, 8 * GIB)
    assert probe(FakeNvml(failing={"nvmlInit": 12}), intel, CPU_BUILD).device == "cpu"


@pytest.mark.parametrize(("is_there", "device"), [(True, "mps"), (False, "cpu")])
def test_a_mac_whose_torch_lacks_mps_falls_back_and_says_so(is_there: bool, device: str) -> None:
    torch = SimpleNamespace(
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: is_there))
    )
    found = confirmed_by_torch(a_mac(), torch)
    assert found.device == device
    assert is_there or "cannot use the Apple GPU" in found.notices[-1]
