"""What was exported comes back whole; a file that is wrong anywhere brings in nothing."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.importing import MAX_BYTES, file, read_conversations
from localspec.chat.service import ReplySettings
from localspec.core.errors import RequestError
from localspec.record.export import Scope, export
from localspec.record.store import Store
from tests.kit.samples import SETTINGS, begin, finish
from tests.kit.services import ask, close, ended, open_service, texts

NASTY = "👩‍👩‍👧 שלום <|im_end|> a\0b e\u0301 \x1b[31m \ufeff \u2028 \ud800 <script>"


def exported(store: Store, folder: Path) -> bytes:
    export(store, Scope(), "jsonl", folder / "out.jsonl")
    return (folder / "out.jsonl").read_bytes()


def tree(store: Store, made: int) -> list[tuple[object, ...]]:
    """A conversation without its numbers."""
    messages = store.messages(made)
    places = {message.id: place for place, message in enumerate(messages)}
    return [
        (
            places.get(one.parent_id or 0),
            *(one.role, one.text, one.state, one.created_at_utc, one.model, one.is_edited),
        )
        for one in messages
    ]


def test_an_export_comes_back_with_every_branch(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path / "one")
    settings = ReplySettings(system_prompt="Be brief.")
    handle = ask(service, "one").handle
    ask(service, "two", handle)
    ended(service, service.regenerate(handle, settings))
    asked = service.messages(handle)[0].message_id
    ended(service, service.edit(handle, asked or 0, "uno", settings))
    service.edit(handle, service.messages(handle)[-1].message_id or 0, "eins", settings)
    service.show_branch(handle, asked or 0)
    assert texts(service, handle)[0] == "one", "not the newest branch"
    service.rename(handle, "<b>Numbers</b>")
    service.pin(handle, True)
    other, _ = open_service(tmp_path / "two")
    ask(other, "here before")
    (made,) = other.import_conversations(exported(service.store, tmp_path))
    assert tree(other.store, made) == tree(service.store, handle)
    assert texts(other, made) == texts(service, handle)
    assert [(m.model, m.text) for m in other.store.messages(made) if m.is_edited] == [
        ("demo-12m", "eins")
    ]
    row = other.conversations()[0]
    assert (row.id, row.title, row.is_pinned) == (made, "<b>Numbers</b>", True)
    assert other.system_prompt(made) == "Be brief."
    assert len(other.store.turn_rows()) == 1  # the numbers stay with the machine that measured
    ask(other, "and then?", made)
    assert len(other.conversations("uno")) == 1
    close(service)
    close(other)


def test_a_reply_gone_on_with_comes_back_as_one(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path / "one")
    handle = ask(service, "Count.", max_tokens=4).handle
    ended(service, service.proceed(handle, ReplySettings(max_tokens=3)))
    ended(service, service.proceed(handle, ReplySettings()))
    (found,) = read_conversations(exported(service.store, tmp_path))
    assert [one.text for one in found.messages] == texts(service, handle)
    close(service)


def test_a_reply_gone_on_with_that_was_also_answered_comes_back_as_two(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path / "one")
    handle = ask(service, "Count.", max_tokens=4).handle
    cut = service.messages(handle)[1]
    ended(service, service.proceed(handle, ReplySettings()))
    whole = texts(service, handle)[1]
    service.show_branch(handle, cut.message_id or 0)
    ask(service, "Why so short?", handle)
    (found,) = read_conversations(exported(service.store, tmp_path))
    assert [one.text for one in found.messages[:4]] == ["Count.", cut.text, whole, "Why so short?"]
    assert found.messages[3].parent_id == found.messages[1].id
    close(service)


def test_strange_texts_come_back_as_they_were(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "one.db")) as store:
        finish(store, begin(store, NASTY), NASTY)
        data = exported(store, tmp_path)
        with closing(Store.open(tmp_path / "two.db")) as other:
            (made,) = other.conversation_list.add_imported(read_conversations(data))
            assert tree(other, made) == tree(store, 1)


def test_a_growing_reply_comes_in_as_interrupted(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "one.db")) as store:
        store.checkpoint_reply(begin(store).message_id, "half")
        (found,) = read_conversations(exported(store, tmp_path))
    assert [(one.text, one.state) for one in found.messages] == [
        ("hi", "complete"),
        ("half", "interrupted"),
    ]
    assert found.conversation.system_prompt == SETTINGS.system_prompt


@pytest.mark.slow
def test_five_thousand_messages_in_a_row_come_in(tmp_path: Path) -> None:
    lines = [record("conversation", tip_message_id=5000)]
    for n in range(1, 5001):
        lines.append(record("message", id=n, parent_id=n - 1 or None, text=str(n)))
    (found,) = read_conversations(jsonl(*lines))
    with closing(Store.open(tmp_path / "log.db")) as store:
        (made,) = store.conversation_list.add_imported([found])
        assert len(store.branch(store.conversations()[0].tip_message_id or 0)) == 5000
        assert made == 1


# Other programs


def test_plain_messages_of_another_program_are_a_conversation() -> None:
    data = {
        "title": "From  elsewhere",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": [{"type": "text", "text": "Hel"}, {"text": "lo."}]},
        ],
    }
    for wrapped in (data, [data]):
        (found,) = read_conversations(b"\xef\xbb\xbf" + json.dumps(wrapped, indent=1).encode())
        assert (found.conversation.title, found.conversation.system_prompt) == (
            "From elsewhere",
            "Be brief.",
        )
        assert [(one.parent_id, one.role, one.text) for one in found.messages] == [
            (None, "user", "Hi."),
            (1, "assistant", "Hello."),
        ]
    two = json.dumps([data, {"messages": data["messages"][1:]}]).encode()
    assert [one.conversation.title for one in read_conversations(two)] == ["From elsewhere", "Hi."]


# Files that are wrong


def record(kind: str, **values: Any) -> dict[str, Any]:
    usual = {
        "conversation": {"id": 1, "title": "t", "created_at_utc": None, "tip_message_id": None},
        "message": {
            "id": 1,
            "conversation_id": 1,
            "parent_id": None,
            "role": "user",
            "text": "hi",
            "state": "complete",
            "created_at_utc": "2026-01-01T00:00:00.000+00:00",
        },
        "export": {"format": "localspec", "version": 1},
        "turn": {"conversation_id": 1, "message_id": 1},
    }
    return {"type": kind, **usual[kind], **values}


def jsonl(*records: object) -> bytes:
    return "\n".join(json.dumps(one) for one in records).encode()


CONVERSATION, MESSAGE = record("conversation"), record("message")
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no conversation"),
    "spaces": (b" \n\n ", "no conversation"),
    "not UTF-8": (b"\xff\xfe\x00", "not a text in UTF-8"),
    "cut off": (jsonl(CONVERSATION, MESSAGE)[:-3], "Line 2 of the import has no JSON"),
    "empty messages": (b'{"messages": []}', "no conversation with a message"),
    "strange role": (b'{"messages": [{"role": "god", "content": "x"}]}', "messages of god (1)"),
    "no content": (b'{"messages": [{"role": "user"}]}', "no conversation with a message"),
    "only a system prompt": (
        b'{"messages": [{"role": "system", "content": "x"}]}',
        "no conversation with a message",
    ),
    "conversation without messages": (jsonl(CONVERSATION), "no conversation with a message"),
    "message of nobody": (jsonl(MESSAGE), "not in the file"),
    "unknown parent": (jsonl(CONVERSATION, record("message", parent_id=7)), "place"),
    "own parent": (jsonl(CONVERSATION, record("message", parent_id=1)), "place"),
    "number twice": (jsonl(CONVERSATION, MESSAGE, MESSAGE), "Line 3"),
    "parent as list": (jsonl(CONVERSATION, record("message", parent_id=[1])), "Line 2"),
    "tip as list": (jsonl(record("conversation", tip_message_id=[1]), MESSAGE), "Line 1"),
    "conversation twice": (jsonl(CONVERSATION, CONVERSATION, MESSAGE), "second conversation"),
    "id as text": (jsonl(CONVERSATION, record("message", id="1")), 'no number under "id"'),
    "id as flag": (jsonl(CONVERSATION, record("message", id=True)), 'no number under "id"'),
    "text missing": (jsonl(CONVERSATION, record("message", text=None)), '"text"'),
    "strange state": (jsonl(CONVERSATION, record("message", state="x")), '"state"'),
    "role as list": (jsonl(CONVERSATION, record("message", role=["user"])), '"role"'),
    "no time": (jsonl(CONVERSATION, record("message", created_at_utc="soon")), "no time"),
    "no title": (jsonl(record("conversation", title=3), MESSAGE), '"title"'),
    "newer": (jsonl(record("export", version=2), CONVERSATION, MESSAGE), "newer localspec"),
    "second is bad": (
        jsonl(CONVERSATION, MESSAGE, record("conversation", id=2), {"type": "message"}),
        "Line 4",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_its_place_and_brings_in_nothing(
    tmp_path: Path, name: str
) -> None:
    data, said = WRONG[name]
    service, _ = open_service(tmp_path)
    with pytest.raises(RequestError) as refused:
        service.import_conversations(data)
    assert said in str(refused.value)
    assert service.conversations() == []
    close(service)


def test_a_file_that_is_too_large_is_refused_unread() -> None:
    with pytest.raises(RequestError, match="64,000,000"):
        read_conversations(b" " * (MAX_BYTES + 1))


@pytest.mark.parametrize(
    ("time", "read_as"),
    [
        ("0001-01-01T00:00:00+14:00", "1970-01-01T00:00:00.000+00:00"),
        ("2026-01-02T01:30:00+02:00", "2026-01-01T23:30:00.000+00:00"),
        ("2026-01-02T01:30:00", "2026-01-02T01:30:00.000+00:00"),
        ("9999-12-31T23:59:59.999-14:00", None),
    ],
)
def test_times_come_in_as_utc_between_1970_and_now(
    tmp_path: Path, time: str, read_as: str | None
) -> None:
    """The list of chats and the messages are drawn with them."""
    service, _ = open_service(tmp_path)
    lines = (record("conversation", created_at_utc=time), record("message", created_at_utc=time))
    (handle,) = service.import_conversations(jsonl(*lines))
    (row,) = service.conversations()
    (message,) = service.store.messages(handle)
    today = datetime.now(UTC).isoformat()[:10]
    (conversation,) = service.store.conversations()
    for value in (row.updated_at_utc, message.created_at_utc, conversation.created_at_utc):
        assert value == read_as or (read_as is None and value.startswith(today))
    close(service)


def test_a_tip_that_is_not_there_becomes_the_newest_message() -> None:
    data = jsonl(record("conversation", tip_message_id=99), MESSAGE)
    (found,) = read_conversations(data)
    assert [one.id for one in found.messages] == [found.conversation.tip_message_id] == [1]


def test_replies_that_continue_themselves_or_each_other_come_in() -> None:
    """No export has such; the conversation must not lose all its messages by it."""
    lines: list[dict[str, Any]] = [{"type": "conversation", "id": 1, "title": "x"}]
    for number, continues in ((1, 1), (2, 3), (3, 2)):
        of_file = {"conversation_id": 1, "parent_id": None}
        message = {"role": "assistant", "state": "complete", "text": f"{number}"}
        lines.append({"type": "message", "id": number, **of_file, **message})
        turn = {"message_id": number, "continues_message_id": continues}
        lines.append({"type": "turn", **of_file, **turn})
    (found,) = read_conversations("\n".join(map(json.dumps, lines)).encode())
    assert [message.text for message in found.messages] == ["1", "3"]


def test_a_reply_that_only_a_missing_one_continues_comes_in() -> None:
    turn = record("turn", message_id=9, continues_message_id=1)
    (found,) = read_conversations(jsonl(CONVERSATION, MESSAGE, turn))
    assert [message.text for message in found.messages] == ["hi"]


def test_a_file_of_too_many_parts_is_refused_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file, "MAX_PARTS", 100)
    monkeypatch.setattr(file, "parsed", lambda text: pytest.fail("it was read"))
    for part in (b"{},", b"[],"):
        with pytest.raises(RequestError, match="more than 100 parts"):
            read_conversations(b"[" + part * 100 + b"0]")
