"""The machine in one line, for the page and the terminal; unknown is said to be unknown.

Not here: reading it (hardware).
"""

from __future__ import annotations

from localspec.core.units import counted, gib
from localspec.machine.hardware import Hardware
from localspec.machine.nvml import Gpu, in_use


def found_line(hardware: Hardware) -> str:
    """ "Found RTX 4070, 12.0 GiB, 10.3 GiB free (Chrome and the desktop use 1.7)." """
    gpu = hardware.gpu
    if gpu is None:
        return _without_gpu(hardware)
    name = _short(gpu)
    if gpu.has_unified_memory:
        return f"Found {name}, which shares the RAM: {_amounts(hardware)}."
    if hardware.total_bytes is None:
        return f"Found {name}. The driver does not say how much memory it has."
    return f"Found {name}, {_amounts(hardware)}{in_use(gpu)}.{_others(hardware)}"


def _others(hardware: Hardware) -> str:
    """The GPUs beside the one to use, as --device counts them."""
    said = [
        f"{_short(gpu)} ({name}, {gib(gpu.free_bytes)} free)"
        for name, gpu in hardware.other_gpus.items()
    ]
    return f" Beside it: {', '.join(said)}." if said else ""


def _short(gpu: Gpu) -> str:
    return gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _without_gpu(hardware: Hardware) -> str:
    cpu, cores = hardware.host.cpu_name, counted(hardware.host.num_cpu_cores, "core")
    if hardware.device == "mps":
        return f"Found an Apple GPU ({cpu}), which shares the RAM: {_amounts(hardware)}."
    build = hardware.torch_build
    is_left_out = hardware.gpus and (build is None or build.cuda)  # by --device
    begin = "Found" if is_left_out else "No GPU that can be used:"
    others = _others(hardware) if is_left_out else ""
    return f"{begin} {cpu}, {cores}, RAM {_amounts(hardware)}.{others}"


def _amounts(hardware: Hardware) -> str:
    free = hardware.free_bytes
    said = "free memory unknown" if free is None else f"{gib(free)} free"
    return f"{gib(hardware.total_bytes)}, {said}"
