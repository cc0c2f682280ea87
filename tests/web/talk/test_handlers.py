"""Text is shown as it was written, forms become settings, and followers do not get in each
other's way."""

from __future__ import annotations

import asyncio
import html
import json
import threading
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.service import ChatService
from localspec.chat.turn import ShownMessage
from localspec.core.backend import DrafterStatus
from localspec.core.decoding import SamplingParams
from localspec.core.errors import RequestError
from localspec.core.workloads import AS_SET
from localspec.record.conversations import Imported
from localspec.record.rows import Conversation, StoredMessage
from localspec.record.store import Store
from localspec.web.talk.commands import Command
from localspec.web.talk.form import Form, form_html, panel
from localspec.web.talk.handlers import Handlers, Shown
from localspec.web.talk.messages import ChatMessage
from localspec.web.talk.presence import Arrivals, Presence
from localspec.web.talk.sending import Extras
from tests.kit.fakes import FakeBackend, Script, session_info
from tests.kit.waiting import until
from tests.web.site import scripted_pace

FORM = Form(top_p="0.9", max_tokens="64", top_k="", min_p="")


@pytest.fixture
def paced_service(tmp_path: Path) -> Iterator[ChatService]:
    store = Store.open(tmp_path / "localspec.db")
    opened = ChatService(
        store, session_info, lambda report: FakeBackend(Script(round_s=scripted_pace))
    )
    opened.start()
    until(lambda: opened.status().phase == "ready")
    yield opened
    opened.close()
    store.close()


def test_a_form_with_empty_fields_means_not_used() -> None:
    settings = FORM.settings()
    assert settings.sampling == SamplingParams(temperature=0.7, top_p=0.9)
    assert (settings.max_tokens, settings.num_draft_tokens) == (64, None)


def test_a_value_out_of_range_is_refused_in_words() -> None:
    with pytest.raises(RequestError, match="The temperature is 9, but must lie between 0 and 5"):
        Form(temperature="9").settings()


def test_stop_strings_are_one_a_line_and_may_hold_a_line_break() -> None:
    assert Form().settings().stop == ()
    assert Form(stop="\nEND\n\\n\\nYou:\n ").settings().stop == ("END", "\n\nYou:", " ")
    with pytest.raises(RequestError, match="may be 16 stop strings of 200 characters"):
        Form(stop=201 * "x").settings()


@pytest.mark.parametrize(
    ("field", "written", "said"),
    [
        ("fixed_gamma", "-1", "The draft length is -1, but must lie between 0 and 64"),
        ("fixed_gamma", "two", "The draft length is 'two', but takes a whole number"),
        ("seed", str(2**63), "The seed is 9223372036854775808, but must lie"),
        ("max_tokens", "1.5", r"Max tokens is '1\.5', but takes a whole number"),
        ("max_tokens", "0", "Max tokens is 0, but must lie between 1"),
        ("top_p", "nan", "Top-p is nan, but must lie"),
        ("min_p", "some", "Min-p is 'some', but takes a number"),
        ("top_k", "-1", "Top-k is -1, but must lie between 0"),
    ],
)
def test_a_refusal_names_the_field_as_the_page_does(field: str, written: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        replace(FORM, **{field: written}).settings()


@pytest.mark.parametrize(
    ("checking", "rule", "asked"),
    [
        ("", "", AS_SET),
        (AS_SET, "typical", AS_SET),
        ("exact", "typical", "exact"),
        ("lenient", "", "threshold"),
        ("lenient", "factor:2", "factor:2"),
    ],
)
def test_only_the_lenient_switch_asks_for_a_lenient_rule(
    checking: str, rule: str, asked: str
) -> None:
    form = replace(FORM, workload="code", checking=checking, lenient_rule=rule)
    assert (form.settings().workload, form.settings().checking) == ("code", asked)
    assert form.settings().sampling.leniency is None  # settled with the message


def test_the_kinds_of_text_and_those_set_to_lenient_can_be_seen(paced_service: ChatService) -> None:
    assert "lenient for" not in form_html(paced_service)
    code = replace(paced_service.workloads["code"], lenient=True)
    paced_service.workloads = {**paced_service.workloads, "code": code}
    made = form_html(paced_service)
    assert "lenient for Code" in made
    kinds = ("auto", "chat", "code", "json", "rework", "story")
    assert all(f'<option value="{kind}">' in made for kind in kinds)


def test_a_title_of_a_kind_of_text_is_no_part_of_the_template(paced_service: ChatService) -> None:
    title = "${alert(1)} `{{x}}` \\ <b>"
    code = replace(paced_service.workloads["code"], title=title, lenient=True)
    paced_service.workloads = {"code": code}
    made = form_html(paced_service)
    assert not any(sign in made for sign in ("${", "`", "{{"))
    assert title in html.unescape(made)


def test_each_way_of_drafting_is_ready_or_says_why_not(paced_service: ChatService) -> None:
    told = panel(paced_service, None)
    ready = {way["name"]: way["is_ready"] for way in told["ways"]}
    assert ready == {"draft_model": True, "ngram": True, "self_quant": False}
    assert any("A 4-bit copy" in way["reason"] for way in told["ways"] if not way["is_ready"])


def test_a_command_in_a_refusal_is_shown_as_it_is_to_be_typed(
    paced_service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = paced_service.status()
    assert status.description is not None
    refused = DrafterStatus("eagle", False, "Train one: python -m localspec train eagle.")
    status = replace(status, description=replace(status.description, drafters=(refused,)))
    monkeypatch.setattr(paced_service, "status", lambda: status)
    assert [way["reason"] for way in panel(paced_service, None)["ways"]] == [refused.reason]


def test_a_chat_with_half_a_character_opens_and_can_go_on(paced_service: ChatService) -> None:
    """It had been imported from a program that cut an emoji in two."""
    talk = {"title": "cut \ud83d", "messages": [
        {"role": "system", "content": "be \ud83d kind"},
        {"role": "user", "content": "cut \ud83d"},
        {"role": "assistant", "content": "so \udc00 it is"},
    ]}  # fmt: skip
    (handle,) = paced_service.import_conversations(json.dumps(talk).encode())
    shown = asyncio.run(handlers_of(paced_service).open("page", handle))
    json.dumps(astuple(shown), ensure_ascii=False).encode("utf-8")
    assert shown.settings is not None and shown.settings.system_prompt == "be \ufffd kind"
    assert "so \ufffd it is" in str(shown.chat)
    asked = asyncio.run(handlers_of(paced_service).send("page", handle, "and then?", FORM))
    assert asked.is_running, asked.warning


@pytest.mark.slow
def test_of_a_long_chat_the_newest_are_shown_and_the_others_when_asked_for(
    paced_service: ChatService,
) -> None:
    """Until another chat is opened, also when it goes on."""
    said = [{"role": ("user", "assistant")[n % 2], "content": f"said {n}"} for n in range(260)]
    long, other = (
        paced_service.import_conversations(
            json.dumps({"title": "", "messages": messages}).encode()
        )[0]
        for messages in (said, said[:100])
    )
    handlers = handlers_of(paced_service)

    def texts(shown: Shown) -> list[str]:
        return [str(one["content"][0]["text"]) for one in shown.chat or []]

    def opened(handle: int) -> list[str]:
        return texts(asyncio.run(handlers.open("page", handle)))

    async def asked_for() -> Shown:
        return await Command(handlers, "page", long, {"do": "earlier", "message": 0}, FORM).move()

    first, *shown = opened(long)
    assert "Show the 150 earlier messages" in first and shown == [
        f"said {n}" for n in range(150, 260)
    ]
    whole = [f"said {n}" for n in range(260)]
    assert texts(asyncio.run(asked_for())) == whole == opened(long)
    sent = asyncio.run(handlers.send("page", long, "and?", FORM))
    assert texts(sent) == [*whole, "and?"]
    assert len(opened(other)) == 100 and "earlier messages" in opened(long)[0]


def handlers_of(service: ChatService) -> Handlers:
    return Handlers(service, Presence(service.stop, grace_s=0.05))


SLOW = replace(FORM, max_tokens="512")


@pytest.mark.slow
def test_a_page_that_moves_on_leaves_the_reply_running(paced_service: ChatService) -> None:
    """And no bubble of it is sent after the page has been told to show something else."""
    handlers = handlers_of(paced_service)
    sent: list[str] = []

    async def run() -> None:
        is_sending = asyncio.Event()

        async def send_bubbles() -> None:
            async for _ in handlers.follow("page", begun.reading):
                is_sending.set()
                await asyncio.sleep(0.2)
                sent.append("bubble")

        begun = await handlers.send("page", None, "steady: hi", FORM)
        assert begun.is_running
        follower = asyncio.create_task(send_bubbles())
        await is_sending.wait()
        opened = await handlers.open("page", None)  # New chat
        sent.append("new chat")
        await follower
        assert await handlers.settle("page", opened.reading) == Shown()

    asyncio.run(run())
    assert sent == ["bubble", "new chat"]
    until(lambda: paced_service.current is None)
    assert paced_service.latest is not None and paced_service.latest.view.finish_reason == "length"


def test_of_two_chats_chosen_at_once_the_later_is_shown(
    paced_service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the log answers later for the one chosen first."""
    handlers = handlers_of(paced_service)
    is_asked, may_answer = threading.Event(), threading.Event()
    answered = paced_service.messages

    def slow(handle: int | None) -> list[ShownMessage]:
        is_asked.set()
        may_answer.wait(10.0)
        return answered(handle)

    async def run() -> tuple[Shown, Shown]:
        begun = await handlers.send("page", None, "hi", FORM)
        async for _ in handlers.follow("page", begun.reading):
            pass
        await handlers.settle("page", begun.reading)
        monkeypatch.setattr(paced_service, "messages", slow)
        first = asyncio.create_task(handlers.open("page", begun.handle))
        await asyncio.to_thread(is_asked.wait, 10.0)
        monkeypatch.setattr(paced_service, "messages", answered)
        second = await handlers.open("page", None)
        may_answer.set()
        return await first, second

    first, second = asyncio.run(run())
    assert first == Shown()
    assert second.is_moved and second.handle is None


@pytest.mark.slow
def test_a_page_that_is_closed_stops_its_reply(paced_service: ChatService) -> None:
    handlers = handlers_of(paced_service)

    async def run() -> None:
        begun = await handlers.send("page", None, "a slow one", SLOW)
        follower = handlers.follow("page", begun.reading)
        await anext(follower)
        await asyncio.to_thread(until, lambda: paced_service.current is not None)
        await follower.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    until(lambda: paced_service.current is None)
    assert (
        paced_service.latest is not None and paced_service.latest.view.finish_reason == "cancelled"
    )


@pytest.mark.slow
def test_closing_a_page_also_stops_the_reply_it_had_moved_on_from(
    paced_service: ChatService,
) -> None:
    handlers = handlers_of(paced_service)

    async def run() -> None:
        await handlers.send("page", None, "a slow one", SLOW)
        await handlers.open("page", None)
        await asyncio.to_thread(until, lambda: paced_service.current is not None)
        handlers.leave("another page")
        assert paced_service.current is not None and not paced_service.current.cancel.is_set()
        handlers.leave("page")

    asyncio.run(run())
    until(lambda: paced_service.current is None)
    assert (
        paced_service.latest is not None and paced_service.latest.view.finish_reason == "cancelled"
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_named", [True, False])
def test_only_a_page_on_its_way_to_the_same_chat_keeps_a_reply(
    paced_service: ChatService, is_named: bool
) -> None:
    """A reload: the new page's request comes first, then the old page goes, then the new opens."""
    handlers = handlers_of(paced_service)

    async def run() -> tuple[Shown, list[list[ChatMessage]], Shown]:
        handle = (await handlers.send("old page", None, "steady", SLOW)).handle
        assert handle is not None
        handlers.presence.expect(handle if is_named else handle + 1)
        handlers.leave("old page")
        await asyncio.sleep(0.2)
        opened = await handlers.open("new page", handle)
        bubbles = [one async for one in handlers.follow("new page", opened.reading)]
        return opened, bubbles, await handlers.settle("new page", opened.reading)

    opened, bubbles, last = asyncio.run(run())
    until(lambda: paced_service.current is None)
    assert paced_service.latest is not None
    assert paced_service.latest.view.finish_reason == ("eos" if is_named else "cancelled")
    assert opened.is_running is is_named
    assert any(bubbles) is is_named
    shown = last.chat if is_named else opened.chat
    assert shown is not None and len(shown) == 2


@pytest.mark.slow
def test_a_second_page_on_the_same_chat_keeps_the_reply_of_the_first(
    paced_service: ChatService,
) -> None:
    handlers = handlers_of(paced_service)

    async def run() -> None:
        handle = (await handlers.send("first", None, "steady: hi", SLOW)).handle
        opened = await handlers.open("second", handle)
        second = handlers.follow("second", opened.reading)
        await anext(second)
        handlers.leave("first")
        async for _ in second:
            pass

    asyncio.run(run())
    assert paced_service.latest is not None and paced_service.latest.view.finish_reason == "eos"


@pytest.mark.slow
def test_a_reply_is_followed_once_and_settled_once(paced_service: ChatService) -> None:
    handlers = handlers_of(paced_service)

    async def run() -> None:
        begun = await handlers.send("page", None, "steady: hi", FORM)
        assert begun.chat is not None and len(begun.chat) == 1
        bubbles = [one async for one in handlers.follow("page", begun.reading)]
        assert len(bubbles) > 2 and all(len(one) <= 1 for one in bubbles)
        assert [one async for one in handlers.follow("page", begun.reading)] == []
        settled = await handlers.settle("page", begun.reading)
        assert settled.chat is not None and len(settled.chat) == 2 and settled.growing == []
        assert await handlers.settle("page", begun.reading) == Shown()

    asyncio.run(run())


def test_the_end_of_a_reply_is_not_shown_before_its_beginning(paced_service: ChatService) -> None:
    """A short reply may end before the page has got the answer that begins it. An event of the page
    that was under way before names what the page read then, and shows nothing of the reply."""
    handlers = handlers_of(paced_service)

    async def run() -> None:
        opened = await handlers.open("page", None)
        begun = await handlers.send("page", None, "hi", FORM)
        await asyncio.to_thread(
            until, lambda: paced_service.latest and paced_service.latest.done.is_set()
        )
        assert begun.is_running and begun.chat is not None and len(begun.chat) == 1
        assert [one async for one in handlers.follow("page", opened.reading)] == []
        assert await handlers.settle("page", opened.reading) == Shown()
        settled = await handlers.settle("page", begun.reading)
        assert settled.chat is not None and len(settled.chat) == 2 and not settled.is_running

    asyncio.run(run())


@pytest.mark.slow
def test_messages_sent_meanwhile_wait_are_followed_and_can_be_taken_back(
    paced_service: ChatService,
) -> None:
    handlers = handlers_of(paced_service)

    async def run() -> int:
        handle = (await handlers.send("page", None, "a slow one", FORM)).handle
        assert handle is not None
        for text in ("and a steady this", "and that", "and last"):
            shown = await handlers.send("page", handle, text, FORM)
        assert shown.chat is not None and len(shown.chat) == 1 and shown.growing is not None
        waiting = shown.growing[-3:]  # behind what the reply has written by now
        assert [str(one).count("#takeback") for one in waiting] == [1, 1, 1]
        middle = paced_service.waiting(handle)[1]
        asked = {"do": "takeback", "message": middle.number}
        back = await Command(handlers, "page", handle, asked, FORM).move()
        assert back.signal is not None and back.signal["taken_back"]["text"] == "and that"
        assert back.growing is not None and "and that" not in str(back.growing)
        handlers.stop(handle)
        async for _ in handlers.follow("page", back.reading):
            pass
        ended = await handlers.settle("page", back.reading)
        assert ended.is_running and ended.signal is not None and ended.signal["more"] == handle
        assert ended.chat is not None and "and a steady this" in str(ended.chat[-1])
        refused = await Command(handlers, "page", handle, asked, FORM).move()
        assert refused.warning is not None
        return handle

    handle = asyncio.run(run())
    until(lambda: paced_service.running(handle) is None)
    assert paced_service.flush()
    said = [one.text for one in paced_service.messages(handle) if one.role == "user"]
    assert said == ["a slow one", "and a steady this", "and last"]


@pytest.mark.slow
def test_answers_asked_for_together_are_shown_together_and_stopped_together(
    paced_service: ChatService,
) -> None:
    handlers = handlers_of(paced_service)
    few = replace(FORM, max_tokens="16")

    async def run() -> None:
        begun = await handlers.send("page", None, "a steady one", few)
        async for _ in handlers.follow("page", begun.reading):
            pass
        settled = await handlers.settle("page", begun.reading)
        handle = settled.handle
        assert handle is not None
        reply_id = paced_service.messages(handle)[1].message_id
        asked = {"do": "several", "message": reply_id}
        begun = await Command(handlers, "page", handle, asked, few).move()
        shown = [one async for one in handlers.follow("page", begun.reading)]
        lines = [str(one) for bubbles in shown for one in bubbles]
        assert any("answer 2 of 4" in one for one in lines)
        assert any("1 at a time" in one for one in lines), "the model has one slot"
        settled = await handlers.settle("page", begun.reading)
        assert settled.signal is not None and settled.signal["warning"].startswith("4 answers: ")
        assert settled.chat is not None and len(settled.chat) == 1
        cards = list(map(str, settled.growing or ()))
        assert [f"answer {n} of 4" in card for n, card in enumerate(cards, 1)] == [True] * 4
        assert ["choose this one" in card for card in cards] == [True] * 3 + [False]
        chosen = paced_service.messages(handle)[1].siblings[1]
        asked_for = {"do": "show", "message": chosen}
        one = await Command(handlers, "page", handle, asked_for, few).move()
        assert one.growing == [] and "2/5</span>" in str(one.chat)
        slow = replace(SLOW, temperature="1")
        begun = await Command(handlers, "page", handle, asked, slow).move()
        first = paced_service.running(handle)
        assert first is not None and len(first.together) == 4
        handlers.stop(handle)
        async for _ in handlers.follow("page", begun.reading):
            pass
        assert first.are_all_done
        assert all(one.view.finish_reason == "cancelled" for one in first.together)

    asyncio.run(run())


def test_a_message_that_waits_for_another_chat_can_be_taken_back(
    paced_service: ChatService,
) -> None:
    handlers = handlers_of(paced_service)

    async def run() -> None:
        first = (await handlers.send("page", None, "a slow one", SLOW)).handle
        await handlers.open("page", None)
        shown = await handlers.send("page", None, "in a new chat", SLOW)
        assert "1 reply ahead" in str(shown.growing) and "take back" in str(shown.growing)
        assert shown.handle is not None
        reply = paced_service.running(shown.handle)
        assert reply is not None
        asked = {"do": "takeback", "message": reply.number}
        back = await Command(handlers, "page", shown.handle, asked, FORM).move()
        assert back.is_moved and back.handle is None
        handlers.stop(first)

    asyncio.run(run())
    until(lambda: paced_service.current is None)
    assert paced_service.flush()
    assert [row.title for row in paced_service.conversations()] == ["a slow one"]


def test_an_unusable_message_warns_and_changes_nothing(paced_service: ChatService) -> None:
    handlers = Handlers(paced_service)

    async def run() -> None:
        shown = await handlers.send("page", None, "word " * 9000, FORM)
        assert shown.signal is not None and "4,096" in shown.signal["overflow"]["sentence"]
        assert shown.chat is None

    asyncio.run(run())
    assert paced_service.conversations() == []


@pytest.mark.slow
def test_going_on_without_the_oldest_is_decided_once(paced_service: ChatService) -> None:
    handlers, long = Handlers(paced_service), "word " * 1500

    async def run() -> None:
        handle, extras = None, Extras()
        for number in range(5):
            shown = await handlers.send("page", handle, f"{number} {long}", FORM, extras)
            if number == 2:
                assert shown.signal is not None
                extras = Extras(num_left_out=shown.signal["overflow"]["left_out"])
                shown = await handlers.send("page", handle, f"{number} {long}", FORM, extras)
                extras = Extras()
            assert shown.handle is not None, shown.signal
            handle = shown.handle
            await asyncio.to_thread(until, lambda: not paced_service.worker.replies)

    asyncio.run(run())
    backend = paced_service.lifecycle.backend
    assert isinstance(backend, FakeBackend)
    assert [one.content[0] for one in backend.requests[-1].messages] == ["3", "S", "4"]

    handle = paced_service.conversations()[0].id
    started_again = Handlers(paced_service)
    shown = asyncio.run(started_again.send("page", handle, f"5 {long}", FORM))
    assert shown.is_running, "what was decided is kept with the chat"
    until(lambda: not paced_service.worker.replies)
    paced_service.decide(handle, "stop")
    shown = asyncio.run(Handlers(paced_service).send("page", handle, f"6 {long}", FORM))
    assert shown.warning is not None and "This chat stops there" in shown.warning
    paced_service.decide(handle, "ask")
    shown = asyncio.run(Handlers(paced_service).send("page", handle, f"6 {long}", FORM))
    assert shown.signal is not None and "overflow" in shown.signal
    with pytest.raises(RequestError, match="one of ask, roll, stop"):
        paced_service.decide(handle, "cut")


def test_the_address_chooses_the_conversation_else_the_newest(paced_service: ChatService) -> None:
    handlers = Handlers(paced_service)
    assert handlers.choose(None) is None
    ids = [paced_service.store.create_conversation(title) for title in ("old", "new")]
    for one in ids:
        paced_service.store.add_message(one, None, "user", "hi")
    assert handlers.choose(None) == ids[1]
    assert handlers.choose(str(ids[0])) == ids[0]
    for other in ("new", "999", "9" * 5000):
        assert handlers.choose(other) is None


def test_a_log_that_an_import_damaged_with_a_date_opens_and_lists(
    paced_service: ChatService,
) -> None:
    handlers = Handlers(paced_service)
    for time in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"):
        message = StoredMessage(1, 0, None, "user", "hi", "complete", time)
        conversation = Conversation(1, "strange", time, 1)
        (handle,) = paced_service.store.conversation_list.add_imported(
            [Imported(conversation, (message,))]
        )
        shown = asyncio.run(handlers.open("page", handle))
        assert "strange" in (shown.history or "")
        assert "hi" in str(shown.chat) and "–" in str(shown.chat)


def test_a_number_that_the_log_cannot_hold_is_refused(paced_service: ChatService) -> None:
    asked = {"do": "when_full", "handle": 2**63}
    shown = asyncio.run(Command(Handlers(paced_service), "page", None, asked, FORM).answer())
    assert shown.warning is not None and "is not there" in shown.warning
    assert Extras.from_data({"edits": 2**63, "left_out": 2**63}) == Extras()


def test_a_page_that_names_no_chat_is_passed_on_as_it_is() -> None:
    passed = list[Any]()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope)

    presence = Presence(lambda reply: None)
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"c=" + b"9" * 5000}
    asyncio.run(Arrivals(inner, presence)(scope, None, None))  # type: ignore[arg-type]
    assert passed == [scope]


@pytest.mark.slow
def test_pages_are_updated_no_more_than_fifteen_times_a_second(paced_service: ChatService) -> None:
    handlers = Handlers(paced_service)

    async def run() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        num_updates, started = 0, loop.time()
        begun = await handlers.send("page", None, "steady: hi", FORM)
        async for _ in handlers.follow("page", begun.reading):
            num_updates += 1
        return num_updates, loop.time() - started

    num_updates, seconds = asyncio.run(run())
    assert num_updates <= 15 * seconds + 6  # the first and the last ones come at once
