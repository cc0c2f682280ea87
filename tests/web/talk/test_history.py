"""The list at the side and its commands: titles are text, what makes no sense is refused."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from localspec.chat.service import ChatService
from localspec.chat.service import ConversationRow as Row
from localspec.web.talk.commands import Commands
from localspec.web.talk.form import Form
from localspec.web.talk.handlers import Handlers, Shown
from localspec.web.talk.history import history_html
from localspec.web.talk.sending import NOT_WHOLE, Extras
from tests.web.conftest import until

FORM = Form(0.7, 0.9, 64, None, "Be kind.", "auto", None, None, None, None)
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


def test_an_empty_list_says_why() -> None:
    assert "No chats yet." in history_html([], None)
    assert "Nothing found for “&lt;x&gt;”." in history_html([], None, "<x>")


@pytest.fixture
def handlers(service: ChatService) -> Handlers:
    service.start()
    until(lambda: service.status().phase == "ready")
    return Handlers(service)


def said(handlers: Handlers, text: str) -> int:
    shown = asyncio.run(handlers.send("page", None, text, FORM))
    assert shown.handle is not None
    until(lambda: handlers.service.running(shown.handle) is None)
    assert handlers.service.flush()
    return shown.handle


def answer(handlers: Handlers, shown: int | None, **command: Any) -> Shown:
    return asyncio.run(Commands(handlers).answer("page", shown, command, FORM))


def move(handlers: Handlers, shown: int | None, **command: Any) -> Shown:
    return asyncio.run(Commands(handlers).move("page", shown, command, FORM))


def test_a_chat_is_renamed_pinned_found_deleted_and_brought_back(handlers: Handlers) -> None:
    first, second = said(handlers, "about owls"), said(handlers, "about bees")
    assert "Night birds" in str(
        answer(handlers, second, do="rename", handle=first, title=" Night \n birds ").history
    )
    assert "Pinned" in str(answer(handlers, second, do="pin", handle=first, is_pinned=True).history)
    found = str(answer(handlers, second, do="search", words="owls").history)
    assert "Night birds" in found and "bees" not in found
    answer(handlers, second, do="search", words="")

    gone = move(handlers, second, do="delete", handle=second)
    assert gone.handle is None and gone.chat == [] and "bees" not in str(gone.history)
    assert gone.signal is not None and gone.signal["deleted"]["title"] == "about bees"
    back = move(handlers, None, do="restore", handle=second)
    assert back.handle == second and "bees" in str(back.history) and back.chat


def test_an_edit_makes_a_branch_and_arrows_lead_back(handlers: Handlers) -> None:
    handle = said(handlers, "first words")
    asked = handlers.service.messages(handle)[0].message_id
    news = answer(handlers, handle, do="edit", message=asked).signal
    assert news == {"edit": {"message": asked, "text": "first words", "files": []}}
    asyncio.run(handlers.send("page", handle, "other words", FORM, Extras(edits=asked)))
    until(lambda: handlers.service.running(handle) is None)
    assert handlers.service.flush()
    assert handlers.service.messages(handle)[0].text == "other words"
    shown = move(handlers, handle, do="show", message=asked)
    assert shown.chat is not None and shown.chat[0]["content"][0]["text"] == "first words"


def test_presets_are_saved_and_deleted(handlers: Handlers) -> None:
    assert answer(handlers, None, do="save_preset", name="Kind").presets == ["Kind"]
    assert handlers.service.presets()[0].system_prompt == "Be kind."
    assert answer(handlers, None, do="delete_preset", name="Kind").presets == []


def test_the_gauge_says_what_is_wrong_with_a_file(handlers: Handlers) -> None:
    counted = answer(handlers, None, do="gauge", text="hello").signal
    assert counted is not None and counted["gauge"]["context"] == 4096
    file = {"name": "x.png", "data": "/////w=="}
    bad = answer(handlers, None, do="gauge", text="", files=[file]).signal
    assert bad is not None and "x.png is not a text" in bad["gauge"]["problem"]


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
        {"do": "save_preset", "name": " "},
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


@pytest.mark.parametrize("written", ["{", "[1]", '{"files": [1]}', '{"files": [{"name": "x"}]}'])
def test_files_that_did_not_arrive_whole_are_refused(written: str) -> None:
    with pytest.raises(Exception, match=NOT_WHOLE[:30]):
        Extras.of(written)


def test_wrong_decisions_are_left_out() -> None:
    extras = Extras.of('{"edits": "7", "left_out": -3, "max_tokens": 1.5}')
    assert extras == Extras()
