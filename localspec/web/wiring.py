"""Which event of the page calls which handler, and how what it returns is placed.

Every event is private, so that the page is the only client of its queue. Nothing here decides
anything: handlers and commands do, and each tab beside Chat wires itself.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from localspec.chat.service import ChatService
from localspec.core.errors import LocalspecError
from localspec.web import layout
from localspec.web.layout import QUIET, Page
from localspec.web.proof import race_tab
from localspec.web.quick_blocks import QuickBlocks
from localspec.web.stats import tab as stats_tab
from localspec.web.talk.commands import Command
from localspec.web.talk.form import Form, written
from localspec.web.talk.handlers import Handlers, Shown
from localspec.web.talk.presence import Presence
from localspec.web.talk.sending import Extras

# Keeps the address in step with the conversation shown, so that a reload comes back to it.
# static/address.js decides whether that is a step of the browser's history.
TO_ADDRESS = """(handle) => {
  const place = window.lsAddress ?? ((url) => history.replaceState(null, '', url));
  place(handle > 0 ? `/?c=${handle}` : '/?c=new');
  return handle;
}"""
# The text, and the files and decisions that travel with it; static/compose.js keeps them.
WITH_EXTRAS = """(conversation, message, extras, settings) =>
  [conversation, ...(window.lsMessage ? window.lsMessage() : [message, '']), settings]"""
NOT_SENT = "() => window.lsNotSent?.()"
MODELS_OPENED = "() => { if (window.lsModels) window.lsModels(); }"
# Gradio looks for an event every millisecond, which takes some 4 % of a core from the engine.
QUEUE_S = 0.01
MANY: dict[str, Any] = {**QUIET, "trigger_mode": "multiple"}  # several may run at once


def build_page(service: ChatService, presence: Presence | None = None) -> gr.Blocks:
    """The whole page over a service. presence: the server's, which knows of reloads."""
    with QuickBlocks(
        title="localspec", fill_height=True, fill_width=True, analytics_enabled=False
    ) as opened:
        blocks: gr.Blocks = opened
        page = _lay_out(service, blocks)
        _wire_chat(blocks, Handlers(service, presence), page)
    blocks.queue(max_size=64, default_concurrency_limit=None, api_open=False)
    blocks._queue.sleep_when_free = max(blocks._queue.sleep_when_free, QUEUE_S)
    # After every event Gradio would make a table of all events and its quantiles, for a monitor
    # that is shut here: 10 ms of a core.
    blocks._queue.ANAYLTICS_CACHE_FREQUENCY = math.inf
    return blocks


def _lay_out(service: ChatService, blocks: gr.Blocks) -> Page:
    side, settings = layout.side(), layout.settings(service)
    layout.frame()
    unseen = layout.unseen()
    with gr.Tabs(elem_id="ls-tabs"):
        with gr.Tab("Chat", id="chat"):
            talk = layout.talk()
        models_tab = layout.models()
        race_tab.add_tab(blocks, service)
        stats_tab.add_tab(service, conversation=unseen[0])
    models_tab.select(None, None, None, js=MODELS_OPENED, api_visibility="private")
    return Page(*side, settings, *unseen, *talk)


def _wire_chat(blocks: gr.Blocks, handlers: Handlers, page: Page) -> None:
    async def open_page(request: gr.Request) -> list[Any]:
        handle = handlers.choose(request.query_params.get("c"))
        return _updates(await handlers.open(_page(request), handle))

    async def new(request: gr.Request) -> list[Any]:
        return _updates(await handlers.begin_new(_page(request)))

    async def send(
        request: gr.Request, handle: float | None, text: str, extras: str, settings: str
    ) -> list[Any]:
        try:
            added, form = Extras.of(extras), Form.read(settings)
        except LocalspecError as error:
            return _updates(Shown(warning=str(error), signal={"unsent": True}))
        sent = handlers.send(_page(request), _handle(handle), text, form, added)
        return _updates(await sent)

    def command(
        request: gr.Request, event: gr.EventData, handle: float | None, settings: str
    ) -> Command:
        asked = event._data if isinstance(event._data, dict) else {}
        return Command(handlers, _page(request), _handle(handle), asked, Form.read(settings))

    async def move(
        request: gr.Request, event: gr.EventData, handle: float | None, settings: str
    ) -> list[Any]:
        return _updates(await command(request, event, handle, settings).move())

    async def answer(
        request: gr.Request, event: gr.EventData, handle: float | None, settings: str
    ) -> list[Any]:
        return _answers(await command(request, event, handle, settings).answer())

    async def follow(request: gr.Request, reading: float | None) -> AsyncIterator[Any]:
        yield gr.skip()  # a generator of Gradio's has to yield once
        async for bubble in handlers.follow(_page(request), _handle(reading)):
            yield bubble
        yield gr.skip()  # Gradio sends the last value once more, when the page may have moved on

    async def settle(request: gr.Request, reading: float | None) -> list[Any]:
        return _updates(await handlers.settle(_page(request), _handle(reading)))

    def stop(handle: float | None) -> None:
        handlers.stop(_handle(handle))

    def leave(request: gr.Request) -> None:
        handlers.leave(str(request.session_hash))

    shown, asked = _outputs(page), [page.conversation, page.settings]
    sent = [page.conversation, page.message, page.extras, page.settings]
    submitted = page.message.submit(send, sent, shown, js=WITH_EXTRAS, **MANY)
    submitted.failure(None, None, None, js=NOT_SENT, api_visibility="private")
    begun = [
        blocks.load(open_page, None, shown, **QUIET),
        submitted,
        page.new_chat.click(new, None, shown, **MANY),
        page.mover.click(move, asked, shown, **MANY),
    ]
    for event in begun:
        # Each output of a yield costs a millisecond in Gradio, so the text comes by an event that
        # has one.
        followed = event.then(follow, page.reading, page.growing, **MANY)
        followed.then(settle, page.reading, shown, **MANY)
    page.bridge.click(answer, asked, [page.history, page.settings, page.signal], **MANY)
    page.stop.click(stop, [page.conversation], None, queue=False, **QUIET)
    page.conversation.change(None, [page.conversation], None, js=TO_ADDRESS)
    blocks.unload(leave)


def _page(request: gr.Request) -> str:
    return str(request.session_hash)


def _outputs(page: Page) -> list[gr.components.Component]:
    """In the order of _updates."""
    said, where = [page.chat, page.growing, page.stop], [page.conversation, page.reading]
    return [*said, *where, page.history, page.settings, page.signal]


NEWS = itertools.count(1)


def _updates(shown: Shown) -> list[Any]:
    running = shown.is_running
    return [
        _or_skip(shown.chat),
        _or_skip(shown.growing),
        gr.skip() if running is None else gr.update(interactive=running),
        gr.update(value=shown.handle) if shown.is_moved else gr.skip(),
        _or_skip(shown.reading),
        *_answers(shown),
    ]


def _answers(shown: Shown) -> list[Any]:
    """Values for the list at the side, the settings and the news."""
    news = shown.signal
    if shown.warning is not None:
        news = {**(news or {}), "warning": shown.warning}
    settings = None if shown.settings is None else written(shown.settings)
    return [_or_skip(shown.history), _or_skip(settings), _or_skip(news and _written(news))]


def _or_skip(value: Any) -> Any:
    return gr.skip() if value is None else value


def _written(news: dict[str, Any]) -> str:
    """News as JSON that is never markup; the number makes the same news twice two of them."""
    return json.dumps({**news, "n": next(NEWS)}).replace("<", "\\u003c")


def _handle(value: float | None) -> int | None:
    """A number as the page holds it: 0 and nothing are none."""
    return int(value) if value else None
