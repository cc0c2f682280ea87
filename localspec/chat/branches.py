"""The tree of a conversation: what is shown of it, and where a new turn is hung.

Contract: a conversation is the path from its first message to its tip, stored or not; the other
branches stay where they are. A function that makes an `Entry` writes nothing: whoever adds it to
the journal does. Walks are loops, so depth costs time only.

    follow_up   a new message after the tip          rephrased   another reply to the last message
    edited      a sibling of a message of the person's
    continued   a sibling of the last reply that begins with its text; that one is then no branch
                of its own any more, but keeps its turn with its numbers

Not here: running turns (worker), storing them (journal).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from localspec.chat.journal import Entry, Journal, Talk
from localspec.chat.turn import ShownMessage
from localspec.errors import RequestError
from localspec.record.store import StoredMessage

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
STATES = {"cancelled": "stopped", "error": "error", "interrupted": "interrupted"}

Groups = Mapping[int | None, tuple[int, ...]]


def conversation(journal: Journal, talk: Talk, until: Entry | None = None) -> list[ShownMessage]:
    """The messages of a conversation, root first. until: end with the person's message of this
    turn, on whatever branch it is."""
    tip = until if until is not None else talk.tip
    base, entries = journal.stored_tip(talk), list[Entry]()
    if tip is not None:
        base, entries = tip.chain()
    groups = journal.sibling_groups(talk)
    shown = [_shown(message, groups) for message in journal.stored_path(base)]
    for entry in entries:
        shown.append(_shown_prompt(entry, groups))
        if entry is not until:
            shown.append(_shown_reply(entry, groups))
    return shown


def follow_up(journal: Journal, talk: Talk, text: str) -> Entry:
    parent_id = None if talk.tip is not None else journal.stored_tip(talk)
    return Entry(talk, text, parent_id=parent_id, after=talk.tip)


def rephrased(journal: Journal, talk: Talk) -> Entry | None:
    """None where nobody has said anything."""
    if talk.tip is not None:
        return Entry(talk, talk.tip.text, rephrases=talk.tip)
    stored = journal.stored_path(journal.stored_tip(talk))
    while stored and stored[-1].role == "assistant":
        stored.pop()
    if not stored:
        return None
    asked = stored[-1]
    return Entry(talk, asked.text, parent_id=asked.parent_id, prompt_id=asked.id)


def edited(message: StoredMessage, talk: Talk, text: str) -> Entry:
    """message: of the person's, already stored."""
    return Entry(talk, text, parent_id=message.parent_id)


def continued(journal: Journal, talk: Talk) -> Entry | None:
    """None where nobody has said anything. Without a reply that says something, the last message
    is answered from the start."""
    entry = rephrased(journal, talk)
    if entry is None:
        return None
    if talk.tip is not None:
        before = talk.tip
        tokens = None if before.ending is None else before.ending.token_ids
        entry.begin_with(before.reply_text, (*before.begun_tokens, *(tokens or ())), None)
        return entry
    reply = journal.stored_path(journal.stored_tip(talk))[-1]
    if reply.role == "assistant":
        entry.begin_with(reply.text, journal.tokens_of(reply.id), reply.id)
    return entry


def message_of(journal: Journal, talk: Talk, message_id: int) -> StoredMessage:
    """A stored message of this conversation. Raises RequestError where it is not one."""
    path = journal.stored_path(message_id)
    if not path or path[-1].conversation_id != talk.stored_id:
        raise RequestError(
            f"This conversation has no message {message_id}. The page is older than the log: "
            "reload it and try again."
        )
    return path[-1]


def _shown(message: StoredMessage, groups: Groups) -> ShownMessage:
    role: Literal["user", "assistant"] = "user" if message.role == "user" else "assistant"
    siblings = _siblings(message.id, message.parent_id, groups)
    return ShownMessage(role, message.text, message.state, message.id, siblings=siblings)


def _shown_prompt(entry: Entry, groups: Groups) -> ShownMessage:
    siblings = _siblings(entry.prompt_id, entry.base_id, groups)
    return ShownMessage("user", entry.text, "complete", entry.prompt_id, siblings=siblings)


def _shown_reply(entry: Entry, groups: Groups) -> ShownMessage:
    message_id = entry.turn.message_id if entry.turn is not None else None
    state, error = "draft", None
    if entry.ending is not None:
        state = STATES.get(entry.ending.finish_reason, "complete")
        error = entry.ending.error
    siblings = _siblings(message_id, entry.prompt_id, groups)
    return ShownMessage("assistant", entry.reply_text, state, message_id, error, siblings)


def _siblings(message_id: int | None, parent_id: int | None, groups: Groups) -> tuple[int, ...]:
    if message_id is None:
        return ()
    group = groups.get(parent_id, ())
    return group if message_id in group else tuple(sorted((*group, message_id)))
