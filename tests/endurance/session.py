"""A scripted session of the chat for faults to hit, and what must still be there afterwards.

`play` loads, takes its turns, edits a message, stops a reply and exports, while the caller's
`Fault` strikes; then the fault is gone, and one more turn must work. Every message that was taken
and every word that a reply showed must be in the log, in this run and after the next start; every
refusal must be a sentence of ours.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from localspec.chat.backend_lifecycle import Opener
from localspec.chat.service import ChatService, Reply, ReplySettings, Scope
from localspec.core.errors import LocalspecError
from localspec.record.store import Store
from tests.kit.fakes import FIVE_WORDS, FakeBackend, session_info
from tests.kit.waiting import until

TURNS = ("First of three.", "Second of three.", "Third of three.")
EDITED, STOPPED, LAST = "First, but edited.", "To be stopped.", "And now?"
WAIT_S = 30.0
BUG = "unexpected fault"
T = TypeVar("T")


@dataclass
class Fault:
    """Strikes at calls `at` to `at + num` of `strike`, as long as it is armed; counts them all."""

    make: Callable[[], BaseException]
    at: int = 0
    num: int = 1
    num_calls: int = 0
    is_armed: bool = True

    def strike(self) -> None:
        self.num_calls += 1
        if self.is_armed and 0 <= self.num_calls - self.at < self.num:
            raise self.make()

    def heal(self) -> None:
        self.is_armed = False


def quick_fake(report: Callable[[str], None]) -> FakeBackend:
    return FakeBackend(FIVE_WORDS)


@dataclass
class Said:
    """What the person saw. sent: messages that were taken. shown: replies as the page had them."""

    sent: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    num_turns: int = 0

    def refused(self, error: str | None) -> None:
        if error is not None:
            self.refusals.append(error)


def play(
    folder: Path,
    fault: Fault,
    opener: Opener = quick_fake,
    max_tokens: int = 512,
    turns: Sequence[str] = TURNS,
) -> None:
    """Play the session on a log in `folder`. Raises AssertionError for a loss."""
    said, settings = Said(), ReplySettings(max_tokens=max_tokens)
    path = folder / "localspec.db"
    store = Store.open(path, busy_timeout_ms=20)
    service = ChatService(store, session_info, opener)
    try:
        service.start()
        until(lambda: service.status().phase in ("ready", "failed", "calibrating"), WAIT_S)
        handle = _converse(service, said, settings, turns)
        _try(said, lambda: service.export(Scope(), "jsonl", folder / "broken.jsonl"))
        fault.heal()
        _recover(service, said, handle, settings)
        _check(said, service.store)
        service.export(Scope(), "jsonl", folder / "out.jsonl")
        exported = (folder / "out.jsonl").read_text()
        assert all(text in exported for text in said.sent), "the export lacks a message"
    finally:
        fault.heal()
        service.close()
        store.close()
    if store.path is not None:
        with closing(Store.open(path)) as again:
            assert again.notices == (), again.notices
            again.tidy()
            if store.logs_text:
                _check(said, again)
            else:  # whether texts may be written could not be read: none is, and it is said
                assert any("text" in notice for notice in store.notices), store.notices
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    else:
        assert any("in memory only" in notice for notice in store.notices), store.notices
    for refusal in said.refusals:
        assert refusal.endswith((".", "?")) and BUG not in refusal, refusal


def _converse(
    service: ChatService, said: Said, settings: ReplySettings, turns: Sequence[str]
) -> int | None:
    handle: int | None = None
    for text in turns:
        reply = _say(service, said, handle, text, settings)
        handle = handle if reply is None else reply.handle
    if handle is None:
        return None
    known = handle
    shown = _try(said, lambda: service.messages(known)) or []
    ids = [message.message_id for message in shown if message.message_id is not None]
    if ids:
        edited = _try(said, lambda: service.edit(known, ids[0], EDITED, settings))
        _follow(said, edited, EDITED)
    stopped = _try(said, lambda: service.submit(known, STOPPED, settings))
    if stopped is not None:
        until(lambda: stopped.view.text or stopped.done.is_set(), WAIT_S)
        service.stop(stopped)
    _follow(said, stopped, STOPPED)
    return handle


def _say(
    service: ChatService, said: Said, handle: int | None, text: str, settings: ReplySettings
) -> Reply | None:
    reply = _try(said, lambda: service.submit(handle, text, settings))
    _follow(said, reply, text)
    return reply


def _follow(said: Said, reply: Reply | None, text: str) -> None:
    """Wait for a reply to a message that was taken."""
    if reply is None:
        return
    said.sent.append(text)
    assert reply.done.wait(WAIT_S), f"the reply to {text!r} never ended"
    said.shown.append(reply.view.text)
    said.refused(reply.view.error)


def _try(said: Said, act: Callable[[], T]) -> T | None:
    try:
        return act()
    except LocalspecError as error:
        said.refused(str(error))
        return None


def _recover(service: ChatService, said: Said, handle: int | None, settings: ReplySettings) -> None:
    """The fault is gone: everything is written, and the next turn works."""
    if service.status().phase == "failed":
        said.refused(service.status().phrase)
        service.retry()
    until(lambda: service.status().phase == "ready", WAIT_S)
    until(service.flush, WAIT_S)
    reply = _say(service, said, handle, LAST, settings)
    assert reply is not None, f"the next turn was refused: {said.refusals[-1]}"
    assert reply.view.finish_reason in ("eos", "length"), reply.view.error
    assert reply.view.text, "the next turn's reply is empty"
    until(service.flush, WAIT_S)
    assert service.status().notices == service.store.notices or service.journal.notice is None


def _check(said: Said, store: Store) -> None:
    """Everything that was said is in the log, once."""
    found = [m for each in store.conversations() for m in store.messages(each.id)]
    asked = Counter(message.text for message in found if message.role == "user")
    assert asked == Counter(said.sent), f"sent {said.sent}, stored {dict(asked)}"
    replies = Counter(message.text for message in found if message.role == "assistant")
    lost = Counter(said.shown) - replies
    assert not lost, f"replies that are not in the log: {dict(lost)}"
