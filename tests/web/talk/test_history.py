"""The list at the side and its commands: titles are text, what makes no sense is refused."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.service import ChatService
from localspec.record.conversations import ConversationRow as Row
from localspec.record.conversations import Folder
from localspec.record.store import Store
from localspec.web.talk.commands import Command
from localspec.web.talk.form import Form, panel
from localspec.web.talk.handlers import Handlers, Shown
from localspec.web.talk.history import history_html
from localspec.web.talk.sending import NOT_WHOLE, Extras
from tests.kit.fakes import FakeBackend, session_info
from tests.kit.waiting import until

FORM = Form(system_prompt="Be kind.", top_p="0.9", max_tokens="64")
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def at(days_ago: float) -> str:
    return (NOON - timedelta(days=days_ago)).isoformat()


def test_titles_and_snippets_are_text_and_the_open_chat_is_marked() -> None:
    rows = [Row(3, '<b>x</b> & "y"', False, "", "<i>found</i>"), Row(-1, "new", False, "")]
    html = history_html(rows, 3, "x")
    assert "<b>" not in html and "<i>" not in html and "&lt;b&gt;x&lt;/b&gt; &amp;" in html
    assert html.count("aria-current") == 1 and 'data-handle="3"' in html
    assert html.count('class="ls-more"') == 1, "what is not recorded yet has no menu"


def test_chats_stand_under_their_day_and_a_clock_set_back_hides_none() -> None:
    rows = [
        Row(1, "pinned", True, at(30)),
        Row(2, "tomorrow", False, at(-1)),
        Row(3, "now", False, at(0)),
        Row(4, "yesterday", False, at(1)),
        Row(5, "this week", False, at(4)),
        Row(6, "old", False, at(40)),
    ]
    html = history_html(rows, None, now=NOON)
    heads = [part.split("<")[0] for part in html.split('class="ls-group">')[1:]]
    assert heads == ["Pinned", "Today", "Yesterday", "Last 7 days", "Older"]
    assert all(row.title in html for row in rows)


def test_a_time_that_cannot_be_shown_is_a_dash_at_the_end_of_the_list() -> None:
    early, late = "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"
    times = [at(40), early, at(0), late, "soon", at(41)]
    rows = [Row(9 - place, f"chat {place}", False, time) for place, time in enumerate(times)]
    html = history_html(rows, None, now=NOON)
    groups = [part.split("<")[0] for part in html.split('class="ls-group">')[1:]]
    assert groups == ["Today", "Older", "–"]
    assert [part[0] for part in html.split('dir="auto">chat ')[1:]] == list("205134")


def test_a_long_list_says_that_it_goes_on_and_a_folder_is_whole() -> None:
    rows = [Row(n, f"chat {n}", False, "") for n in range(1250, 0, -1)]
    rows[-1] = replace(rows[-1], folder_id=7)
    html = history_html(rows, None, folders=[Folder(7, "Old", False)])
    assert html.count('class="ls-row"') == 201 and "1,049 more: a search finds them." in html
    assert "chat 1<" in html.split("</section>")[0]


def test_an_empty_list_says_why() -> None:
    assert "No chats yet." in history_html([], None)
    assert "Nothing found for “&lt;x&gt;”." in history_html([], None, "<x>")


@pytest.fixture
def handlers(idle_service: ChatService) -> Handlers:
    idle_service.start()
    until(lambda: idle_service.status().phase == "ready")
    return Handlers(idle_service)


def said(handlers: Handlers, text: str) -> int:
    shown = asyncio.run(handlers.send("page", None, text, FORM))
    assert shown.handle is not None
    until(lambda: handlers.service.running(shown.handle) is None)
    assert handlers.service.flush()
    return shown.handle


def answer(handlers: Handlers, shown: int | None, **command: Any) -> Shown:
    return asyncio.run(Command(handlers, "page", shown, command, FORM).answer())


def move(handlers: Handlers, shown: int | None, **command: Any) -> Shown:
    return asyncio.run(Command(handlers, "page", shown, command, FORM).move())


def test_a_chat_is_renamed_pinned_found_deleted_and_brought_back(handlers: Handlers) -> None:
    first, second = said(handlers, "about owls"), said(handlers, "about bees")
    assert "Night birds" in str(
        answer(handlers, second, do="rename", handle=first, title=" Night \n birds ").history
    )
    assert "Pinned" in str(answer(handlers, second, do="pin", handle=first, is_pinned=True).history)
    found = str(answer(handlers, second, do="search", number=1, words="owls").history)
    assert "Night birds" in found and "bees" not in found
    answer(handlers, second, do="search", number=2, words="")

    gone = move(handlers, second, do="delete", handle=second)
    assert gone.handle is None and gone.chat == [] and "bees" not in str(gone.history)
    assert gone.signal is not None and gone.signal["deleted"]["title"] == "about bees"
    elsewhere = move(handlers, second, do="open", handle=second)  # another tab
    sent = asyncio.run(handlers.send("another", second, "and wasps?", FORM))
    for told in (elsewhere, sent):
        assert told.handle is None and told.signal is not None
        assert told.signal["deleted"] == {"handle": second, "title": "about bees"}
    back = move(handlers, None, do="restore", handle=second)
    assert back.handle == second and "bees" in str(back.history) and back.chat


def test_a_search_that_arrives_after_a_later_one_changes_nothing(handlers: Handlers) -> None:
    first, _ = said(handlers, "about owls"), said(handlers, "about bees")
    answer(handlers, first, do="search", number=2, words="")
    late = str(answer(handlers, first, do="search", number=1, words="owls").history)
    assert "owls" in late and "bees" in late


def test_chats_move_between_folders_and_survive_them(handlers: Handlers) -> None:
    first, second = said(handlers, "about owls"), said(handlers, "about bees")
    made = str(answer(handlers, second, do="new_folder", name="<Birds>", handle=first).history)
    inside, outside = made.split("</section>", 1)
    assert "&lt;Birds&gt;" in inside and "owls" in inside and "bees" in outside
    news = answer(handlers, second, do="folders", handle=second).signal
    assert news is not None
    ((folder, _name),) = news["folders"]["folders"]
    both = str(answer(handlers, second, do="place", handle=second, folder=folder).history)
    assert "bees" in both.split("</section>")[0] and " open>" in both
    answer(handlers, second, do="fold", folder=folder, is_collapsed=True)
    named = answer(handlers, second, do="rename_folder", folder=folder, name="All")
    assert ">All<" in str(named.history) and " open>" not in str(named.history)
    gone = str(answer(handlers, second, do="delete_folder", folder=folder).history)
    assert "ls-folder" not in gone and "owls" in gone and "bees" in gone
    assert answer(handlers, second, do="new_folder", name=" ").warning is not None


def test_a_model_that_gets_ready_gives_its_defaults_to_a_new_chat_alone(
    handlers: Handlers,
) -> None:
    """A page that is still to open its chat names none, as a new chat does."""
    handle = said(handlers, "about owls")
    assert answer(handlers, None, do="panel", is_ready=True).settings is None
    move(handlers, handle, do="open", handle=None)
    assert answer(handlers, None, do="panel", is_ready=True).settings == Form()
    elsewhere = Command(handlers, "to open", None, {"do": "panel", "is_ready": True}, FORM)
    assert asyncio.run(elsewhere.answer()).settings is None


@pytest.mark.slow
@pytest.mark.parametrize("act", ["again", "several", "show", "fork", "remove", "duplicate"])
def test_a_wrong_value_is_refused_in_a_sentence(handlers: Handlers, act: str) -> None:
    handle = said(handlers, "about owls")
    told = move(handlers, handle, do=act, message="1", handle="1").warning
    assert told is not None and "Reload it" in told
    assert len(handlers.service.conversations()) == 1


def test_a_duplicate_stands_beside_its_chat(handlers: Handlers) -> None:
    handle = said(handlers, "about owls")
    twin = move(handlers, None, do="duplicate", handle=handle)
    assert twin.handle not in (None, handle) and "Copy of about owls" in str(twin.history)
    assert twin.chat is not None and len(twin.chat) == 2


def test_an_edit_makes_a_branch_and_arrows_lead_back(handlers: Handlers) -> None:
    handle = said(handlers, "first words")
    asked = handlers.service.messages(handle)[0].message_id
    news = answer(handlers, handle, do="edit", message=asked).signal
    assert news == {"edit": {"message": asked, "role": "user", "text": "first words", "files": []}}
    move(handlers, handle, do="rewrite", message=asked, text="other words")
    until(lambda: handlers.service.running(handle) is None)
    assert handlers.service.flush()
    assert handlers.service.messages(handle)[0].text == "other words"
    shown = move(handlers, handle, do="show", message=asked)
    assert shown.chat is not None and shown.chat[0]["content"][0]["text"] == "first words"


def test_a_rewritten_reply_is_labelled_and_read_by_the_next_turn(handlers: Handlers) -> None:
    handle = said(handlers, "first words")
    reply = handlers.service.messages(handle)[1]
    shown = move(handlers, handle, do="rewrite", message=reply.message_id, text="Better.")
    assert shown.chat is not None and "edited" in shown.chat[1]["content"][1]["text"]
    assert handlers.service.messages(handle)[1].model == reply.model
    asyncio.run(handlers.send("page", handle, "and then?", FORM))
    until(lambda: handlers.service.running(handle) is None)
    backend = handlers.service.lifecycle.backend
    assert isinstance(backend, FakeBackend)
    assert [one.content for one in backend.requests[-1].messages][2] == "Better."


def test_a_message_is_deleted_brought_back_and_a_chat_forked(handlers: Handlers) -> None:
    handle = said(handlers, "first words")
    asked, reply = handlers.service.messages(handle)
    gone = move(handlers, handle, do="remove", message=asked.message_id)
    assert gone.chat is not None and len(gone.chat) == 1 and gone.signal is not None
    back = move(handlers, handle, do="bring_back", **gone.signal["removed"])
    assert back.chat is not None and len(back.chat) == 2
    fork = move(handlers, handle, do="fork", message=asked.message_id)
    assert fork.handle not in (None, handle) and fork.chat is not None and len(fork.chat) == 1
    assert "Fork of first words" in str(fork.history)
    again = move(handlers, fork.handle, do="duplicate", handle=fork.handle)
    assert "Copy of first words" in str(again.history), "a title does not grow with each copy"
    last = move(handlers, fork.handle, do="remove", message=reply.message_id)
    assert last.warning is not None, "a message of another chat is not touched"


def test_prompts_are_saved_renamed_and_deleted(handlers: Handlers) -> None:
    def prompts(**command: Any) -> Any:
        news = answer(handlers, None, **command).signal
        return news and news["panel"]["prompts"]

    kind = {"system_prompt": "Be kind."}
    assert prompts(do="save_prompt", name=" Kind\n") == {"Kind": kind}
    assert prompts(do="rename_prompt", name="Kind", wanted="Nice") == {"Nice": kind}
    assert prompts(do="delete_prompt", name="Nice") == {}


def test_who_names_new_chats_is_asked_and_set(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "localspec.db")) as store:
        service = ChatService(store, session_info, lambda _: FakeBackend(), makes_titles=True)
        handlers = Handlers(service)
        assert panel(service, None)["makes_titles"] is True
        answer(handlers, None, do="titles", value=False)
        assert panel(service, None)["makes_titles"] is False
        unnamed = ChatService(store, session_info, lambda _: FakeBackend())
        assert panel(unnamed, None)["makes_titles"] is None, "there is nothing to switch"


def test_the_disk_for_chats_is_asked_and_set(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "localspec.db")) as store:
        service = ChatService(store, session_info, lambda _: FakeBackend())
        handlers = Handlers(service)
        assert panel(service, None)["kept"] == {"limit": 4.0, "now": "0 MiB"}
        told = answer(handlers, None, do="keep_chats", value=2.5).signal
        assert told is not None and told["panel"]["kept"]["limit"] == 2.5
        for value in (-1, None, "many", True):
            answer(handlers, None, do="keep_chats", value=value)
        assert ChatService(store, session_info, lambda _: FakeBackend()).kept_chats.gigabytes == 2.5


def test_the_gauge_says_what_is_wrong_with_a_file(handlers: Handlers) -> None:
    counted = answer(handlers, None, do="gauge", text="hello").signal
    assert counted is not None and counted["gauge"]["context_length"] == 4096
    file = {"name": "x.png", "text": "a\0b"}
    bad = answer(handlers, None, do="gauge", text="", files=[file]).signal
    assert bad is not None and "x.png is not a text" in bad["gauge"]["problem"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        {},
        {"do": "rename", "handle": "1; DROP", "title": "x"},
        {"do": "rename", "handle": 999, "title": "x"},
        {"do": "rename", "handle": True, "title": "x"},
        {"do": "pin"},
        {"do": "edit", "message": None},
        {"do": "all", "message": 10**30},
        {"do": "save_prompt", "name": " "},
        {"do": "__init__"},
    ],
)
def test_a_command_that_makes_no_sense_changes_nothing(
    handlers: Handlers, command: dict[str, Any]
) -> None:
    handle = said(handlers, "stays")
    shown = answer(handlers, handle, **command)
    assert shown.history is None or "stays" in shown.history
    assert handlers.service.messages(handle)[0].text == "stays"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        {"do": "delete", "handle": "all"},
        {"do": "show", "message": 10**9},
        {"do": "import", "data": "!"},
        {"do": "restore"},
        {"do": "nothing of ours"},
    ],
)
def test_a_move_that_makes_no_sense_leaves_the_page(
    handlers: Handlers, command: dict[str, Any]
) -> None:
    handle = said(handlers, "stays")
    shown = move(handlers, handle, **command)
    assert shown.warning is not None or shown.handle == handle
    assert move(handlers, handle, do="open", handle="../../x").handle is None


@pytest.mark.parametrize(
    "written",
    [
        "{",
        "[1]",
        '{"files": [1]}',
        '{"files": [{"name": "x"}]}',
        '{"files": [{"name": "x", "text": 5}]}',
    ],
)
def test_files_that_did_not_arrive_whole_are_refused(written: str) -> None:
    with pytest.raises(Exception, match=NOT_WHOLE[:30]):
        Extras.of(written)


def test_wrong_decisions_are_left_out() -> None:
    extras = Extras.of('{"edits": "7", "left_out": -3, "max_tokens": 1.5}')
    assert extras == Extras()
