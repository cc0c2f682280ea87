"""What the store writes of messages and turns, inside a transaction that the caller opened.

Contract: each function is one step of a turn's life (store); ids that do not belong together are
a StoreError. Whether texts may be written was settled before.

Not here: transactions, memory of what was not written (store).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from localspec.backend import Role, TurnStats
from localspec.core import Step
from localspec.record.connection import Tables, missing
from localspec.record.rows import (
    STATE_AFTER,
    Begun,
    MessageState,
    Turn,
    TurnSettings,
    now,
    stats_row,
    step_row,
)


@dataclass(frozen=True)
class Ended:
    """How a turn ended. token_ids, drafted: None where they may not be written."""

    token_ids: Sequence[int] | None
    provenance: Sequence[str]
    drafted: bytes | None
    finish_reason: str
    error: str | None


def add_message(
    tables: Tables,
    conversation_id: int,
    parent_id: int | None,
    role: Role,
    columns: Mapping[str, object],
    state: MessageState,
) -> int:
    """Insert a message and move the conversation's tip to it; its id. columns: of the text."""
    if parent_id is not None:
        check_belongs(tables, parent_id, conversation_id)
    row = {
        "conversation_id": conversation_id,
        "parent_id": parent_id,
        "role": role,
        **columns,
        "state": state,
        "created_at_utc": now(),
    }
    message_id = tables.insert("message", row)
    tables.update("conversation", conversation_id, {"tip_message_id": message_id})
    return message_id


def add_turn(
    tables: Tables,
    session_id: int,
    conversation_id: int,
    message_id: int,
    settings: TurnSettings,
    begun: Begun | None,
) -> Turn:
    """Insert the turn of a reply that was just added, and note its system prompt."""
    links = {
        "session_id": session_id,
        "conversation_id": conversation_id,
        "message_id": message_id,
        "started_at_utc": now(),
        "continues_message_id": None if begun is None else begun.message_id,
    }
    tables.update("conversation", conversation_id, {"system_prompt": settings.system_prompt})
    return Turn(tables.insert("turn", {**links, **asdict(settings)}), message_id)


def end_turn(
    tables: Tables,
    turn: Turn,
    columns: Mapping[str, object],
    ended: Ended,
    stats: TurnStats | None,
    steps: Sequence[Step],
) -> None:
    """Write the end of a turn over whatever was written of it before."""
    ids = ended.token_ids
    ending = {
        "finished_at_utc": now(),
        "finish_reason": ended.finish_reason,
        "error": ended.error,
        "token_ids": None if ids is None else json.dumps([int(token) for token in ids]),
        "provenance": json.dumps(list(ended.provenance)),
        "drafted": ended.drafted,
    }
    state = STATE_AFTER.get(ended.finish_reason, "complete")
    tables.update("message", turn.message_id, {**columns, "state": state})
    tables.update("turn", turn.turn_id, {**ending, **stats_row(stats)})
    tables.execute("DELETE FROM step WHERE turn_id = ?", turn.turn_id)
    for n, step in enumerate(steps):
        tables.insert("step", step_row(turn.turn_id, n, step))


def check_belongs(tables: Tables, message_id: int, conversation_id: int) -> None:
    rows = tables.rows("SELECT conversation_id FROM message WHERE id = ?", message_id)
    if not rows or rows[0]["conversation_id"] != conversation_id:
        raise missing("message", message_id)
