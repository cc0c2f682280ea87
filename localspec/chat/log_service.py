"""What a page asks of the log: the list of conversations, kept settings, statistics, tokens,
exports.

Contract: none of it needs an engine. Everything may be called from any thread; StoreError where
the log cannot be read or take a change.

Not here: new turns (service).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.chat import branches
from localspec.chat.audit import Replay, logged_reply, replay_of
from localspec.chat.importing import Report, read_conversations
from localspec.chat.journal import COMMIT_WAIT_S, Journal, OpenConversation
from localspec.chat.kept_chats import KeptChats
from localspec.chat.turn import Reply, ShownMessage, clean
from localspec.controller.controller import measurements
from localspec.core.errors import RequestError
from localspec.core.speculation import Measurement
from localspec.record.conversations import PROMPT, ConversationList, ConversationRow
from localspec.record.drafted import TokenRecord, unpack
from localspec.record.export import Format, Scope, export, export_to_send, sweep_unsent
from localspec.record.kept_settings import settings_from
from localspec.record.rows import Conversation, RecentGain, visible_line
from localspec.record.store import STATE_KEY, SessionInfo, Store

WHEN_FULL = ("ask", "roll", "stop")


@dataclass(frozen=True)
class ReplyRecord:
    """What the log has of one reply's tokens. row: of its turn. text: what was thought and
    said, in characters that JSON can carry. record: what its rounds drafted, None where an older
    log did not keep it."""

    row: dict[str, Any]
    text: str
    tokens: tuple[int, ...]
    provenance: tuple[str, ...]
    record: TokenRecord | None
    steps: list[dict[str, Any]]


class LogService:
    """See the module. session_info: asked when the first turn begins. prompts: the person's library
    of prompts. defaults: what a new chat begins with, by the name of the model. api_keys: of other
    programs. folders: of the list of conversations. kept_chats: what was read of them."""

    def __init__(self, store: Store, session_info: Callable[[], SessionInfo]) -> None:
        self.store = store
        self.journal = Journal(store, session_info)
        self.prompts, self.defaults = store.prompts, store.defaults
        self.api_keys, self.folders = store.api_keys, store.folders
        self.kept_chats = KeptChats(store)

    # the list of conversations

    def conversations(self, search: str = "") -> list[ConversationRow]:
        """Those not recorded yet, the newest first, then the stored ones, pinned ones first. With
        `search`: the stored ones that have all its words in a message or the title. The id of one
        that is not recorded yet is negative."""
        stored = self.store.conversation_list.rows(search)
        if search.strip():
            return stored
        unstored = reversed(self.journal.unstored_conversations())
        return [*(ConversationRow(one.handle, one.title, False, "") for one in unstored), *stored]

    def rename(self, handle: int, title: str) -> None:
        """Raises RequestError for an empty title, StoreError."""
        title = visible_line(title, "title")
        conversation = self.journal.change(
            handle, lambda conversations, stored_id: conversations.rename(stored_id, title)
        )
        conversation.title = title

    def pin(self, handle: int, is_pinned: bool) -> None:
        self._set(handle, is_pinned=int(is_pinned))

    def import_conversations(self, data: bytes, report: Report | None = None) -> list[int]:
        """Store the conversations of an exported file, all or none; the new handles. Raises
        RequestError, StoreError. report: is told what was not imported."""
        return self.store.conversation_list.add_imported(read_conversations(data, report))

    def place(self, handle: int, folder_id: int | None) -> None:
        """Move a chat into a folder; None: out of it."""
        self._set(handle, folder_id=folder_id)

    def messages(self, handle: int | None) -> list[ShownMessage]:
        """The conversation from its root to its newest message, the growing reply included."""
        if handle is None:
            return []
        return branches.messages_of(self.store, self.journal.conversation(handle))

    def messages_before(self, reply: Reply) -> list[ShownMessage]:
        """The conversation up to the message that this reply answers."""
        return branches.messages_of(self.store, reply.pending.conversation, until=reply.pending)

    def when_full(self, handle: int | None) -> str:
        """What is done when the context of this chat is full: ask, roll (go on without the oldest
        messages) or stop."""
        found = None if handle is None else self._stored(self.journal.conversation(handle))
        return (None if found is None else found.when_full) or WHEN_FULL[0]

    def _stored(self, conversation: OpenConversation) -> Conversation | None:
        stored_id = conversation.stored_id
        return None if stored_id is None else self.store.conversation(stored_id)

    def decide(self, handle: int, when_full: str) -> None:
        """Set `when_full` of this chat. Raises RequestError for what is none of these."""
        if when_full not in WHEN_FULL:
            raise RequestError(f"A full context is met by one of {', '.join(WHEN_FULL)}.")
        self._set(handle, when_full=when_full)

    def _set(self, handle: int, **columns: str | int | None) -> None:
        """See ConversationList.change."""
        self.journal.change(handle, lambda chats, stored_id: chats.change(stored_id, **columns))

    def delete(self, handle: int) -> None:
        """Remove it from every list, until `restore` or, at the next start, for good."""
        conversation = self.journal.change(handle, ConversationList.delete)
        conversation.is_deleted = True
        self.kept_chats.forget(conversation.stored_id)

    def delete_if_empty(self, handle: int) -> None:
        """After its only message was taken back."""
        if not self.messages(handle):
            self.delete(handle)

    def restore(self, handle: int) -> None:
        """Undo `delete`. Raises StoreError where it is deleted for good."""
        conversation = self.journal.change(handle, ConversationList.restore)
        conversation.is_deleted = False

    def deleted_title(self, handle: int) -> str | None:
        """Of a conversation that `restore` brings back; None for any other."""
        is_deleted = handle > 0 and self.journal.conversation(handle).is_deleted
        found = self.store.conversation(handle) if is_deleted else None
        return None if found is None else found.title

    def system_prompt(self, handle: int) -> str:
        """That of the conversation's latest turn."""
        conversation = self.journal.conversation(handle)
        tip = conversation.tip  # read once: the journal's thread takes it away when it is stored
        if tip is not None and tip.settings is not None:
            return tip.settings.system_prompt or ""
        found = self._stored(conversation)
        return "" if found is None else found.system_prompt or ""

    # settings: texts by the names of the page's fields

    def settings_of(self, handle: int) -> dict[str, str]:
        """What was kept for a conversation; of an older or imported one its system prompt alone."""
        conversation = self.journal.conversation(handle)
        if conversation.settings is not None:
            return conversation.settings
        found = self._stored(conversation)
        kept = None if found is None else settings_from(found.settings)
        return {PROMPT: self.system_prompt(handle), **(kept or {})}

    def keep_settings(self, handle: int, settings: Mapping[str, str]) -> None:
        kept = dict(settings)
        conversation = self.journal.change(
            handle, lambda conversations, stored_id: conversations.keep_settings(stored_id, kept)
        )
        conversation.settings = kept

    # what the log holds

    @property
    def data_folder(self) -> Path | None:
        """The folder of the log; None for a log in memory."""
        return None if self.store.path is None else self.store.path.parent

    @property
    def session_id(self) -> int | None:
        """This session's number in the log; None before its first turn."""
        return self.journal.session_id

    def flush(self, wait_s: float = COMMIT_WAIT_S) -> bool:
        """Wait until everything due was written; False where something could not be."""
        return self.journal.flush(wait_s)

    def session_rows(self) -> list[dict[str, Any]]:
        return self.store.session_rows()

    def turn_rows(
        self, handle: int | None = None, session_id: int | None = None
    ) -> list[dict[str, Any]]:
        """Flat rows of turns, oldest first: of a conversation, of a session, or of all."""
        if handle is None:
            return self.store.turn_rows(session_id=session_id)
        stored_id = self.journal.conversation(handle).stored_id
        return [] if stored_id is None else self.store.turn_rows(session_id, stored_id)

    def recent_gains(self) -> dict[str, RecentGain]:
        """What drafting brought lately, by model."""
        return {one.model: one for one in self.store.recent_gains()}

    def logged_models(self) -> list[str]:
        return self.store.models()

    def rounds(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rounds of these turns, oldest first."""
        return [step for row in rows for step in self.store.step_rows(row["turn_id"])]

    def hindsight(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """How drafters were judged by these turns, oldest first."""
        return self.store.hindsight.rows([row["turn_id"] for row in rows])

    def reply_record(self, message_id: int) -> ReplyRecord:
        """All that the log has of a reply's tokens. Raises StoreError where it has none."""
        row, tokens, provenance = logged_reply(self.store, message_id)
        packed, reply = self.store.drafted(message_id), self.store.branch(message_id)[-1]
        return ReplyRecord(
            row=row,
            text=clean(reply.thinking + reply.text),
            tokens=tokens,
            provenance=provenance,
            record=None if packed is None else unpack(packed),
            steps=self.store.step_rows(row["turn_id"]),
        )

    def replay(self, message_id: int, drafter: str) -> Replay:
        """The replay of a logged reply; its `run` is a job for `enqueue`. Raises StoreError as
        `reply_record`."""
        return replay_of(self.store, message_id, drafter)

    def measurements(self, context_length: int) -> tuple[Measurement, ...]:
        """What earlier runs measured, for the planner."""
        return measurements(self.store.load_state(STATE_KEY) or {}, context_length)

    def export(self, scope: Scope, format: Format, out: Path) -> None:
        """Write what is in scope to `out`. Raises StoreError."""
        self.journal.flush()
        export(self.store, scope, format, out)

    def export_to_send(self, scope: Scope, format: Format) -> Path:
        """Return a new file with what is in scope, alone in a folder that the caller removes.
        Raises StoreError."""
        self.journal.flush()
        return export_to_send(self.store, scope, format)

    def tidy(self) -> None:
        """Remove what an earlier run left unfinished or deleted. Only for the one program that has
        the sole use of the log."""
        self.journal.once(Store.tidy)  # a failure waits for the next start
        self.kept_chats.tidy()
        sweep_unsent(self.store)
