"""A fault at every call of a session: of memory, of the model, of SQLite, of the disk, of the
engine's process and of the app's. Nothing that was taken or shown is lost, and the next turn
works."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils.chat_template_utils import render_jinja_template

from localspec.chat import template
from localspec.chat.backend_lifecycle import Opener
from localspec.chat.local import LocalBackend
from localspec.chat.service import ChatService, ReplySettings
from localspec.core.backend import Backend, Chunk, Request
from localspec.core.options import LoadOptions
from localspec.loading.local_backend import open_local_backend
from localspec.record.store import Store
from localspec.remote.child import ChildBackend
from tests.endurance.copies import in_a_copy
from tests.endurance.session import EDITED, TURNS, WAIT_S, Fault, play, quick_fake
from tests.kit.engines import forked_quickly, opening
from tests.kit.fakes import session_info
from tests.kit.tally import Tally

Report = Callable[[str], None]
NUM_PERSISTENT = 40  # calls for which a fault lasts that does not pass at once


def never() -> BaseException:
    return AssertionError("this fault never strikes")


# SQLite


class Watched(sqlite3.Connection):
    """Asks `fault` before every statement on a file."""

    fault: Fault

    def __init__(self, database: str, *arguments: Any, **named: Any) -> None:
        super().__init__(database, *arguments, **named)
        self._is_of_file = database != ":memory:"

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        if self._is_of_file:
            self.fault.strike()
        return super().execute(*arguments)


@pytest.fixture
def watch_sqlite(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Fault], None]]:
    real = sqlite3.connect

    def watch(fault: Fault) -> None:
        watched = type("WatchedByOne", (Watched,), {"fault": fault})
        monkeypatch.setattr(sqlite3, "connect", partial(real, factory=watched))

    yield watch


LOCKED, FULL, BROKEN = "database is locked", "database or disk is full", "disk I/O error"


@pytest.mark.slow
def test_a_fault_of_sqlite_at_any_statement_loses_nothing(
    tmp_path: Path, watch_sqlite: Callable[[Fault], None], tally: Tally
) -> None:
    counted = Fault(never, at=10**9)
    watch_sqlite(counted)
    play(tmp_path, counted)
    tally.figures.append(f"{counted.num_calls} statements")
    cases = [
        (at, words, num)
        for at in range(1, counted.num_calls + 1)
        for words in (LOCKED, FULL, BROKEN)
        for num in (1, NUM_PERSISTENT)
    ]
    for at, words, num in tally.some(cases, quick=12):
        fault = Fault(lambda said=words: sqlite3.OperationalError(said), at, num)
        watch_sqlite(fault)
        with (
            tally.case(f"{words!r} at statement {at} and the {num - 1} after it"),
            tempfile.TemporaryDirectory(dir=tmp_path) as folder,
        ):
            play(Path(folder), fault)


class Kill(Fault):
    """Ends this process at a call."""

    def strike(self) -> None:
        self.num_calls += 1
        if self.num_calls == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def _converse(path: Path, taken: Connection | None = None) -> None:
    """Two turns, one edited, a title, a copy. taken: told of each message that was taken."""
    store = Store.open(path)
    service = ChatService(store, session_info, quick_fake)
    service.start()
    handle, asked = None, [*TURNS[:2], EDITED]
    for text in asked:
        if text == EDITED:
            first = service.messages(handle)[0].message_id
            reply = service.edit(handle or 0, first or 0, text, ReplySettings())
        else:
            reply = service.submit(handle, text, ReplySettings())
        assert reply is not None
        if taken is not None:
            taken.send(text)
        assert reply.done.wait(WAIT_S) and service.flush()
        handle = reply.handle
    service.rename(handle or 0, "another title")
    service.copy(handle or 0)
    service.close()
    store.close()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_an_app_killed_at_any_statement_loses_nothing(
    tmp_path: Path, watch_sqlite: Callable[[Fault], None], tally: Tally
) -> None:
    forked = multiprocessing.get_context("fork")
    counted = Fault(never, at=10**9)
    watch_sqlite(counted)
    _converse(tmp_path / "whole.db")
    tally.figures.append(f"{counted.num_calls} statements")
    for at in tally.some(range(1, counted.num_calls + 1), quick=6):
        watch_sqlite(Kill(never, at))
        path = tmp_path / f"{at}.db"
        near, far = forked.Pipe(duplex=False)
        process = forked.Process(target=_converse, args=(path, far))
        process.start()
        far.close()
        taken = set[str]()
        with closing(near), suppress(EOFError):
            while True:
                taken.add(near.recv())
        process.join()
        watch_sqlite(Fault(never))
        with tally.case(f"killed at statement {at}"):
            assert process.exitcode in (0, -signal.SIGKILL)  # not every run has as many
            _check_killed(path, taken)


def _check_killed(path: Path, taken: set[str]) -> None:
    with closing(Store.open(path)) as store:
        store.tidy()
        assert store.notices == (), store.notices
        found = [m for each in store.conversations() for m in store.messages(each.id)]
        assert taken <= {message.text for message in found}, f"{taken} were taken"
        assert "draft" not in {message.state for message in found}
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    _converse(path)


# a disk that fills up


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a small disk")
def test_a_disk_that_is_full_at_any_size_loses_nothing(tmp_path: Path, tally: Tally) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        return subprocess.run(command, capture_output=True).returncode == 0

    if not mount("size=64k"):
        pytest.skip("a small disk cannot be made here: mounting is not permitted")
    subprocess.run(["umount", "-l", str(disk)], check=True)
    for pages in tally.some(range(4, 200, 2), quick=3):
        with tally.case(f"a disk of {4 * pages} KiB"):
            assert mount(f"size={4 * pages}k")

            class Freed(Fault):
                def heal(self) -> None:
                    mount("remount,size=64m")

            try:
                play(disk, Freed(never))
            finally:
                subprocess.run(["umount", "-l", str(disk)], check=True)


# the model and its memory


class EveryOperation(TorchDispatchMode):
    """Every operation of torch allocates."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._fault.strike()
        return func(*args, **(kwargs or {}))


class Hit:
    """The local backend whose forwards, or operations, ask `fault`; nothing is measured, so that
    the calls are the same every time."""

    def __init__(self, backend: LocalBackend, fault: Fault, is_each_operation: bool) -> None:
        self._backend, self._fault, self._is_each = backend, fault, is_each_operation
        if not is_each_operation:
            target: Any = backend.loaded.engine.target
            forward = target.forward

            def faulty(*arguments: Any, **named: Any) -> Any:
                fault.strike()
                return forward(*arguments, **named)

            target.forward = faulty

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def calibrate(self, cancel: threading.Event) -> Iterator[str]:
        return iter(())

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        chunks = self._backend.generate(request, cancel)
        return self._watched(chunks) if self._is_each else chunks

    def _watched(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        while True:
            with EveryOperation(self._fault):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk


def short_of_cuda() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def short_of_memory() -> BaseException:
    return MemoryError()


def wrong() -> BaseException:
    return RuntimeError("shape '[1, 2]' is invalid for input of size 3")


FAULTS = (short_of_cuda, short_of_memory, wrong)


def hitting(backend: LocalBackend, fault: Fault, is_each_operation: bool) -> Opener:
    return lambda report: Hit(backend, fault, is_each_operation)  # type: ignore[return-value]


class Rendering:
    """Renders templates in this process: to start one for them takes longer than a session."""

    def render(self, asked: Mapping[str, Any]) -> str:
        return str(render_jinja_template(**asked)[0][0])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("is_each_operation", [False, True], ids=["forward", "allocation"])
def test_a_fault_of_the_model_at_any_call_loses_nothing(
    tmp_path: Path,
    pair_options: LoadOptions,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
    is_each_operation: bool,
) -> None:
    """Each case in a copy of this process: one load serves all."""
    monkeypatch.setattr(template, "template_process", Rendering)
    backend = open_local_backend(pair_options, None, lambda phrase: None)

    def play_one(fault: Fault) -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            opener = hitting(backend, fault, is_each_operation)
            play(Path(folder), fault, opener, max_tokens=3, turns=("The only one.",))
        return fault.num_calls

    num_calls = in_a_copy(partial(play_one, Fault(never, at=10**9)))
    tally.figures.append(f"{num_calls} calls")
    # The first third has every call once, with one fault after the other.
    turned = [[*FAULTS[by:], *FAULTS[:by]] for by in range(len(FAULTS))]
    calls = range(1, num_calls + 1)
    cases = [(at, faults[at % len(FAULTS)]) for faults in turned for at in calls]
    for at, make in tally.some(cases, quick=6):
        with tally.case(f"{make.__name__} at call {at}"):
            in_a_copy(partial(play_one, Fault(make, at)))
    backend.close()


# the engine's process


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_an_engine_that_dies_at_any_call_costs_its_turn_alone(tmp_path: Path, tally: Tally) -> None:
    """Calls are counted by the lines of a file, so that the engine after it lives."""
    with forked_quickly():
        _play_in_a_child(tmp_path, 10**9)
        num_calls = len((tmp_path / "calls").read_text())
        tally.figures.append(f"{num_calls} calls")
        for at in tally.some(range(1, num_calls + 1), quick=1):
            folder = tmp_path / str(at)
            folder.mkdir()
            with tally.case(f"dies at call {at}"):
                _play_in_a_child(folder, at)


def _play_in_a_child(folder: Path, at: int) -> None:
    def open_backend(report: Report) -> Backend:
        return ChildBackend.open(opening("dying_at", calls=folder / "calls", at=at), report)

    class Healed(Fault):
        def heal(self) -> None:
            (folder / "healed").touch()

    play(folder, Healed(never), open_backend)
