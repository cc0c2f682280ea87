"""An engine's process that is stopped, not dead, while it is idle, writes or loads: unload and
retry end it, and the next message is answered by another one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from localspec.chat.service import ChatService, ReplySettings
from localspec.record.store import Store
from localspec.remote import child
from localspec.remote.child import ChildBackend
from tests.kit.engines import SLOW, forked_quickly, opening
from tests.kit.fakes import REPLY, session_info
from tests.kit.services import ask, close, ended
from tests.kit.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP"),
]


@dataclass
class Engines:
    """Opens engines. The first one writes its number and waits where `is_slow_to_open`."""

    notes: Path
    is_slow_to_open: bool
    before: set[int] = field(default_factory=lambda: _children())

    def open(self, report: Callable[[str], None]) -> ChildBackend:
        if self.is_slow_to_open:
            self.is_slow_to_open = False
            return ChildBackend.open(opening("slow_to_open", notes=self.notes), report)
        return ChildBackend.open(opening("playing", calibration=()), report)

    def stop(self) -> psutil.Process:
        (pid,) = _children() - self.before
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGSTOP)
        # One of its threads has to run to stop them all; until then the others may answer.
        until(lambda: process.status() == psutil.STATUS_STOPPED)
        return process


def _children() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(child, "SILENT_S", 0.6)
    with forked_quickly():
        ChildBackend.open(opening("playing"), lambda phrase: None).close()  # starts the forkserver
        yield


@pytest.mark.parametrize("act", [ChatService.unload, ChatService.retry])
@pytest.mark.parametrize("moment", ["idle", "writing", "loading"])
def test_a_stopped_engine_is_ended_and_another_one_answers(
    tmp_path: Path, moment: str, act: Callable[[ChatService], None]
) -> None:
    engines = Engines(tmp_path / "pid", is_slow_to_open=moment == "loading")
    store = Store.open(tmp_path / "localspec.db")
    service = ChatService(store, session_info, engines.open)
    service.start()
    reply = None
    if moment == "loading":
        until(lambda: engines.notes.exists() and engines.notes.read_text())
    else:
        until(lambda: service.status().phase == "ready")
    if moment == "writing":
        reply = service.submit(None, SLOW, ReplySettings())
        assert reply is not None
        until(lambda: reply.view.text)
    process = engines.stop()
    act(service)
    until(lambda: not process.is_running())
    if reply is not None:
        view = ended(service, reply).view
        assert view.finish_reason == "interrupted" and view.text in REPLY
        assert service.messages(reply.handle)[-1].text == view.text
    until(lambda: service.status().phase in ("ready", "unloaded"))
    assert ask(service, "And now?").view.text == REPLY
    close(service)
    assert _children() == engines.before
