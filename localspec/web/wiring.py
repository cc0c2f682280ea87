"""Which event of the page calls which handler, and how what it returns is placed.

Every event is private, so that the page is the only client of its queue. Nothing here decides
anything: handlers do, and stats counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import gradio as gr
import pandas as pd  # type: ignore[import-untyped]

from localspec.chat.service import ChatService
from localspec.core import AUTO
from localspec.web import stats
from localspec.web.handlers import Form, Handlers, Shown, drafter_choices, workload_choices
from localspec.web.layout import Choices, Page, StatsPage, lay_out
from localspec.web.panels import exports_html, summary_html

# Keeps the address in step with the conversation shown, so that a reload comes back to it.
TO_ADDRESS = """(handle) => {
  const url = handle > 0 ? `/?c=${handle}` : '/?c=new';
  if (location.pathname + location.search !== url) history.replaceState(null, '', url);
  return handle;
}"""


def build_page(service: ChatService) -> gr.Blocks:
    """The whole page over a service."""
    handlers = Handlers(service)
    with gr.Blocks(
        title="localspec", fill_height=True, fill_width=True, analytics_enabled=False
    ) as opened:
        blocks: gr.Blocks = opened
        drafters, _ = drafter_choices(service)
        choices = Choices(drafters, service.drafter, *workload_choices(service))
        page, stats_page = lay_out(choices)
        _wire_chat(blocks, handlers, service, page)
        _wire_stats(service, page, stats_page)
    blocks.queue(max_size=64, default_concurrency_limit=None, api_open=False)
    return blocks


def _wire_chat(blocks: gr.Blocks, handlers: Handlers, service: ChatService, page: Page) -> None:
    shown = [page.chat, page.message, page.stop, page.regenerate, page.conversations]

    async def open_page(request: gr.Request) -> AsyncIterator[list[Any]]:
        handle = handlers.choose(request.query_params.get("c"))
        async for update in handlers.open(str(request.session_hash), handle):
            yield _updates(update, is_opening=True)

    async def choose(handle: int | None, request: gr.Request) -> AsyncIterator[list[Any]]:
        async for update in handlers.open(str(request.session_hash), handle):
            yield _updates(update)

    async def new(request: gr.Request) -> AsyncIterator[list[Any]]:
        async for update in handlers.open(str(request.session_hash), None):
            yield _updates(update, is_opening=True)

    async def send(
        request: gr.Request, handle: int | None, text: str, *form: Any
    ) -> AsyncIterator[list[Any]]:
        async for update in handlers.send(str(request.session_hash), handle, text, Form(*form)):
            yield _updates(update)

    async def regenerate(
        request: gr.Request, handle: int | None, *form: Any
    ) -> AsyncIterator[list[Any]]:
        async for update in handlers.regenerate(str(request.session_hash), handle, Form(*form)):
            yield _updates(update)

    def drafters() -> list[Any]:
        choices, note = drafter_choices(service)
        is_known = service.status().phase != "loading"
        is_possible = service.drafter in dict(choices).values()
        chosen = (
            gr.update(choices=choices) if is_possible else gr.update(choices=choices, value=AUTO)
        )
        return [chosen, note, gr.Timer(active=not is_known)]

    def leave(request: gr.Request) -> None:
        handlers.leave(str(request.session_hash))

    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    blocks.load(open_page, None, shown, **quiet)
    blocks.unload(leave)
    gr.on(
        [page.message.submit],
        send,
        [page.conversations, page.message, *page.form],
        shown,
        **quiet,
    )
    page.regenerate.click(regenerate, [page.conversations, *page.form], shown, **quiet)
    page.stop.click(handlers.stop, [page.conversations], None, queue=False, **quiet)
    page.conversations.input(choose, [page.conversations], shown, **quiet)
    page.conversations.change(None, [page.conversations], None, js=TO_ADDRESS)
    page.new_chat.click(new, None, shown, **quiet)
    outputs = [page.drafter, page.drafter_note, page.waiting_for_model]
    page.waiting_for_model.tick(drafters, None, outputs, **quiet)


def _updates(shown: Shown, is_opening: bool = False) -> list[Any]:
    """Values for chat, message, stop, regenerate, conversations."""
    if shown.warning is not None:
        gr.Warning(shown.warning, title="Not sent", duration=None)
    radio = gr.skip()
    if shown.conversations is not None:
        radio = gr.update(choices=shown.conversations, value=shown.handle)
    elif is_opening:
        radio = gr.update(value=shown.handle)
    running = shown.is_running
    return [
        gr.skip() if shown.chat is None else shown.chat,
        gr.skip() if shown.message is None else shown.message,
        gr.skip() if running is None else gr.update(interactive=running),
        gr.skip() if running is None else gr.update(interactive=not running),
        radio,
    ]


def _wire_stats(service: ChatService, page: Page, view: StatsPage) -> None:
    def refresh(scope: str, handle: int | None) -> list[Any]:
        rows = _rows(service, scope, handle)
        speed: Literal["tokens_per_second"] = "tokens_per_second"
        rate: Literal["acceptance_rate"] = "acceptance_rate"
        summary = stats.summarise(rows, service.journal.rounds(rows))
        return [
            summary_html(summary),
            exports_html(scope, handle),
            _plot(stats.by_turn(rows, speed), speed),
            _plot(stats.by_turn(rows, rate, 100.0), rate, 100.0),
            _plot(stats.by_temperature(rows, speed), speed),
            _plot(stats.by_temperature(rows, rate, 100.0), rate, 100.0),
            gr.update(value=stats.turn_table(rows)),
        ]

    outputs = [
        view.summary,
        view.exports,
        view.speed_by_turn,
        view.acceptance_by_turn,
        view.speed_by_temperature,
        view.acceptance_by_temperature,
        view.turns,
    ]
    for event in (view.tab.select, view.scope.input):
        event(
            refresh,
            [view.scope, page.conversations],
            outputs,
            api_visibility="private",
            show_progress="hidden",
        )


def _plot(points: dict[str, list[Any]], name: str, top: float | None = None) -> Any:
    """A plot is hidden while it has no point: an empty one would show invented axes."""
    table = pd.DataFrame(points)
    if table.empty:
        return gr.update(value=None, visible=False)
    return gr.update(value=table, visible=True, y_lim=[0, top or 1.15 * table[name].max()])


def _rows(service: ChatService, scope: str, handle: int | None) -> list[dict[str, Any]]:
    if scope == "conversation":
        return [] if handle is None else service.journal.turn_rows(handle, None)
    if scope == "session":
        session_id = service.journal.session_id
        return [] if session_id is None else service.journal.turn_rows(None, session_id)
    return service.journal.turn_rows(None, None)
