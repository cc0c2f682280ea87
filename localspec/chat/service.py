"""One engine and one queue of turns for every page and client.

Contract: `submit` commits the person's message and returns a `Reply` at once, also while the model
loads; the reply's `view` is replaced as it grows, and a slow reader never slows the engine.
`enqueue` gives any other job the backend to itself, in the same queue. `switch`, `unload` and
`retry` change what is loaded. However a turn ends (end of text, stop, fault, lost engine, closed
page), the log has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from localspec.chat import branches
from localspec.chat.backend_lifecycle import BackendLifecycle, Opener, Smaller
from localspec.chat.context_room import ContextUsage, check_servable, count_prompt
from localspec.chat.jobs import Task
from localspec.chat.journal import OpenConversation, PendingTurn
from localspec.chat.log_service import LogService
from localspec.chat.off_reasons import off_now
from localspec.chat.rolling import SPARE_SHARE, fewest_left_out
from localspec.chat.titles import Titles, title_of, title_of_copy
from localspec.chat.turn import (
    Reply,
    ReplySettings,
    ShownMessage,
    Status,
    applicable,
    clean,
    decided,
    prompt_messages,
    request_of,
    versions,
)
from localspec.chat.worker import Worker
from localspec.core.backend import Backend, Message, Request
from localspec.core.decoding import AUTO
from localspec.core.errors import ContextOverflow, EngineLost, RequestError, StoreError
from localspec.core.options import LoadOptions
from localspec.core.workloads import Workload, load_workloads
from localspec.record.export import Format, Scope
from localspec.record.store import STATE_KEY, SessionInfo, Store


class ChatService(LogService):
    """Owns the worker, the backend's lifecycle and the journal.

    open_backend(report) loads; `report` takes one phrase of progress at a time, and may raise to
    end the load. session_info is asked when the first turn begins. drafter: of the page and of
    programs that name none. workloads: None for those shipped. options: what open_backend loads,
    None where the caller does not name it. opener_for: opens other options; without it nothing can
    be switched. unload_after_s: unload the model after so long without work; None never. smaller:
    see BackendLifecycle. makes_titles: the model may write titles. `start` once, `close` at the
    end.
    """

    def __init__(
        self,
        store: Store,
        session_info: Callable[[], SessionInfo],
        open_backend: Opener,
        drafter: str = AUTO,
        workloads: Mapping[str, Workload] | None = None,
        *,
        options: LoadOptions | None = None,
        opener_for: Callable[[LoadOptions], Opener] | None = None,
        unload_after_s: float | None = None,
        smaller: Smaller | None = None,
        makes_titles: bool = False,
    ) -> None:
        super().__init__(store, session_info)
        self.titles = Titles(store) if makes_titles else None
        self.workloads = load_workloads() if workloads is None else workloads
        self.drafter = drafter
        save_state = partial(self.journal.save_state, STATE_KEY)
        self.lifecycle = BackendLifecycle(open_backend, save_state, options, opener_for, smaller)
        self._submitting = threading.Lock()
        self.kept_chats.backend = lambda: self.lifecycle.backend
        more = (self._request_now, unload_after_s, self._idle_task)
        self.worker = Worker(self.lifecycle, self.journal, *more)

    def start(self) -> None:
        """Begin loading, in the background; once is enough. Nobody else may use the log so."""
        self.tidy()
        self.worker.start()

    def close(self) -> None:
        """Stop the running reply, write what is left, release the backend."""
        self.worker.close()
        self.journal.close()

    # what is there

    def status(self, handle: int | None = None) -> Status:
        """reply: the one under way in this conversation, else the oldest, else the last one of this
        conversation, or of all where handle is None."""
        lifecycle = self.lifecycle
        notices = (*self.store.notices, *lifecycle.notices)
        if lifecycle.loaded is not None:
            notices += lifecycle.loaded.notices
        if self.journal.notice is not None:
            notices += (self.journal.notice,)
        reply = self.running(handle) or self.current or self.worker.latest
        if reply is not None and handle is not None and reply.view.ended_s is not None:
            reply = reply if reply.pending.conversation.is_named(handle) else None
        view = None if reply is None else reply.view
        is_over = view is None or view.ended_s is not None
        is_of_this = view and (view.ended_s is None or view.ended_s > lifecycle.opened_s)
        stats = view.stats if view and is_of_this else None
        return Status(
            phase=lifecycle.phase,
            phrase=lifecycle.phrase,
            seconds=lifecycle.seconds,
            description=lifecycle.loaded,
            notices=notices,
            num_waiting=self.worker.num_waiting,
            reply=view,
            off=off_now(lifecycle.loaded, stats, lifecycle.was_lost, is_over=is_over),
            offer=lifecycle.offer,
            num_list_changes=self.store.conversation_list.num_changes,
        )

    @property
    def options(self) -> LoadOptions | None:
        """What is loaded or is being loaded; None when unloaded or not named."""
        return None if self.lifecycle.phase == "unloaded" else self.lifecycle.options

    @property
    def current(self) -> Reply | None:
        """The reply being written, of several the oldest."""
        return next(iter(self.worker.running), None)

    @property
    def latest(self) -> Reply | None:
        """The reply that ended last."""
        return self.worker.latest

    def running(self, handle: int | None) -> Reply | None:
        """The reply of this conversation that is queued or being written."""
        return next(iter(self._unfinished(handle)), None)

    def waiting(self, handle: int | None) -> list[Reply]:
        """The replies of this conversation that wait for the one that `running` gives, and for
        those asked for together with it."""
        unfinished = self._unfinished(handle)
        return [one for one in unfinished if one not in unfinished[0].together]

    def _unfinished(self, handle: int | None) -> list[Reply]:
        named = handle or 0
        return [one for one in self.worker.replies if one.pending.conversation.is_named(named)]

    # what is loaded

    def switch(self, options: LoadOptions) -> None:
        """Free what is loaded, then load this, after the reply under way and before those that
        wait; `status` says how it went. Raises ConfigError where a server does not answer now."""
        if options.remote is not None:
            self.lifecycle.try_out(options)
        self.worker.order(lambda: self.lifecycle.switch(options))

    def unload(self) -> None:
        """Free what is loaded, after the reply under way; the next message loads it again."""
        self.worker.order(
            lambda: self.lifecycle.release("Unloaded; the next message loads the model again.")
        )

    def retry(self) -> None:
        """Load again a model that could not be loaded, or an engine that was lost too often."""
        self.worker.order(self.lifecycle.reload)

    def enqueue(self, name: str, job: Callable[[Backend, threading.Event], None]) -> Task:
        """Run `job(backend, cancel)` in the worker's thread, in one queue with the replies. A
        waiting reply does not interrupt it; its `cancel` asks it to end."""
        task = Task(name, job)
        self.worker.queue(task)
        return task

    # one turn

    def submit(self, handle: int | None, text: str, settings: ReplySettings) -> Reply | None:
        """Commit the person's message and queue its reply. handle None starts a conversation.

        Returns None for an empty message. Raises ContextOverflow or RequestError with the message
        taken back; while the model loads, or does not answer, the turn itself is refused.
        """
        text = clean(text)
        if not text.strip():
            return None
        with self._submitting:  # of two pages that send at once, one follows the other
            if handle is None:
                conversation = OpenConversation(0, title_of(text))
            else:
                conversation = self.journal.conversation(handle)
            return self._ask(branches.follow_up(self.store, conversation, text), settings)

    def regenerate(
        self,
        handle: int,
        settings: ReplySettings,
        message_id: int | None = None,
        num_replies: int = 1,
    ) -> Reply | None:
        """Queue other replies beside this one, None: beside the last; the first of them. They are
        written together where there are slots. None while a reply is being written, or where there
        is nothing to answer. Raises RequestError as `versions` and `submit`."""
        again = partial(branches.regenerated, message_id=message_id)
        return self._answer_again(handle, again, versions(settings, num_replies))

    def proceed(self, handle: int, settings: ReplySettings) -> Reply | None:
        """Continue the last reply, whatever ended it; the result is one text with the old one. None
        as for `regenerate`."""
        return self._answer_again(handle, branches.continued, [settings])

    def edit(
        self, handle: int, message_id: int, text: str, settings: ReplySettings
    ) -> Reply | None:
        """Put a text in a message's place, on a new branch. A message of the person's is answered;
        a rewritten reply is only stored, and None returned, as for an empty text and while a reply
        is being written. Raises RequestError, StoreError."""
        text = clean(text)
        with self._submitting:
            if not text.strip() or self.running(handle) is not None:
                return None
            conversation = self.journal.conversation(handle)
            message = branches.message_of(self.store, conversation, message_id)
            if message.role == "user":
                turn = PendingTurn(conversation, text, parent_id=message.parent_id)
                return self._ask(turn, settings)
            self.store.add_message(
                message.conversation_id,
                message.parent_id,
                "assistant",
                text,
                model=message.model,
                is_edited=1,
            )
            return None

    def show_branch(self, handle: int, message_id: int) -> None:
        """Make the newest end of the branch through this message the conversation's tip. Raises
        RequestError while a reply is being written or waits to be recorded; StoreError."""
        message = branches.message_of(self.store, self._at_rest(handle), message_id)
        self.store.message_tree.set_tip(
            message.conversation_id, self.store.message_tree.newest_leaf(message_id)
        )

    def delete_message(self, handle: int, message_id: int) -> None:
        """Take one message out; what follows it stays. Raises as `show_branch`."""
        branches.message_of(self.store, self._at_rest(handle), message_id)
        self.store.message_tree.delete(message_id)
        self.kept_chats.forget(self.journal.conversation(handle).stored_id)

    def restore_message(self, handle: int, message_id: int) -> None:
        """Undo `delete_message`. Raises as `show_branch`."""
        self.store.message_tree.restore(self._at_rest(handle).stored_id or 0, message_id)

    def copy(self, handle: int, until: int | None = None) -> int:
        """A new chat with the messages up to this one, None: with all, on every branch; its
        handle. Raises as `show_branch`."""
        conversation = self._at_rest(handle)
        if until is not None:
            branches.message_of(self.store, conversation, until)
        found = self._stored(conversation)
        named = title_of_copy("" if found is None else found.title, is_whole=until is None)
        return self.store.message_tree.copy(conversation.stored_id or 0, named, until)

    def _at_rest(self, handle: int) -> OpenConversation:
        """The conversation, stored whole. Raises RequestError while a reply is written."""
        conversation = self.journal.conversation(handle)
        is_running = self.running(handle) is not None
        if is_running or (conversation.tip is not None and not self.journal.flush()):
            raise RequestError(
                "A reply of this conversation is still being written or recorded. Wait for its "
                "end or stop it, then try again."
            )
        return conversation

    def context_usage(
        self, handle: int | None, text: str, settings: ReplySettings
    ) -> ContextUsage | None:
        """How full the context would be with this message, by the backend's own tokenizer. None
        while that is not known, or where the chat format refuses the conversation."""
        loaded = self.lifecycle.loaded
        if loaded is None or loaded.context_length is None:
            return None
        shown = self.messages(handle)
        messages = prompt_messages(settings.system_prompt, shown[settings.num_left_out :])
        if text.strip() or not shown:  # no chat format renders a system prompt alone
            messages = (*messages, Message("user", clean(text)))
        if (num_tokens := count_prompt(self.lifecycle.backend, messages)) is None:
            return None
        num_reply_tokens, num_left_out = settings.max_tokens or 0, settings.num_left_out
        return ContextUsage(num_tokens, num_reply_tokens, loaded.context_length, num_left_out)

    def num_tokens(self, text: str) -> int | None:
        """Of a text, by the model's own tokenizer; None while it cannot count."""
        return count_prompt(self.lifecycle.backend, (Message("user", clean(text)),))

    def stop(self, reply: Reply) -> None:
        """End a reply within one round, or take it out of the queue. No effect once it is over."""
        self.worker.stop(reply)

    def take_back(self, handle: int, number: int) -> str:
        """Drop the message whose reply of this number still waits; its text. Raises RequestError
        once it is being answered, StoreError."""
        with self._submitting:
            found = [one for one in self.worker.replies if one.number == number]
            is_ours = found and found[0].pending.conversation.is_named(handle)
            if not is_ours or not self.worker.take_back(found[0]):
                raise RequestError(
                    "This message is being answered already. Stop the reply, then edit the message."
                )
            self.delete_if_empty(handle)
        return found[0].pending.text

    def _idle_task(self, latest: Reply | None, is_quiet: bool) -> Task | None:
        """What was read is kept before it is measured or a title written: that takes its place."""
        is_next, titles = self.lifecycle.needs_calibration, self.titles
        task = self.kept_chats.task(latest) if is_quiet or is_next else None
        return task or (titles.task(latest) if titles and is_quiet and not is_next else None)

    def _request_now(self, reply: Reply) -> Request:
        """In a chat that goes on without its oldest messages, without as many as it takes now."""
        owned = partial(self.kept_chats.owned, conversation=reply.pending.conversation)
        if reply.request is not None:
            return owned(reply.request)
        shown = self.messages_before(reply)
        reply.settings = applicable(reply.settings, self.lifecycle.loaded)
        if self.when_full(reply.handle) == "roll":
            place = (self.lifecycle, reply.settings, shown, reply.pending)
            if (fewest := fewest_left_out(*place, SPARE_SHARE)) is not None:
                reply.settings = replace(reply.settings, num_left_out=fewest)
        return owned(request_of(reply.settings, shown, reply.pending))

    def _answer_again(
        self,
        handle: int,
        make_turn: Callable[[Store, OpenConversation], PendingTurn | None],
        each: list[ReplySettings],
    ) -> Reply | None:
        first: Reply | None = None
        with self._submitting:  # a double click asks once
            if self.running(handle) is not None:
                return None
            conversation = self.journal.conversation(handle)
            turns = [make_turn(self.store, conversation) for _ in each]
            for turn, settings in zip(turns, each, strict=True):
                if turn is not None:
                    first = self._ask(turn, settings, first).together[0]
        return first

    def _ask(
        self, turn: PendingTurn, settings: ReplySettings, beside: Reply | None = None
    ) -> Reply:
        """Commit this turn's message, check it as long as the engine answers, queue its reply."""
        conversation = turn.conversation
        if conversation.is_deleted:
            raise RequestError("This conversation was deleted. Restore it, or write in a new chat.")
        reply = Reply(turn, decided(settings, self.workloads, turn.text))
        found = self._stored(conversation)
        tip_id = None if found is None or conversation.tip is not None else found.tip_message_id
        self.journal.add(turn)
        try:
            with suppress(EngineLost, StoreError):
                self.check(self._request_now(reply))
        except RequestError as error:
            with suppress(StoreError):
                if isinstance(error, ContextOverflow):
                    shown = self.messages_before(reply)
                    fewest = fewest_left_out(self.lifecycle, reply.settings, shown, turn)
                    error.fewest_left_out = fewest
                self.journal.take_back(turn)
                self._show_again(reply.handle, tip_id)
                raise
        if beside is not None:
            reply.join(beside)
        self.worker.queue(reply)  # what could not be checked or taken back, its turn refuses
        return reply

    def _show_again(self, handle: int, tip_id: int | None) -> None:
        with suppress(StoreError):
            self.delete_if_empty(handle)
            if tip_id is not None:
                self.store.message_tree.set_tip(handle, tip_id)

    def check(self, request: Request) -> None:
        """Raise RequestError where what is loaded cannot serve it, EngineLost without an answer."""
        if (backend := self.lifecycle.backend) and (loaded := self.lifecycle.loaded):
            check_servable(backend, loaded, request)


__all__ = [
    "ChatService", "Format", "Reply", "ReplySettings", "Scope", "ShownMessage", "Status", "Task",
    "clean",
]  # fmt: skip
