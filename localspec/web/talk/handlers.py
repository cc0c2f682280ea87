"""What the page does with one turn: ask for a reply, follow it, show its end.

A turn takes three steps, each an event of its own: `send` (or its like) begins it, `follow` shows
the text that grows and nothing else, `settle` shows what the log holds in the end. Following never
blocks a thread and never slows the engine: it reads the reply's view at most twelve times a second.
A message sent meanwhile waits, is shown below the reply, and is followed next. Where another
conversation is chosen, the page stops following and the reply goes on; what is shown next waits
until the last text is sent, so that none appears in another conversation. When a page is gone,
presence decides what becomes of its replies.

Not here: components (layout), messages as Markdown (messages), the list at the side (commands).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from localspec.chat.service import ChatService, Reply, ReplySettings, clean
from localspec.chat.turn import TurnView
from localspec.core.errors import ContextOverflow, LocalspecError, RequestError, StoreError
from localspec.core.units import counted
from localspec.web.talk import sending
from localspec.web.talk.form import Form, defaults
from localspec.web.talk.history import history_html
from localspec.web.talk.messages import (
    ChatMessage,
    answers,
    chat_messages,
    growing,
    growing_together,
    hidden,
    together_line,
    waiting,
)
from localspec.web.talk.presence import Presence, Reader
from localspec.web.talk.sending import Extras
from localspec.web.words import number_of

FIRST_POLL_S = 0.015  # between two readings of the reply until its first words
POLL_S = 0.085  # and then: 10 to 12 times a second
POLL_CHARACTERS = 40_000  # a text this long is read half as often, since its Markdown costs more
SETTLE_S = 1.0  # how long the end of a reply waits for the log

NOTHING = Extras()
STOPS = "This chat stops there: its menu in the list says what is done instead."
STILL_WRITING = "A reply is still being written. Stop it, or wait until it is complete."


@dataclass(frozen=True)
class Shown:
    """What changed on the page; None leaves a part as it is.

    chat: the messages that stand; growing: the reply being written. handle: the conversation
    shown, placed where `is_moved`. reading: the number of the reader of its reply. history: the
    list at the side. settings: what the fields hold. warning: a passing message; signal: news for
    our scripts, as plain data.
    """

    chat: list[ChatMessage] | None = None
    growing: list[ChatMessage] | None = None
    handle: int | None = None
    is_moved: bool = False
    reading: int | None = None
    history: str | None = None
    is_running: bool | None = None
    settings: Form | None = None
    warning: str | None = None
    signal: dict[str, Any] | None = None


class Handlers:
    """One for each server; pages are told apart by their session hash."""

    def __init__(self, service: ChatService, presence: Presence | None = None) -> None:
        self.service = service
        self.presence = presence or Presence(service.stop)
        self._searches: dict[str, tuple[int, str]] = {}
        self._lists = itertools.count(1)
        self._listing = threading.Lock()
        self._left_out: dict[int, int] = {}
        self._unsent: Form | None = None

    # conversations

    def history(self, page: str, opening: Reader | None = None) -> str:
        """The list at the side, as the page last searched it. Lists are numbered in the order in
        which they were read: the page shows no earlier one after a later one. opening: whose chat
        is read next; of a chat that has changed since then the list says so (static/chat.js)."""
        with self._listing:
            number, (_, search) = next(self._lists), self._searches.get(page, (0, ""))
            rows, folders = self.service.conversations(search), self.service.folders.all()
            reader = self.presence.reader(page)
        handle = None if reader is None else reader.handle
        now = next((row.messages for row in rows if row.id == handle), None)
        if opening is not None:
            opening.messages = now
        was = None if reader is None else reader.messages
        is_old = was is not None and now != was and not (search and now is None)
        listed = history_html(rows, handle, search, folders=folders)
        return f'<div data-number="{number}"{" data-is-old" if is_old else ""}>{listed}</div>'

    def search(self, page: str, number: int, words: str) -> None:
        """number: among those of the page; one that comes after a later one changes nothing."""
        with self._listing:
            self._searches[page] = max((number, words), self._searches.get(page, (0, "")))

    def choose(self, wanted: str | None) -> int | None:
        """The conversation a page opens with: the one its address names, else the newest."""
        rows = self.service.conversations()
        if wanted is None:
            newest = max(rows, key=lambda row: (row.id < 0, row.updated_at_utc), default=None)
            return newest.id if newest is not None else None
        named = number_of(wanted)
        return named if named in {row.id for row in rows} else None

    def restorable(self, handle: int | None) -> dict[str, Any]:
        """News of a conversation that was deleted, by this page or another, and can come back."""
        title = None if handle is None else self.service.deleted_title(handle)
        return {} if title is None else {"deleted": {"handle": handle, "title": title}}

    async def begin_new(self, page: str) -> Shown:
        """Show a new chat, with the defaults."""
        self._unsent = None
        return await self.open(page, None)

    async def open(self, page: str, handle: int | None) -> Shown:
        """Show a conversation; `follow` then shows its reply if one is being written."""
        reader = await self.presence.take_over(page, handle)
        try:
            reply = self.service.running(handle)
            shown = await self._as_it_stands(page, reader, handle, reply)
            settings = await asyncio.to_thread(self.settings, handle)
        except LocalspecError as error:  # the log cannot be read
            nothing = Shown([], [], is_moved=True, history="", is_running=False)
            return replace(nothing, warning=str(error))
        if reply is not None:
            self.presence.read(page, reader, reply)
        self.presence.arrived(handle)
        if not self.presence.is_reading(page, reader):  # another one was chosen meanwhile
            return Shown()
        return replace(shown, settings=settings, signal={"moved": handle or 0})

    async def _as_it_stands(
        self, page: str, reader: Reader, handle: int | None, reply: Reply | None
    ) -> Shown:
        """The conversation with this reply under way; nothing where another one was chosen
        meanwhile."""
        history = await asyncio.to_thread(self.history, page, reader)
        chat = await asyncio.to_thread(self._chat, handle, reply, reader.is_whole)
        if not self.presence.is_reading(page, reader):
            return Shown()
        growing, is_running = self._growing(reply), reply is not None
        return Shown(chat, growing, handle, True, reader.number, history, is_running)

    # settings

    @property
    def model(self) -> str | None:
        """The name of the model that is loaded, or that the next message loads again."""
        known = self.service.lifecycle.known
        return None if known is None else known.target

    def settings(self, handle: int | None) -> Form:
        """What was kept for the conversation; of a new one what its page held last, else the
        defaults of the model."""
        usual = defaults(self.service, self.model)
        if handle is None:
            return self._unsent or usual
        kept = self.service.settings_of(handle)
        return Form.of({**usual.data, **{name: clean(value) for name, value in kept.items()}})

    @property
    def is_untouched(self) -> bool:
        """Whether the fields of a new chat still hold the defaults."""
        return self._unsent is None

    def keep(self, handle: int | None, form: Form) -> None:
        if handle is None:
            self._unsent = form
        elif self.service.settings_of(handle) != form.data:
            self.service.keep_settings(handle, form.data)

    # one turn

    async def send(
        self, page: str, handle: int | None, text: str, form: Form, extras: Extras = NOTHING
    ) -> Shown:
        """Send a message, or another version of one. An unusable message stays in its box. The news
        is `sent`, with the handle, or `unsent`."""

        def begin(settings: ReplySettings) -> Reply | None:
            whole = extras.joined(text)
            if extras.edits is not None and handle is not None:
                if self.service.running(handle) is not None:
                    raise RequestError(STILL_WRITING)
                return self.service.edit(handle, extras.edits, whole, settings)
            return self.service.submit(handle, whole, settings)

        asked = await self._ask(page, handle, form, extras, begin)
        if asked.handle is not None:
            return replace(asked, signal={"sent": asked.handle})
        return replace(asked, signal={**(asked.signal or {}), "unsent": True})

    async def answer_again(
        self,
        page: str,
        handle: int | None,
        form: Form,
        begin: Callable[[int, ReplySettings], Reply | None],
        refusal: str,
    ) -> Shown:
        """Another reply in the place of one, or more of it. refusal: what is said where `begin`
        gives none."""
        if handle is None:
            return Shown(warning=refusal)
        return await self._ask(page, handle, form, NOTHING, partial(begin, handle), refusal)

    async def _ask(
        self,
        page: str,
        handle: int | None,
        form: Form,
        extras: Extras,
        begin: Callable[[ReplySettings], Reply | None],
        refusal: str | None = None,
    ) -> Shown:
        """Begin a reply; what cannot begin is said, and nothing is lost."""
        try:
            settings = self.settled(handle, form, extras)
            reply = await asyncio.to_thread(begin, settings)
        except ContextOverflow as error:
            if self.service.when_full(handle) == "stop":
                return Shown(warning=f"{error} {STOPS}")
            return Shown(signal={"overflow": sending.overflow(error)})
        except LocalspecError as error:
            return Shown(warning=str(error), signal=self.restorable(handle))
        if reply is None:
            return Shown(warning=refusal)
        if extras.num_left_out:
            self.service.decide(reply.handle, "roll")
        if handle is None:
            self._unsent = None
        with suppress(StoreError):  # the journal says that the log takes nothing
            await asyncio.to_thread(self.keep, reply.handle, form)
        if reply.settings.num_left_out:
            self._left_out[reply.handle] = reply.settings.num_left_out
        reader = await self.presence.take_over(page, reply.handle)
        first = self.service.running(reply.handle) or reply  # a later one waits below it
        self.presence.asked(page, reply)
        self.presence.read(page, reader, first)
        shown = await self._as_it_stands(page, reader, reply.handle, first)
        return replace(shown, handle=reply.handle)

    def settled(self, handle: int | None, form: Form, extras: Extras) -> ReplySettings:
        """The form's settings, with what the person decided about an overflow. Raises
        RequestError."""
        settings = form.settings()
        left_out = max(extras.num_left_out, self._left_out.get(handle or 0, 0))
        max_tokens = extras.max_tokens or settings.max_tokens
        return replace(settings, num_left_out=left_out, max_tokens=max_tokens)

    def stop(self, handle: int | None) -> None:
        """Stop the reply of this conversation, and those asked for with it."""
        reply = self.service.running(handle)
        for one in [] if reply is None else reply.together:
            self.service.stop(one)

    def leave(self, page: str) -> None:
        """The page was closed or reloaded."""
        self._searches.pop(page, None)
        self.presence.leave(page)

    async def follow(self, page: str, reading: int | None) -> AsyncIterator[list[ChatMessage]]:
        """The growing text of the reply that the page reads, until it ends or the page moves on.
        Yields nothing where the page reads another or none, or where it is followed already."""
        reader = self.presence.claim(page, reading)
        if reader is None or reader.reply is None:
            return
        reply, shown = reader.reply, None
        try:
            while not reply.are_all_done and self.presence.is_reading(page, reader):
                views = [one.view for one in reply.together]
                later = self.service.waiting(reply.handle)
                if (views, later) != shown:
                    shown = (views, later)
                    yield self._growing(reply)
                await reader.pause(_pause_s(sum(map(_num_characters, views))))
        except (GeneratorExit, asyncio.CancelledError):
            self.presence.leave(page)
            raise
        finally:
            reader.leave()

    async def settle(self, page: str, reading: int | None) -> Shown:
        """The reply that the page followed has ended: show what the log holds of it."""
        reader = self.presence.finished(page, reading)
        if reader is None or reader.reply is None:
            return Shown()
        reply = reader.reply
        await asyncio.to_thread(self.service.flush, SETTLE_S)
        following = self.service.running(reply.handle)
        shown = await self._as_it_stands(page, reader, reply.handle, following)
        if not shown.is_moved:
            return shown
        news = {"announce": _ending(reply), "recorded": reply.handle}
        if len(reply.together) > 1:
            news["warning"] = together_line([one.view for one in reply.together], num_slots=None)
            if following is None:
                shown = await asyncio.to_thread(self._to_choose_from, shown, reply)
        if following is not None:
            news["more"] = reply.handle
        return replace(shown, signal=news)

    def _to_choose_from(self, shown: Shown, reply: Reply) -> Shown:
        """The same with all answers that were asked for together, in the place of the last one."""
        rows = {row["message_id"]: row for row in self.service.turn_rows(reply.handle)}
        tip_id = self.service.messages(reply.handle)[-1].message_id
        cards = answers(reply.together, rows, tip_id)
        return replace(shown, chat=self._chat(reply.handle, reply), growing=cards)

    # messages for the chat component

    def _growing(self, reply: Reply | None) -> list[ChatMessage]:
        """The reply being written, and the messages of its conversation that wait for it."""
        if reply is None:
            return []
        later = map(waiting, self.service.waiting(reply.handle))
        if len(reply.together) > 1:
            views = [one.view for one in reply.together]
            return [*growing_together(views, self.service.lifecycle.num_slots), *later]
        number = reply.number if reply is not self.service.current else 0
        return [*growing(reply.view, number), *later]

    def _chat(
        self, handle: int | None, reply: Reply | None, is_whole: bool = False
    ) -> list[ChatMessage]:
        """The messages that stand: without the reply that is still being written, and without the
        first ones of a long chat."""
        service = self.service
        shown = service.messages(handle) if reply is None else service.messages_before(reply)
        if not shown:
            return []
        rows = {row["message_id"]: row for row in service.turn_rows(handle)}
        num_hidden = 0 if is_whole else hidden(len(shown))
        return chat_messages(shown, rows, is_running=reply is not None, num_hidden=num_hidden)


def _num_characters(view: TurnView) -> int:
    return len(view.text) + len(view.thinking)


def _pause_s(num_characters: int) -> float:
    if not num_characters:
        return FIRST_POLL_S
    return POLL_S * (1 + num_characters / POLL_CHARACTERS)


ENDINGS = {
    "eos": "The reply is complete: {}.",
    "stop": "The reply is complete: {}.",
    "length": "The reply ended at the length limit: {}.",
    "cancelled": "The reply was stopped after {}.",
    "error": "The reply failed after {}.",
}


def _ending(reply: Reply) -> str:
    """What a screen reader is told, once."""
    view = reply.view
    num_tokens = view.stats.num_output_tokens if view.stats is not None else 0
    said = ENDINGS.get(view.finish_reason or "", "The reply was cut short after {}.")
    return said.format(counted(num_tokens, "token"))
