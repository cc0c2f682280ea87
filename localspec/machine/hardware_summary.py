"""What was found, as one line for the person: the device, its memory, and who else uses it.

Contract: pure. Unknown is said to be unknown; a program whose share the driver hides is named
without one.
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.machine.hardware import Hardware, gib
from localspec.machine.nvml import Gpu, GpuUser

MOST_NAMED = 3
# Programs that draw the screen, as Linux, Windows and the servers of remote desktops call them.
DESKTOP = (
    "xorg", "xwayland", "gnome-shell", "kwin_x11", "kwin_wayland", "plasmashell", "mutter",
    "cinnamon", "xfwm4", "sway", "hyprland", "weston", "dwm.exe", "explorer.exe", "csrss.exe",
    "winlogon.exe", "searchhost.exe", "startmenuexperiencehost.exe", "shellexperiencehost.exe",
)  # fmt: skip
TITLES = {"chrome": "Chrome", "firefox": "Firefox", "msedge": "Edge", "code": "VS Code"}


def found_line(hardware: Hardware) -> str:
    """ "Found RTX 4070, 12.0 GiB, 10.3 GiB free (Chrome and the desktop use 1.7)." """
    gpu = hardware.gpu
    if gpu is None:
        return _without_gpu(hardware)
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    if gpu.has_unified_memory:
        return f"Found {name}, which shares the RAM: {_amounts(hardware)}."
    if hardware.total_bytes is None:
        return f"Found {name}. The driver does not say how much memory it has."
    return f"Found {name}, {_amounts(hardware)}{_in_use(gpu)}."


def _without_gpu(hardware: Hardware) -> str:
    if hardware.device == "mps":
        return f"Found an Apple GPU ({hardware.host.cpu_name}), which shares the RAM: " + (
            f"{_amounts(hardware)}."
        )
    cores = hardware.host.num_cpu_cores
    noun = "core" if cores == 1 else "cores"
    return (
        f"No GPU that can be used: {hardware.host.cpu_name}, {cores} {noun}, RAM "
        f"{_amounts(hardware)}."
    )


def _amounts(hardware: Hardware) -> str:
    free = hardware.free_bytes
    said = "free memory unknown" if free is None else f"{gib(free)} free"
    return f"{gib(hardware.total_bytes)}, {said}"


def _in_use(gpu: Gpu) -> str:
    """ " (Chrome and the desktop use 1.7)"; empty when nobody else does."""
    users = gpu.users
    if users is None:
        return " (what other programs use is unknown)"
    if not users:
        return ""
    named = _names(users)
    verb = "use" if " and " in named else "uses"
    total = gpu.used_by_others_bytes
    if total is None:
        return f" ({named} {verb} an unknown part)"
    return f" ({named} {verb} {total / 2**30:.1f})"


def _names(users: Sequence[GpuUser]) -> str:
    seen = list(dict.fromkeys(_title(user.name) for user in users))
    seen.sort(key=lambda name: name in ("the desktop", "another program"))
    if len(seen) > MOST_NAMED:
        seen = [*seen[: MOST_NAMED - 1], f"{len(seen) - MOST_NAMED + 1} others"]
    if len(seen) == 1:
        return seen[0]
    return f"{', '.join(seen[:-1])} and {seen[-1]}"


def _title(name: str | None) -> str:
    if name is None:
        return "another program"
    if name.lower() in DESKTOP:
        return "the desktop"
    bare = name.lower().removesuffix(".exe").removesuffix("-bin")
    return TITLES.get(bare, bare)
