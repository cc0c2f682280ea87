"""What is missing on this machine and how to mend it, what works, and what nobody has tried.

Contract: `doctor_report` always returns, whatever is broken, as plain data; `render` turns it
into text. It changes nothing on the disk and loads no model; torch is imported, guarded, since
only torch knows whether it can use the GPU.

Source of `never_run`: the project is developed and tested on Linux computers without a GPU.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from localspec.core.config import PROJECT_FOLDER, Settings, settings_for
from localspec.core.errors import ConfigError, first_line
from localspec.core.files import free_disk, why_not_writable
from localspec.core.units import gib
from localspec.core.workloads import load_workloads, workload_folders
from localspec.formats.prefix_files import FOLDER, PrefixFiles
from localspec.machine.hardware import Hardware, confirmed_by_torch, probe
from localspec.machine.memory import full_precision
from localspec.machine.nvml import NO_LIBRARY
from localspec.machine.profiles import load_profiles
from localspec.machine.sources import is_whole

PACKAGES = ("torch", "transformers", "safetensors", "gradio", "sqlite-utils")
DEMO_FOLDERS = ("assets/demo/target", "assets/demo/draft")
# Room for the log and exports; a model to download needs its own size besides.
LEAST_DISK_BYTES = 2**30

Finding = dict[str, str]


def _found(name: str, value: str) -> Finding:
    return {"name": name, "value": value}


def _missing(name: str, fact: str, fix: str) -> Finding:
    """fact: what is not there and what that means. fix: what to do."""
    return {"name": name, "fact": fact, "fix": fix}


def doctor_report(
    settings: Settings | None = None,
    hardware: Hardware | None = None,
    project: Path = PROJECT_FOLDER,
) -> dict[str, Any]:
    """{"device", "missing": [{name, fact, fix}], "works": [sentence], "found": [{name, value}],
    "never_run": [{path, is_possible_here, note}]}."""
    settings, torch_error = settings or settings_for(), None
    if hardware is None:
        hardware = probe()
        try:
            hardware = confirmed_by_torch(hardware)
        except (ImportError, OSError, RuntimeError) as error:  # a damaged or half-installed torch
            torch_error = first_line(error)
    findings = [
        *_system(hardware),
        *_packages(hardware, torch_error),
        *_devices(hardware),
        *_bitsandbytes(),
        *_home(settings.home),
        *_demo(project),
        *_profiles(settings),
    ]
    missing = [each for each in findings if "fix" in each]
    return {
        "device": hardware.device,
        "missing": missing,
        "works": works(hardware, {each["name"] for each in missing}, settings.home),
        "found": [each for each in findings if "value" in each],
        "never_run": never_run(hardware),
    }


def render(report: Mapping[str, Any]) -> str:
    """The report for a terminal: what is wrong and what to do, what will work, then details."""
    lines = ["What is wrong, and what to do" if report["missing"] else "Nothing is wrong."]
    for number, each in enumerate(report["missing"], start=1):
        lines += [f"  {number}. {each['name']}: {each['fact']}", f"     {each['fix']}"]
    lines += ["", "What will work"]
    lines += [f"  {sentence}" for sentence in report["works"] or ["Nothing until then."]]
    lines += ["", "Details"]
    width = max((len(each["name"]) for each in report["found"]), default=0)
    lines += [f"  {each['name']:<{width}}  {each['value']}" for each in report["found"]]
    paths = {True: list[str](), False: list[str]()}
    for each in report["never_run"]:
        paths[each["is_possible_here"]].append(each["path"])
    if paths[True]:
        lines += ["", "Never tried, and this machine may be the first to:"]
        lines += [f"  {path}" for path in paths[True]]
    lines += ["", f"Never tried, nor possible here: {', '.join(paths[False])}."]
    return "\n".join(lines)


def works(hardware: Hardware, missing: Collection[str], home: Path) -> list[str]:
    """Return what a person can do here as it is, a sentence each. missing: names of faults."""
    if not {"torch", "transformers", "safetensors", "profiles"}.isdisjoint(missing):
        return []
    full, free = full_precision(None, hardware), gib(hardware.free_bytes)
    place = {"cuda": "the GPU", "mps": "the Apple GPU", "cpu": "the processor"}[hardware.device]
    name = "" if hardware.device == "mps" else f" ({hardware.device_name})"
    sentences = [f"Models run on {place}{name} in {full}, with {free} of memory free for them."]
    if "demo pair" not in missing and "gradio" not in missing:
        sentences.append("python app.py opens a chat with the included model pair.")
    sentences.append("python -m localspec plan lists the models that fit, with their drafts.")
    if "bitsandbytes" not in missing and hardware.device != "mps":
        sentences.append("Models can be quantised to 4 and 8 bits while they are loaded.")
    if "home" not in missing:
        sentences.append(f"Chats and what was measured are kept in {home}.")
    return sentences


# -- checks ---------------------------------------------------------------------------------


def _system(hardware: Hardware) -> Iterator[Finding]:
    host = hardware.host
    yield _found("python", ".".join(str(part) for part in sys.version_info[:3]))
    wsl = " (WSL)" if host.is_wsl else ""
    yield _found("system", f"{host.system} {host.release}{wsl} on {host.architecture}")


def _packages(hardware: Hardware, torch_error: str | None) -> Iterator[Finding]:
    for name in PACKAGES:
        version = version_of(name)
        if version is None:
            fix = "Run: python app.py (it installs)."
            yield _missing(name, "The package is not installed.", fix)
        else:
            yield _found(name, version)
    build = hardware.torch_build
    if build is not None:
        yield _found("torch build", f"CUDA {build.cuda}" if build.cuda else "CPU only")
    if torch_error is not None:
        yield _missing(
            "torch",
            f"torch is installed but cannot be imported: {torch_error}.",
            "Delete the .venv folder and run: python app.py",
        )


def _devices(hardware: Hardware) -> Iterator[Finding]:
    for gpu in hardware.gpus:
        drawn = ", draws the screen" if gpu.has_display else ""
        yield _found(
            "GPU",
            f"{gpu.name}, {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free, other "
            f"processes {gib(gpu.used_by_others_bytes)}{drawn}, driver {gpu.driver or '–'}",
        )
    if NO_LIBRARY in hardware.notices:  # no fault of a computer without such a card
        yield _found("GPU", "no NVIDIA driver; if this computer has an NVIDIA GPU, install it")
    for notice in (each for each in hardware.notices if each != NO_LIBRARY):
        fact, _, fix = notice.partition(". ")
        fix = fix or f"localspec uses {hardware.device_name}."
        yield _missing("GPU", f"{fact.rstrip('.')}.", fix)
    yield _found("device", f"{hardware.device}: {hardware.device_name}")
    host = hardware.host
    bf16 = "multiplies bf16" if host.multiplies_bf16 else "emulates bf16, so fp32 is used"
    yield _found("RAM", f"{gib(host.ram_available_bytes)} of {gib(host.ram_total_bytes)} free")
    yield _found("CPU", f"{host.cpu_name}, {host.num_cpu_cores} cores, {bf16}")


def _bitsandbytes() -> Iterator[Finding]:
    version = version_of("bitsandbytes")
    if version is None:
        yield _missing(
            "bitsandbytes",
            "Not installed, so there is no self_quant drafter and no 8-bit or 4-bit target.",
            "Install it: pip install 'bitsandbytes>=0.50'",
        )
    elif tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < (0, 50):
        yield _missing(
            "bitsandbytes",
            f"Version {version} unpacks whole weights to check a draft, which makes that two "
            "to three times a plain step.",
            "Update it: pip install 'bitsandbytes>=0.50'",
        )
    else:
        yield _found("bitsandbytes", version)


def _home(home: Path) -> Iterator[Finding]:
    why = why_not_writable(home / "localspec.db")
    if why is None:
        yield _found("home", f"{home}, writable")
    else:
        yield _missing(
            "home",
            f"{home} cannot be written ({why}), so chats would be lost at the end.",
            "Give a folder of your own with --home, or correct its permissions.",
        )
    free = free_disk(home)
    if free is not None and free < LEAST_DISK_BYTES:
        yield _missing("disk", f"Only {gib(free)} is free at {home}.", "Free at least 1 GiB.")
    else:
        yield _found("disk", f"{gib(free)} free")
    if kept := PrefixFiles(home / FOLDER).num_bytes:
        yield _found("chats to reopen", f"{gib(kept)} in {home / FOLDER}")


def _demo(project: Path) -> Iterator[Finding]:
    absent = [name for name in DEMO_FOLDERS if not is_whole(project / name)]
    if absent:
        yield _missing(
            "demo pair",
            f"{' and '.join(absent)} hold no whole model, so nothing runs without --model.",
            "Restore the folders from the project, or train them: python -m tools.demo_pair",
        )
    else:
        yield _found("demo pair", "present")


def _profiles(settings: Settings) -> Iterator[Finding]:
    try:
        profiles = load_profiles(settings.profile_folders)
        load_workloads(workload_folders(settings))
    except ConfigError as error:
        yield _missing("profiles", str(error), "Nothing starts until then.")
        return
    if profiles:
        yield _found("profiles", ", ".join(sorted(profiles)))
    else:
        fix = "Restore profiles/models/*.toml."
        yield _missing("profiles", "No model profile was found.", fix)


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- what nobody has tried ------------------------------------------------------------------

# A code path that no test of ours has run on the hardware it is for, and whether this is such.
UNTRIED: tuple[tuple[str, Callable[[Hardware], bool]], ...] = (
    ("Decoding in bf16 and fp16 on CUDA", lambda found: found.device == "cuda"),
    ("Captured CUDA graphs", lambda found: found.device == "cuda"),
    ("Weights in 4 bits on CUDA, NF4 and in groups", lambda found: found.device == "cuda"),
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


def never_run(hardware: Hardware) -> list[dict[str, Any]]:
    """Each untried path, and whether this machine is one that could try it."""
    notes = {
        True: "this machine can run it, and may be the first to",
        False: "nor can it run on this machine",
    }
    possible = {path: applies(hardware) for path, applies in UNTRIED}
    return [
        {"path": path, "is_possible_here": can, "note": notes[can]}
        for path, can in possible.items()
    ]
