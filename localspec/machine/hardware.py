"""The machine: GPU, RAM, CPU, the installed torch, and how much memory may be allocated now.

Contract: `probe` runs before CUDA starts and without importing torch; it always returns, and says
in `notices` what it could not read and what to do. `free_bytes_now` is asked again right before
allocating. A GPU is matched to torch's device by UUID or PCI address, never by index: the two
count in different orders. Inside a container its own memory limit counts, which psutil does not
see.

Not here: what fits (planner). Tests pass stand-ins for NVML, torch and the host's figures.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from localspec.core.errors import ConfigError, MemoryShortage
from localspec.machine.nvml import Gpu, read_gpus, shown_by_cuda

Device = Literal["cuda", "mps", "cpu"]

# Left free on a GPU: 512 MiB for fragmentation and the spare slots of caches (at most 271 tokens),
# and, where a screen or Windows uses it too, as much again for what the desktop may take back at
# any time (there an overrun does not fail but runs some ten times slower; loading sets torch a
# limit). llama.cpp keeps 1 GiB, Ollama 457 MiB.
MARGIN_HEADLESS_BYTES = 512 * 2**20
MARGIN_DISPLAY_BYTES = 2**30
# Left free in RAM: a computer that swaps is worse than a model that was refused (our choice).
MARGIN_RAM_BYTES = 2**30
MARGIN_SHARE = 0.04
# As Linux spells the instruction sets in which a CPU multiplies bf16.
BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16"))


# -- the computer around the GPU ------------------------------------------------------------


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


def read_host(group: Path = Path("/sys/fs/cgroup")) -> Host:
    """group: where Linux tells the limits of a container."""
    import psutil

    memory, system = psutil.virtual_memory(), platform.uname()
    limit, room = _container_memory(group) or (memory.total, memory.available)
    return Host(
        system=system.system,
        release=system.release,
        architecture=system.machine,
        cpu_name=_cpu_info("model name") or platform.processor() or system.machine,
        num_cpu_cores=_usable_cores(),
        ram_total_bytes=min(memory.total, limit),
        ram_available_bytes=min(memory.available, room),
        multiplies_bf16=not BF16_FLAGS.isdisjoint(cpu_flags()),
    )


def cpu_flags() -> frozenset[str]:
    """The instruction sets of the CPU, as Linux spells them; empty where they are not known."""
    return frozenset((_cpu_info("flags") or "").split())


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


def _container_memory(group: Path) -> tuple[int, int] | None:
    """The memory limit of a container, which psutil does not see, and the bytes left under it; None
    without one. Cached file pages count as used there, but give way on demand."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):  # no such container, or "max": no limit
        return None
    return limit, max(1, limit - used + (int(cached.group(1)) if cached else 0))


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


# -- the whole machine ----------------------------------------------------------------------


def margin_for(device: Device, total_bytes: int, has_display: bool) -> int:
    """Bytes to leave free on a device."""
    if device != "cuda":
        least = MARGIN_RAM_BYTES
    else:
        least = MARGIN_DISPLAY_BYTES if has_display else MARGIN_HEADLESS_BYTES
    return max(least, int(MARGIN_SHARE * total_bytes))


@dataclass(frozen=True)
class Hardware:
    """What was found. gpu: the one to use, None for CPU and Apple GPUs."""

    device: Device
    host: Host
    gpu: Gpu | None
    gpus: tuple[Gpu, ...]
    torch_build: TorchBuild | None
    notices: tuple[str, ...]

    @property
    def free_bytes(self) -> int | None:
        """Memory that was free when the device was read; None when unknown."""
        if self.gpu is None or self.gpu.has_unified_memory:
            return self.host.ram_available_bytes
        return self.gpu.free_bytes

    @property
    def total_bytes(self) -> int | None:
        if self.gpu is None or self.gpu.has_unified_memory:
            return self.host.ram_total_bytes
        return self.gpu.total_bytes

    @property
    def ram_beside_bytes(self) -> int | None:
        """Free RAM that models may take while a GPU computes, less what is left to other programs;
        None where the RAM is the memory of the device itself."""
        if self.gpu is None or self.gpu.has_unified_memory:
            return None
        margin = margin_for("cpu", self.host.ram_total_bytes, has_display=False)
        return max(0, self.host.ram_available_bytes - margin)

    @property
    def has_display(self) -> bool:
        return self.gpu is not None and (self.gpu.has_display or self.host.draws_with_gpu)

    @property
    def other_gpus(self) -> dict[str, Gpu]:
        """Those beside the one to use, by the name that on_device takes."""
        used = None if self.gpu is None else _bare_uuid(self.gpu.uuid)
        return {
            f"cuda:{number}": gpu
            for number, gpu in enumerate(self.gpus)
            if _bare_uuid(gpu.uuid) != used
        }

    @property
    def device_name(self) -> str:
        if self.gpu is not None:
            return self.gpu.name
        return "Apple GPU" if self.device == "mps" else self.host.cpu_name


def probe(
    nvml: Any = None, host: Host | None = None, torch_build: TorchBuild | None = None
) -> Hardware:
    """Read the machine. An argument is taken in place of what would be read; None reads it.

    nvml: the module `pynvml`. torch_build: pass one to plan for another installation.
    """
    host = host or read_host()
    torch_build = torch_build or read_torch_build()
    reading = read_gpus(nvml)
    gpus, notices = shown_by_cuda(reading.gpus, os.environ), list(reading.notices)
    usable = gpus if torch_build is None or torch_build.cuda else ()
    if reading.gpus and not gpus:
        notices.append(
            f"CUDA_VISIBLE_DEVICES hides {reading.gpus[0].name}, so the CPU is used. Unset it to "
            "use the GPU."
        )
    elif gpus and not usable:
        version = torch_build.version if torch_build else "(unknown version)"
        notices.append(
            f"{gpus[0].name} is here, but the installed torch {version} is "
            "a build for CPUs only. Install torch's CUDA build to use the GPU."
        )
    # A GPU stays the one that was chosen while a model of ours fills it.
    gpu = max(usable, key=lambda each: each.without_us_bytes, default=None)
    is_apple = host.system == "Darwin" and host.architecture == "arm64"
    device: Device = "cuda" if gpu else "mps" if is_apple else "cpu"
    if device == "mps":  # a Mac has no NVML to miss
        notices = []
    return Hardware(device, host, gpu, gpus, torch_build, tuple(notices))


def on_device(hardware: Hardware, name: str | None, flag: str = "--device") -> Hardware:
    """The machine with the device that was asked for by `flag`. Raises ConfigError."""
    if name is None or name == hardware.device:
        return hardware
    if name == "cpu":
        return replace(hardware, device="cpu", gpu=None)
    found = {f"cuda:{index}": gpu for index, gpu in enumerate(hardware.gpus)}
    if hardware.device == "cuda" and name in found:
        return replace(hardware, gpu=found[name])
    known = ["cpu", *(["mps"] if hardware.device == "mps" else [])]
    known += ["cuda", *found] if hardware.device == "cuda" else []
    raise ConfigError(f"{flag} {name} is not here. The machine has: {', '.join(known)}.")


def hardware_for(
    machine: Hardware, name: str | None, torch: Any, flag: str = "--device"
) -> Hardware:
    """As `on_device`, as torch sees it."""
    found = on_device(machine, name, flag)
    return found if name == "cpu" else confirmed_by_torch(found, torch)


# -- torch's view ---------------------------------------------------------------------------


def confirmed_by_torch(hardware: Hardware, torch: Any = None) -> Hardware:
    """The same machine as torch sees it, asked when a model is about to be loaded.

    Where NVML was silent but torch has a GPU, torch's figures fill in (WSL, containers, ROCm);
    where NVML shows a GPU that torch cannot use, the CPU takes over and a notice says so.
    """
    if torch is None:
        import torch  # heavy: only when about to load a model
    notices = hardware.notices
    if hardware.device == "mps":
        if torch.backends.mps.is_available():
            return hardware
        notices += ("This torch build cannot use the Apple GPU, so the CPU is used.",)
        return replace(hardware, device="cpu", notices=notices)
    if not torch.cuda.is_available():
        if hardware.gpu is not None:
            notices += (
                f"torch cannot start CUDA on {hardware.gpu.name}, so the CPU is used. "
                "Check that the driver is as new as torch's CUDA version asks.",
            )
        return replace(hardware, device="cpu", gpu=None, notices=notices)
    if hardware.gpu is None:
        return replace(hardware, device="cuda", gpu=_gpu_from_torch(torch))
    index = torch_index(hardware.gpu, torch)
    if index is not None and not _has_kernels(torch, index):
        notices += (
            f"The installed torch holds nothing that runs on {hardware.gpu.name}, so the CPU is "
            "used. Remove the folder .venv and start again: another build of torch is then chosen.",
        )
        return replace(hardware, device="cpu", gpu=None, notices=notices)
    if index is None:
        notices += (
            f"torch does not show {hardware.gpu.name} (see CUDA_VISIBLE_DEVICES), "
            "so the GPU it does show is used.",
        )
        return replace(hardware, gpu=_gpu_from_torch(torch), notices=notices)
    if hardware.gpu.free_bytes is None and not hardware.gpu.has_unified_memory:
        free, total = torch.cuda.mem_get_info(index)
        gpu = replace(hardware.gpu, free_bytes=int(free), total_bytes=int(total))
        return replace(hardware, gpu=gpu)
    return hardware


def _has_kernels(torch: Any, index: int) -> bool:
    """Whether torch was built for this GPU: with code of its generation, or code that the driver
    can translate. True where torch names architectures of another kind (ROCm)."""
    own = tuple(torch.cuda.get_device_capability(index))
    found = re.findall(r"\b(sm|compute)_(\d+)(\d)[af]?\b", " ".join(torch.cuda.get_arch_list()))
    built = [(kind, (int(major), int(minor))) for kind, major, minor in found]
    return not built or any(
        arch <= own and (kind == "compute" or arch[0] == own[0]) for kind, arch in built
    )


def _gpu_from_torch(torch: Any) -> Gpu:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return Gpu(
        name=properties.name,
        uuid=str(getattr(properties, "uuid", "")),
        pci_bus_id="{:08x}:{:02x}:{:02x}.0".format(*_pci_of(properties)),
        total_bytes=int(total),
        free_bytes=int(free),
        driver=None,
        num_cuda_cores=None,
        has_display=False,
        computes_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
    )


def torch_index(gpu: Gpu, torch: Any) -> int | None:
    """torch's index of this GPU, by UUID or else PCI address; None if torch does not see it."""
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    for index, each in enumerate(properties):
        if gpu.uuid and _bare_uuid(str(getattr(each, "uuid", ""))) == _bare_uuid(gpu.uuid):
            return index
    for index, each in enumerate(properties):
        if gpu.pci_bus_id and _pci_of(each) == _pci_numbers(gpu.pci_bus_id):
            return index
    return None


def _bare_uuid(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _pci_numbers(address: str) -> tuple[int, int, int] | None:
    """ "00000000:01:00.0" as (domain, bus, device)."""
    found = re.fullmatch(r"(?:([0-9a-f]+):)?([0-9a-f]+):([0-9a-f]+)(?:\.\d)?", address.lower())
    if found is None:
        return None
    return (int(found.group(1) or "0", 16), int(found.group(2), 16), int(found.group(3), 16))


def _pci_of(properties: Any) -> tuple[int, int, int]:
    return (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)


def free_bytes_now(hardware: Hardware, nvml: Any = None, torch: Any = None) -> int:
    """Bytes that may be allocated at this moment: the smaller of what the driver and torch call
    free, less the margin; never below 0.

    On a GPU this starts CUDA (torch cannot say otherwise), so the figure is after the CUDA
    context. Raises MemoryShortage when neither knows.
    """
    if torch is None:
        import torch  # heavy: only when about to allocate
    if hardware.device == "cuda":
        free = _free_on_gpu(hardware, nvml, torch)
    else:
        free = read_host().ram_available_bytes
    if hardware.device == "mps":
        limit = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        free = min(free, limit)
    total = hardware.total_bytes or free
    return max(0, free - margin_for(hardware.device, total, hardware.has_display))


def _free_on_gpu(hardware: Hardware, nvml: Any, torch: Any) -> int:
    assert hardware.gpu is not None, "the device cuda comes with a GPU"
    index = torch_index(hardware.gpu, torch)
    if index is None:
        raise MemoryShortage(
            f"{hardware.gpu.name} is in this computer, but torch does not show it. Unset "
            "CUDA_VISIBLE_DEVICES, or run on the CPU."
        )
    from_torch = int(torch.cuda.mem_get_info(index)[0])
    again = {_bare_uuid(gpu.uuid): gpu for gpu in read_gpus(nvml).gpus}
    gpu = again.get(_bare_uuid(hardware.gpu.uuid))
    known = [from_torch] if gpu is None or gpu.free_bytes is None else [from_torch, gpu.free_bytes]
    return min(known)
