"""The tree of a conversation: what is shown of it, and where a new turn is placed.

Contract: a conversation is the path from its first message to its tip, stored or not; the other
branches stay as they are. A function that makes a `PendingTurn` writes nothing: the caller adds it
to the journal. Walks are loops, so a deep conversation needs no deep stack.

    follow_up     a new message after the tip
    regenerated   another reply to the message before it
    continued     a sibling of the last reply that begins with its text; the old one is then not a
                  branch of its own any more, but keeps its turn with its numbers

Not here: running turns (worker), storing them (journal).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from localspec.chat.journal import OpenConversation, PendingTurn
from localspec.chat.turn import ShownMessage
from localspec.core.errors import RequestError
from localspec.record.rows import STATE_AFTER
from localspec.record.store import Store, StoredMessage

SiblingGroups = Mapping[int | None, tuple[int, ...]]


def messages_of(
    store: Store, conversation: OpenConversation, until: PendingTurn | None = None
) -> list[ShownMessage]:
    """The messages of a conversation, root first. until: end with the person's message of this
    turn, on whatever branch it is."""
    tip = until if until is not None else conversation.tip
    base, turns = (_stored_tip(store, conversation), []) if tip is None else tip.chain()
    stored_id = conversation.stored_id
    groups = {} if stored_id is None else store.message_tree.sibling_groups(stored_id)
    shown = [shown_message(message, groups) for message in store.branch(base)]
    for turn in turns:
        siblings = _siblings(turn.prompt_id, turn.base_id, groups)
        shown.append(
            ShownMessage(
                "user",
                turn.text,
                "complete",
                turn.prompt_id,
                siblings=siblings,
                created_at_utc=turn.asked_at_utc,
            )
        )
        if turn is not until:
            shown.append(_reply(turn, groups))
    return shown


def follow_up(store: Store, conversation: OpenConversation, text: str) -> PendingTurn:
    tip = conversation.tip  # read once: the journal's thread takes it away when it is stored
    parent_id = None if tip is not None else _stored_tip(store, conversation)
    return PendingTurn(conversation, text, parent_id=parent_id, after=tip)


def regenerated(
    store: Store, conversation: OpenConversation, message_id: int | None = None
) -> PendingTurn | None:
    """Another reply in the place of this one, None: of the last. None where there is no message of
    the person's. Raises RequestError as `message_of`."""
    tip = conversation.tip
    if message_id is not None:
        message_of(store, conversation, message_id)
    elif tip is not None:
        return PendingTurn(conversation, tip.text, asked_by=tip.asked_by or tip)
    stored = store.branch(message_id or _stored_tip(store, conversation))
    while stored and stored[-1].role == "assistant":
        stored.pop()
    if not stored:
        return None
    asked = stored[-1]
    return PendingTurn(conversation, asked.text, parent_id=asked.parent_id, prompt_id=asked.id)


def continued(store: Store, conversation: OpenConversation) -> PendingTurn | None:
    """None where there is no message of the person's. Where the last reply is empty, the message
    is answered from the start."""
    before = conversation.tip
    turn = regenerated(store, conversation)
    if turn is None:
        return None
    if before is not None:
        tokens = () if before.end is None else before.end.token_ids
        said = (before.reply_text, before.reply_thinking)
        turn.begin_with(*said, (*before.begun_tokens, *tokens), before)
        return turn
    reply = store.branch(_stored_tip(store, conversation))[-1]
    if reply.role == "assistant":
        turn.begin_with(reply.text, reply.thinking, tokens_of(store, reply.id), reply.id)
    return turn


def message_of(store: Store, conversation: OpenConversation, message_id: int) -> StoredMessage:
    """A stored message of this conversation. Raises RequestError where it is not one."""
    path = store.branch(message_id)
    if not path or path[-1].conversation_id != conversation.stored_id:
        raise RequestError(
            f"This conversation has no message {message_id}. The page is older than the log: "
            "reload it and try again."
        )
    return path[-1]


def shown_message(message: StoredMessage, groups: SiblingGroups) -> ShownMessage:
    role: Literal["user", "assistant"] = "user" if message.role == "user" else "assistant"
    siblings = _siblings(message.id, message.parent_id, groups)
    return ShownMessage(
        role,
        message.text,
        message.state,
        message.id,
        siblings=siblings,
        created_at_utc=message.created_at_utc,
        model=message.model,
        is_edited=message.is_edited,
        thinking=message.thinking,
    )


def _reply(turn: PendingTurn, groups: SiblingGroups) -> ShownMessage:
    message_id = turn.turn.message_id if turn.turn is not None else None
    state, error = "draft", None
    if turn.end is not None:
        state = STATE_AFTER.get(turn.end.finish_reason, "complete")
        error = turn.end.error
    siblings = _siblings(message_id, turn.prompt_id, groups)
    model = None if turn.settings is None else turn.settings.model
    return ShownMessage(
        "assistant",
        turn.reply_text,
        state,
        message_id,
        error,
        siblings,
        created_at_utc=turn.asked_at_utc,
        model=model,
        thinking=turn.reply_thinking,
    )


def _siblings(
    message_id: int | None, parent_id: int | None, groups: SiblingGroups
) -> tuple[int, ...]:
    if message_id is None:
        return ()
    group = groups.get(parent_id, ())
    return group if message_id in group else tuple(sorted((*group, message_id)))


def _stored_tip(store: Store, conversation: OpenConversation) -> int | None:
    """The end of the stored branch in use."""
    stored_id = conversation.stored_id
    found = None if stored_id is None else store.conversation(stored_id)
    return None if found is None else found.tip_message_id


def tokens_of(store: Store, message_id: int) -> tuple[int, ...]:
    """Every id of a stored reply, those of the replies it continues first; none at all where some
    are not known."""
    tokens = list[int]()
    for part in store.message_tree.continued(message_id):
        found = store.reply_tokens(part)
        if found is None:
            return ()
        tokens += found[0]
    return tuple(tokens)
