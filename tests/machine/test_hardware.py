"""Reading the machine, with a fake at the NVML library boundary and one for torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from localspec.core.errors import ConfigError, MemoryShortage
from localspec.machine.hardware import (
    Hardware,
    Host,
    TorchBuild,
    confirmed_by_torch,
    free_bytes_now,
    margin_for,
    on_device,
    probe,
    read_host,
    torch_index,
)
from localspec.machine.nvml import SENTENCES, energy_counter, read_gpus, shown_by_cuda
from tests.kit.fake_nvml import (
    ALL_ERRORS,
    CPU_BUILD,
    CUDA_BUILD,
    FUNCTIONS,
    GIB,
    LINUX,
    FakeNvml,
)


def found(nvml: FakeNvml, host: Host = LINUX, build: TorchBuild = CUDA_BUILD) -> Hardware:
    return probe(nvml, host, build)


class FakeTorch:
    """torch.cuda with GPUs in an order of its own."""

    def __init__(self, uuids: tuple[str, ...], free_gib: float = 8.0, has_mps: bool = False):
        self.properties = [
            SimpleNamespace(name="A GPU", uuid=uuid, pci_domain_id=0, pci_bus_id=9, pci_device_id=0)
            for uuid in uuids
        ]
        self.free_gib = free_gib
        self.capability = (8, 9)
        self.cuda = self
        self.backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: has_mps))
        self.asked: list[int] = []

    def is_available(self) -> bool:
        return bool(self.properties)

    def device_count(self) -> int:
        return len(self.properties)

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self.capability

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self.capability >= (8, 0)

    def get_arch_list(self) -> list[str]:
        return ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]

    def get_device_properties(self, index: int) -> Any:
        return self.properties[index]

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.asked.append(index)
        return int(self.free_gib * GIB), 12 * GIB


def test_the_fake_has_only_names_the_real_library_has() -> None:
    for name in (*FUNCTIONS, "NVMLError", "NVML_DRIVER_WDDM", "nvmlMemory_v2"):
        assert hasattr(pynvml, name), name


def test_a_gpu_is_read_with_name_memory_driver_and_identity() -> None:
    hardware = found(FakeNvml(free_gib=10, total_gib=12))
    gpu = hardware.gpu
    assert hardware.device == "cuda" and gpu is not None and hardware.notices == ()
    assert (gpu.name, gpu.uuid) == ("NVIDIA GeForce RTX 4070", "GPU-0000-gpu0")
    assert (gpu.total_bytes, gpu.free_bytes) == (12 * GIB, 10 * GIB)
    assert (gpu.driver, gpu.pci_bus_id) == ("580.95.05", "00000000:01:00.0")


def test_the_library_is_closed_again() -> None:
    nvml = FakeNvml()
    found(nvml)
    assert not nvml.is_open


@pytest.mark.parametrize("code", ALL_ERRORS)
def test_each_error_at_start_is_one_sentence_and_the_cpu(code: int) -> None:
    hardware = found(FakeNvml(failing={"nvmlInit": code}))
    assert hardware.device == "cpu"
    assert hardware.free_bytes == 20 * GIB
    assert len(hardware.notices) == 1
    assert hardware.notices[0].endswith(".")


def test_the_known_errors_have_sentences_of_their_own() -> None:
    wanted = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "No NVIDIA driver library",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "not loaded",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "updated",
        pynvml.NVML_ERROR_GPU_IS_LOST: "lost",
        pynvml.NVML_ERROR_NO_PERMISSION: "permission",
        pynvml.NVML_ERROR_NOT_SUPPORTED: "does not offer",
        pynvml.NVML_ERROR_UNKNOWN: "WSL",
    }
    assert {code for code in wanted} <= set(SENTENCES)
    for code, words in wanted.items():
        assert words in found(FakeNvml(failing={"nvmlInit": code})).notices[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_error_of_any_call_escapes(name: str) -> None:
    for code in ALL_ERRORS:
        for num_mig in (0, 2):
            hardware = found(FakeNvml(failing={name: code}, num_mig=num_mig))
            assert hardware.device in ("cuda", "cpu")
            assert hardware.device == "cuda" or hardware.notices, (name, code)


def test_memory_falls_back_to_version_one() -> None:
    for code in (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_UNKNOWN):
        hardware = found(FakeNvml(failing={"nvmlDeviceGetMemoryInfo_v2": code}))
        assert hardware.free_bytes == 10 * GIB and hardware.notices == ()


def test_a_gpu_without_memory_of_its_own_uses_the_ram() -> None:
    code = pynvml.NVML_ERROR_NOT_SUPPORTED
    hardware = found(FakeNvml(failing={"nvmlDeviceGetMemoryInfo": code}))
    assert hardware.device == "cuda" and hardware.free_bytes == LINUX.ram_available_bytes
    assert "RAM" in hardware.notices[0]


def test_unreadable_memory_is_unknown_and_then_taken_from_torch() -> None:
    hardware = found(FakeNvml(failing={"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_UNKNOWN}))
    assert hardware.free_bytes is None and "WSL" in hardware.notices[0]
    confirmed = confirmed_by_torch(hardware, FakeTorch(("0000-gpu0",), free_gib=7))
    assert confirmed.free_bytes == 7 * GIB


def test_memory_of_other_processes_leaves_out_our_own() -> None:
    nvml = FakeNvml(processes=((os.getpid(), 3 * GIB), (4242, 2 * GIB)))
    gpu = found(nvml).gpu
    assert gpu is not None and gpu.used_by_others_bytes == 2 * GIB


def test_the_gpu_stays_the_chosen_one_while_a_model_of_ours_fills_it() -> None:
    """A load that follows another one, and what is recommended for it, mean the same card."""

    class Two(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
            free = 3 if handle == "gpu0" else 8
            return SimpleNamespace(total=12 * GIB, free=free * GIB)

        def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
            pid = self.holder if handle == "gpu0" else 1
            return [SimpleNamespace(pid=pid, usedGpuMemory=7 * GIB)]

        holder = os.getpid()

    ours, others = Two(num_gpus=2), Two(num_gpus=2)
    others.holder = 1
    assert found(ours).gpu == found(ours).gpus[0] != found(others).gpu == found(others).gpus[1]


def test_a_process_that_hides_its_share_makes_the_sum_unknown() -> None:
    gpu = found(FakeNvml(processes=((4242, 2 * GIB), (4243, None)))).gpu
    assert gpu is not None and gpu.used_by_others_bytes is None


def test_mig_instances_are_read_instead_of_their_parent() -> None:
    hardware = found(FakeNvml(free_gib=80, total_gib=80, num_mig=2))
    assert [gpu.is_mig for gpu in hardware.gpus] == [True, True]
    assert hardware.free_bytes == 20 * GIB
    assert hardware.gpu is not None and hardware.gpu.uuid.startswith("MIG-")


def test_unreadable_mig_instances_leave_the_cpu_and_a_sentence() -> None:
    code = pynvml.NVML_ERROR_NO_PERMISSION
    failing = {"nvmlDeviceGetMigDeviceHandleByIndex": code}
    hardware = found(FakeNvml(num_mig=2, failing=failing))
    assert hardware.device == "cpu" and "MIG" in hardware.notices[0]


def test_a_cpu_build_of_torch_leaves_the_gpu_alone_and_says_so() -> None:
    hardware = found(FakeNvml(), build=CPU_BUILD)
    assert hardware.device == "cpu" and hardware.gpu is None and len(hardware.gpus) == 1
    assert "2.13.0+cpu" in hardware.notices[0] and "CUDA build" in hardware.notices[0]


def test_windows_and_wsl_draw_with_the_gpu() -> None:
    assert found(FakeNvml(driver_model=pynvml.NVML_DRIVER_WDDM)).has_display
    wsl = replace(LINUX, release="5.15.90.1-microsoft-standard-WSL2")
    assert found(FakeNvml(), host=wsl).has_display
    assert not found(FakeNvml()).has_display


def test_a_mac_is_read_without_a_word_about_nvidia() -> None:
    mac = replace(LINUX, system="Darwin", architecture="arm64")
    code = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    hardware = found(FakeNvml(failing={"nvmlInit": code}), host=mac)
    assert hardware.device == "mps" and hardware.notices == ()


def test_torchs_device_is_found_by_uuid_whatever_the_order() -> None:
    gpus = found(FakeNvml(num_gpus=2)).gpus
    torch = FakeTorch(("0000-gpu1", "0000-gpu0"))
    assert [torch_index(gpu, torch) for gpu in gpus] == [1, 0]


def test_torchs_device_is_found_by_pci_address_without_a_uuid() -> None:
    gpu = replace(found(FakeNvml()).gpus[0], uuid="", pci_bus_id="00000000:09:00.0")
    assert torch_index(gpu, FakeTorch(("unlike",))) == 0
    assert torch_index(replace(gpu, pci_bus_id="00000000:0A:00.0"), FakeTorch(("unlike",))) is None


def test_free_memory_is_the_smaller_figure_less_the_margin() -> None:
    hardware, torch = found(FakeNvml(free_gib=10)), FakeTorch(("other", "0000-gpu0"), free_gib=8)
    margin = margin_for("cuda", 12 * GIB, has_display=False)
    assert free_bytes_now(hardware, FakeNvml(free_gib=10), torch) == 8 * GIB - margin
    assert free_bytes_now(hardware, FakeNvml(free_gib=5), torch) == 5 * GIB - margin
    assert set(torch.asked) == {1}


def test_free_memory_survives_a_driver_that_fell_silent() -> None:
    silent = FakeNvml(failing={"nvmlInit": pynvml.NVML_ERROR_GPU_IS_LOST})
    torch = FakeTorch(("0000-gpu0",), free_gib=8)
    margin = margin_for("cuda", 12 * GIB, has_display=False)
    assert free_bytes_now(found(FakeNvml()), silent, torch) == 8 * GIB - margin


def test_a_gpu_first_seen_by_torch_is_found_in_the_driver_again() -> None:
    torch = FakeTorch(("0000-gpu0",), free_gib=8)
    silent = found(FakeNvml(failing={"nvmlInit": pynvml.NVML_ERROR_UNKNOWN}))
    hardware = confirmed_by_torch(silent, torch)
    margin = margin_for("cuda", hardware.total_bytes or 0, has_display=False)
    assert free_bytes_now(hardware, FakeNvml(free_gib=5), torch) == 5 * GIB - margin


def test_free_memory_is_never_negative() -> None:
    torch = FakeTorch(("0000-gpu0",), free_gib=0.25)
    assert free_bytes_now(found(FakeNvml()), FakeNvml(), torch) == 0


def test_a_gpu_torch_does_not_see_is_an_error_with_a_remedy() -> None:
    with pytest.raises(MemoryShortage, match="CUDA_VISIBLE_DEVICES"):
        free_bytes_now(found(FakeNvml()), FakeNvml(), FakeTorch(("another",)))


def test_torchs_gpu_stands_in_when_the_driver_is_silent() -> None:
    hardware = found(FakeNvml(failing={"nvmlInit": pynvml.NVML_ERROR_UNKNOWN}))
    confirmed = confirmed_by_torch(hardware, FakeTorch(("abcd",), free_gib=6))
    assert confirmed.device == "cuda" and confirmed.free_bytes == 6 * GIB
    assert confirmed.notices == hardware.notices


def test_a_gpu_that_torch_cannot_start_falls_back_to_the_cpu() -> None:
    confirmed = confirmed_by_torch(found(FakeNvml()), FakeTorch(()))
    assert confirmed.device == "cpu" and confirmed.gpu is None
    assert "cannot start CUDA" in confirmed.notices[0]


def test_an_apple_gpu_that_torch_cannot_use_falls_back_to_the_cpu() -> None:
    mac = replace(LINUX, system="Darwin", architecture="arm64")
    hardware = found(FakeNvml(failing={"nvmlInit": 12}), host=mac)
    assert confirmed_by_torch(hardware, FakeTorch((), has_mps=True)).device == "mps"
    assert confirmed_by_torch(hardware, FakeTorch((), has_mps=False)).device == "cpu"


@pytest.mark.parametrize(
    ("shown", "left"),
    [
        ("1", ["GPU-0000-gpu1"]),
        ("2, 0", ["GPU-0000-gpu2", "GPU-0000-gpu0"]),
        ("GPU-0000-gpu1", ["GPU-0000-gpu1"]),
        ("0,7,1", ["GPU-0000-gpu0"]),
        ("-1", []),
        ("", []),
    ],
)
def test_cards_that_cuda_does_not_show_are_not_planned_for(
    shown: str, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    found = probe(FakeNvml(num_gpus=3), LINUX, CUDA_BUILD)
    assert [gpu.uuid for gpu in found.gpus] == left
    assert (found.device == "cuda") == bool(left)
    assert any("CUDA_VISIBLE_DEVICES hides" in each for each in found.notices) == (not left)


def test_numbers_of_unlike_cards_are_left_to_torch_unless_they_count_by_address() -> None:
    first, second = (replace(gpu, name=gpu.uuid) for gpu in read_gpus(FakeNvml(num_gpus=2)).gpus)
    asked = {"CUDA_VISIBLE_DEVICES": "1"}
    assert shown_by_cuda((first, second), asked) == (first, second)
    asked["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    assert shown_by_cuda((first, second), asked) == (second,)


def test_this_machine_is_read_without_importing_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from localspec.machine.hardware import probe; h = probe();"
        "assert h.host.ram_total_bytes > 2**28, h;"
        "print('torch' in sys.modules, h.torch_build is not None)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


def test_the_hosts_figures_make_sense() -> None:
    host = read_host()
    assert 0 < host.ram_available_bytes <= host.ram_total_bytes
    assert host.num_cpu_cores >= 1 and host.cpu_name


def test_a_container_with_less_memory_than_the_computer_has_only_its_own(tmp_path: Path) -> None:
    kept = {
        "memory.max": 3000,
        "memory.current": 2500,
        "memory.stat": "anon 9\ninactive_file 700\n",
    }
    for name, value in kept.items():
        (tmp_path / name).write_text(f"{value}\n" if isinstance(value, int) else value)
    host = read_host(tmp_path)
    assert (host.ram_total_bytes, host.ram_available_bytes) == (3000, 3000 - 2500 + 700)
    (tmp_path / "memory.max").write_text("max\n")
    assert read_host(tmp_path).ram_total_bytes > 2**28


# -- energy ---------------------------------------------------------------------------------


def test_the_energy_counter_answers_in_joules_each_time_anew() -> None:
    joules = energy_counter("GPU-1", FakeNvml())
    assert (joules(), joules()) == (5.0, 7.5)


def test_without_a_gpu_no_counter_is_read() -> None:
    assert energy_counter(None)() is None


@pytest.mark.parametrize(
    "name", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"]
)
def test_energy_that_the_driver_refuses_is_unknown(name: str) -> None:
    for code in ALL_ERRORS:
        assert energy_counter("GPU-1", FakeNvml(failing={name: code}))() is None


def test_a_device_is_taken_by_name_or_refused_with_those_there_are() -> None:
    two = found(FakeNvml(num_gpus=2))
    assert on_device(two, None) is two is on_device(two, "cuda")
    assert on_device(two, "cuda:1").gpu == two.gpus[1] != on_device(two, "cuda:0").gpu
    alone = on_device(two, "cpu")
    assert (alone.device, alone.gpu) == ("cpu", None)
    with pytest.raises(ConfigError, match="has: cpu, cuda, cuda:0, cuda:1"):
        on_device(two, "cuda:2")
    with pytest.raises(ConfigError, match=r"has: cpu\."):
        on_device(found(FakeNvml(), build=CPU_BUILD), "cuda")


@pytest.mark.parametrize(
    ("capability", "device"),
    [((6, 1), "cpu"), ((7, 0), "cpu"), ((8, 9), "cuda"), ((12, 1), "cuda")],
)
def test_a_card_that_torch_was_not_built_for_is_said_before_it_is_promised(
    capability: tuple[int, int], device: str
) -> None:
    hardware = found(FakeNvml())
    assert hardware.gpu is not None
    torch = FakeTorch((hardware.gpu.uuid,))
    torch.capability = capability
    confirmed = confirmed_by_torch(hardware, torch)
    assert confirmed.device == device
    assert any("nothing that runs on" in each for each in confirmed.notices) is (device == "cpu")
