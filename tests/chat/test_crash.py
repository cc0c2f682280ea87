"""A process killed in the middle of a reply loses neither the message nor what was written: the
app's process and the engine's are each killed at places spread over a reply."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from localspec.chat.service import ChatService, Reply, ReplySettings
from localspec.record.store import Store
from localspec.remote.child import ChildBackend
from tests.kit.engines import opening
from tests.kit.fakes import REPLY, FakeBackend, Script, session_info
from tests.kit.services import ask
from tests.kit.tally import Tally
from tests.kit.waiting import WAIT_S, until

NUM_APPS, NUM_ENGINES = 5, 3  # killed; an app is forked, an engine's process starts anew
NUM_KILLS = 50  # of each, where all cases are tried
SEED = 7
PAUSE_S = 0.02  # at most, from a place in the reply to the kill: about a round of the app's
BEFORE_A_WORD = 0.05  # the share of the places that lie before the first word
LATE_S = 0.5  # a tenth of a second between checkpoints, and room for other programs
ROOM = 10**6  # tokens: for a conversation of many turns
NEXT = "Still here."  # the reply of the turn after a crash


@dataclass(frozen=True)
class Moment:
    """Of a kill: once the reply has so many characters, and a pause later. The places do not depend
    on how fast the machine is."""

    length: int
    pause_s: float


def moments(num: int) -> list[Moment]:
    """A random place in each of `num` equal parts of the reply, shuffled."""
    draw = random.Random(SEED)
    shares = [(part + draw.random()) / num - BEFORE_A_WORD for part in range(num)]
    draw.shuffle(shares)
    return [Moment(max(0, int(s * len(REPLY))), PAUSE_S * draw.random()) for s in shares]


def has_come_to(reply: Reply, moment: Moment) -> bool:
    return len(reply.view.text) >= moment.length or reply.done.is_set()


def is_sound(path: Path) -> bool:
    with sqlite3.connect(path) as database:
        found = database.execute("PRAGMA integrity_check").fetchone()
    database.close()
    return bool(found == ("ok",))


@pytest.fixture
def crashing(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Forks an app for each path it is given."""
    command = [sys.executable, "-m", "tests.chat.crashing_app"]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as forger:
        yield forger


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_an_app_killed_at_any_moment_of_a_turn_loses_nothing(
    tmp_path: Path, crashing: subprocess.Popen[str], tally: Tally
) -> None:
    num_apps = tally.size(NUM_APPS, NUM_KILLS)
    path = tmp_path / "localspec.db"
    expected: list[str] = []
    interrupted: list[str] = []
    for moment in moments(num_apps):
        tally.num_cases += 1
        pid, was_kept, num_logged, num_shown = _kill_one(crashing, path, moment)
        assert is_sound(path)
        store = Store.open(path)
        store.tidy()
        stored = store.conversations()
        handle = stored[0].id if stored else None
        shown = store.branch(stored[0].tip_message_id or 0) if stored else []
        texts = [message.text for message in shown if message.role == "user"]
        if was_kept:
            expected.append(f"Are you there, {pid}?")
        if len(texts) > len(expected):  # committed just before it could be said
            expected.append(f"Are you there, {pid}?")
        assert texts == expected
        assert {m.state for m in shown} <= {"complete", "interrupted"}
        replies = [message.text for message in shown if message.role == "assistant"]
        assert all(REPLY.startswith(text) or text == NEXT for text in replies)
        is_there = shown and shown[-1].role == "assistant"
        num_kept = len(shown[-1].text) if is_there else 0
        assert num_kept >= num_logged, "what was in the log is lost"
        if tally.is_whole:
            assert num_kept >= num_shown, "what was written long ago is lost"
        interrupted += [message.text for message in shown[-1:] if message.state == "interrupted"]
        backend = FakeBackend(Script(reply=NEXT, round_s=0.0, prefill_s=0.0, context_length=ROOM))
        service = ChatService(store, session_info, lambda report, given=backend: given)
        service.start()
        assert ask(service, "And now?", handle).view.text == NEXT
        expected.append("And now?")
        service.close()
        store.close()
    tally.figures.append(f"{len(interrupted)} in the middle of a reply")
    assert len(interrupted) > num_apps // 4
    assert max(len(text) for text in interrupted) > 40, "nothing of a growing reply was kept"


def _kill_one(
    forger: subprocess.Popen[str], path: Path, moment: Moment
) -> tuple[int, bool, int, int]:
    """The killed app's process id, whether it had said that the message is kept, how much of the
    reply it had said to be in the log, and how long the reply was LATE_S before the end."""
    to, from_ = _ends(forger)
    to.write(f"{path}\n")
    to.flush()
    pid, said = int(from_.readline()), list[str]()
    while moment.length and (not said or said[-1] not in ("done\n", "over\n", "")):
        said.append(from_.readline())
        if said[-1].startswith("shown") and int(said[-1].split()[2]) >= moment.length:
            break
    time.sleep(moment.pause_s)
    killed_s = time.monotonic()
    with contextlib.suppress(ProcessLookupError):  # the turn was over before
        os.kill(pid, signal.SIGKILL)
    while not said or said[-1] != "over\n":
        said.append(from_.readline())
        assert said[-1], "the forger itself died"
    lengths = [line.split()[1:] for line in said if line.startswith("shown")]
    early = [int(length) for moment_s, length in lengths if float(moment_s) < killed_s - LATE_S]
    logged = [int(line.split()[1]) for line in said if line.startswith("logged")]
    return pid, "kept\n" in said, max(logged, default=0), max(early, default=0)


def _ends(forger: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert forger.stdin is not None and forger.stdout is not None
    return forger.stdin, forger.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.usefixtures("quick_start")
def test_an_engine_killed_at_any_moment_of_a_turn_costs_that_turn_alone(
    tmp_path: Path, tally: Tally
) -> None:
    num_engines = tally.size(NUM_ENGINES, NUM_KILLS)
    path = tmp_path / "localspec.db"
    store = Store.open(path)
    opened: list[ChildBackend] = []

    def open_backend(report: object) -> ChildBackend:
        opened.append(
            ChildBackend.open(
                opening("playing", round_s=0.004, context_length=ROOM, calibration=()),
                lambda phrase: None,
            )
        )
        return opened[-1]

    service = ChatService(store, session_info, open_backend)
    service.start()
    handle, num_interrupted = None, 0
    for number, moment in enumerate(moments(num_engines)):
        tally.num_cases += 1
        until(lambda: service.status().phase == "ready")
        reply = service.submit(handle, f"Message {number}", ReplySettings())
        assert reply is not None
        until(partial(has_come_to, reply, moment))
        time.sleep(moment.pause_s)
        for process in multiprocessing.active_children():
            process.kill()
        assert reply.done.wait(WAIT_S)
        handle = reply.handle
        assert reply.view.finish_reason in ("interrupted", "eos")
        assert REPLY.startswith(reply.view.text)
        num_interrupted += reply.view.finish_reason == "interrupted"
        again = ask(service, "And now?")
        assert again.view.finish_reason == "eos" and again.view.text == REPLY
        shown = service.messages(reply.handle)
        assert [m.text for m in shown if m.role == "user"][number] == f"Message {number}"
        assert shown[-1].text == reply.view.text and len(shown) == 2 * (number + 1)
    service.close()
    store.close()
    assert is_sound(path)
    tally.figures.append(f"{num_interrupted} in the middle of a reply")
    assert num_interrupted > num_engines // 4
    assert not any(each.is_alive() for each in opened)
    assert multiprocessing.active_children() == []
