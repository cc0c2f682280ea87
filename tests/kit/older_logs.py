"""Logs as earlier versions of the program left them: their tables, and rows that they wrote."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

FOLDER = Path(__file__).with_name("logs")
# The tables of the first version, of the last with presets, and of the oldest that a start
# upgrades.
VERSIONS = (1, 10, 19)

# A branch with two replies, of which SQLite cannot hold the second as text, and a reply that a
# crash cut. The first reply's speedup is that of its rounds.
ROWS = """
INSERT INTO session (started_at_utc, app_version) VALUES ('2026-11-20T14:00:00.000+00:00', '0.1');
INSERT INTO conversation (title, created_at_utc) VALUES ('old', '2026-11-20T14:00:00.000+00:00');
INSERT INTO message (conversation_id, role, text, state, created_at_utc)
    VALUES (1, 'user', 'asked', 'complete', '2026-11-20T14:00:01.000+00:00');
INSERT INTO message (conversation_id, parent_id, role, text, state, created_at_utc)
    VALUES (1, 1, 'assistant', 'answered', 'complete', '2026-11-20T14:00:02.000+00:00');
INSERT INTO message (conversation_id, parent_id, role, text, text_exact, state, created_at_utc)
    VALUES (1, 1, 'assistant', 'an\ufffdother', '"an\\u0000other"', 'stopped',
    '2026-11-20T14:00:03Z');
INSERT INTO message (conversation_id, parent_id, role, text, state, created_at_utc)
    VALUES (1, 3, 'user', 'and then?', 'complete', '2026-11-20T14:00:04Z');
INSERT INTO message (conversation_id, parent_id, role, text, state, created_at_utc)
    VALUES (1, 1, 'assistant', 'half an', 'draft', '2026-11-20T14:00:05.000+00:00');
INSERT INTO turn (session_id, conversation_id, message_id, started_at_utc, model, drafter,
    temperature, exact, num_output_tokens, num_drafts, num_draft_tokens, num_accepted_tokens,
    decode_ms, plain_decode_ms, speedup, token_ids, provenance)
    VALUES (1, 1, 2, '2026-11-20T14:00:02.000+00:00', 'm', 'ngram', 0.5, 1, 8, 1, 3, 3, 9.0, 18.0,
    2.0, '[1, 2]', '["ngram", "target"]');
INSERT INTO turn (session_id, conversation_id, message_id, started_at_utc, drafter,
    num_output_tokens, num_draft_tokens, decode_ms, plain_decode_ms, speedup)
    VALUES (1, 1, 3, '2026-11-20T14:00:03Z', 'off', 4, 0, 90.0, 33.3, 0.37);
INSERT INTO turn (session_id, conversation_id, message_id, started_at_utc)
    VALUES (1, 1, 5, '2026-11-20T14:00:05.000+00:00');
INSERT INTO step (turn_id, n, drafter, num_draft_tokens, num_accepted_tokens, num_output_tokens,
    is_probe) VALUES (1, 0, 'ngram', 3, 3, 4, 0);
INSERT INTO calibration VALUES ('controller', '{"a | b": {"version": 1}}', '2026-11-20T14:00:03Z');
UPDATE conversation SET tip_message_id = 4;
"""
PRESET = "INSERT INTO preset VALUES ('Mine', 'Be \"brief\".', 0.7, 1.0, 40, 0.05, 1.1, 256);"
# For some commits the tables had a column more.
FURTHER_COLUMN = "ALTER TABLE turn ADD COLUMN draft_prefill_ms REAL;"


def write_log(path: Path, version: int, rows: str = ROWS) -> Path:
    """Write a log of that version with these rows."""
    with closing(sqlite3.connect(path)) as conn:
        conn.executescript((FOLDER / f"version_{version}.sql").read_text() + rows)
    return path
