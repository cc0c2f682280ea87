"""A running service on the fake backend and a log in a folder, for the tests of conversations."""

from __future__ import annotations

from pathlib import Path

from localspec.chat.service import ChatService, Reply, ReplySettings
from localspec.record.store import Store
from tests.kit.fakes import BreakableStore, FakeBackend, Script, session_info
from tests.kit.waiting import WAIT_S, until

FAST = Script(reply="One two three four five six seven eight nine ten.", round_s=0.001)


def open_service(
    folder: Path, script: Script = FAST, store: Store | None = None
) -> tuple[ChatService, FakeBackend]:
    backend = FakeBackend(script)
    log = store or BreakableStore.open(folder / "localspec.db", busy_timeout_ms=200)
    service = ChatService(log, session_info, lambda report: backend)
    service.start()
    until(lambda: service.status().phase == "ready")
    service.flush()  # the log is tidied
    return service, backend


def close(service: ChatService) -> None:
    service.close()
    service.store.close()


def ended(service: ChatService, reply: Reply | None) -> Reply:
    """The reply, when it has ended and is stored."""
    assert reply is not None
    assert reply.done.wait(WAIT_S)
    service.journal.flush()
    return reply


def ask(
    service: ChatService, text: str = "hi", handle: int | None = None, max_tokens: int = 512
) -> Reply:
    """Return the reply to a message, when it has ended and is stored."""
    settings = ReplySettings(max_tokens=max_tokens)
    return ended(service, service.submit(handle, text, settings))


def texts(service: ChatService, handle: int) -> list[str]:
    return [message.text for message in service.messages(handle)]
