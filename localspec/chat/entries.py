"""The nouns of the journal: a conversation of this process, and a turn on its way into the log.

Contract: an Entry knows how far it got into the store; `advance` does whichever writes are due and
may be called again after a failure.

Not here: the thread that writes (journal), what is shown of them (branches).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localspec.backend import TurnStats
from localspec.core import Step
from localspec.record.store import Begun, Store, Turn, TurnSettings

MAX_TITLE_LENGTH = 200


def title_line(text: str) -> str:
    """A title as one line of text: without control characters, and without those that would turn
    the direction of what stands beside it."""
    kept = (c if c.isspace() or unicodedata.category(c) not in HIDDEN else " " for c in text)
    return " ".join("".join(kept).split())[:MAX_TITLE_LENGTH]


HIDDEN = ("Cc", "Cs")


@dataclass(frozen=True)
class Ending:
    """How a reply ended: everything the store is told about it."""

    text: str
    token_ids: Sequence[int]
    provenance: Sequence[str]
    stats: TurnStats | None
    steps: Sequence[Step]
    finish_reason: str
    error: str | None
    drafted: bytes | None = None


@dataclass
class Talk:
    """A conversation of this process. entries: its turns not yet wholly stored, oldest first.
    tip: the turn at the end of the branch in use, None where the store knows that one. due: what
    is still to be done to it, with its id, once it is stored."""

    handle: int
    title: str
    stored_id: int | None = None
    entries: list[Entry] = field(default_factory=list)
    tip: Entry | None = None
    is_deleted: bool = False
    due: list[Callable[[Store, int], None]] = field(default_factory=list)


@dataclass
class Entry:
    """One turn on its way into the log.

    after: the turn before it, where that one is not stored yet; else parent_id is known.
    prompt_id: the person's stored message; given from the start for another reply to it.
    rephrases: the unstored turn whose message gets another reply.
    begun_text, begun_tokens, continues_id: of the reply that this one goes on with (`begin_with`).
    """

    talk: Talk
    text: str
    parent_id: int | None = None
    after: Entry | None = None
    prompt_id: int | None = None
    rephrases: Entry | None = None
    settings: TurnSettings | None = None
    turn: Turn | None = None
    reply_text: str = ""
    begun_text: str = ""
    begun_tokens: tuple[int, ...] = ()
    continues_id: int | None = None
    ending: Ending | None = None
    is_stored: bool = False

    def advance(self, store: Store, session_id: Callable[[], int]) -> None:
        """Write what is due and not yet written. Raises StoreError; may be called again.

        A message that follows a reply is due once that reply has its place in the tree: hung
        on anything earlier, the reply would drop out of the branch.
        """
        if self.after is not None and self.after.turn is None:
            return
        if self.talk.stored_id is None:
            self.talk.stored_id = store.create_conversation(self.talk.title)
        while self.talk.due:
            self.talk.due[0](store, self.talk.stored_id)
            self.talk.due.pop(0)
        if self.prompt_id is None:
            self.prompt_id = self._store_prompt(store, self.talk.stored_id)
        if self.settings is not None and self.turn is None:
            self.turn = store.begin_turn(
                session_id(), self.talk.stored_id, self.prompt_id, self.settings, self._begun()
            )
        if self.ending is not None and self.turn is not None:
            end = self.ending
            store.finish_turn(
                self.turn,
                text=end.text,
                token_ids=end.token_ids,
                provenance=end.provenance,
                stats=end.stats,
                steps=end.steps,
                finish_reason=end.finish_reason,
                error=end.error,
                drafted=end.drafted,
            )
            self.is_stored = True

    def _store_prompt(self, store: Store, conversation_id: int) -> int:
        if self.rephrases is not None:
            assert self.rephrases.prompt_id is not None, "entries are written in order"
            return self.rephrases.prompt_id
        return store.add_user_message(conversation_id, self.base_id, self.text)

    def begin_with(self, text: str, tokens: Sequence[int], message_id: int | None) -> None:
        """Go on with this reply. tokens: its ids, none where they are not known. message_id: None
        for the reply of the unstored turn that is rephrased."""
        # Half a character at its end is written anew, and whole.
        self.reply_text = self.begun_text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        self.begun_tokens, self.continues_id = tuple(tokens), message_id

    def _begun(self) -> Begun | None:
        if not self.begun_text:
            return None
        before = self.rephrases.turn if self.rephrases is not None else None
        message_id = before.message_id if before is not None else self.continues_id
        assert message_id is not None, "entries are written in order"
        return Begun(message_id, self.begun_text)

    def chain(self) -> tuple[int | None, list[Entry]]:
        """The stored message that everything begins after, and the turns from there to this one."""
        chain, at = [self], self
        while True:
            while at.rephrases is not None:
                at = at.rephrases
            if at.after is None:
                return at.parent_id, chain[::-1]
            at = at.after
            chain.append(at)

    @property
    def base_id(self) -> int | None:
        """The stored message that the person's message follows, None for the first."""
        entry = self
        while entry.rephrases is not None:
            entry = entry.rephrases
        return entry.parent_id if entry.after is None else entry.after.tip_id

    @property
    def tip_id(self) -> int | None:
        """The newest stored message of this turn."""
        return self.prompt_id if self.turn is None else self.turn.message_id
