"""One moment of the log, read for an export part by part.

Contract: `reading` gives Contents whose every part is of the same moment. Messages, steps and
tokens are read when they are asked for, so that a long log never stands in memory as a whole. The
scope of a session or of days is its turns, with the whole conversations they belong to: earlier
messages were part of every prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from localspec.record.rows import Conversation
from localspec.record.store import Store


@dataclass(frozen=True)
class Scope:
    """What to export: the turns that are in all that is given. since: a day in UTC."""

    session_id: int | None = None
    conversation_id: int | None = None
    since: str | None = None

    @property
    def is_of_turns(self) -> bool:
        """Whether a conversation without such a turn is left out."""
        return self.session_id is not None or self.since is not None


@dataclass(frozen=True)
class Contents:
    """sessions, turns: flat rows, oldest first. store: what belongs to them is read from it."""

    sessions: list[dict[str, Any]]
    conversations: list[Conversation]
    turns: list[dict[str, Any]]
    store: Store

    def turns_by_conversation(self) -> dict[int, list[dict[str, Any]]]:
        found: dict[int, list[dict[str, Any]]] = {one.id: [] for one in self.conversations}
        for turn in self.turns:
            found[turn["conversation_id"]].append(turn)
        return found


@contextmanager
def reading(store: Store, scope: Scope) -> Iterator[Contents]:
    with store.snapshot():
        turns = store.turn_rows(scope.session_id, scope.conversation_id, scope.since)
        yield Contents(
            sessions=_sessions(store, scope, turns),
            conversations=_conversations(store, scope, turns),
            turns=turns,
            store=store,
        )


def _sessions(store: Store, scope: Scope, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    used = {turn["session_id"] for turn in turns} | {scope.session_id}
    return [one for one in store.session_rows() if scope == Scope() or one["id"] in used]


def _conversations(store: Store, scope: Scope, turns: list[dict[str, Any]]) -> list[Conversation]:
    used = {turn["conversation_id"] for turn in turns}
    return [
        one
        for one in store.conversations()
        if scope.conversation_id in (None, one.id) and (one.id in used or not scope.is_of_turns)
    ]
