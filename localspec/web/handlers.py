"""What the page's buttons do: functions between the service and values the page shows.

Following a reply never blocks a thread and never slows the engine: an async generator looks at
the reply's view and yields at most twelve times a second. One follower lives per open page; a
newer one (another conversation chosen, another message sent) makes the older one end quietly,
while the reply itself goes on. A closed or reloaded page stops the reply it was following.

Not here: components (layout), figures (live, stats).
"""

from __future__ import annotations

import asyncio
import html
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from localspec.chat.service import ChatService, Reply, ReplySettings, ShownMessage
from localspec.core import AUTO, OFF, SamplingParams
from localspec.errors import LocalspecError
from localspec.leniency import THRESHOLD
from localspec.web.live import badge, footer
from localspec.workloads import AS_SET

FIRST_LOOK_S = 0.015  # how often the reply is looked at until its first words
LOOK_S = 0.085  # and then: 10 to 12 times a second
LENIENT = "lenient"  # of the checking field: by the rule of its own field
SETTLE_S = 1.0  # how long the end of a reply waits for the log, to show what it holds
MAX_SHOWN_CONVERSATIONS = 200

# Fenced code, also while its end is still to come, and code within a line.
CODE = re.compile(
    r"(^[ ]{0,3}```.*?(?:^[ ]{0,3}```[^\S\n]*$|\Z)|`[^`\n]+`)", re.DOTALL | re.MULTILINE
)
ENTITY = re.compile(r"&(?=#?\w{1,31};)")

log = logging.getLogger(__name__)

ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """The settings as the page's fields hold them; numbers may be missing while being typed."""

    temperature: float | None
    top_p: float | None
    max_tokens: float | None
    seed: float | None
    system_prompt: str | None
    drafter: str | None
    top_k: float | None
    min_p: float | None
    repetition_penalty: float | None
    fixed_gamma: float | None
    workload: str | None = None
    checking: str | None = None
    lenient_rule: str | None = None

    def settings(self) -> ReplySettings:
        """Raises RequestError for a value out of range."""
        return ReplySettings(
            sampling=SamplingParams(
                temperature=_or(self.temperature, 0.0),
                top_k=int(_or(self.top_k, 0)),
                top_p=_or(self.top_p, 1.0),
                min_p=_or(self.min_p, 0.0),
                repetition_penalty=_or(self.repetition_penalty, 1.0),
                seed=None if self.seed is None else int(self.seed),
            ),
            max_tokens=int(_or(self.max_tokens, 512)),
            drafter=self.drafter or AUTO,
            num_draft_tokens=None if self.fixed_gamma is None else int(self.fixed_gamma),
            system_prompt=self.system_prompt or "",
            workload=self.workload or AUTO,
            checking=self._checking(),
        )

    def _checking(self) -> str:
        if self.checking == LENIENT:
            return self.lenient_rule or THRESHOLD
        return self.checking or AS_SET


@dataclass(frozen=True)
class Shown:
    """What changed on the page; None leaves a part as it is. notice: a passing message."""

    chat: list[ChatMessage] | None = None
    handle: int | None = None
    conversations: list[tuple[str, int]] | None = None
    is_running: bool | None = None
    message: str | None = None
    warning: str | None = None


class Handlers:
    """One for each server; pages are told apart by their session hash."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._followers: dict[str, object] = {}
        self._begun: dict[str, list[Reply]] = {}

    # conversations

    def conversations(self) -> list[tuple[str, int]]:
        """Titles and handles, newest first."""
        stored = [(item.title, item.id) for item in self._service.journal.conversations()]
        waiting = [
            (f"{talk.title} (not recorded yet)", talk.handle)
            for talk in self._service.journal.unstored_talks()
        ]
        return [*reversed([*stored, *waiting])][:MAX_SHOWN_CONVERSATIONS]

    def choose(self, wanted: str | None) -> int | None:
        """The conversation a page opens with: the one its address names, else the newest."""
        known = [handle for _, handle in self.conversations()]
        if wanted is None:
            return known[0] if known else None
        return int(wanted) if wanted.isdecimal() and int(wanted) in known else None

    async def open(self, page: str, handle: int | None) -> AsyncIterator[Shown]:
        """Show a conversation, and follow its reply if one is being written."""
        had_follower = page in self._followers
        me = self._take_over(page)
        try:
            chat = await asyncio.to_thread(self._chat, handle)
            conversations = await asyncio.to_thread(self.conversations)
        except LocalspecError as error:  # the log cannot be read
            yield Shown([], None, [], is_running=False, warning=str(error))
            return
        reply = self._service.running(handle) if handle is not None else None
        yield Shown(chat, handle, conversations, is_running=reply is not None)
        if reply is not None:
            async for shown in self._follow(page, me, reply):
                yield shown
        elif had_follower:
            # What the older follower sent at its last moment may arrive after ours.
            await asyncio.sleep(2 * LOOK_S)
            if self._followers.get(page) is me:
                yield Shown(chat)
        self._let_go(page, me)

    # one turn

    async def send(
        self, page: str, handle: int | None, text: str, form: Form
    ) -> AsyncIterator[Shown]:
        """Send a message and follow the reply. An unusable message stays in its box."""
        try:
            reply = await asyncio.to_thread(self._service.submit, handle, text, form.settings())
        except LocalspecError as error:
            yield Shown(warning=str(error))
            return
        if reply is None:
            yield Shown()
            return
        me = self._take_over(page)
        self._remember(page, reply)
        chat = await asyncio.to_thread(self._chat, reply.handle)
        conversations = await asyncio.to_thread(self.conversations) if handle is None else None
        yield Shown(chat, reply.handle, conversations, is_running=True, message="")
        async for shown in self._follow(page, me, reply):
            yield shown

    async def regenerate(self, page: str, handle: int | None, form: Form) -> AsyncIterator[Shown]:
        """Another reply to the last message."""
        if handle is None:
            yield Shown(warning="There is no message to answer again yet.")
            return
        try:
            reply = await asyncio.to_thread(self._service.regenerate, handle, form.settings())
        except LocalspecError as error:
            yield Shown(warning=str(error))
            return
        if reply is None:
            yield Shown(warning="There is nothing to answer again, or a reply is being written.")
            return
        self._remember(page, reply)
        async for shown in self._follow(page, self._take_over(page), reply):
            yield shown

    def stop(self, handle: int | None) -> None:
        """Stop the reply of this conversation."""
        reply = self._service.running(handle) if handle is not None else None
        if reply is not None:
            self._service.stop(reply)

    def leave(self, page: str) -> None:
        """The page was closed or reloaded: stop the replies it had asked for."""
        self._followers.pop(page, None)
        for reply in self._begun.pop(page, []):
            self._service.stop(reply)

    def _take_over(self, page: str) -> object:
        """Make the caller the page's only follower; the one before ends at its next look."""
        self._followers[page] = me = object()
        return me

    def _remember(self, page: str, reply: Reply) -> None:
        still_open = [one for one in self._begun.get(page, []) if not one.done.is_set()]
        self._begun[page] = [*still_open, reply]

    def _let_go(self, page: str, me: object) -> None:
        if self._followers.get(page) is me:
            del self._followers[page]

    async def _follow(self, page: str, me: object, reply: Reply) -> AsyncIterator[Shown]:
        before = await asyncio.to_thread(self._chat_before, reply)
        seen = None
        try:
            while not reply.done.is_set():
                if self._followers.get(page) is not me:
                    return
                view = reply.view
                if view is not seen:
                    seen = view
                    yield Shown([*before, *_growing(reply)], is_running=True)
                await asyncio.sleep(LOOK_S if view.text else FIRST_LOOK_S)
        except (GeneratorExit, asyncio.CancelledError):
            self.leave(page)
            raise
        await asyncio.to_thread(self._service.journal.flush, SETTLE_S)
        chat = await asyncio.to_thread(self._chat, reply.handle)
        conversations = await asyncio.to_thread(self.conversations)
        if self._followers.get(page) is me:
            self._let_go(page, me)
            yield Shown(chat, reply.handle, conversations, is_running=False)

    # messages as the chat component takes them

    def _chat(self, handle: int | None) -> list[ChatMessage]:
        return self._dressed(handle, self._service.messages(handle))

    def _chat_before(self, reply: Reply) -> list[ChatMessage]:
        return self._dressed(reply.handle, self._service.messages_before(reply))

    def _dressed(self, handle: int | None, shown: list[ShownMessage]) -> list[ChatMessage]:
        if not shown:
            return []
        rows = {row["message_id"]: row for row in self._service.journal.turn_rows(handle, None)}
        return [_message(message, rows.get(message.message_id)) for message in shown]


def _growing(reply: Reply) -> list[ChatMessage]:
    view = reply.view
    if view.text:
        return [_text("assistant", view.text)]
    if view.phase == "loading":
        return [_text("assistant", "*The model is still loading; this is answered right after.*")]
    if view.phase == "queued" and view.position:
        noun = "reply" if view.position == 1 else "replies"
        return [_text("assistant", f"*Waiting: {view.position} {noun} ahead of this one.*")]
    return []


def _message(message: ShownMessage, row: dict[str, Any] | None) -> ChatMessage:
    if message.role == "user":
        return _text("user", message.text)
    notes = []
    if message.state == "error":
        stored = row["error"] if row is not None else None
        error = message.error or stored or "The reply failed. Send the message again."
        notes.append(f'<p class="ls-error">{html.escape(error)}</p>')
    if row is not None and (label := badge(row)):
        notes.append(f'<p class="ls-lenient">{html.escape(label)}</p>')
    ending = {"stopped": "stopped", "interrupted": "interrupted, Regenerate answers again"}
    parts = [ending[message.state]] if message.state in ending else []
    if row is not None and row["num_output_tokens"]:
        parts.append(html.escape(footer(row)))
    if parts:
        notes.append(f'<p class="ls-footer">{" · ".join(parts)}</p>')
    return _text("assistant", message.text, "\n".join(notes))


def as_text(text: str) -> str:
    """Markdown that shows markup instead of obeying it: outside code, tags, entities and images
    stay as they were written. Nothing in a message can then load or run anything."""
    parts = CODE.split(text)
    for index in range(0, len(parts), 2):
        plain = ENTITY.sub("&amp;", parts[index]).replace("<", "&lt;")
        parts[index] = plain.replace("![", "&#33;[")
    return "".join(parts)


def _text(role: str, text: str, note: str = "") -> ChatMessage:
    """A message; the note is a part of its own, so that an open code fence cannot swallow it."""
    parts = [{"type": "text", "text": as_text(text)}] if text else []
    if note:
        parts.append({"type": "text", "text": note})
    return {"role": role, "content": parts or [{"type": "text", "text": ""}]}


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def workload_choices(service: ChatService) -> tuple[list[tuple[str, str]], list[str]]:
    """The kinds of text that can be chosen, and the titles of those the person set to lenient."""
    kinds = service.workloads.values()
    choices = [("recognised from the message", AUTO), *((kind.title, kind.name) for kind in kinds)]
    return choices, [kind.title for kind in kinds if kind.lenient]


def drafter_choices(service: ChatService) -> tuple[list[tuple[str, str]], str]:
    """The drafters that can be chosen, and a line about each that cannot or why it can."""
    choices = [("auto: whatever is fastest", AUTO), ("off: plain decoding", OFF)]
    loaded = service.status().description
    if loaded is None:
        if service.drafter not in (AUTO, OFF):  # asked for at the start, not known yet
            choices.append((service.drafter, service.drafter))
        return choices, "The drafters are known once the model is loaded."
    notes = []
    for drafter in loaded.drafters:
        if drafter.is_available:
            choices.append((drafter.name, drafter.name))
        mark = "" if drafter.is_available else " (not available)"
        notes.append(f"**{drafter.name}**{mark}: {html.escape(drafter.reason)}")
    return choices, "\n\n".join(notes)
