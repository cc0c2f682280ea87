"""The engine's process behind the seam: all that a backend promises, and its sudden end."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localspec.backend import Backend, Chunk, Message, Request
from localspec.errors import ContextOverflow, EngineLost, MemoryShortage, RequestError
from localspec.remote import wire
from localspec.remote.child import ChildBackend
from tests.fakes import REPLY, FakeBackend, Script
from tests.remote.engines import opening
from tests.waiting import WAIT_S, until


def silent(phrase: str) -> None:
    pass


@pytest.fixture
def opened() -> Iterator[Any]:
    """Open engines by name; all are closed at the end."""
    found: list[ChildBackend] = []

    def make(name: str = "playing", **keywords: Any) -> ChildBackend:
        found.append(ChildBackend.open(opening(name, **keywords), silent))
        return found[-1]

    yield make
    for backend in found:
        backend.close()
        assert not backend._process.is_alive()


@pytest.fixture(scope="module")
def shared() -> Iterator[ChildBackend]:
    """An engine that no test ends."""
    backend = ChildBackend.open(opening("playing"), silent)
    yield backend
    backend.close()


def request(text: str = "hi", **more: Any) -> Request:
    return Request((Message("user", text),), **more)


def play(backend: Backend, text: str = "hi") -> list[Chunk]:
    return list(backend.generate(request(text), threading.Event()))


def test_every_method_of_the_seam_is_passed_on() -> None:
    methods = {n for n, _ in inspect.getmembers(Backend, inspect.isfunction) if n[0] != "_"}
    assert len(methods) > 7
    assert {name for name in methods if name not in vars(ChildBackend)} == set()


def test_a_turn_is_what_the_same_backend_gives_in_one_process(shared: ChildBackend) -> None:
    direct = play(FakeBackend(Script(round_s=0.001)))
    found = play(shared)
    assert "".join(chunk.text for chunk in found) == REPLY
    assert [(c.phase, c.text, c.tokens, c.provenance, c.finish_reason) for c in found] == [
        (c.phase, c.text, c.tokens, c.provenance, c.finish_reason) for c in direct
    ]
    assert found[-1].stats.num_accepted_tokens == direct[-1].stats.num_accepted_tokens > 0


def test_description_snapshot_and_counts_cross(shared: ChildBackend) -> None:
    here = FakeBackend(Script())
    messages = (Message("user", "one two three 👩‍👩‍👧 \0"),)
    assert shared.describe() == here.describe()
    assert shared.count_tokens(messages) == here.count_tokens(messages)
    assert set(shared.snapshot()) == {"num_rounds"}


def test_errors_of_ours_arrive_as_themselves(opened: Any) -> None:
    with pytest.raises(MemoryShortage, match="A smaller model would fit"):
        opened("refusing")
    with pytest.raises(ContextOverflow, match="set max tokens to 324") as found:
        opened("overflowing")
    assert (found.value.num_prompt_tokens, found.value.context_length) == (700, 1024)


def test_errors_in_a_call_leave_the_engine_usable(opened: Any) -> None:
    backend = opened()
    with pytest.raises(MemoryShortage, match="1 GiB more"):
        play(backend, "shortage")
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        play(backend, "bug")
    with pytest.raises(RuntimeError, match=r"OddError: who am I\?"):
        play(backend, "odd")
    with pytest.raises(ContextOverflow):
        list(backend.generate(request("word " * 5000), threading.Event()))
    assert backend.is_alive() and play(backend)[-1].finish_reason == "eos"


def test_a_faulty_request_is_an_error_that_pickles() -> None:
    fault = wire.fault_of(3, RequestError("max tokens is 0."))
    error = wire.error_of(fault)
    assert type(error) is RequestError and str(error) == "max tokens is 0."


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("kill", "killed, as the system does when memory runs out"),
        ("segfault", "SIGSEGV"),
        ("exit", "exit code 7"),
        ("lost", "The device stopped computing"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_lost_engine_ends_the_turn_after_what_was_written(
    opened: Any, deed: str, said: str
) -> None:
    backend = opened()
    texts: list[str] = []
    with pytest.raises(EngineLost, match=said):
        for chunk in backend.generate(request(deed), threading.Event()):
            texts.append(chunk.text)
    assert REPLY.startswith("".join(texts))
    assert not backend.is_alive()
    for call in (backend.describe, backend.snapshot, lambda: play(backend)):
        with pytest.raises(EngineLost):
            call()


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_an_idle_engine_that_is_killed_is_noticed(opened: Any) -> None:
    backend = opened()
    assert backend.is_alive()
    backend._process.kill()
    until(lambda: not backend.is_alive())


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_an_engine_that_ends_while_it_loads_is_lost(tmp_path: Path) -> None:
    with pytest.raises(EngineLost, match="killed"):
        ChildBackend.open(opening("dying", counter=tmp_path / "n"), silent)


def test_phrases_of_loading_arrive_and_loading_can_be_given_up(tmp_path: Path) -> None:
    heard: list[str] = []

    def report(phrase: str) -> None:
        heard.append(phrase)
        if phrase == "Loading slowly" and heard.count(phrase) > 2:
            raise KeyboardInterrupt

    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ChildBackend.open(opening("slow_to_open", notes=tmp_path / "pid"), report)
    assert time.monotonic() - started_s < WAIT_S
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def rounds_of(notes: Path) -> int:
    return notes.read_text().count("decode") if notes.exists() else 0


def test_cancel_acts_within_a_round_while_it_streams(opened: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    backend = opened(round_s=0.05, notes=notes)
    cancel = threading.Event()
    seen = 0
    for chunk in backend.generate(request(), cancel):
        seen += chunk.phase == "decode"
        if seen == 3:
            cancel.set()
    assert chunk.finish_reason == "cancelled"
    assert rounds_of(notes) <= 6  # three seen, one under way, what was waiting to be sent


def test_cancel_acts_while_nobody_reads(opened: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    backend = opened(round_s=0.03, notes=notes)
    cancel = threading.Event()
    with closing(backend.generate(request(), cancel)) as chunks:
        next(chunks)
        cancel.set()
        until(lambda: "done" in notes.read_text())
    assert rounds_of(notes) <= 5


def test_an_unread_reply_does_not_hold_the_engine_up(opened: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    backend = opened(round_s=0.001, reply="word " * 3000, notes=notes, context_length=9000)
    with closing(backend.generate(request(max_tokens=4000), threading.Event())) as chunks:
        next(chunks)
        until(lambda: "done" in notes.read_text())  # all of it was made, one chunk was read
        assert sum(len(chunk.tokens) for chunk in chunks) > 2900


def test_leaving_a_reply_ends_it(opened: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    backend = opened(round_s=0.03, notes=notes)
    with closing(backend.generate(request(), threading.Event())) as chunks:
        next(chunks)
    assert backend.describe().target == "demo-12m"  # answered only when the engine is free again
    assert rounds_of(notes) <= 4


def test_tokens_are_counted_while_a_reply_is_written(opened: Any) -> None:
    backend = opened(round_s=0.1)
    with closing(backend.generate(request(), threading.Event())) as chunks:
        next(chunks)
        started_s = time.monotonic()
        assert backend.count_tokens((Message("user", "hi"),)) > 0
        assert time.monotonic() - started_s < 1.0  # the reply takes several seconds


def test_measuring_crosses_and_can_be_paused(opened: Any) -> None:
    phrases = tuple(f"Measuring {n}" for n in range(20))
    backend = opened(calibration=phrases, calibration_step_s=0.05)
    cancel = threading.Event()
    heard: list[str] = []
    for phrase in backend.calibrate(cancel):
        heard.append(phrase)
        if len(heard) == 2:
            cancel.set()
    assert heard[:2] == list(phrases[:2]) and len(heard) < 6


def test_what_libraries_print_does_not_disturb(opened: Any) -> None:
    assert play(opened("busy"))[-1].finish_reason == "eos"


def test_closing_ends_the_process_in_the_middle_of_a_reply(opened: Any) -> None:
    backend = opened(round_s=0.05)
    chunks = backend.generate(request(), threading.Event())
    next(chunks)
    started_s = time.monotonic()
    backend.close()
    assert not backend._process.is_alive() and time.monotonic() - started_s < 5.0
    assert list(chunks)[-1].finish_reason == "cancelled"
    with pytest.raises(EngineLost):
        backend.describe()


PARENT = """
import sys, threading, time
from localspec.backend import Message, Request
from localspec.remote.child import ChildBackend
from tests.remote.engines import opening
notes, doing = sys.argv[1:]
if doing == "loading":
    ChildBackend.open(opening("slow_to_open", notes=notes), lambda p: None)
backend = ChildBackend.open(opening("playing", round_s=0.05, reply="word " * 999), lambda p: None)
open(notes, "w").write(str(backend._process.pid))
if doing == "writing":
    for _ in backend.generate(Request((Message("user", "hi"),)), threading.Event()):
        pass
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("doing", ["writing", "nothing", "loading"])
def test_no_engine_outlives_a_killed_parent(root: Path, tmp_path: Path, doing: str) -> None:
    notes = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(notes), doing], cwd=root) as parent:
        until(lambda: notes.exists() and notes.read_text() != "")
        pid = int(notes.read_text())
        time.sleep(0.2)
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        until(lambda: not is_running(pid))
        assert time.monotonic() - killed_s < 2.0
