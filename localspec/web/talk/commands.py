"""What our own scripts ask of the page: open, search, rename, edit, branch, presets.

Contract: a command is plain data from the browser, `{"do": name, ...}`, and is not trusted: unknown
ones do nothing, wrong values are refused in a sentence. Each answers with what changed on the page
(`Shown`), never with an exception.

Not here: sending and following a turn (handlers), how clicks become commands (static/*.js).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from localspec.chat.service import clean
from localspec.errors import LocalspecError, RequestError
from localspec.web.talk import sending
from localspec.web.talk.form import Form, preset_of
from localspec.web.talk.handlers import Handlers, Shown
from localspec.web.talk.messages import parted
from localspec.web.talk.sending import Extras

MAX_TITLE_LENGTH = 200
Command = dict[str, Any]
News = dict[str, Any]
Answer = Callable[[str, int | None, Command, Form], Shown]


class Commands:
    """One for each server."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._service = handlers.service
        self._answers: dict[str, Answer] = {
            "search": self._search,
            "rename": self._rename,
            "pin": self._pin,
            "edit": self._edit,
            "all": self._all,
            "gauge": self._gauge,
            "save_preset": self._save_preset,
            "delete_preset": self._delete_preset,
        }

    async def answer(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        """Do what is asked where the page stays where it is. handle: the conversation shown."""
        act = self._answers.get(str(command.get("do")))
        try:
            if act is not None:
                return await asyncio.to_thread(act, page, handle, command, form)
        except LocalspecError as error:
            return Shown(warning=str(error))
        return Shown()

    async def move(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        """Do what is asked, after which the page shows another conversation, branch or reply."""
        name = str(command.get("do"))
        if name == "continue":
            return await self._handlers.proceed(page, handle, form)
        try:
            wanted, news = await asyncio.to_thread(self._go, name, handle, command)
        except LocalspecError as error:
            return Shown(warning=str(error))
        shown = await self._handlers.open(page, wanted)
        return replace(shown, signal={**(shown.signal or {}), **news})

    def _go(self, name: str, handle: int | None, command: Command) -> tuple[int | None, News]:
        """The conversation to show then, and news for our scripts."""
        if name == "open":
            return self._known(command.get("handle")), {}
        if name == "show" and handle is not None:
            self._service.show_branch(handle, _whole(command, "message"))
        elif name == "delete":
            news = self._delete(command)
            return (None if news["deleted"]["handle"] == handle else handle), news
        elif name == "restore":
            self._service.restore(_whole(command, "handle"))
            return _whole(command, "handle"), {}
        return handle, {}

    # the list at the side

    def _known(self, handle: object) -> int | None:
        known = {row.id for row in self._service.conversations()}
        return handle if isinstance(handle, int) and handle in known else None

    def _listed(self, page: str, handle: int | None) -> Shown:
        return Shown(history=self._handlers.history(page, handle))

    def _search(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._handlers.search(page, str(command.get("words", ""))[:MAX_TITLE_LENGTH])
        return self._listed(page, handle)

    def _rename(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        title = " ".join(str(command.get("title", "")).split())[:MAX_TITLE_LENGTH]
        if not title:
            raise RequestError("A chat needs a title. Type one, or leave the old one.")
        self._service.rename(_whole(command, "handle"), title)
        return self._listed(page, handle)

    def _pin(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._service.pin(_whole(command, "handle"), bool(command.get("is_pinned")))
        return self._listed(page, handle)

    def _delete(self, command: Command) -> News:
        handle = _whole(command, "handle")
        reply = self._service.running(handle)
        if reply is not None:
            self._service.stop(reply)
        rows = self._service.conversations()
        title = next((row.title for row in rows if row.id == handle), "")
        self._service.delete(handle)
        return {"deleted": {"handle": handle, "title": title}}

    # one message

    def _edit(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        text, files = parted(self._text_of(handle, command))
        news = {"message": command["message"], "text": text, "files": [*map(_file, files)]}
        return Shown(signal={"edit": news})

    def _all(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        return Shown(signal={"all": self._text_of(handle, command)})

    def _text_of(self, handle: int | None, command: Command) -> str:
        wanted = _whole(command, "message")
        for message in self._service.messages(handle):
            if message.message_id == wanted:
                return message.text
        raise RequestError("This message is not in the chat any more. Reload the page.")

    def _gauge(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        try:
            extras = Extras.from_data(command)
            text = extras.joined(str(command.get("text", "")))
            settings = self._handlers.settled(handle, form, extras)
            figures = sending.counted(self._service, handle, text, settings)
        except LocalspecError as error:  # said where the figures stand, while it is being typed
            figures = {"problem": str(error)}
        return Shown(signal={"gauge": figures})

    # presets

    def _save_preset(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        name = clean(" ".join(str(command.get("name", "")).split()))[:MAX_TITLE_LENGTH]
        if not name:
            raise RequestError("A preset needs a name. Type one and save again.")
        preset = preset_of(name, form)
        is_there = any(one.name == name for one in self._service.presets())
        if is_there and command.get("replace") is not True:
            return Shown(signal={"preset_exists": name})
        self._service.save_preset(preset)
        return Shown(presets=[one.name for one in self._service.presets()], preset=name)

    def _delete_preset(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._service.delete_preset(str(command.get("name", "")))
        return Shown(presets=[one.name for one in self._service.presets()], preset=None)


def _whole(command: Command, name: str) -> int:
    value = command.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError("The page asked for something that is not there. Reload it.")
    return value


def _file(file: tuple[str, str]) -> dict[str, Any]:
    """A file as static/compose.js holds it."""
    data = file[1].encode("utf-8", "replace")
    return {"name": file[0], "size": len(data), "data": base64.b64encode(data).decode()}
