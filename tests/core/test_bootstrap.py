"""The set-up makes, repairs and shares one environment, and says what is wrong in one sentence.

pip is played by a small script inside a real, empty environment, so that the log, the stamps, the
locks and the kills are real and no package is fetched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import venv
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.core import bootstrap
from localspec.core.bootstrap import (
    CUDA_12_INDEX,
    CUDA_13_INDEX,
    ROOT,
    Environment,
    NvidiaCard,
    cards_of,
    check_disk,
    check_port,
    ensure_environment,
    prepare,
    run_inside,
    torch_build,
)
from localspec.core.errors import SetupError
from tests.kit.waiting import until

FETCH = (
    "Collecting torch==2.13.0",
    "Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (888.1 MB)",
)
INSTALL = "Installing collected packages: torch, jinja2"
NO_NETWORK = (
    "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)'",
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0",
    "ERROR: No matching distribution found for torch==2.13.0",
)


class Checkout:
    """A checkout in a temporary folder whose pip logs what it is told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        self.num_folders_made = 0
        (root / "requirements.txt").write_text("# comment\ntorch==2.13.0\n")
        (root / "requirements-dev.txt").write_text("-r requirements.txt\npytest==9.2.0\n")
        self.pip_does(*FETCH, INSTALL)

    def pip_does(self, *lines: str, code: int = 0, seconds: float = 0.0) -> None:
        script = [
            "import pathlib, sys, time",
            f"with pathlib.Path({str(self.root / 'pip-runs')!r}).open('a') as runs:",
            "    runs.write(' '.join(sys.argv[1:]) + '\\n')",
            "log = pathlib.Path(sys.argv[sys.argv.index('--log') + 1])",
            f"log.write_text({''.join(f'2026-11-22T18:12:42,318 {x}' + chr(10) for x in lines)!r})",
            "print('Downloading', flush=True)",
            f"time.sleep({seconds})",
            f"sys.exit({code})",
        ]
        (self.root / "pip.py").write_text("\n".join(script))

    def make_venv(self, folder: Path) -> int:
        self.num_folders_made += 1
        venv.create(folder, symlinks=os.name != "nt")
        (site,) = (*folder.glob("lib/python*/site-packages"), *folder.glob("Lib/site-packages"))
        (site / "pip").mkdir()
        main = f"exec(open({str(self.root / 'pip.py')!r}).read())"
        (site / "pip" / "__main__.py").write_text(main)
        return 0

    def environment(self, requirements: str = "requirements.txt") -> Environment:
        return Environment(self.root, requirements)

    def prepare(self, requirements: str = "requirements.txt") -> None:
        prepare(self.environment(requirements), self.said.append)

    @property
    def pip_runs(self) -> list[str]:
        path = self.root / "pip-runs"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    made = Checkout(tmp_path)
    monkeypatch.setattr(bootstrap, "make_venv", made.make_venv)
    monkeypatch.setattr(bootstrap, "has_nvidia_card", lambda: False)
    monkeypatch.setattr(bootstrap, "read_cards", lambda: ())
    return made


def test_the_first_start_installs_and_the_second_goes_straight_up(checkout: Checkout) -> None:
    checkout.prepare()
    assert checkout.environment().is_complete()
    num_lines = len(checkout.said)
    checkout.prepare()
    assert len(checkout.pip_runs) == 1 and len(checkout.said) == num_lines


def test_pip_shows_its_own_progress_on_stderr_and_keeps_a_log(
    checkout: Checkout, capfd: pytest.CaptureFixture[str]
) -> None:
    checkout.prepare()
    shown = capfd.readouterr()
    assert shown.err.startswith("Downloading") and shown.out == "", "stdout is for results"
    assert "Collecting torch" in checkout.environment().log.read_text()


def test_changed_requirements_are_installed_into_the_same_environment(checkout: Checkout) -> None:
    checkout.prepare()
    (checkout.root / "requirements.txt").write_text("torch==2.14.0\n")
    assert not checkout.environment().is_complete()
    checkout.prepare()
    assert len(checkout.pip_runs) == 2 and checkout.num_folders_made == 1


def test_the_tests_have_their_own_stamp_and_satisfy_the_app(checkout: Checkout) -> None:
    checkout.prepare()
    assert not checkout.environment("requirements-dev.txt").is_complete()
    checkout.prepare("requirements-dev.txt")
    assert checkout.environment("requirements-dev.txt").is_complete()
    (checkout.root / "requirements.txt").write_text("torch==2.14.0\n")
    assert not checkout.environment("requirements-dev.txt").is_complete(), "includes count"
    checkout.prepare("requirements-dev.txt")
    assert checkout.environment().is_complete() and len(checkout.pip_runs) == 3


def test_an_install_that_broke_off_is_made_anew(checkout: Checkout) -> None:
    checkout.pip_does(*FETCH, INSTALL, "ERROR: something", code=1)
    with pytest.raises(SetupError, match="something"):
        checkout.prepare()
    assert not checkout.environment().is_complete()
    checkout.pip_does(*FETCH, INSTALL)
    checkout.prepare()
    assert checkout.environment().is_complete() and checkout.num_folders_made == 2
    assert any("unfinished" in line for line in checkout.said)


def test_a_killed_install_is_made_anew(checkout: Checkout) -> None:
    checkout.prepare()
    checkout.environment().unfinished_mark.touch()  # what a killed process leaves behind
    (checkout.environment().folder / "half-written").touch()
    checkout.prepare()
    assert checkout.environment().is_complete() and checkout.num_folders_made == 2
    assert not (checkout.environment().folder / "half-written").exists()


def test_no_network_for_the_tests_leaves_the_app_usable(checkout: Checkout) -> None:
    checkout.prepare()
    checkout.pip_does(*NO_NETWORK, code=1)
    with pytest.raises(SetupError):
        checkout.prepare("requirements-dev.txt")
    assert checkout.environment().is_complete()
    assert checkout.num_folders_made == 1


@pytest.mark.skipif(os.name == "nt", reason="plays a Python by a shell script")
def test_an_environment_of_another_python_is_made_anew(checkout: Checkout) -> None:
    checkout.prepare()
    python = checkout.environment().python
    python.unlink()
    python.write_text("#!/bin/sh\necho '(3, 9)'\n")
    python.chmod(0o755)
    checkout.environment().stamp("requirements.txt").write_text("of another version")
    checkout.prepare()
    assert checkout.num_folders_made == 2


def test_an_environment_without_pip_is_made_anew(checkout: Checkout) -> None:
    venv.create(checkout.environment().folder)
    checkout.prepare()
    assert checkout.num_folders_made == 1 and checkout.environment().is_complete()


def test_an_environment_whose_python_vanished_is_not_complete(checkout: Checkout) -> None:
    checkout.prepare()
    checkout.environment().python.unlink()
    assert not checkout.environment().is_complete()


@pytest.mark.slow
def test_two_starts_at_once_install_once(checkout: Checkout) -> None:
    checkout.pip_does(*FETCH, INSTALL, seconds=1.0)
    threads = [threading.Thread(target=checkout.prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(checkout.pip_runs) == 1 and checkout.environment().is_complete()
    assert any("Another start" in line for line in checkout.said)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_the_lock_of_a_killed_start_is_free_again(checkout: Checkout) -> None:
    lock = checkout.root / ".venv.lock"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, time\nfrom localspec.core.bootstrap import lock\n"
            f"with lock(pathlib.Path({str(lock)!r}), print):\n"
            "    print('held', flush=True)\n    time.sleep(60)\n",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        waiting = threading.Thread(target=checkout.prepare)
        waiting.start()
        until(lambda: any("waiting for it" in line for line in checkout.said))
        assert not checkout.pip_runs, "the lock is held, so nothing may be installed"
        holder.send_signal(signal.SIGKILL)
        waiting.join(timeout=20)
    assert checkout.environment().is_complete()


def test_no_network_is_one_sentence_with_the_remedy(checkout: Checkout) -> None:
    checkout.pip_does(*NO_NETWORK, code=1)
    with pytest.raises(SetupError, match=r"network does not answer.*start again"):
        checkout.prepare()


@pytest.mark.parametrize(("has_card", "room"), [(False, "6 GiB"), (True, "10 GiB")])
def test_a_disk_that_fills_up_is_one_sentence_with_the_remedy(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, has_card: bool, room: str
) -> None:
    monkeypatch.setattr(bootstrap, "has_nvidia_card", lambda: has_card)
    monkeypatch.setattr(bootstrap, "check_disk", lambda *_: None)  # it had room at the start
    line = "ERROR: Could not install packages: [Errno 28] No space left on device"
    checkout.pip_does(*FETCH, INSTALL, line, code=1)
    with pytest.raises(SetupError, match=rf"disk became full.*Free about {room}"):
        checkout.prepare()


def test_a_full_disk_is_seen_before_anything_is_made(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 * 2**30, 97 * 2**30, 3 * 2**30))
    with pytest.raises(SetupError, match=r"needs about 6 GiB.*3\.0 GiB is free\. Free disk space"):
        checkout.prepare()
    assert checkout.num_folders_made == 0
    check_disk(checkout.root, 2 * 2**30)


def test_a_python_without_venv_says_what_to_install(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "make_venv", lambda folder: 1)
    with pytest.raises(SetupError, match="python3-venv"):
        checkout.prepare()


def test_a_folder_that_cannot_be_written_says_so(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bootstrap, "make_venv", refuse)
    with pytest.raises(SetupError, match=r"cannot be written \(Permission denied\)"):
        checkout.prepare()


RTX = NvidiaCard("NVIDIA GeForce RTX 4070", 580, (8, 9))


@pytest.mark.parametrize(
    ("card", "is_windows", "index", "words"),
    [
        (None, True, None, None),
        (RTX, True, CUDA_13_INDEX, None),
        (RTX, False, None, None),
        (replace(RTX, driver=570), False, CUDA_12_INDEX, "driver 570, too old"),
        (
            NvidiaCard("GTX 1080", 580, (6, 1)),
            True,
            CUDA_12_INDEX,
            "GTX 1080 is older than CUDA 13",
        ),
        (replace(RTX, driver=470), False, None, "Update the driver"),
        (NvidiaCard("Tesla K80", 470, (3, 7)), False, None, "older than torch supports"),
    ],
)
def test_the_build_of_torch_is_one_that_card_and_driver_can_run(
    checkout: Checkout,
    monkeypatch: pytest.MonkeyPatch,
    card: NvidiaCard | None,
    is_windows: bool,
    index: str | None,
    words: str | None,
) -> None:
    monkeypatch.setattr(bootstrap, "IS_WINDOWS", is_windows)
    monkeypatch.setattr(bootstrap, "read_cards", lambda: () if card is None else (card,))
    arguments = bootstrap.pip_arguments(checkout.environment())
    assert ("--extra-index-url" in arguments) is (index is not None)
    assert index is None or {index, "--upgrade"} <= {*arguments}
    said = torch_build(bootstrap.read_cards()).notice
    assert said is None if words is None else words in (said or "")
    if not is_windows:  # the folder's layout is another there
        checkout.prepare()
        assert said is None or said in checkout.said


def test_what_nvidia_smi_says_is_read_line_by_line() -> None:
    answer = "NVIDIA GeForce RTX 4070, 580.95.05, 8.9\nTesla, P4, 535.1, 6.1\nNo devices\n"
    assert cards_of(answer) == (RTX, NvidiaCard("Tesla, P4", 535, (6, 1)))
    assert torch_build(cards_of("")).index is None


def test_a_card_put_in_later_asks_for_the_other_build(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "IS_WINDOWS", True)
    before = checkout.environment().fingerprint()
    monkeypatch.setattr(bootstrap, "read_cards", lambda: (RTX,))
    assert checkout.environment().fingerprint() != before


def test_the_command_is_started_again_inside(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "IS_WINDOWS", False)
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(arguments))
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    with pytest.raises(SystemExit):
        run_inside(checkout.environment(), ["app.py", "--port", "1"])
    assert started == [[str(checkout.environment().python), "app.py", "--port", "1"]]


class FakeProcess:
    """A child that the person interrupts once and that then ends with 3."""

    def __init__(self, arguments: list[str]) -> None:
        self.num_waits = 0

    def wait(self) -> int:
        self.num_waits += 1
        if self.num_waits == 1:
            raise KeyboardInterrupt
        return 3


def test_on_windows_the_first_process_waits_and_passes_the_exit_code_on(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "IS_WINDOWS", True)
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    with pytest.raises(SystemExit) as ended:
        run_inside(checkout.environment(), ["app.py"])
    assert ended.value.code == 3


def test_inside_the_environment_the_command_just_goes_on(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.prepare()
    monkeypatch.setattr(sys, "prefix", str(checkout.environment().folder))
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it would start for ever"))
    ensure_environment("requirements.txt", ["app.py"], checkout.root, checkout.said.append)


def test_a_taken_port_is_one_sentence_with_the_remedy(taken_port: int) -> None:
    with pytest.raises(SetupError, match=rf"Port {taken_port}.*--port {taken_port + 1}"):
        check_port("127.0.0.1", taken_port)
    check_port("127.0.0.1", 0)


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_a_host_that_is_not_here_is_one_sentence_with_the_remedy(host: str) -> None:
    with pytest.raises(SetupError, match=r"no address of this machine.*without --host"):
        check_port(host, 7860)
