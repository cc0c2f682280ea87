"""A log of many turns, made by SQL in a few seconds.

Contract: each turn is a copy of one that `Store` wrote, every tenth without drafting, in
conversations of TURNS_PER_CONVERSATION and sessions of TURNS_PER_SESSION turns, a minute apart.
Each has STEPS_PER_TURN rounds, a message with the words `word<t % 977>` and `turn<t>`, and a reply
of 600 characters.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from localspec.record.connection import connect
from localspec.record.store import Store
from tests.kit import samples

TURNS_PER_CONVERSATION = 10
TURNS_PER_SESSION = 200
STEPS_PER_TURN = 30
# What turn t has in place of what the copied one has, by table.
CONVERSATION, SESSION = f"2 + t / {TURNS_PER_CONVERSATION}", f"2 + t / {TURNS_PER_SESSION}"
STARTED = "strftime('%Y-%m-%dT%H:%M:%S.000+00:00', '2026-01-01', t || ' minutes')"
ASKED, ANSWERED = "2 * t + 3", "2 * t + 4"
PARENT = f"CASE t % {TURNS_PER_CONVERSATION} WHEN 0 THEN NULL ELSE 2 * t + 2 END"
OWN = {
    "session": {"id": SESSION, "started_at_utc": STARTED},
    "conversation": {
        "id": CONVERSATION, "title": "'chat ' || t", "created_at_utc": STARTED,
        "tip_message_id": f"2 * (t + {TURNS_PER_CONVERSATION} - 1) + 4",
    },
    "message": {
        "id": f"CASE id WHEN 1 THEN {ASKED} ELSE {ANSWERED} END",
        "parent_id": f"CASE id WHEN 1 THEN {PARENT} ELSE {ASKED} END",
        "conversation_id": CONVERSATION, "created_at_utc": STARTED,
        "text": "CASE id WHEN 1 THEN 'a line with word' || (t % 977) || ' and turn' || t "
        "ELSE 'a reply ' || hex(zeroblob(296)) END",
    },
    "turn": {
        "id": "2 + t", "message_id": ANSWERED, "conversation_id": CONVERSATION,
        "session_id": SESSION, "started_at_utc": STARTED,
    },
    "step": {"turn_id": "2 + t", "n": "n + 3 * part"},
}  # fmt: skip
EVERY = {"session": TURNS_PER_SESSION, "conversation": TURNS_PER_CONVERSATION}
PLAIN = """
UPDATE turn SET drafter = 'off', drafted_by = '{}', num_drafts = 0, num_draft_tokens = 0,
    num_accepted_tokens = 0, acceptance_rate = NULL, mean_accepted_length = NULL,
    mean_num_draft_tokens = NULL, speedup = NULL, decode_speedup = NULL, plain_decode_ms = NULL,
    plain_reply_ms = NULL
WHERE id % 10 = 0
"""
COUNTED = """
RECURSIVE turns (t) AS (SELECT 0 UNION ALL SELECT t + {every} FROM turns WHERE t < {end} - {every}),
parts (part) AS (SELECT 0 UNION ALL SELECT part + 1 FROM parts WHERE part < 9)
"""


def make_large_log(path: Path, num_turns: int) -> None:
    """Write the log; none may be there."""
    with closing(Store.open(path)) as store:
        samples.finish(store, samples.begin(store))
    with closing(connect(str(path)).conn) as conn:
        conn.execute("PRAGMA synchronous = OFF")
        conn.execute("BEGIN")
        for table, own in OWN.items():
            columns = [name for _, name, *_ in conn.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(own.get(name, name) for name in columns)
            conn.execute(
                f"WITH {COUNTED.format(every=EVERY.get(table, 1), end=num_turns)} "
                f"INSERT INTO {table} SELECT {values} FROM {table}, turns, parts "
                f"WHERE part = 0 OR '{table}' = 'step'"
            )
        conn.execute(PLAIN)
        conn.execute("COMMIT")
