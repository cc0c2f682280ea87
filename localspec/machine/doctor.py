"""What was found on this machine, what is missing and how to mend it, and what nobody has tried.

Contract: `doctor_report` always returns, whatever is broken, as plain data; `render` turns it
into text. It changes nothing on the disk and loads no model; torch is imported, guarded, since
only torch knows whether it can use the GPU.

Source of `never_run`: the project is developed and tested on Linux computers without a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localspec.config import PROJECT_FOLDER, Settings, load_profiles, settings_for
from localspec.errors import ConfigError
from localspec.machine.hardware import Hardware, confirmed_by_torch, gib, probe
from localspec.workloads import load_workloads, workload_folders

PACKAGES = ("torch", "transformers", "safetensors", "gradio", "sqlite-utils")
DEMO_FOLDERS = ("assets/demo/target", "assets/demo/draft")
# Room for the log and exports; a model to download needs its own size besides.
LEAST_DISK_BYTES = 2**30


@dataclass(frozen=True)
class Found:
    name: str
    value: str


@dataclass(frozen=True)
class Missing:
    """fact: what is not there and what that means. fix: what to do."""

    name: str
    fact: str
    fix: str


@dataclass(frozen=True)
class NeverRun:
    """A code path no test of ours has run on the hardware it is for."""

    path: str
    is_possible_here: bool
    note: str


@dataclass(frozen=True)
class _Machine:
    """What the checks look at. torch_error: why torch could not be imported."""

    hardware: Hardware
    settings: Settings
    project: Path
    torch_error: str | None


def doctor_report(
    settings: Settings | None = None,
    hardware: Hardware | None = None,
    project: Path = PROJECT_FOLDER,
) -> dict[str, Any]:
    """{"device", "found": [{name, value}], "missing": [{name, fact, fix}],
    "never_run": [{path, is_possible_here, note}]}."""
    machine = _machine(settings or settings_for(), hardware, project)
    found: list[Found] = []
    missing: list[Missing] = []
    for check in (_python, _packages, _gpu, _memory, _bitsandbytes, _home, _demo, _profiles):
        results = check(machine)
        found += [each for each in results if isinstance(each, Found)]
        missing += [each for each in results if isinstance(each, Missing)]
    return {
        "device": machine.hardware.device,
        "found": [asdict(each) for each in found],
        "missing": [asdict(each) for each in missing],
        "never_run": [asdict(each) for each in never_run(machine.hardware)],
    }


def render(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    lines = ["Found"]
    width = max((len(each["name"]) for each in report["found"]), default=0)
    lines += [f"  {each['name']:<{width}}  {each['value']}" for each in report["found"]]
    lines += ["", "Missing" if report["missing"] else "Nothing is missing."]
    for each in report["missing"]:
        lines += [f"  {each['name']}: {each['fact']}", f"    {each['fix']}"]
    lines += ["", "Never run on the hardware it is for"]
    lines += [f"  {each['path']}: {each['note']}" for each in report["never_run"]]
    return "\n".join(lines)


def _machine(settings: Settings, hardware: Hardware | None, project: Path) -> _Machine:
    if hardware is not None:
        return _Machine(hardware, settings, project, None)
    read = probe()
    try:
        return _Machine(confirmed_by_torch(read), settings, project, None)
    except (ImportError, OSError, RuntimeError) as error:  # a damaged or half-installed torch
        return _Machine(read, settings, project, str(error).split("\n")[0])


# -- checks ---------------------------------------------------------------------------------

Results = list[Found | Missing]


def _python(machine: _Machine) -> Results:
    host = machine.hardware.host
    version = ".".join(str(part) for part in sys.version_info[:3])
    wsl = " (WSL)" if host.is_wsl else ""
    system = f"{host.system} {host.release}{wsl} on {host.architecture}"
    return [Found("python", version), Found("system", system)]


def _packages(machine: _Machine) -> Results:
    results: Results = []
    for name in PACKAGES:
        version = _version(name)
        if version is None:
            results.append(
                Missing(name, "The package is not installed.", "Run: python app.py (it installs).")
            )
        else:
            results.append(Found(name, version))
    build = machine.hardware.torch_build
    if build is not None:
        built_for = f"CUDA {build.cuda}" if build.cuda else "CPU only"
        results.append(Found("torch build", built_for))
    if machine.torch_error is not None:
        results.append(
            Missing(
                "torch",
                f"torch is installed but cannot be imported: {machine.torch_error}.",
                "Delete the .venv folder and run: python app.py",
            )
        )
    return results


def _gpu(machine: _Machine) -> Results:
    results: Results = []
    for gpu in machine.hardware.gpus:
        drawn = ", draws the screen" if gpu.has_display else ""
        results.append(
            Found(
                "GPU",
                f"{gpu.name}, {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free, other "
                f"processes {gib(gpu.used_by_others_bytes)}{drawn}, driver {gpu.driver or '–'}",
            )
        )
    for notice in machine.hardware.notices:
        fact, _, fix = notice.partition(". ")
        results.append(Missing("GPU", f"{fact.rstrip('.')}.", fix or "localspec uses the CPU."))
    results.append(Found("device", f"{machine.hardware.device}: {machine.hardware.device_name}"))
    return results


def _memory(machine: _Machine) -> Results:
    host = machine.hardware.host
    bf16 = "multiplies bf16" if host.multiplies_bf16 else "emulates bf16, so fp32 is used"
    return [
        Found("RAM", f"{gib(host.ram_available_bytes)} of {gib(host.ram_total_bytes)} free"),
        Found("CPU", f"{host.cpu_name}, {host.num_cpu_cores} cores, {bf16}"),
    ]


def _bitsandbytes(_: _Machine) -> Results:
    version = _version("bitsandbytes")
    if version is None:
        return [
            Missing(
                "bitsandbytes",
                "Not installed, so there is no self_quant drafter and no 8-bit or 4-bit target.",
                "Install it: pip install 'bitsandbytes>=0.50'",
            )
        ]
    if _numbers(version) < (0, 50):
        return [
            Missing(
                "bitsandbytes",
                f"Version {version} unpacks whole weights to check a draft, which makes that two "
                "to three times a plain step.",
                "Update it: pip install 'bitsandbytes>=0.50'",
            )
        ]
    return [Found("bitsandbytes", version)]


def _home(machine: _Machine) -> Results:
    home = machine.settings.home
    existing = next(each for each in (home, *home.parents) if each.exists())
    results: Results = []
    if existing.is_dir() and os.access(existing, os.W_OK):
        results.append(Found("home", f"{home}, writable"))
    else:
        results.append(
            Missing(
                "home",
                f"{home} cannot be written, so chats would be lost at the end.",
                "Give a folder of your own with --home, or correct its permissions.",
            )
        )
    free = shutil.disk_usage(existing).free
    if free < LEAST_DISK_BYTES:
        results.append(
            Missing("disk", f"Only {gib(free)} is free at {existing}.", "Free at least 1 GiB.")
        )
    else:
        results.append(Found("disk", f"{gib(free)} free"))
    return results


def _demo(machine: _Machine) -> Results:
    absent = [
        each
        for each in DEMO_FOLDERS
        if not list((machine.project / each).glob("*.safetensors"))
        or not (machine.project / each / "config.json").is_file()
    ]
    if absent:
        return [
            Missing(
                "demo pair",
                f"{' and '.join(absent)} hold no model, so nothing runs without --model.",
                "Restore the folders from the project, or train them: python -m tools.demo_pair",
            )
        ]
    return [Found("demo pair", "present")]


def _profiles(machine: _Machine) -> Results:
    try:
        profiles = load_profiles(machine.settings.profile_folders)
        load_workloads(workload_folders(machine.settings))
    except ConfigError as error:
        return [Missing("profiles", str(error), "Nothing starts until then.")]
    if not profiles:
        return [
            Missing("profiles", "No model profile was found.", "Restore profiles/models/*.toml.")
        ]
    return [Found("profiles", ", ".join(sorted(profiles)))]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 50) of "0.50.2": the first two parts, which is what a bound compares."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


# -- what nobody has tried ------------------------------------------------------------------

Applies = Callable[[Hardware], bool]

UNTRIED: tuple[tuple[str, Applies], ...] = (
    ("Decoding in bf16 and fp16 on CUDA", lambda found: found.device == "cuda"),
    ("Captured CUDA graphs", lambda found: found.device == "cuda"),
    ("NF4 weights of self_quant on CUDA", lambda found: found.device == "cuda"),
    ("The memory plan against a GPU's measured memory", lambda found: found.device == "cuda"),
    ("NVML on a real driver", lambda found: bool(found.gpus)),
    ("MIG instances", lambda found: any(gpu.is_mig for gpu in found.gpus)),
    (
        "GPUs that share the RAM (GB10)",
        lambda found: any(gpu.has_unified_memory for gpu in found.gpus),
    ),
    ("Apple GPUs (mps)", lambda found: found.device == "mps"),
    ("macOS", lambda found: found.host.system == "Darwin"),
    ("Windows", lambda found: found.host.system == "Windows"),
    ("WSL", lambda found: found.host.is_wsl),
    ("ARM processors", lambda found: found.host.architecture in ("arm64", "aarch64")),
)


def never_run(hardware: Hardware) -> tuple[NeverRun, ...]:
    """Each untried path, and whether this machine is one that could try it."""
    here = "this machine can run it, and may be the first to"
    not_here = "nor can it run on this machine"
    return tuple(
        NeverRun(path, applies(hardware), here if applies(hardware) else not_here)
        for path, applies in UNTRIED
    )
