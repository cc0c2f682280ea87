"""Checks 7 to 9: a closed tab, a reload, and two tabs at once lose and mix nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localspec.chat.service import ReplySettings
from tests.kit.fakes import REPLY
from tests.kit.waiting import WAIT_S, until
from tests.web.browser.checks import ask, bubbles, newest, num_rows, wait_for_reply
from tests.web.browser.tabs import Tabs
from tests.web.browser.visits import WAIT_MS, Open, Visit, end
from tests.web.site import Site

pytestmark = pytest.mark.slow

END = "only sooner."
TO_THE_FRONT = "document.dispatchEvent(new Event('visibilitychange'))"


def test_check_7_a_closed_tab_leaves_the_engine_idle_and_the_text_kept(
    visit: Open, site: Site
) -> None:
    page = visit()
    page.open("&c=new")
    page.send("steady endless: to be left")
    page.wait_for("Speculative decoding lets")
    page.page.close()
    until(lambda: site.service.current is None)
    num_rounds = site.backend.num_rounds
    row = newest(site)
    assert row["state"] == "stopped"
    again = visit()
    again.open()
    again.wait_for("steady endless: to be left")
    again.wait_for("Speculative decoding lets")
    again.wait_for("stopped")
    assert site.backend.num_rounds == num_rounds
    assert bubbles(again, "user") == ["steady endless: to be left"] and len(bubbles(again)) == 1


def test_check_8_a_reload_finds_the_running_reply_again_and_shows_it_once(
    visit: Open, site: Site
) -> None:
    page = visit()
    page.open("&c=new")
    before = num_rows(site)
    page.send("slow: through a reload")
    page.wait_for("Speculative decoding lets")
    page.page.wait_for_url("**/?c=*")
    address = page.page.url
    page.reload()
    page.wait_for("Speculative decoding lets")
    site.pace(0.004)
    wait_for_reply(page, 0, END)
    assert page.page.url == address
    assert bubbles(page, "user") == ["slow: through a reload"]
    assert len(bubbles(page)) == 1 and bubbles(page)[0].count(END) == 1
    assert num_rows(site) == before + 1 and newest(site)["state"] == "complete"
    assert site.store.branch(newest(site)["message_id"])[-1].text == REPLY
    page.reload()
    page.wait_for("tok/s")
    assert bubbles(page, "user") == ["slow: through a reload"]
    assert len(bubbles(page)) == 1 and bubbles(page)[0].count(END) == 1


@pytest.fixture(scope="module")
def opened_windows(site: Site, tabs: Tabs) -> Iterator[tuple[Visit, Visit]]:
    both = tabs.take(), tabs.take()
    for page in both:
        page.open("&c=new")
    yield both
    end([*both], tabs.give_back)


@pytest.fixture
def windows(site: Site, opened_windows: tuple[Visit, Visit]) -> tuple[Visit, Visit]:
    """Two windows, both on a new chat, and no other chat is there."""
    site.clear()
    for page in opened_windows:
        page.show()
        page.new_chat()
    return opened_windows


def test_two_windows_show_what_is_done_and_said_in_either(
    windows: tuple[Visit, Visit], site: Site
) -> None:
    """However soon the reply is there, and without any of them coming to the front."""
    left, right = windows
    ask(left, "echo about terns", "about terns")
    right.wait_for("echo about terns", "#ls-history")
    chat = site.service.conversations()[0].id
    site.service.rename(chat, "Birds")
    for page in (left, right):
        page.wait_for("Birds", "#ls-history")
    right.open_chat(chat)
    right.wait_for("about terns")
    quick = site.service.submit(chat, "echo about auks", ReplySettings())
    assert quick is not None and quick.done.wait(WAIT_S)
    for page in (left, right):
        page.wait_for("echo about auks")
    assert bubbles(left) == bubbles(right) == ["echo about terns", "echo about auks"]
    right.page.fill("#ls-message textarea", "typed here")
    left.send("slow: about loons")
    right.show()
    right.wait_for("slow: about loons")
    right.page.wait_for_selector("#ls-stop:not(:disabled)", timeout=WAIT_MS)
    site.pace(0.004)
    for page in (left, right):
        wait_for_reply(page, 2, END)
    assert right.page.input_value("#ls-message textarea") == "typed here"

    first = site.service.messages(chat)[0].message_id
    assert first is not None
    site.service.delete_message(chat, first)
    for page in (left, right):
        until(lambda page=page: bubbles(page, "user")[0] == "echo about auks")
    site.service.restore_message(chat, first)
    for page in (left, right):
        page.wait_for("echo about terns")
    site.service.delete(chat)
    for page in (left, right):
        page.page.wait_for_url("**/?c=new")
        until(lambda page=page: bubbles(page) == [])


def test_check_9_two_tabs_queue_their_texts_stay_apart_and_one_chat_ends_alike(
    windows: tuple[Visit, Visit], site: Site
) -> None:
    left, right = windows
    left.send("slow: the left one")
    until(lambda: site.service.current is not None)
    right.send("echo the right one")
    right.wait_for("Waiting: 1 reply ahead of this one.")
    site.pace(0.004)
    wait_for_reply(right, 0, "the right one")
    wait_for_reply(left, 0, END)
    until(lambda: bubbles(right))  # its question holds the same words, and its figures come first
    assert bubbles(left, "user") == ["slow: the left one"]
    assert bubbles(right, "user") == bubbles(right) == ["echo the right one"]
    assert len(bubbles(left)) == 1 and "right" not in bubbles(left)[0]
    assert "the right one" not in left.text("#ls-chat")
    assert "Speculative" not in right.text("#ls-chat")
    texts = [site.store.branch(row["message_id"])[-1].text for row in site.store.turn_rows()[-2:]]
    assert texts == [REPLY, "echo the right one"], "in the order in which they were asked"

    left.open_chat(int(right.page.url.split("c=")[1]))
    left.wait_for("echo the right one")
    site.begin()
    right.send("slow: two")
    right.wait_for("Speculative decoding lets")
    left.reload()
    left.wait_for("Speculative decoding lets")
    site.pace(0.004)
    wait_for_reply(left, 1, END)
    wait_for_reply(right, 1, END)
    assert bubbles(left) == bubbles(right) and len(bubbles(left)) == 2, "one chat in two tabs"

    ask(right, "echo three", "three")
    left.page.evaluate(TO_THE_FRONT)
    left.wait_for("echo three")
    site.service.delete(site.service.conversations()[0].id)
    left.page.evaluate(TO_THE_FRONT)
    left.page.get_by_role("button", name="Undo").click()
    wait_for_reply(left, 2, "three")
