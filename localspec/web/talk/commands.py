"""What our own scripts ask of the page: open, search, rename, edit, branch, settings.

Contract: a command is plain data from the browser, `{"do": name, ...}`, and is not trusted: unknown
ones do nothing, wrong values are refused in a sentence. Each answers with what changed on the page
(`Shown`), never with an exception.

Not here: sending and following a turn (handlers), how clicks become commands (static/*.js).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from localspec.chat.attachments import Attachment
from localspec.chat.service import ChatService, Reply, ReplySettings, ShownMessage, clean
from localspec.core.decoding import LARGEST_INTEGER
from localspec.core.errors import LocalspecError, RequestError
from localspec.core.options import MOST_GB
from localspec.record.conversations import PROMPT
from localspec.web.talk.form import Form, panel
from localspec.web.talk.handlers import Handlers, Shown
from localspec.web.talk.messages import parted
from localspec.web.talk.sending import Extras

MAX_TITLE_LENGTH = 200
MAX_PROMPT_NAME = 80
# Replies in the place of one, "several" as the label of the action says; 0: the last one goes on.
ANSWERS_AGAIN = {"again": 1, "several": 4, "continue": 0}
NOTHING_TO_ANSWER = "There is nothing to answer again, or a reply is being written."
NOTHING_GOES_ON = "There is no reply that could go on, or one is being written."
News = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """One that was asked for. page, handle: where, and the conversation shown there. asked: as it
    came. form: what the fields hold."""

    handlers: Handlers
    page: str
    handle: int | None
    asked: dict[str, Any]
    form: Form

    @property
    def service(self) -> ChatService:
        return self.handlers.service

    async def answer(self) -> Shown:
        """Do what is asked where the page stays where it is. Each of these commands is a method,
        `do_` and its name."""
        act = getattr(self, f"do_{self.asked.get('do')}", None)
        try:
            if act is not None:
                return await asyncio.to_thread(act)
        except LocalspecError as error:
            return Shown(warning=str(error))
        return Shown()

    async def move(self) -> Shown:
        """Do what is asked, after which the page shows another conversation, branch or reply."""
        name = self._text("do")
        try:
            if name in ANSWERS_AGAIN:
                return await self._answer_again(name)
            if name == "rewrite" and self.handle is not None:
                return await self._rewrite(self.handle)
            wanted, news = await asyncio.to_thread(self._go, name)
        except LocalspecError as error:
            return Shown(warning=str(error))
        shown = await self.handlers.open(self.page, wanted)
        return replace(shown, signal={**(shown.signal or {}), **news})

    async def _answer_again(self, name: str) -> Shown:
        begin: Callable[[int, ReplySettings], Reply | None] = self.service.proceed
        refusal = NOTHING_GOES_ON
        if num_replies := ANSWERS_AGAIN[name]:
            message_id = self._number("message")
            begin = partial(self.service.regenerate, message_id=message_id, num_replies=num_replies)
            refusal = NOTHING_TO_ANSWER
        return await self.handlers.answer_again(self.page, self.handle, self.form, begin, refusal)

    def _go(self, name: str) -> tuple[int | None, News]:
        """The conversation to show then, and news for our scripts."""
        handle = self.handle
        if name == "open":
            return self._opened(self.asked.get("handle"))
        if name == "show" and handle is not None:
            self.service.show_branch(handle, self._number("message"))
        elif name == "duplicate":
            return self.service.copy(self._number("handle")), {}
        elif name == "fork" and handle is not None:
            return self.service.copy(handle, self._number("message")), {}
        elif name == "remove" and handle is not None:
            message_id = self._number("message")
            self.service.delete_message(handle, message_id)
            gone = {"removed": {"handle": handle, "message": message_id}}
            return (handle if self.service.messages(handle) else None), gone
        elif name == "earlier" and (reader := self.handlers.presence.reader(self.page)):
            reader.is_whole = True
        elif name == "bring_back":
            wanted = self._number("handle")
            self.service.restore_message(wanted, self._number("message"))
            return wanted, {}
        elif name == "takeback" and handle is not None:
            text, files = parted(self.service.take_back(handle, self._number("message")))
            back = {"text": text, "files": [{"name": name, "text": file} for name, file in files]}
            return (handle if self.service.messages(handle) else None), {"taken_back": back}
        elif name == "delete":
            news = self._delete()
            return (None if news["deleted"]["handle"] == handle else handle), news
        elif name == "restore":
            self.service.restore(self._number("handle"))
            return self._number("handle"), {}
        return handle, {}

    # the list at the side

    def _opened(self, handle: object) -> tuple[int | None, News]:
        known = {row.id for row in self.service.conversations()}
        if not isinstance(handle, int) or handle in known:
            return handle if isinstance(handle, int) else None, {}
        return None, self.handlers.restorable(handle)

    def _listed(self) -> Shown:
        return Shown(history=self.handlers.history(self.page))

    def do_search(self) -> Shown:
        words = self._text("words")[:MAX_TITLE_LENGTH]
        self.handlers.search(self.page, self._number("number"), words)
        return self._listed()

    def do_rename(self) -> Shown:
        title = " ".join(self._text("title").split())[:MAX_TITLE_LENGTH]
        if not title:
            raise RequestError("A chat needs a title. Type one, or leave the old one.")
        self.service.rename(self._number("handle"), title)
        return self._listed()

    def do_pin(self) -> Shown:
        self.service.pin(self._number("handle"), bool(self.asked.get("is_pinned")))
        return self._listed()

    def do_titles(self) -> Shown:
        """Whether the model names new chats."""
        if self.service.titles is not None:
            self.service.titles.switch(self.asked.get("value") is True)
        return Shown()

    def do_keep_chats(self) -> Shown:
        """How many GB of disk hold what was read of chats."""
        value = self.asked.get("value")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= float(value or 0) <= MOST_GB:
            raise RequestError(f"The disk for chats is a number of GB from 0 to {MOST_GB:,}.")
        self.service.kept_chats.limit(float(value or 0))
        return self._told()

    def do_when_full(self) -> Shown:
        """Says what this chat does when its context is full; with a value, sets it first."""
        wanted = self._number("handle")
        if "value" in self.asked:
            self.service.decide(wanted, str(self.asked["value"]))
            return Shown()
        news = {"handle": wanted, "value": self.service.when_full(wanted)}
        return Shown(signal={"when_full": news})

    def do_folders(self) -> Shown:
        """The folders that a chat can be moved to."""
        wanted = self._number("handle")
        named = [[one.id, clean(one.name)] for one in self.service.folders.all()]
        return Shown(signal={"folders": {"handle": wanted, "folders": named}})

    def do_new_folder(self) -> Shown:
        """handle in the command: of the chat that goes into it, None for an empty one."""
        made = self.service.folders.add(self._text("name"))
        if self.asked.get("handle") is not None:
            self.service.place(self._number("handle"), made)
        return self._listed()

    def do_rename_folder(self) -> Shown:
        self.service.folders.rename(self._number("folder"), self._text("name"))
        return self._listed()

    def do_delete_folder(self) -> Shown:
        self.service.folders.delete(self._number("folder"))
        return self._listed()

    def do_fold(self) -> Shown:
        self.service.folders.fold(self._number("folder"), self.asked.get("is_collapsed") is True)
        return Shown()

    def do_place(self) -> Shown:
        folder = None if self.asked.get("folder") is None else self._number("folder")
        self.service.place(self._number("handle"), folder)
        return self._listed()

    def _delete(self) -> News:
        handle = self._number("handle")
        reply = self.service.running(handle)
        if reply is not None:
            self.service.stop(reply)
        rows = self.service.conversations()
        title = next((row.title for row in rows if row.id == handle), "")
        self.service.delete(handle)
        return {"deleted": {"handle": handle, "title": title}}

    # one message

    def do_edit(self) -> Shown:
        message = self._message()
        text, files = parted(message.text) if message.role == "user" else (message.text, [])
        names = [name for name, _ in files]
        news = {"message": message.message_id, "role": message.role, "text": text, "files": names}
        return Shown(signal={"edit": news})

    async def _rewrite(self, handle: int) -> Shown:
        """Another version of a message: one of the person's is answered anew, with its files; a
        reply is kept as it was rewritten."""
        message = await asyncio.to_thread(self._message)
        text = self._text("text")
        if not text.strip():
            raise RequestError("A message needs a text. To remove it, delete the message.")
        if message.role == "assistant":
            edit = self.service.edit
            settings = self.handlers.settled(handle, self.form, Extras())
            await asyncio.to_thread(edit, handle, message.message_id or 0, text, settings)
            return await self.handlers.open(self.page, handle)
        files = tuple(Attachment(*one) for one in parted(message.text)[1])
        decided = replace(Extras.from_data(self.asked), files=files, edits=message.message_id)
        sent = await self.handlers.send(self.page, handle, text, self.form, decided)
        is_sent = sent.signal is not None and "sent" in sent.signal
        signal = {"rewritten": message.message_id} if is_sent else sent.signal
        return replace(sent, signal=signal)

    def do_all(self) -> Shown:
        return Shown(signal={"all": self._message().text})

    def _message(self) -> ShownMessage:
        wanted = self._number("message")
        for message in self.service.messages(self.handle):
            if message.message_id == wanted:
                return message
        raise RequestError("This message is not in the chat any more. Reload the page.")

    def do_gauge(self) -> Shown:
        try:
            extras = Extras.from_data(self.asked)
            text = extras.joined(self._text("text"))
            settings = self.handlers.settled(self.handle, self.form, extras)
            usage = self.service.context_usage(self.handle, text, settings)
            figures = None if usage is None else asdict(usage)
        except LocalspecError as error:  # said where the figures stand, while it is being typed
            figures = {"problem": str(error)}
        return Shown(signal={"gauge": figures})

    # settings

    def do_panel(self) -> Shown:
        """is_ready: a model was loaded, so that a new chat gets its defaults. A page that is still
        to open a chat names none either, and gets the settings with it."""
        reader = self.handlers.presence.reader(self.page)
        is_new = reader is not None and reader.handle is None and self.handlers.is_untouched
        is_late = is_new and bool(self.asked.get("is_ready"))
        return replace(self._told(), settings=self.handlers.settings(None) if is_late else None)

    def do_keep(self) -> Shown:
        self.handlers.keep(self.handle, self.form)
        return Shown(signal={"faults": self.form.faults})

    def do_save_prompt(self) -> Shown:
        self.service.prompts.save(self._name("name"), {PROMPT: self.form.system_prompt})
        return self._told()

    def do_rename_prompt(self) -> Shown:
        self.service.prompts.rename(self._name("name"), self._name("wanted"))
        return self._told()

    def do_delete_prompt(self) -> Shown:
        self.service.prompts.delete(self._name("name"))
        return self._told()

    def do_save_defaults(self) -> Shown:
        self.form.settings()  # what is out of range is refused here, not in each new chat
        self.service.defaults.save(self._loaded_model(), self.form.data)
        return self._told(defaults_saved=True)

    def do_forget_defaults(self) -> Shown:
        self.service.defaults.delete(self._loaded_model())
        return self._told()

    def _loaded_model(self) -> str:
        model = self.handlers.model
        if model is None:
            raise RequestError("Defaults belong to a model, and none is loaded yet. Wait for it.")
        return model

    def _told(self, **news: Any) -> Shown:
        return Shown(signal={"panel": panel(self.service, self.handlers.model), **news})

    # what was asked

    def _text(self, name: str) -> str:
        return str(self.asked.get(name, ""))

    def _name(self, name: str) -> str:
        """A prompt's name. Raises RequestError."""
        found = clean(" ".join(self._text(name).split()))[:MAX_PROMPT_NAME]
        if not found:
            raise RequestError("A prompt needs a name. Type one and save again.")
        return found

    def _number(self, name: str) -> int:
        value = self.asked.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST_INTEGER:
            raise RequestError("The page asked for something that is not there. Reload it.")
        return value
