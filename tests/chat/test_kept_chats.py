"""What is read of a chat is kept on the disk while the chat is in the log, and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.chat.service import ChatService, ReplySettings
from localspec.core.decoding import OFF
from localspec.formats.prefix_files import USUAL_BYTES, PrefixFiles
from localspec.record.store import Store
from tests.kit.fakes import FakeBackend, Script
from tests.kit.services import ask, close, ended, open_service
from tests.kit.waiting import until

NAME = f"rows-{'0' * 32}-{{:032x}}.prefix"


@pytest.fixture(autouse=True)
def idle_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.chat.worker.IDLE_TASK_S", 0.02)
    monkeypatch.setattr("localspec.chat.worker.WATCH_S", 0.02)


def written(folder: Path, owner: int, number: int = 1) -> Path:
    """A file that an engine has written for a chat."""
    name = NAME.format(number)
    assert PrefixFiles(folder / "prefixes").write(name, [1], {}, [], owner)
    return folder / "prefixes" / name


def stored_id(service: ChatService, handle: int) -> int:
    found = service.journal.conversation(handle).stored_id
    assert found is not None
    return found


def test_a_request_names_the_chat_with_which_it_is_kept(
    service_and_fake: tuple[ChatService, FakeBackend],
) -> None:
    service, backend = service_and_fake
    handle = ask(service).handle
    assert backend.requests[-1].kept_with == stored_id(service, handle)
    ask(service, "more", handle)
    assert backend.requests[-1].kept_with == stored_id(service, handle)


def test_texts_that_are_not_logged_are_never_kept_on_the_disk(
    service_and_fake: tuple[ChatService, FakeBackend],
) -> None:
    """Nor those of a chat whose beginning was not logged."""
    service, backend = service_and_fake
    service.store.logs_text = False
    private = ask(service).handle
    assert backend.requests[-1].kept_with is None
    until(lambda: backend.kept)
    assert backend.kept == [None], "what was read is kept in memory"
    service.store.logs_text = True
    ask(service, "more", private)
    assert backend.requests[-1].kept_with is None
    ask(service, "another chat")
    assert backend.requests[-1].kept_with is not None


def test_what_was_read_is_kept_once_after_a_reply(
    service_and_fake: tuple[ChatService, FakeBackend],
) -> None:
    service, backend = service_and_fake
    ask(service)
    until(lambda: backend.kept)
    assert backend.kept == [USUAL_BYTES]
    ask(service)
    until(lambda: len(backend.kept) == 2)


def test_a_message_ends_the_keeping_and_the_rest_is_kept_after_its_reply(tmp_path: Path) -> None:
    service, backend = open_service(tmp_path, Script(round_s=0.001, keep_s=30.0))
    ask(service)
    until(lambda: backend.kept)
    reply = service.submit(None, "do not wait", ReplySettings(drafter=OFF))
    assert ended(service, reply).view.finish_reason == "eos"
    until(lambda: len(backend.kept) == 2)
    close(service)


def test_a_deleted_chat_takes_its_files_along(
    service_and_fake: tuple[ChatService, FakeBackend], tmp_path: Path
) -> None:
    service, backend = service_and_fake
    first, second = ask(service, "one").handle, ask(service, "two").handle
    paths = [
        written(tmp_path, stored_id(service, handle), number)
        for number, handle in enumerate((first, second))
    ]
    service.delete(first)
    assert [path.exists() for path in paths] == [False, True]
    assert backend.forgotten == [stored_id(service, first)]
    message = service.messages(second)[0].message_id
    assert message is not None
    service.delete_message(second, message)
    assert not paths[1].exists()


def test_a_start_deletes_what_belongs_to_no_chat(tmp_path: Path) -> None:
    """As after a log was deleted by hand, or a process was killed."""
    service, _ = open_service(tmp_path)
    handle = ask(service).handle
    owner = stored_id(service, handle)
    close(service)
    kept, lost = written(tmp_path, owner), written(tmp_path, owner + 1, 2)
    service, _ = open_service(tmp_path)
    assert (kept.exists(), lost.exists()) == (True, False)
    close(service)


def test_the_limit_is_kept_and_0_keeps_nothing(tmp_path: Path) -> None:
    service, backend = open_service(tmp_path)
    owner = stored_id(service, ask(service).handle)
    path = written(tmp_path, owner)
    service.kept_chats.limit(0)
    assert not path.exists()
    ask(service)
    until(lambda: backend.kept and backend.kept[-1] == 0)
    close(service)
    service, _ = open_service(tmp_path)
    assert service.kept_chats.gigabytes == 0
    service.kept_chats.limit(2.5, is_lasting=False)
    assert service.kept_chats.disk_bytes == 2_500_000_000
    close(service)
    service, _ = open_service(tmp_path)
    assert service.kept_chats.gigabytes == 0
    close(service)


def test_a_log_in_memory_keeps_nothing_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "localspec.db").mkdir()
    store = Store.open(tmp_path / "localspec.db")
    assert store.path is None
    service, backend = open_service(tmp_path, store=store)
    service.delete(ask(service).handle)
    ask(service)
    until(lambda: backend.kept)
    assert backend.kept[-1] is None
    close(service)
