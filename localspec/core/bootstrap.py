"""Make the environment `.venv` beside the code and run a command inside it.

Contract: standard library only. `ensure_environment` returns when it runs inside a complete
environment; otherwise it makes or repairs one and starts the command again inside it. pip shows its
own progress and writes its own log; the log says why it failed. Complete means: a stamp, written
last, carries the hash of the requirements and the Python version, and no mark of an unfinished
install is there. A lock that the operating system drops with its process keeps two starts apart.

Not here: flags, and anything that needs an installed package.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

from localspec.core.errors import SetupError
from localspec.core.files import try_lock

ROOT = Path(__file__).resolve().parents[2]
IS_WINDOWS = os.name == "nt"
GIB = 1024**3
NEEDED_BYTES = 6 * GIB  # measured on Linux: 5.3
# PyTorch's CUDA build and its libraries; an estimate, no such machine was at hand.
NEEDED_BYTES_CUDA = 10 * GIB
# PyPI's wheel for Linux brings CUDA 13.0, the one for Windows none. CUDA 13 needs a driver of the
# 580 line and a card from Turing on; CUDA 12.6 a driver from 525 on and a card from Maxwell on.
CUDA_13_INDEX = "https://download.pytorch.org/whl/cu130"
CUDA_12_INDEX = "https://download.pytorch.org/whl/cu126"
CUDA_13_DRIVER, CUDA_13_CAPABILITY = 580, (7, 5)
CUDA_12_DRIVER, CUDA_12_CAPABILITY = 525, (5, 0)
SMI_SECONDS = 20.0

INSTALLING = "Installing collected packages"  # pip has everything and begins to change packages
DISK_FULL = ("No space left on device", "not enough space on the disk")
NO_NETWORK = (
    "Failed to establish a new connection", "NewConnectionError", "NameResolutionError",
    "Temporary failure in name resolution", "getaddrinfo failed", "Network is unreachable",
    "Read timed out", "ConnectTimeoutError", "ProxyError", "Max retries exceeded",
    "No route to host",
)  # fmt: skip

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """stdout is for the result of the command alone."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Environment:
    """The environment of one checkout and the requirements file a command needs."""

    root: Path
    requirements: str

    @property
    def folder(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        return self.folder / ("Scripts/python.exe" if IS_WINDOWS else "bin/python")

    @property
    def unfinished_mark(self) -> Path:
        return self.folder / "install-unfinished"

    @property
    def log(self) -> Path:
        return self.folder / "install.log"

    def stamp(self, requirements: str) -> Path:
        return self.folder / f"installed-{requirements}.stamp"

    def files(self) -> tuple[str, ...]:
        """The requirements file and those it includes by `-r`."""
        text = (self.root / self.requirements).read_text(encoding="utf-8")
        included = re.findall(r"^-r (\S+)", text, re.M)
        nested = (Environment(self.root, name).files() for name in included)
        return (self.requirements, *(name for names in nested for name in names))

    def fingerprint(self) -> str:
        """Changes with the requirements (includes too), the Python version and the machine, and
        with a card or a driver that needs another build of torch."""
        build = torch_build(read_cards()).index or ""
        digest = hashlib.sha256(f"{sys.version_info[:2]} {sys.platform}{build}".encode())
        for name in self.files():
            digest.update((self.root / name).read_bytes())
        return digest.hexdigest()

    def is_complete(self) -> bool:
        stamp = self.stamp(self.requirements)
        return (
            self.python.exists()
            and not self.unfinished_mark.exists()
            and stamp.is_file()
            and stamp.read_text(encoding="utf-8") == self.fingerprint()
        )

    def write_stamps(self) -> None:
        """Stamp the file and the files it includes: all of them are installed now."""
        for name in self.files():
            fingerprint = Environment(self.root, name).fingerprint()
            self.stamp(name).write_text(fingerprint, encoding="utf-8")


def is_complete(requirements: str, root: Path = ROOT) -> bool:
    """True if there is nothing to set up."""
    return Environment(root, requirements).is_complete()


def ensure_environment(
    requirements: str, command: Sequence[str], root: Path = ROOT, say: Say = say_on_stderr
) -> None:
    """Return inside the complete environment; else make it and run `command` in it.

    command: arguments of the Python of the environment. Raises SetupError with one sentence.
    """
    environment = Environment(root, requirements)
    prepare(environment, say)
    if not _is_inside(environment):
        run_inside(environment, command)


def prepare(environment: Environment, say: Say) -> None:
    """Make the environment complete, once, whoever else tries at the same time."""
    if environment.is_complete():
        return
    try:
        with lock(environment.root / ".venv.lock", say):
            if not environment.is_complete():  # the other start may have finished it meanwhile
                _install(environment, say)
    except OSError as error:
        raise SetupError(
            f"The environment in {environment.folder} cannot be written ({error.strerror}). "
            "Make the folder writable, or copy the project to one that is, and start again."
        ) from error


def run_inside(environment: Environment, command: Sequence[str]) -> NoReturn:
    """Replace this process by the environment's Python, or wait for it on Windows."""
    arguments = [str(environment.python), *command]
    sys.stdout.flush()
    sys.stderr.flush()
    if not IS_WINDOWS:
        os.execv(arguments[0], arguments)
    # On Windows exec returns to the shell at once, which then fights for the keyboard.
    process = subprocess.Popen(arguments)
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl+C reaches the child by itself
            sys.exit(process.wait())


def check_port(host: str, port: int) -> None:
    """Raise SetupError if another program listens there. 0 lets the system choose.

    Asked before a set-up of minutes; the server binds for good later and has the last word.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if not IS_WINDOWS:  # there it would let two programs share a port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, TypeError, ValueError) as error:  # the latter two: no name of any machine
        why = error.strerror if isinstance(error, OSError) else error
        if not isinstance(error, OSError) or error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise SetupError(
                f"{host!a}:{port} is no address of this machine ({why}). "
                "Start without --host, or give an address this machine has."
            ) from error
        other_port = 7860 if port < 1024 else port + 1
        raise SetupError(
            f"Port {port} on {host} cannot be used ({why}): perhaps localspec is "
            f"running there already. Close it, or start with --port {other_port}."
        ) from error


def check_disk(folder: Path, needed: int) -> None:
    """needed: bytes. Raises SetupError."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed:
        raise SetupError(
            f"The installation needs about {needed / GIB:.0f} GiB on the disk of {folder}, "
            f"but {free_bytes / GIB:.1f} GiB is free. Free disk space and start again."
        )


def needed_bytes() -> int:
    """Of the disk, for the environment."""
    return NEEDED_BYTES_CUDA if has_nvidia_card() else NEEDED_BYTES


def has_nvidia_card() -> bool:
    """Whether NVIDIA's driver is installed, judged without any package."""
    library = "nvcuda" if IS_WINDOWS else "cuda"
    return shutil.which("nvidia-smi") is not None or find_library(library) is not None


@dataclass(frozen=True)
class NvidiaCard:
    """An NVIDIA card as its driver describes it. driver: the first part of its version."""

    name: str
    driver: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class TorchIndex:
    """index: of PyTorch's wheels, None where its own pin brings the right one. notice: why the
    card cannot be used, or what an update of the driver would give."""

    index: str | None
    notice: str | None = None


@cache
def read_cards() -> tuple[NvidiaCard, ...]:
    """By nvidia-smi, which comes with the driver; none where it is missing or does not answer."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return cards_of(ended.stdout)


def cards_of(answer: str) -> tuple[NvidiaCard, ...]:
    """Lines like "NVIDIA GeForce RTX 4070, 580.95.05, 8.9"; others are left out."""
    found = re.findall(r"^(.+), (\d+)\.[\d.]+, (\d+)\.(\d+)\s*$", answer, re.M)
    return tuple(
        NvidiaCard(name, int(driver), (int(major), int(minor)))
        for name, driver, major, minor in found
    )


def torch_build(cards: Sequence[NvidiaCard]) -> TorchIndex:
    """The build of torch that the best card and its driver can run."""
    if not cards:
        return TorchIndex(None)
    best = max(cards, key=lambda card: card.capability)
    said = f"{best.name} has driver {best.driver}"
    if best.capability < CUDA_12_CAPABILITY:
        return TorchIndex(None, f"{best.name} is older than torch supports: the processor is used.")
    if best.driver < CUDA_12_DRIVER:
        return TorchIndex(
            None,
            f"{said}, and torch needs {CUDA_12_DRIVER} or newer: the processor is used. Update the "
            f"driver (to {CUDA_13_DRIVER} or newer) and start again.",
        )
    if best.driver >= CUDA_13_DRIVER and best.capability >= CUDA_13_CAPABILITY:
        return TorchIndex(CUDA_13_INDEX if IS_WINDOWS else None)
    is_old = best.capability < CUDA_13_CAPABILITY
    reason = f"{best.name} is older than CUDA 13 supports" if is_old else f"{said}, too old for it"
    return TorchIndex(CUDA_12_INDEX, f"torch is installed with CUDA 12.6: {reason}.")


def _install(environment: Environment, say: Say) -> None:
    check_disk(environment.root, needed_bytes())
    start = time.monotonic()
    _make_folder(environment, say)
    if (notice := torch_build(read_cards()).notice) is not None:
        say(notice)
    say(f"Installing {environment.requirements} into .venv (once; some minutes) ...")
    environment.unfinished_mark.touch()
    environment.log.unlink(missing_ok=True)  # pip appends to it
    command = [str(environment.python), "-m", "pip", *pip_arguments(environment)]
    ended = subprocess.run(command, stdout=sys.stderr, cwd=environment.root)
    if ended.returncode:
        log = environment.log.read_text(encoding="utf-8", errors="replace")
        if INSTALLING not in log:  # pip changed nothing: the old environment is still whole
            environment.unfinished_mark.unlink()
        raise SetupError(_why_pip_failed(log, environment))
    environment.write_stamps()
    environment.unfinished_mark.unlink(missing_ok=True)
    say(f"The environment is ready ({time.monotonic() - start:.0f} s).")


def _make_folder(environment: Environment, say: Say) -> None:
    """Make .venv, unless there is one of this Python version without an unfinished install."""
    if environment.folder.exists():
        if not environment.unfinished_mark.exists() and _is_of_this_python(environment):
            return
        say("Removing an environment that is unfinished or of another Python version ...")
        shutil.rmtree(environment.folder)
    say(f"Making the environment .venv with Python {sys.version.split()[0]} ...")
    if make_venv(environment.folder):
        shutil.rmtree(environment.folder, ignore_errors=True)
        raise SetupError(
            "Python cannot make an environment here: its venv or ensurepip part is missing. "
            "Install it (on Debian and Ubuntu: apt install python3-venv) and start again."
        )


def make_venv(folder: Path) -> int:
    """The exit code of Python's venv module."""
    # Inside an environment the base interpreter must make the new one, not the one just removed.
    base = getattr(sys, "_base_executable", sys.executable)
    return subprocess.run([base, "-m", "venv", str(folder)], capture_output=True).returncode


def _is_of_this_python(environment: Environment) -> bool:
    """Whether its Python runs, has pip and is of the version of this one."""
    if not environment.python.exists():
        return False
    question = "import pip, sys; print(sys.version_info[:2])"
    command = [str(environment.python), "-c", question]
    answer = subprocess.run(command, capture_output=True, text=True)
    return answer.stdout.strip() == str(sys.version_info[:2])


def pip_arguments(environment: Environment) -> list[str]:
    options = ["--disable-pip-version-check", "--no-input", "--log", str(environment.log)]
    if (index := torch_build(read_cards()).index) is not None:
        # Another build that is already here satisfies the pin; --upgrade prefers this one's.
        options += ["--extra-index-url", index, "--upgrade"]
    return ["install", *options, "-r", str(environment.root / environment.requirements)]


def _why_pip_failed(log: str, environment: Environment) -> str:
    if any(sign in log for sign in DISK_FULL):
        return (
            "The disk became full while installing. Free about "
            f"{needed_bytes() / GIB:.0f} GiB and start again; a half-made environment is repaired."
        )
    if any(sign in log for sign in NO_NETWORK):
        return (
            "The packages could not be downloaded: the network does not answer. "
            "Connect to it (or set the proxy) and start again."
        )
    reason = (re.findall(r"\bERROR: (.+)", log) or ["it gave no reason."])[-1]
    return (
        f"pip could not install the packages: {reason} Its log is {environment.log}. Remove the "
        "cause and start again."
    )


def _is_inside(environment: Environment) -> bool:
    return environment.folder.exists() and os.path.samefile(sys.prefix, environment.folder)


@contextlib.contextmanager
def lock(path: Path, say: Say) -> Iterator[None]:
    """Hold the file's lock; the operating system releases it if this process dies."""
    with path.open("a+b") as file:
        if not try_lock(file):
            say("Another start is making the environment; waiting for it ...")
            while not try_lock(file):
                time.sleep(0.5)
        yield  # closing the file releases the lock


def prefer_large_pages() -> None:
    """Ask torch, before it is imported, to put large tensors in large pages where Linux has them:
    a step reads all weights, and small pages cost it an eighth of the memory's speed."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
