"""One moment of the log, read for an export.

Contract: all parts of a Contents are of the same moment. The scope of a session is its turns, with
the whole conversations they belong to: earlier messages were part of every prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localspec.record.rows import Conversation, StoredMessage
from localspec.record.store import Store


@dataclass(frozen=True)
class Scope:
    """What to export. Both None: everything; both given: the turns in both."""

    session_id: int | None = None
    conversation_id: int | None = None


@dataclass(frozen=True)
class Contents:
    """sessions, turns: flat rows, oldest first. messages: all branches, by conversation id.
    steps, tokens (with provenance): by turn id."""

    sessions: list[dict[str, Any]]
    conversations: list[Conversation]
    messages: dict[int, list[StoredMessage]]
    turns: list[dict[str, Any]]
    steps: dict[int, list[dict[str, Any]]]
    tokens: dict[int, tuple[list[int], list[str]] | None]


def read_contents(store: Store, scope: Scope) -> Contents:
    with store.snapshot():
        turns = store.turn_rows(scope.session_id, scope.conversation_id)
        conversations = _conversations(store, scope, turns)
        return Contents(
            sessions=_sessions(store, scope, turns),
            conversations=conversations,
            messages={one.id: store.messages(one.id) for one in conversations},
            turns=turns,
            steps={turn["turn_id"]: store.step_rows(turn["turn_id"]) for turn in turns},
            tokens={turn["turn_id"]: store.reply_tokens(turn["message_id"]) for turn in turns},
        )


def _sessions(store: Store, scope: Scope, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    used = {turn["session_id"] for turn in turns} | {scope.session_id}
    return [one for one in store.session_rows() if scope == Scope() or one["id"] in used]


def _conversations(store: Store, scope: Scope, turns: list[dict[str, Any]]) -> list[Conversation]:
    used = {turn["conversation_id"] for turn in turns}
    return [
        one
        for one in store.conversations()
        if scope.conversation_id in (None, one.id) and (scope.session_id is None or one.id in used)
    ]
