"""What our own scripts ask of the page: open, search, rename, edit, branch, settings.

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

from localspec.chat.attachments import Attachment
from localspec.chat.service import ShownMessage, clean
from localspec.errors import LocalspecError, RequestError
from localspec.record.conversations import PROMPT
from localspec.web.talk import sending
from localspec.web.talk.form import Form, panel
from localspec.web.talk.handlers import Handlers, Shown
from localspec.web.talk.messages import parted
from localspec.web.talk.sending import Extras

MAX_TITLE_LENGTH = 200
MAX_PROMPT_NAME = 80
NUM_WAYS = 4  # as the label of the action says
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
            "titles": self._titles,
            "when_full": self._when_full,
            "folders": self._folders,
            "new_folder": self._new_folder,
            "rename_folder": self._rename_folder,
            "delete_folder": self._delete_folder,
            "fold": self._fold,
            "place": self._place,
            "edit": self._edit,
            "all": self._all,
            "gauge": self._gauge,
            "panel": self._panel,
            "keep": self._keep,
            "save_prompt": self._save_prompt,
            "rename_prompt": self._rename_prompt,
            "delete_prompt": self._delete_prompt,
            "save_defaults": self._save_defaults,
            "forget_defaults": self._forget_defaults,
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
        if name == "again":
            return await self._handlers.regenerate(page, handle, form, _whole(command, "message"))
        if name == "several":
            message = _whole(command, "message")
            return await self._handlers.regenerate(page, handle, form, message, NUM_WAYS)
        try:
            if name == "rewrite" and handle is not None:
                return await self._rewrite(page, handle, command, form)
            wanted, news = await asyncio.to_thread(self._go, name, handle, command)
        except LocalspecError as error:
            return Shown(warning=str(error))
        shown = await self._handlers.open(page, wanted)
        return replace(shown, signal={**(shown.signal or {}), **news})

    def _go(self, name: str, handle: int | None, command: Command) -> tuple[int | None, News]:
        """The conversation to show then, and news for our scripts."""
        if name == "open":
            return self._opened(command.get("handle"))
        if name == "show" and handle is not None:
            self._service.show_branch(handle, _whole(command, "message"))
        elif name == "duplicate":
            return self._service.copy(_whole(command, "handle")), {}
        elif name == "fork" and handle is not None:
            return self._service.copy(handle, _whole(command, "message")), {}
        elif name == "remove" and handle is not None:
            message_id = _whole(command, "message")
            self._service.delete_message(handle, message_id)
            gone = {"removed": {"handle": handle, "message": message_id}}
            return (handle if self._service.messages(handle) else None), gone
        elif name == "bring_back":
            wanted = _whole(command, "handle")
            self._service.restore_message(wanted, _whole(command, "message"))
            return wanted, {}
        elif name == "takeback" and handle is not None:
            text, files = parted(self._service.take_back(handle, _whole(command, "message")))
            back = {"text": text, "files": [*map(_file, files)]}
            return (handle if self._service.messages(handle) else None), {"taken_back": back}
        elif name == "delete":
            news = self._delete(command)
            return (None if news["deleted"]["handle"] == handle else handle), news
        elif name == "restore":
            self._service.restore(_whole(command, "handle"))
            return _whole(command, "handle"), {}
        return handle, {}

    # the list at the side

    def _opened(self, handle: object) -> tuple[int | None, News]:
        known = {row.id for row in self._service.conversations()}
        if not isinstance(handle, int) or handle in known:
            return handle if isinstance(handle, int) else None, {}
        return None, self._handlers.restorable(handle)

    def _listed(self, page: str) -> Shown:
        return Shown(history=self._handlers.history(page))

    def _search(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._handlers.search(page, str(command.get("words", ""))[:MAX_TITLE_LENGTH])
        return self._listed(page)

    def _rename(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        title = " ".join(str(command.get("title", "")).split())[:MAX_TITLE_LENGTH]
        if not title:
            raise RequestError("A chat needs a title. Type one, or leave the old one.")
        self._service.rename(_whole(command, "handle"), title)
        return self._listed(page)

    def _pin(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._service.pin(_whole(command, "handle"), bool(command.get("is_pinned")))
        return self._listed(page)

    def _titles(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        """Whether the model names new chats."""
        if self._service.titles is not None:
            self._service.titles.switch(command.get("value") is True)
        return Shown()

    def _when_full(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        """Says what this chat does when its context is full; with a value, sets it first."""
        wanted = _whole(command, "handle")
        if "value" in command:
            self._service.decide(wanted, str(command["value"]))
            return Shown()
        news = {"handle": wanted, "value": self._service.when_full(wanted)}
        return Shown(signal={"when_full": news})

    def _folders(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        """The folders that a chat can be moved to."""
        wanted = _whole(command, "handle")
        named = [[one.id, clean(one.name)] for one in self._service.folders.all()]
        return Shown(signal={"folders": {"handle": wanted, "folders": named}})

    def _new_folder(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        """handle in the command: of the chat that goes into it, None for an empty one."""
        made = self._service.folders.add(str(command.get("name", "")))
        if command.get("handle") is not None:
            self._service.place(_whole(command, "handle"), made)
        return self._listed(page)

    def _rename_folder(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._service.folders.rename(_whole(command, "folder"), str(command.get("name", "")))
        return self._listed(page)

    def _delete_folder(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._service.folders.delete(_whole(command, "folder"))
        return self._listed(page)

    def _fold(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._service.folders.fold(_whole(command, "folder"), command.get("is_collapsed") is True)
        return Shown()

    def _place(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        folder = None if command.get("folder") is None else _whole(command, "folder")
        self._service.place(_whole(command, "handle"), folder)
        return self._listed(page)

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
        message = self._message(handle, command)
        text, files = parted(message.text) if message.role == "user" else (message.text, [])
        names = [name for name, _ in files]
        news = {"message": message.message_id, "role": message.role, "text": text, "files": names}
        return Shown(signal={"edit": news})

    async def _rewrite(self, page: str, handle: int, command: Command, form: Form) -> Shown:
        """Another version of a message: one of the person's is answered anew, with its files; a
        reply is kept as it was rewritten."""
        message = await asyncio.to_thread(self._message, handle, command)
        text = str(command.get("text", ""))
        if not text.strip():
            raise RequestError("A message needs a text. To remove it, delete the message.")
        if message.role == "assistant":
            edit = self._service.edit
            settings = self._handlers.settled(handle, form, Extras())
            await asyncio.to_thread(edit, handle, message.message_id or 0, text, settings)
            return await self._handlers.open(page, handle)
        files = tuple(Attachment(*one) for one in _encoded(parted(message.text)[1]))
        decided = replace(Extras.from_data(command), files=files, edits=message.message_id)
        sent = await self._handlers.send(page, handle, text, form, decided)
        is_sent = sent.signal is not None and "sent" in sent.signal
        signal = {"rewritten": message.message_id} if is_sent else sent.signal
        return replace(sent, signal=signal)

    def _all(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        return Shown(signal={"all": self._message(handle, command).text})

    def _message(self, handle: int | None, command: Command) -> ShownMessage:
        wanted = _whole(command, "message")
        for message in self._service.messages(handle):
            if message.message_id == wanted:
                return message
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

    # settings

    def _panel(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        """is_ready: a model was loaded, so that a new chat gets its defaults."""
        handlers = self._handlers
        is_late = bool(command.get("is_ready")) and handle is None and handlers.is_untouched
        news = {"panel": panel(self._service, handlers.model)}
        return Shown(settings=handlers.settings(None) if is_late else None, signal=news)

    def _keep(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._handlers.keep(handle, form)
        return Shown()

    def _save_prompt(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._service.prompts.save(_prompt(command, "name"), {PROMPT: form.system_prompt})
        return self._told()

    def _rename_prompt(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._service.prompts.rename(_prompt(command, "name"), _prompt(command, "wanted"))
        return self._told()

    def _delete_prompt(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        self._service.prompts.delete(_prompt(command, "name"))
        return self._told()

    def _save_defaults(self, page: str, handle: int | None, command: Command, form: Form) -> Shown:
        form.settings()  # what is out of range is refused here, not in each new chat
        self._service.defaults.save(self._loaded_model(), form.data)
        return self._told(defaults_saved=True)

    def _forget_defaults(
        self, page: str, handle: int | None, command: Command, form: Form
    ) -> Shown:
        self._service.defaults.delete(self._loaded_model())
        return self._told()

    def _loaded_model(self) -> str:
        model = self._handlers.model
        if model is None:
            raise RequestError("Defaults belong to a model, and none is loaded yet. Wait for it.")
        return model

    def _told(self, **news: Any) -> Shown:
        return Shown(signal={"panel": panel(self._service, self._handlers.model), **news})


def _prompt(command: Command, name: str) -> str:
    """A prompt's name. Raises RequestError."""
    found = clean(" ".join(str(command.get(name, "")).split()))[:MAX_PROMPT_NAME]
    if not found:
        raise RequestError("A prompt needs a name. Type one and save again.")
    return found


def _whole(command: Command, name: str) -> int:
    value = command.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError("The page asked for something that is not there. Reload it.")
    return value


def _encoded(files: list[tuple[str, str]]) -> list[tuple[str, bytes]]:
    return [(name, text.encode("utf-8", "replace")) for name, text in files]


def _file(file: tuple[str, str]) -> dict[str, Any]:
    """A file as static/compose.js holds it."""
    data = file[1].encode("utf-8", "replace")
    return {"name": file[0], "size": len(data), "data": base64.b64encode(data).decode()}
