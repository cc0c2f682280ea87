"""What the NVIDIA driver says about the GPUs, through NVML; CUDA is not started.

Contract: whatever NVML raises becomes one plain sentence and a value that is unknown, never an
exception. Order and indices are NVML's own and mean nothing to torch: a GPU is known by its UUID
and PCI address. Tests pass a fake of the module `pynvml`; None imports it.

Not here: deciding on a device, reading RAM (hardware).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from localspec.core.units import enumerated

Value = TypeVar("Value")

# Codes of nvml.h; the numbers are part of the library's binary interface.
NOT_SUPPORTED = 3
NO_LIBRARY = (
    "No NVIDIA driver library (NVML) was found. If this computer has an NVIDIA GPU, install its "
    "driver."
)
SENTENCES: dict[int, str] = {
    NOT_SUPPORTED: "The NVIDIA driver does not offer this reading on this GPU.",
    4: "The NVIDIA driver refuses to be read by this user (no permission). "
    "Add the user to the group that owns /dev/nvidia*, or ask the administrator.",
    9: "An NVIDIA driver is installed but not loaded. Load it (on Linux: sudo modprobe nvidia) "
    "or restart the computer.",
    12: NO_LIBRARY,
    15: "The NVIDIA GPU stopped answering and is lost to the system. Restart the computer; if it "
    "happens again, check power and seating of the card.",
    16: "The NVIDIA GPU needs a reset. Restart the computer.",
    17: "The operating system blocks access to the NVIDIA driver. Inside a container, start it "
    "with GPU access.",
    18: "The NVIDIA driver was updated while the old one is still running (version mismatch). "
    "Restart the computer.",
    999: "The NVIDIA driver reports an unknown error, as it does under WSL and after sleep with "
    "some versions. Update the driver or restart the computer (for WSL: wsl --shutdown).",
}
NO_PACKAGE = "The package nvidia-ml-py is missing, so no GPU can be read. Install it."
BF16_GENERATION = 8  # the first compute capability that multiplies bf16
MOST_NAMED = 3  # programs that hold memory of a GPU
# Programs that draw the screen, as Linux, Windows and the servers of remote desktops call them.
DESKTOP = (
    "xorg", "xwayland", "gnome-shell", "kwin_x11", "kwin_wayland", "plasmashell", "mutter",
    "cinnamon", "xfwm4", "sway", "hyprland", "weston", "dwm.exe", "explorer.exe", "csrss.exe",
    "winlogon.exe", "searchhost.exe", "startmenuexperiencehost.exe", "shellexperiencehost.exe",
)  # fmt: skip
TITLES = {"chrome": "Chrome", "firefox": "Firefox", "msedge": "Edge", "code": "VS Code"}

# Joules since the driver was loaded; only differences mean something. None: not known.
Joules = Callable[[], float | None]


@dataclass(frozen=True)
class GpuUser:
    """Another program that holds memory of a GPU. used_bytes: None where the driver hides it."""

    name: str | None
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of it. Unknown is None.

    users: the other programs that hold memory of it, the largest first; None where the driver does
    not tell. own_bytes: what this program and the engine that it started hold.
    has_display: a screen is connected to it, or Windows draws with it (WDDM).
    has_unified_memory: it shares the RAM and has no memory figure of its own. computes_bf16: it
    does so itself, from Ampere on; emulated, bf16 is slower than fp16.
    """

    name: str
    uuid: str
    pci_bus_id: str | None
    total_bytes: int | None
    free_bytes: int | None
    driver: str | None
    num_cuda_cores: int | None
    has_display: bool
    is_mig: bool = False
    has_unified_memory: bool = False
    users: tuple[GpuUser, ...] | None = None
    own_bytes: int | None = None
    computes_bf16: bool = True

    @property
    def without_us_bytes(self) -> int:
        """Free memory, were nothing of ours loaded; 0 where it is not known."""
        return (self.free_bytes or 0) + (self.own_bytes or 0)

    @property
    def used_by_others_bytes(self) -> int | None:
        """None as soon as one process hides its share (WDDM, WSL): a part is not a sum."""
        used = [None] if self.users is None else [user.used_bytes for user in self.users]
        known = [each for each in used if each is not None]
        return sum(known) if len(known) == len(used) else None


@dataclass(frozen=True)
class GpuReading:
    gpus: tuple[Gpu, ...]
    notices: tuple[str, ...]


class _Reader:
    """Calls into one initialised NVML and gathers a sentence for each thing that failed."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.notices: list[str] = []

    def ask(
        self, question: Callable[..., Value], *arguments: Any, subject: str | None = None
    ) -> Value | None:
        """The answer, or None; `subject` names it in a notice, without one the gap is silent
        (for readings that many healthy GPUs do not offer)."""
        try:
            return question(*arguments)
        except self.nvml.NVMLError as error:
            if subject is not None:
                self.notices.append(f"{subject}: {sentence(error)}")
            return None

    def gpus(self) -> Iterator[Gpu]:
        driver = self.ask(self.nvml.nvmlSystemGetDriverVersion)
        count = self.ask(self.nvml.nvmlDeviceGetCount, subject="Counting GPUs") or 0
        for index in range(count):
            by_index = self.nvml.nvmlDeviceGetHandleByIndex
            handle = self.ask(by_index, index, subject=f"GPU {index}")
            if handle is not None:
                yield from self._device(handle, driver)

    def _device(self, handle: Any, driver: str | None) -> Iterator[Gpu]:
        mode = self.ask(self.nvml.nvmlDeviceGetMigMode, handle)
        if not mode or not mode[0]:
            yield self._gpu(handle, handle, driver, is_mig=False)
            return
        instances = list(self._mig_instances(handle))
        for instance in instances:
            yield self._gpu(instance, handle, driver, is_mig=True)
        if not instances:
            self.notices.append(
                "This GPU is divided into MIG instances, but none can be read. Ask the "
                "administrator for one, or for MIG mode to be turned off."
            )

    def _mig_instances(self, parent: Any) -> Iterator[Any]:
        most = self.ask(self.nvml.nvmlDeviceGetMaxMigDeviceCount, parent) or 0
        for index in range(most):
            found = self.ask(self.nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, index)
            if found is not None:
                yield found

    def _gpu(self, handle: Any, parent: Any, driver: str | None, is_mig: bool) -> Gpu:
        nvml = self.nvml
        name = self.ask(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"
        uuid = self.ask(nvml.nvmlDeviceGetUUID, handle, subject=name) or ""
        pci = self.ask(nvml.nvmlDeviceGetPciInfo, parent)
        memory, is_unified = self._memory(handle, name)
        total, free = memory or (None, None)
        users, own_bytes = self._users(handle)
        capability = self.ask(nvml.nvmlDeviceGetCudaComputeCapability, parent)
        return Gpu(
            name=name,
            uuid=uuid,
            pci_bus_id=None if pci is None else pci.busId,
            total_bytes=total,
            free_bytes=free,
            users=users,
            own_bytes=own_bytes,
            driver=driver,
            num_cuda_cores=self.ask(nvml.nvmlDeviceGetNumGpuCores, parent),
            has_display=self._has_display(parent),
            is_mig=is_mig,
            has_unified_memory=is_unified,
            computes_bf16=capability is None or capability[0] >= BF16_GENERATION,
        )

    def _memory(self, handle: Any, name: str) -> tuple[tuple[int, int] | None, bool]:
        """((total, free), unified?). Version 2 keeps the driver's own reserve apart; older
        drivers lack it and WSL answers it with an unknown error, so any failure tries version 1."""
        nvml = self.nvml
        try:
            found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            return (int(found.total), int(found.free)), False
        except nvml.NVMLError:
            pass  # version 1 below is the remedy, and speaks up if it fails too
        try:
            found = nvml.nvmlDeviceGetMemoryInfo(handle)
            return (int(found.total), int(found.free)), False
        except nvml.NVMLError as error:
            if error.value == NOT_SUPPORTED:
                self.notices.append(
                    f"{name} has no memory of its own to report, so the free RAM is used instead."
                )
                return None, True
            self.notices.append(f"Memory of {name}: {sentence(error)}")
            return None, False

    def _users(self, handle: Any) -> tuple[tuple[GpuUser, ...] | None, int | None]:
        """Programs other than this one and the engine that it started, and what these two hold."""
        by_process: dict[int, int | None] = {}
        for question in (
            self.nvml.nvmlDeviceGetComputeRunningProcesses,
            self.nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            processes = self.ask(question, handle)
            if processes is None:
                return None, None
            for each in processes:  # a process may be in both lists
                known, used = by_process.get(each.pid), each.usedGpuMemory
                by_process[each.pid] = max(known or 0, int(used)) if used is not None else known
        ours = own_processes() if by_process else frozenset()
        users = [
            GpuUser(process_name(pid), used) for pid, used in by_process.items() if pid not in ours
        ]
        held = [used for pid, used in by_process.items() if pid in ours]
        told = [used for used in held if used is not None]
        own_bytes = sum(told) if len(told) == len(held) else None
        return tuple(sorted(users, key=lambda user: -(user.used_bytes or 0))), own_bytes

    def _has_display(self, handle: Any) -> bool:
        active = self.ask(self.nvml.nvmlDeviceGetDisplayActive, handle)
        model = self.ask(self.nvml.nvmlDeviceGetCurrentDriverModel, handle)  # Windows only
        return bool(active) or model == self.nvml.NVML_DRIVER_WDDM


def own_processes() -> frozenset[int]:
    """This process and those it started: what the engine holds is not another program's."""
    import psutil

    me = psutil.Process()
    return frozenset((me.pid, *(child.pid for child in me.children(recursive=True))))


def process_name(pid: int) -> str | None:
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:  # gone, another user's, or outside this container
        return None


def read_gpus(nvml: Any = None) -> GpuReading:
    """Every GPU that the driver shows, and a sentence for each reading that failed."""
    nvml = nvml or _library()
    if nvml is None:
        return GpuReading((), (NO_PACKAGE,))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReading((), (sentence(error),))
    reader = _Reader(nvml)
    try:
        gpus = tuple(reader.gpus())
    finally:
        reader.ask(nvml.nvmlShutdown)
    if not gpus and not reader.notices:
        reader.notices.append("The NVIDIA driver is running but shows no GPU.")
    return GpuReading(gpus, tuple(dict.fromkeys(reader.notices)))


def shown_by_cuda(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves. Its numbers count from the fastest card on, which
    only CUDA knows, those of NVML by PCI address: where the orders may differ, all are left."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    is_by_address = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    is_counted_alike = is_by_address or len({gpu.name for gpu in gpus}) <= 1
    if named is None or any(gpu.is_mig for gpu in gpus):
        return gpus
    found = list[Gpu]()
    for name in map(str.strip, named.split(",")):
        if name.isdigit() and not is_counted_alike:
            return gpus
        if name.isdigit():
            chosen = gpus[int(name) : int(name) + 1]
        else:
            chosen = tuple(gpu for gpu in gpus if name and gpu.uuid.startswith(name))
        if not chosen:  # CUDA reads no further
            break
        found += chosen[:1]
    return tuple(found)


def sentence(error: Any) -> str:
    """An NVMLError as one plain sentence with its remedy."""
    known = SENTENCES.get(error.value)
    return known or f"The NVIDIA driver answered with an error ({error}). Update or reload it."


def in_use(gpu: Gpu) -> str:
    """Who else uses it: " (Chrome and the desktop use 1.7)", in GiB; empty when nobody does."""
    users = gpu.users
    if users is None:
        return " (what other programs use is unknown)"
    if not users:
        return ""
    names, total = _names(users), gpu.used_by_others_bytes
    part = "an unknown part" if total is None else f"{total / 2**30:.1f}"
    return f" ({enumerated(names)} {'uses' if len(names) == 1 else 'use'} {part})"


def _names(users: Sequence[GpuUser]) -> list[str]:
    seen = list(dict.fromkeys(_title(user.name) for user in users))
    seen.sort(key=lambda name: name in ("the desktop", "another program"))
    if len(seen) > MOST_NAMED:
        seen = [*seen[: MOST_NAMED - 1], f"{len(seen) - MOST_NAMED + 1} others"]
    return seen


def _title(name: str | None) -> str:
    if name is None:
        return "another program"
    if name.lower() in DESKTOP:
        return "the desktop"
    bare = name.lower().removesuffix(".exe").removesuffix("-bin")
    return TITLES.get(bare, bare)


def energy_counter(uuid: str | None, nvml: Any = None) -> Joules:
    """The energy used by the GPU with this UUID, all its programs together; None: no GPU.

    It answers None where the GPU has no such counter (before Volta, in MIG instances), NVML is
    missing, or reading fails. The driver renews the counter every few tens of milliseconds, so a
    difference over less says little.
    """
    nvml = None if uuid is None else nvml or _library()
    if nvml is None:
        return lambda: None
    try:
        nvml.nvmlInit()  # held for as long as the process runs
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return lambda: None
    return lambda: _joules(nvml, handle)


def _joules(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000.0  # millijoules
    except nvml.NVMLError:
        return None


def _library() -> Any:
    """The module `pynvml` of nvidia-ml-py; None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
