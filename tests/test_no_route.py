"""Nothing leaves this machine: the real app and the demo pair, with no route and under watch.

One session (tests/no_route_session.py) proves two facts: in a network namespace that has loopback
only it works, and no process of the app so much as looks up a name. The watch sees the calls of
Python before they fail; the namespace also holds for what is not Python. Where no namespace can be
made, the watch remains.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs namespaces and signals"),
]

# Imported by every Python process of the app before anything else: refuses and notes what goes out.
WATCH = """
import sys
LOCAL = ("127.", "::1", "localhost", "::ffff:127.", "None", "b'127.", "b'localhost")
NOTES = {notes!r}

def note(what):
    with open(NOTES, "a", encoding="utf-8") as file:
        file.write(what + chr(10))

def watch(event, details):
    where = None
    if event in ("socket.connect", "socket.sendto") and isinstance(details[1], tuple):
        where = details[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        where = details[0]
    if where is not None and not str(where).startswith(LOCAL):
        note(event + " " + str(where))
        raise OSError("refused by a test: " + str(where))

sys.addaudithook(watch)
note("watching " + " ".join(sys.orig_argv)[-60:])
"""
HOSTILE = {"HF_HUB_OFFLINE": "0", "GRADIO_ANALYTICS_ENABLED": "True", "GRADIO_SHARE": "True"}


def watched(folder: Path) -> tuple[dict[str, str], Path]:
    """An environment in which every process is watched, and the file of what it noted."""
    folder.mkdir()
    notes = folder / "notes.txt"
    (folder / "sitecustomize.py").write_text(WATCH.format(notes=str(notes)), encoding="utf-8")
    own = {"PYTHONPATH": str(folder), "HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"}
    return os.environ | HOSTILE | own, notes


def alone() -> list[str] | None:
    """The command before one that is to run without a route; None where there is none."""
    for unshare in (["unshare", "-rn"], ["unshare", "-n"]):
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
                return unshare
    return None


@pytest.fixture(scope="module")
def session(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the session found, and the notes of the watch."""
    folder, before = tmp_path_factory.mktemp("session"), alone()
    environment, notes = watched(folder / "watch")
    command = [sys.executable, "-m", "tests.no_route_session", str(folder / "home")]
    command = command if before is None else [*before, *command, "--alone"]
    ran = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1]), notes.read_text(encoding="utf-8")


def test_no_process_of_the_app_tries_another_address(
    session: tuple[dict[str, Any], str],
) -> None:
    found, notes = session
    lines = notes.splitlines()
    assert found["answered"] is True
    assert sum(line.startswith("watching") for line in lines) >= 3, "session, page and engine"
    assert [line for line in lines if not line.startswith("watching")] == []


def test_the_watch_sees_an_attempt(root: Path, tmp_path: Path) -> None:
    environment, notes = watched(tmp_path / "watch")
    code = "import socket; socket.create_connection(('leak.test', 80))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert ran.returncode != 0
    assert "socket.getaddrinfo leak.test" in notes.read_text(encoding="utf-8")


def test_the_app_works_where_there_is_no_route(session: tuple[dict[str, Any], str]) -> None:
    found, _ = session
    if not found["is_alone"]:
        pytest.skip("this machine does not permit a network namespace of one's own")
    assert found["answered"] is True
