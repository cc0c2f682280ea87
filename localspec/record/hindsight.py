"""How drafters were judged by finished replies: a row for each turn and drafter.

The rows hold counts and times only. They go with their turn when that is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from localspec.core.hindsight import Hindsight
from localspec.record.connection import SharedConnection

TABLE = """
CREATE TABLE hindsight (
    turn_id INTEGER NOT NULL REFERENCES turn(id),
    drafter TEXT NOT NULL,
    -- Of the reply, as far as the drafter was judged by it.
    num_output_tokens INTEGER NOT NULL,
    num_drafts INTEGER NOT NULL,
    num_draft_tokens INTEGER NOT NULL,
    num_accepted_tokens INTEGER NOT NULL,
    -- Of the rounds that it would have run, and of plain decoding, by the measured costs.
    decode_ms REAL,
    plain_decode_ms REAL,
    PRIMARY KEY (turn_id, drafter)
) STRICT
"""
GOES_WITH_ITS_TURN = """
CREATE TRIGGER hindsight_of_deleted_turn AFTER DELETE ON turn
BEGIN
    DELETE FROM hindsight WHERE turn_id = old.id;
END
"""

# first and last id of a turn
ROWS = "SELECT * FROM hindsight WHERE turn_id BETWEEN ? AND ? ORDER BY turn_id, rowid"

# name of a model, how many → the newest rows of its turns
OF_MODEL = """
SELECT hindsight.* FROM hindsight JOIN turn ON turn.id = turn_id
JOIN conversation ON conversation.id = turn.conversation_id
WHERE turn.model = ? AND conversation.deleted_at_utc IS NULL
ORDER BY turn_id DESC LIMIT ?
"""
MOST_OF_MODEL = 500  # Rows that are read for one model: some 50 replies with ten drafters.


class HindsightTable:
    """The rows of one log."""

    def __init__(self, db: SharedConnection) -> None:
        self._db = db

    def add(self, turn_id: int, results: Sequence[Hindsight]) -> None:
        """Record the results of a turn, in place of earlier ones of the same drafters."""
        with self._db.writing() as tables:
            for result in results:
                sql = "DELETE FROM hindsight WHERE turn_id = ? AND drafter = ?"
                tables.execute(sql, turn_id, result.drafter)
                tables.insert("hindsight", {"turn_id": turn_id, **asdict(result)})

    def rows(self, turn_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of these turns, oldest first."""
        if not turn_ids:
            return []
        known, rows = set(turn_ids), self._db.rows(ROWS, min(turn_ids), max(turn_ids))
        return [row for row in rows if row["turn_id"] in known]

    def of_model(self, model: str) -> list[dict[str, Any]]:
        """Return the newest rows of this model's turns."""
        return self._db.rows(OF_MODEL, model, MOST_OF_MODEL)
