"""The tables of the log, as an ordered list of migrations.

Contract: a shipped migration is never edited; a change is a new function at the end.
Each runs in one transaction together with the record of having run. Tables are STRICT; unknown
is NULL; times are in ms, sizes in bytes, timestamps UTC in ISO 8601, flags 0 or 1; columns named
`token_ids`, `provenance`, `drafted_by`, `signal`, `leniency`, `state` (of calibration) and
`text_exact` hold JSON. The names of numbers are those of `backend.TurnStats`. Opens in Datasette.

Not here: reading and writing rows (store).
"""

from __future__ import annotations

from contextlib import closing

from sqlite_utils import Database, Migrations

MIGRATIONS = Migrations("localspec")

SESSION = """
CREATE TABLE session (
    id INTEGER PRIMARY KEY,
    started_at_utc TEXT NOT NULL,
    app_version TEXT,
    device TEXT,
    gpu TEXT,
    driver TEXT,
    vram_total_bytes INTEGER,
    ram_total_bytes INTEGER,
    torch TEXT,
    transformers TEXT,
    bitsandbytes TEXT,
    python TEXT,
    platform TEXT
) STRICT
"""

CONVERSATION = """
CREATE TABLE conversation (
    id INTEGER PRIMARY KEY,
    title TEXT NOT NULL,
    created_at_utc TEXT NOT NULL,
    tip_message_id INTEGER REFERENCES message(id)
) STRICT
"""

# `text` is always valid UTF-8 without NUL, so that every SQLite tool can read it; where that
# needed a replacement character, `text_exact` holds the true text as a JSON string.
MESSAGE = """
CREATE TABLE message (
    id INTEGER PRIMARY KEY,
    conversation_id INTEGER NOT NULL REFERENCES conversation(id),
    parent_id INTEGER REFERENCES message(id),
    role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
    text TEXT NOT NULL,
    text_exact TEXT,
    state TEXT NOT NULL
        CHECK (state IN ('draft', 'complete', 'stopped', 'error', 'interrupted')),
    created_at_utc TEXT NOT NULL
) STRICT
"""

# `plain_decode_ms` is kept so that speedups can be summed before dividing. Until m006 `speedup` was
# that of the rounds alone.
TURN = """
CREATE TABLE turn (
    id INTEGER PRIMARY KEY,
    session_id INTEGER NOT NULL REFERENCES session(id),
    conversation_id INTEGER NOT NULL REFERENCES conversation(id),
    message_id INTEGER NOT NULL UNIQUE REFERENCES message(id),
    started_at_utc TEXT NOT NULL,
    finished_at_utc TEXT,
    model TEXT,
    draft TEXT,
    device TEXT,
    dtype TEXT,
    context_length INTEGER,
    drafter_requested TEXT,
    num_draft_tokens_requested INTEGER,
    temperature REAL,
    top_k INTEGER,
    top_p REAL,
    min_p REAL,
    repetition_penalty REAL,
    seed INTEGER,
    max_tokens INTEGER,
    system_prompt TEXT,
    finish_reason TEXT,
    error TEXT,
    drafter TEXT,
    reason TEXT,
    exact INTEGER CHECK (exact IN (0, 1)),
    num_prompt_tokens INTEGER,
    num_reused_tokens INTEGER,
    num_output_tokens INTEGER,
    num_steps INTEGER,
    num_drafts INTEGER,
    num_draft_tokens INTEGER,
    num_accepted_tokens INTEGER,
    acceptance_rate REAL,
    draft_share REAL,
    mean_accepted_length REAL,
    mean_num_draft_tokens REAL,
    tokens_per_second REAL,
    speedup REAL,
    ttft_ms REAL,
    prefill_ms REAL,
    decode_ms REAL,
    plain_decode_ms REAL,
    drafted_by TEXT,
    token_ids TEXT,
    provenance TEXT
) STRICT
"""

STEP = """
CREATE TABLE step (
    turn_id INTEGER NOT NULL REFERENCES turn(id),
    n INTEGER NOT NULL,
    drafter TEXT NOT NULL,
    num_draft_tokens INTEGER NOT NULL,
    num_accepted_tokens INTEGER NOT NULL,
    num_output_tokens INTEGER NOT NULL,
    draft_ms REAL,
    verify_ms REAL,
    context_length INTEGER,
    is_probe INTEGER NOT NULL CHECK (is_probe IN (0, 1)),
    signal TEXT,
    PRIMARY KEY (turn_id, n)
) STRICT
"""

CALIBRATION = """
CREATE TABLE calibration (
    key TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    updated_at_utc TEXT NOT NULL
) STRICT
"""

# Ratios of sums, not means of ratios, so that long turns weigh more.
TURN_BY_TEMPERATURE = """
CREATE VIEW turn_by_temperature AS
SELECT
    model,
    draft,
    device,
    drafter,
    temperature,
    count(*) AS num_turns,
    sum(num_output_tokens) AS num_output_tokens,
    sum(num_drafts) AS num_drafts,
    sum(num_draft_tokens) AS num_draft_tokens,
    sum(num_accepted_tokens) AS num_accepted_tokens,
    1.0 * sum(num_accepted_tokens) / nullif(sum(num_draft_tokens), 0) AS acceptance_rate,
    1.0 * sum(num_accepted_tokens) / nullif(sum(num_output_tokens), 0) AS draft_share,
    1.0 + 1.0 * sum(num_accepted_tokens) / nullif(sum(num_drafts), 0) AS mean_accepted_length,
    1.0 * sum(num_draft_tokens) / nullif(sum(num_drafts), 0) AS mean_num_draft_tokens,
    1000.0 * sum(num_output_tokens) / nullif(sum(decode_ms), 0) AS tokens_per_second,
    sum(plain_decode_ms) / nullif(sum(decode_ms) FILTER (WHERE plain_decode_ms IS NOT NULL), 0)
        AS speedup
FROM turn
WHERE num_output_tokens > 0
GROUP BY model, draft, device, drafter, temperature
"""

INDEXES = (
    "CREATE INDEX message_by_parent ON message (conversation_id, parent_id)",
    "CREATE INDEX turn_by_session ON turn (session_id)",
    "CREATE INDEX turn_by_conversation ON turn (conversation_id)",
)


@MIGRATIONS()
def m001_tables(db: Database) -> None:
    for statement in (SESSION, CONVERSATION, MESSAGE, TURN, STEP, CALIBRATION):
        db.conn.execute(statement)


@MIGRATIONS()
def m002_indexes_and_view_by_temperature(db: Database) -> None:
    for statement in (*INDEXES, TURN_BY_TEMPERATURE):
        db.conn.execute(statement)


# Turns from before were all exact, and their kind of text is not known.
LENIENCY_COLUMNS = (
    "ALTER TABLE turn ADD COLUMN workload TEXT",
    "ALTER TABLE turn ADD COLUMN leniency TEXT",
    "ALTER TABLE turn ADD COLUMN num_lenient_tokens INTEGER",
    "ALTER TABLE step ADD COLUMN num_lenient_tokens INTEGER",
)


@MIGRATIONS()
def m003_leniency(db: Database) -> None:
    """The view separates lenient turns, whose acceptance says nothing of exact ones."""
    view = TURN_BY_TEMPERATURE.replace("    temperature,\n", "    temperature,\n    exact,\n")
    by_exactness = f"{view.rstrip()}, exact\n"
    for statement in (*LENIENCY_COLUMNS, "DROP VIEW turn_by_temperature", by_exactness):
        db.conn.execute(statement)


# `is_logged` is 0 where logging of text was switched off: `text` is then empty.
# `continues_message_id`: the unfinished reply that this turn continued; its message begins with
# that one's text, its numbers and tokens are those of the new part alone.
CONVERSATION_COLUMNS = (
    "ALTER TABLE conversation ADD COLUMN is_pinned INTEGER NOT NULL DEFAULT 0"
    " CHECK (is_pinned IN (0, 1))",
    "ALTER TABLE conversation ADD COLUMN deleted_at_utc TEXT",
    "ALTER TABLE conversation ADD COLUMN system_prompt TEXT",
    "ALTER TABLE message ADD COLUMN is_logged INTEGER NOT NULL DEFAULT 1"
    " CHECK (is_logged IN (0, 1))",
    "ALTER TABLE turn ADD COLUMN continues_message_id INTEGER REFERENCES message(id)",
    "ALTER TABLE turn ADD COLUMN continued_from TEXT CHECK (continued_from IN ('tokens', 'text'))",
    "CREATE INDEX turn_by_continued ON turn (continues_message_id)"
    " WHERE continues_message_id IS NOT NULL",
    # For walks down the tree, and for the checks of a deletion.
    "CREATE INDEX message_below ON message (parent_id)",
    "CREATE INDEX conversation_by_tip ON conversation (tip_message_id)",
)

PRESET = """
CREATE TABLE preset (
    name TEXT PRIMARY KEY,
    system_prompt TEXT NOT NULL,
    temperature REAL NOT NULL,
    top_p REAL NOT NULL,
    top_k INTEGER NOT NULL,
    min_p REAL NOT NULL,
    repetition_penalty REAL NOT NULL,
    max_tokens INTEGER NOT NULL
) STRICT
"""


@MIGRATIONS()
def m004_history_and_presets(db: Database) -> None:
    """The index of texts is made apart, where SQLite has FTS5 (search)."""
    for statement in (*CONVERSATION_COLUMNS, PRESET):
        db.conn.execute(statement)


# `drafted` is packed (record.drafted): as JSON it would be the largest column by far.
PROOF_COLUMNS = (
    "ALTER TABLE turn ADD COLUMN drafted BLOB",
    "ALTER TABLE turn ADD COLUMN energy_joules REAL",
)


@MIGRATIONS()
def m005_drafted_tokens_and_energy(db: Database) -> None:
    for statement in PROOF_COLUMNS:
        db.conn.execute(statement)


# `speedup` is of the whole reply, `decode_speedup` of its rounds alone; each is the ratio of two
# columns. `step.plain_ms` is plain decoding for the tokens of the round. The last three say whether
# a reply that is made again has the same weights, kernels and prompt.
REPLY_COLUMNS = (
    "ALTER TABLE turn ADD COLUMN decode_speedup REAL",
    "ALTER TABLE turn ADD COLUMN no_speedup TEXT CHECK (no_speedup IN ('load_changed'))",
    "ALTER TABLE turn ADD COLUMN reply_ms REAL",
    "ALTER TABLE turn ADD COLUMN plain_reply_ms REAL",
    "ALTER TABLE step ADD COLUMN plain_ms REAL",
    "ALTER TABLE turn ADD COLUMN target_fingerprint TEXT",
    "ALTER TABLE turn ADD COLUMN kernels TEXT",
    "ALTER TABLE turn ADD COLUMN prompt_fingerprint TEXT",
    # What a turn without a draft gained was chance.
    "UPDATE turn SET plain_decode_ms = NULL, speedup = NULL WHERE num_draft_tokens = 0",
    "UPDATE turn SET decode_speedup = speedup, speedup = NULL",
)
BOTH_SPEEDUPS = """        AS decode_speedup,
    sum(plain_reply_ms) / nullif(sum(reply_ms) FILTER (WHERE plain_reply_ms IS NOT NULL), 0)
        AS speedup
"""


@MIGRATIONS()
def m006_whole_replies_made_again(db: Database) -> None:
    view = TURN_BY_TEMPERATURE.replace("    temperature,\n", "    temperature,\n    exact,\n")
    both = view.replace("        AS speedup\n", BOTH_SPEEDUPS)
    for statement in (*REPLY_COLUMNS, "DROP VIEW turn_by_temperature", f"{both.rstrip()}, exact\n"):
        db.conn.execute(statement)


@MIGRATIONS()
def m007_messages_left_out(db: Database) -> None:
    """How many of the oldest messages a turn's prompt was made without."""
    db.conn.execute("ALTER TABLE turn ADD COLUMN num_left_out INTEGER")


def unknown_migrations(db: Database) -> list[str]:
    """Migrations applied to this database that this program does not have: it is newer."""
    with closing(Database(memory=True, execute_plugins=False)) as empty:
        known = {migration.name for migration in MIGRATIONS.pending(empty)}
    return [applied.name for applied in MIGRATIONS.applied(db) if applied.name not in known]
