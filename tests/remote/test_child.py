"""The engine's process behind the seam: all that a backend promises, and its sudden end."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from localspec.core.backend import Backend, Chunk, Message, Request
from localspec.core.errors import (
    ContextOverflow,
    EngineLost,
    LocalspecError,
    MemoryShortage,
    RequestError,
)
from localspec.remote import child, wire
from localspec.remote.child import ChildBackend
from tests.kit.engines import (
    CONTEXT_LENGTH,
    HI,
    JUDGED,
    LONG,
    PHRASES,
    SLOW,
    opening,
)
from tests.kit.fakes import REPLY, FakeBackend, Script
from tests.kit.waiting import WAIT_S, until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_start")]  # starts child processes


def silent(phrase: str) -> None:
    pass


@pytest.fixture
def open_engine() -> Iterator[Any]:
    """Open engines by name; all are closed at the end, and leave no process."""
    found: list[ChildBackend] = []
    before = set(multiprocessing.active_children())

    def make(name: str = "playing", **keywords: Any) -> ChildBackend:
        found.append(ChildBackend.open(opening(name, **keywords), silent))
        return found[-1]

    yield make
    for backend in found:
        backend.close()
    assert set(multiprocessing.active_children()) <= before


# Rounds of a slow reply between a cancel and the end: one is under way, and the cancel has its way
# to go. A whole reply has 103.
MOST_ROUNDS_LATER = 4


@dataclass
class Shared:
    """An engine that no test ends. notes: it writes a line for each round there."""

    backend: ChildBackend
    notes: Path

    @property
    def num_rounds(self) -> int:
        return self.notes.read_text().count("decode")

    @property
    def is_done(self) -> bool:
        return "done" in self.notes.read_text()


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    notes = tmp_path_factory.mktemp("shared") / "notes"
    backend = ChildBackend.open(opening("playing", notes=notes), silent)
    yield Shared(backend, notes)
    backend.close()


@pytest.fixture
def shared(shared_engine: Shared) -> Iterator[Shared]:
    shared_engine.notes.write_text("")
    yield shared_engine
    assert (
        shared_engine.backend.is_alive() and play(shared_engine.backend)[-1].finish_reason == "eos"
    )


def request(text: str = HI, **more: Any) -> Request:
    return Request((Message("user", text),), **more)


def play(backend: Backend, text: str = HI) -> list[Chunk]:
    return list(backend.generate(request(text), threading.Event()))


def test_every_method_of_the_seam_is_passed_on() -> None:
    methods = {n for n, _ in inspect.getmembers(Backend, inspect.isfunction) if n[0] != "_"}
    assert len(methods) > 7
    assert {name for name in methods if name not in vars(ChildBackend)} == set()


def test_a_turn_is_what_the_same_backend_gives_in_one_process(shared: Shared) -> None:
    direct = play(FakeBackend(Script(round_s=0.001)))
    found = play(shared.backend)
    assert "".join(chunk.text for chunk in found) == REPLY
    assert [(c.phase, c.text, c.tokens, c.provenance, c.finish_reason) for c in found] == [
        (c.phase, c.text, c.tokens, c.provenance, c.finish_reason) for c in direct
    ]
    assert found[-1].stats.num_accepted_tokens == direct[-1].stats.num_accepted_tokens > 0


def test_description_snapshot_and_counts_cross(shared: Shared) -> None:
    here = FakeBackend(Script(context_length=CONTEXT_LENGTH, calibration=PHRASES))
    messages = (Message("user", "one two three 👩‍👩‍👧 \0"),)
    assert shared.backend.describe() == here.describe()
    for tools in ((), ({"type": "function", "function": {"name": "look"}},)):
        assert shared.backend.count_tokens(messages, tools) == here.count_tokens(messages, tools)
    asked = Request(messages)
    assert shared.backend.prompt_tokens(asked) == here.prompt_tokens(asked)
    assert set(shared.backend.snapshot()) == {"num_rounds"}
    assert list(shared.backend.review(asked, threading.Event())) == [JUDGED]


def test_replies_run_beside_each_other_and_calls_that_need_no_engine_between(
    shared: Shared,
) -> None:
    cancel = threading.Event()
    slow = shared.backend.generate(request(LONG, max_tokens=4000), cancel)
    next(slow)
    beside = play(shared.backend)
    assert beside[-1].finish_reason == "eos"
    assert shared.backend.describe().target and shared.backend.snapshot()
    head = [next(slow) for _ in range(2)]
    assert head[-1].finish_reason is None
    num_ended = list[int]()

    def measure() -> None:
        next(iter(shared.backend.calibrate(threading.Event())))
        num_ended.append(shared.notes.read_text().count("done"))

    measuring = threading.Thread(target=measure)
    measuring.start()
    measuring.join(0.05)  # time to ask; it needs the engine to itself
    cancel.set()
    assert list(slow)[-1].finish_reason == "cancelled"
    measuring.join(WAIT_S)
    assert num_ended == [2], "both replies came to their end before"


def test_an_error_of_ours_while_loading_arrives_as_itself(open_engine: Any) -> None:
    with pytest.raises(ContextOverflow, match="set max tokens to 324") as found:
        open_engine("overflowing")
    assert (found.value.num_prompt_tokens, found.value.context_length) == (700, 1024)


def test_errors_in_a_call_leave_the_engine_usable(shared: Shared) -> None:
    with pytest.raises(MemoryShortage, match="1 GiB more"):
        play(shared.backend, "shortage")
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        play(shared.backend, "bug")
    with pytest.raises(RuntimeError, match=r"OddError: who am I\?"):
        play(shared.backend, "odd")
    with pytest.raises(RuntimeError, match="PanicException: index out of bounds"):
        play(shared.backend, "panic")
    with pytest.raises(RuntimeError, match="PanicException"):
        shared.backend.count_tokens((Message("user", "panic in counting"),))
    with pytest.raises(ContextOverflow):
        play(shared.backend, "word " * CONTEXT_LENGTH)


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
    open_engine: Any, deed: str, said: str
) -> None:
    backend = open_engine()
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
def test_an_idle_engine_that_is_killed_is_noticed(open_engine: Any) -> None:
    others = multiprocessing.active_children()
    backend = open_engine()
    assert backend.is_alive()
    (process,) = [one for one in multiprocessing.active_children() if one not in others]
    process.kill()
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

    with pytest.raises(KeyboardInterrupt):
        ChildBackend.open(opening("slow_to_open", notes=tmp_path / "pid"), report)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not is_running(pid))


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_close_ends_what_the_engine_started(open_engine: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    backend = open_engine("with_a_stopped_child", notes=notes)
    started = psutil.Process(int(notes.read_text()))
    assert started.is_running()
    backend.close()
    until(lambda: not started.is_running() or started.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
@pytest.mark.parametrize("is_stopped", [False, True], ids=["asleep", "stopped"])
def test_a_load_that_stands_still_is_ended_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    notes = tmp_path / "pid"

    def report(phrase: str) -> None:
        if phrase == "Loading slowly":  # before, the process may have to wait for a processor
            monkeypatch.setattr(child, "STILL_S", 0.6)
            if is_stopped:
                os.kill(int(notes.read_text()), signal.SIGSTOP)

    with pytest.raises(LocalspecError, match=r"stood still .* does not answer\. See that") as found:
        ChildBackend.open(opening("slow_to_open", notes=notes), report)
    assert not isinstance(found.value, EngineLost), "it would only stand still again"
    until(lambda: not is_running(int(notes.read_text())))


def test_a_load_that_works_has_no_limit(
    open_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look finds that the process has taken more processor time, as if it always had some."""
    num_looks = count(1)

    class Working(psutil.Process):
        def cpu_times(self) -> Any:
            number = next(num_looks)
            if number == 20:
                (tmp_path / "go").touch()
            return SimpleNamespace(user=number / 100, system=0.0)

    monkeypatch.setattr(child, "OPENING_LOOK_S", 0.01)
    monkeypatch.setattr(child, "STILL_S", 0.1)  # half of the looks
    with monkeypatch.context() as patched:
        patched.setattr(child, "psutil", SimpleNamespace(Process=Working, Error=psutil.Error))
        backend = open_engine("silent_to_open", go_on=tmp_path / "go")
    assert backend.is_alive()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_cancel_acts_within_a_round_while_it_streams(shared: Shared) -> None:
    cancel = threading.Event()
    seen = 0
    for chunk in shared.backend.generate(request(SLOW), cancel):
        seen += chunk.phase == "decode"
        if seen == 3:
            num_before = shared.num_rounds
            cancel.set()
    assert chunk.finish_reason == "cancelled"
    assert shared.num_rounds <= num_before + MOST_ROUNDS_LATER


def test_cancel_acts_while_nobody_reads(shared: Shared) -> None:
    cancel = threading.Event()
    with closing(shared.backend.generate(request(SLOW), cancel)) as chunks:
        next(chunks)
        num_before = shared.num_rounds
        cancel.set()
        until(lambda: shared.is_done)
    assert shared.num_rounds <= num_before + MOST_ROUNDS_LATER


def test_an_unread_reply_does_not_hold_the_engine_up(shared: Shared) -> None:
    asked = request(LONG, max_tokens=4000)
    with closing(shared.backend.generate(asked, threading.Event())) as chunks:
        next(chunks)
        until(lambda: shared.is_done)  # all of it was made, one chunk was read
        assert sum(len(chunk.tokens) for chunk in chunks) > 2900


def test_leaving_a_reply_ends_it(shared: Shared) -> None:
    with closing(shared.backend.generate(request(SLOW), threading.Event())) as chunks:
        next(chunks)
        num_before = shared.num_rounds
    shared.backend.describe()  # answered only when the engine is free again
    assert shared.num_rounds <= num_before + MOST_ROUNDS_LATER


def test_tokens_are_counted_while_a_reply_is_written(shared: Shared) -> None:
    with closing(shared.backend.generate(request(SLOW), threading.Event())) as chunks:
        next(chunks)
        assert shared.backend.count_tokens((Message("user", "hi"),)) > 0
        assert not shared.is_done


def test_measuring_crosses_and_can_be_paused(shared: Shared) -> None:
    cancel = threading.Event()
    heard: list[str] = []
    for phrase in shared.backend.calibrate(cancel):
        heard.append(phrase)
        if len(heard) == 2:
            cancel.set()
    assert len(heard) < len(PHRASES)  # a late reader hears the latest phrase, not each
    assert heard == [phrase for phrase in PHRASES if phrase in heard]


class Process:
    """The engine's process as the other end of a pipe, without one."""

    exitcode = -signal.SIGTERM
    pid = 2**31 - 1  # of no process

    def __init__(self, far_end: Connection) -> None:
        self.far_end = far_end

    def is_alive(self) -> bool:
        return not self.far_end.closed

    def kill(self) -> None:
        self.far_end.close()

    def join(self, timeout: float) -> None:
        pass


@dataclass
class Mute:
    """A backend whose process reads nothing. While `beats` is set it says that it runs."""

    backend: ChildBackend
    process: Process
    beats: threading.Event

    def beat(self) -> None:
        while self.process.is_alive() and self.beats.is_set():
            wire.send(self.process.far_end, wire.packed(wire.Items(wire.OPEN_CALL, [])))
            time.sleep(0.02)


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mute]:
    monkeypatch.setattr(wire, "BEAT_S", 0.05)
    monkeypatch.setattr(child, "SILENT_S", 1.0)  # fifty beats of `Mute`
    monkeypatch.setattr(child, "COUNT_SILENT_S", 60.0)  # or a count gives up at the same moment
    monkeypatch.setattr(child, "COUNT_S", 60.0)
    pipe, far_end = multiprocessing.Pipe()
    process: Any = Process(far_end)
    made = Mute(ChildBackend(process, pipe), process, threading.Event())
    made.beats.set()
    beating = threading.Thread(target=made.beat)
    beating.start()
    made.backend.start()
    yield made
    made.beats.clear()
    beating.join()
    made.backend.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda backend: backend.describe(),
        lambda backend: list(backend.generate(request(), threading.Event())),
        lambda backend: backend.count_tokens((Message("user", "x" * 1_000_000),)),
    ],
    ids=["ask", "stream", "larger than the pipe"],
)
def test_a_process_that_falls_silent_is_killed_and_lost(mute: Mute, call: Any) -> None:
    mute.beats.clear()
    with pytest.raises(EngineLost, match="stands still"):
        call(mute.backend)
    assert not mute.process.is_alive() and not mute.backend.is_alive()


def test_a_count_waits_its_time_alone_and_a_beating_engine_is_not_lost(
    mute: Mute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "COUNT_S", 0.1)
    for text in ("hi", "x" * 1_000_000):
        with pytest.raises(EngineLost, match="does not answer"):
            mute.backend.count_tokens((Message("user", text),))
    assert mute.backend.is_alive() and mute.process.is_alive()


def test_a_reply_that_does_not_heed_its_cancel_is_given_up(
    mute: Mute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "STOP_S", 0.1)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(EngineLost, match="does not answer"):
        list(mute.backend.generate(request(), cancel))


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_a_stopped_process_is_ended(open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SILENT_S", 0.6)
    others = multiprocessing.active_children()
    backend = open_engine()
    (process,) = [one for one in multiprocessing.active_children() if one not in others]
    with pytest.raises(EngineLost, match="stands still"):
        for chunk in backend.generate(request(SLOW), threading.Event()):
            if chunk.phase == "prefill":
                os.kill(process.pid, signal.SIGSTOP)
    until(lambda: not process.is_alive())


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_a_page_does_not_wait_for_a_count_by_a_stopped_process(
    open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "COUNT_S", 600.0)
    others = multiprocessing.active_children()
    backend = open_engine()
    (process,) = [one for one in multiprocessing.active_children() if one not in others]
    os.kill(process.pid, signal.SIGSTOP)
    # One of its threads has to run to stop them all; until then the others may answer.
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    with pytest.raises(EngineLost, match="does not answer"):
        backend.count_tokens((Message("user", "hi"),))
    assert backend.is_alive(), "the process may still go on"
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: counts(backend))


def counts(backend: ChildBackend) -> bool:
    try:
        return backend.count_tokens((Message("user", "hi"),)) > 0
    except EngineLost:
        return False


def test_what_libraries_print_does_not_disturb(open_engine: Any) -> None:
    assert play(open_engine("busy"))[-1].finish_reason == "eos"


def test_closing_ends_the_process_in_the_middle_of_a_reply(
    open_engine: Any, tmp_path: Path
) -> None:
    others = multiprocessing.active_children()
    backend = open_engine(notes=tmp_path / "notes")
    chunks = backend.generate(request(SLOW), threading.Event())
    next(chunks)
    backend.close()
    assert "done" not in (tmp_path / "notes").read_text()
    assert set(multiprocessing.active_children()) <= set(others)
    for call in (lambda: list(chunks), backend.describe):
        with pytest.raises(EngineLost):
            call()


PARENT = """
import multiprocessing, sys, threading, time
from localspec.core.backend import Message, Request
from localspec.remote.child import ChildBackend
from tests.kit.engines import opening
notes, doing = sys.argv[1:]
if doing == "loading":
    ChildBackend.open(opening("slow_to_open", notes=notes), lambda p: None)
backend = ChildBackend.open(opening("playing"), lambda p: None)
open(notes, "w").write(str(multiprocessing.active_children()[0].pid))
if doing == "writing":
    for _ in backend.generate(Request((Message("user", "slow"),)), threading.Event()):
        pass
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("doing", ["writing", "loading"])
def test_no_engine_outlives_a_killed_parent(root: Path, tmp_path: Path, doing: str) -> None:
    notes = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(notes), doing], cwd=root) as parent:
        until(lambda: notes.exists() and notes.read_text() != "")
        pid = int(notes.read_text())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
        until(lambda: not is_running(pid))
