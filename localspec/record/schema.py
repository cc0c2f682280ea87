"""The tables of the log, as an ordered list of migrations.

Contract: a shipped migration is never edited; a change is a new one at the end.
Each runs in one transaction together with the record of having run. Tables are STRICT; unknown
is NULL; times are in ms, sizes in bytes, timestamps UTC in ISO 8601, flags 0 or 1; columns named
`token_ids`, `provenance`, `drafted_by`, `signal`, `leniency`, `state` (of calibration),
`children_ids`, `settings` and `text_exact` hold JSON. The names of numbers are those of
`backend.TurnStats`. Opens in Datasette.

Not here: reading and writing rows (store).
"""

from __future__ import annotations

import json
from contextlib import closing

from sqlite_utils import Database, Migrations

from localspec.record.first_tables import (
    CALIBRATION,
    CONVERSATION,
    INDEXES,
    MESSAGE,
    SESSION,
    STEP,
    TURN,
    TURN_BY_TEMPERATURE,
)

MIGRATIONS = Migrations("localspec")


def migration(name: str, *statements: str) -> None:
    """Add one that runs these statements in order."""

    def run(db: Database) -> None:
        for statement in statements:
            db.conn.execute(statement)

    MIGRATIONS(name=name)(run)


migration("m001_tables", SESSION, CONVERSATION, MESSAGE, TURN, STEP, CALIBRATION)
migration("m002_indexes_and_view_by_temperature", *INDEXES, TURN_BY_TEMPERATURE)

# Turns from before were all exact, and their kind of text is not known. The view separates lenient
# turns, whose acceptance says nothing of exact ones.
BY_EXACTNESS = (
    TURN_BY_TEMPERATURE.replace("    temperature,\n", "    temperature,\n    exact,\n").rstrip()
    + ", exact\n"
)
migration(
    "m003_leniency",
    "ALTER TABLE turn ADD COLUMN workload TEXT",
    "ALTER TABLE turn ADD COLUMN leniency TEXT",
    "ALTER TABLE turn ADD COLUMN num_lenient_tokens INTEGER",
    "ALTER TABLE step ADD COLUMN num_lenient_tokens INTEGER",
    "DROP VIEW turn_by_temperature",
    BY_EXACTNESS,
)

# `is_logged` is 0 where logging of text was switched off: `text` is then empty.
# `continues_message_id`: the unfinished reply that this turn continued; its message begins with
# that one's text, its numbers and tokens are those of the new part alone. The index of texts is
# made apart, where SQLite has FTS5 (search).
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
migration(
    "m004_history_and_presets",
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
    PRESET,
)

# `drafted` is packed (record.drafted): as JSON it would be the largest column by far.
migration(
    "m005_drafted_tokens_and_energy",
    "ALTER TABLE turn ADD COLUMN drafted BLOB",
    "ALTER TABLE turn ADD COLUMN energy_joules REAL",
)

# `speedup` is of the whole reply, `decode_speedup` of its rounds alone; each is the ratio of two
# columns. `step.plain_ms` is plain decoding for the tokens of the round. The last three say whether
# a reply that is made again has the same weights, kernels and prompt.
BOTH_SPEEDUPS = """        AS decode_speedup,
    sum(plain_reply_ms) / nullif(sum(reply_ms) FILTER (WHERE plain_reply_ms IS NOT NULL), 0)
        AS speedup
"""
BY_BOTH_SPEEDUPS = BY_EXACTNESS.replace("        AS speedup\n", BOTH_SPEEDUPS)
migration(
    "m006_whole_replies_made_again",
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
    "DROP VIEW turn_by_temperature",
    BY_BOTH_SPEEDUPS,
)

# How many of the oldest messages a turn's prompt was made without.
migration("m007_messages_left_out", "ALTER TABLE turn ADD COLUMN num_left_out INTEGER")

# `children_ids`: of a deleted message, the messages that followed it and now follow its parent, as
# JSON; what undoing the deletion needs.
migration(
    "m008_models_edits_and_deleted_messages",
    "ALTER TABLE message ADD COLUMN model TEXT",
    "ALTER TABLE message ADD COLUMN is_edited INTEGER NOT NULL DEFAULT 0"
    " CHECK (is_edited IN (0, 1))",
    "ALTER TABLE message ADD COLUMN deleted_at_utc TEXT",
    "ALTER TABLE message ADD COLUMN children_ids TEXT",
    "UPDATE message SET model = (SELECT model FROM turn WHERE turn.message_id = message.id)",
)

# `title_by`: NULL where it is not known, so that such a title is never replaced. `when_full`: what
# the person decided for a context that is full, NULL where they were not asked yet.
FOLDER = """
CREATE TABLE folder (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    is_collapsed INTEGER NOT NULL DEFAULT 0 CHECK (is_collapsed IN (0, 1))
) STRICT
"""
migration(
    "m010_folders_titles_and_full_contexts",
    FOLDER,
    "ALTER TABLE conversation ADD COLUMN folder_id INTEGER REFERENCES folder(id)",
    "ALTER TABLE conversation ADD COLUMN title_by TEXT"
    " CHECK (title_by IN ('words', 'model', 'person'))",
    "ALTER TABLE conversation ADD COLUMN when_full TEXT"
    " CHECK (when_full IN ('ask', 'roll', 'stop'))",
    "CREATE INDEX conversation_by_folder ON conversation (folder_id)",
)

# `settings` are texts by the names of the page's fields. A conversation's own prompt is in
# `system_prompt` where texts are not to be written, or the program was older.
KEPT_SETTINGS = """
CREATE TABLE kept_settings (
    kind TEXT NOT NULL CHECK (kind IN ('prompt', 'model')),
    name TEXT NOT NULL,
    settings TEXT NOT NULL,
    PRIMARY KEY (kind, name)
) STRICT
"""


@MIGRATIONS()
def m011_settings_of_chats_prompts_and_models(db: Database) -> None:
    """A preset becomes a prompt that sets the other fields too."""
    db.conn.execute("ALTER TABLE conversation ADD COLUMN settings TEXT")
    db.conn.execute(KEPT_SETTINGS)
    for preset in list(db.query("SELECT * FROM preset")):
        name = preset.pop("name")
        texts = {key: f"{value:g}" if isinstance(value, float) else str(value)
                 for key, value in preset.items()}  # fmt: skip
        row = ("prompt", name, json.dumps(texts))
        db.conn.execute("INSERT INTO kept_settings VALUES (?, ?, ?)", row)
    db.conn.execute("DROP TABLE preset")


# And no plain cost of the calm rounds alone, in a turn that could not be compared.
migration(
    "m012_stop_strings",
    "ALTER TABLE turn ADD COLUMN stop TEXT",
    "UPDATE step SET plain_ms = NULL WHERE turn_id IN"
    " (SELECT id FROM turn WHERE plain_decode_ms IS NULL)",
)

# Where a conversation was held, and the keys of programs. `hash`: SHA-256 of the key, which is
# stored nowhere.
migration(
    "m013_other_programs",
    "ALTER TABLE conversation ADD COLUMN source TEXT NOT NULL DEFAULT 'page'"
    " CHECK (source IN ('page', 'api'))",
    "CREATE TABLE api_key (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,"
    " hash TEXT NOT NULL UNIQUE, created_at_utc TEXT NOT NULL) STRICT",
)

migration(
    "m014_penalties",
    "ALTER TABLE turn ADD COLUMN presence_penalty REAL",
    "ALTER TABLE turn ADD COLUMN frequency_penalty REAL",
)

# What a reply of a few tokens gained was mostly chance; sums still count it. SQLite cannot change
# the CHECK of a column.
migration(
    "m015_short_replies",
    "ALTER TABLE turn RENAME COLUMN no_speedup TO earlier",
    "ALTER TABLE turn ADD COLUMN no_speedup TEXT"
    " CHECK (no_speedup IN ('load_changed', 'too_short'))",
    "UPDATE turn SET no_speedup = earlier",
    "ALTER TABLE turn DROP COLUMN earlier",
    "UPDATE turn SET speedup = NULL, decode_speedup = NULL, no_speedup = 'too_short'"
    " WHERE num_output_tokens < 8 AND plain_decode_ms IS NOT NULL",
)

# What a model thinks is apart from what it says. `thinking`: what it thought before the reply; NULL
# where it did not.
migration(
    "m016_thoughts",
    "ALTER TABLE message ADD COLUMN thinking TEXT",
    "ALTER TABLE turn ADD COLUMN thinks INTEGER CHECK (thinks IN (0, 1))",
    "ALTER TABLE turn ADD COLUMN thinking_budget INTEGER",
    "ALTER TABLE turn ADD COLUMN num_thinking_tokens INTEGER",
    "ALTER TABLE turn ADD COLUMN thinking_ms REAL",
)

# When a key of a program was used last.
migration("m017_use_of_keys", "ALTER TABLE api_key ADD COLUMN last_used_at_utc TEXT")

# What the speedup of a reply is at least, where it is not known itself; counts in no total.
migration("m018_least_speedups", "ALTER TABLE turn ADD COLUMN least_speedup REAL")

# Without these a reply to a program could not be made again.
migration(
    "m019_formats",
    "ALTER TABLE turn ADD COLUMN is_raw INTEGER CHECK (is_raw IN (0, 1))",
    "ALTER TABLE turn ADD COLUMN grammar TEXT",
)

# Of the draft tokens those that were checked; NULL in rows from before.
migration(
    "m020_checked_tokens",
    "ALTER TABLE turn ADD COLUMN num_checked_tokens INTEGER",
    "ALTER TABLE step ADD COLUMN num_checked_tokens INTEGER",
)

# `is_copy`: the turn of a copied reply, so that its figures and tokens stay with it. What was
# measured was measured once, so no total counts it.
ALL_MEASURED = "WHERE num_output_tokens > 0"
migration(
    "m021_turns_of_copies",
    "ALTER TABLE turn ADD COLUMN is_copy INTEGER NOT NULL DEFAULT 0 CHECK (is_copy IN (0, 1))",
    "DROP VIEW turn_by_temperature",
    BY_BOTH_SPEEDUPS.replace(ALL_MEASURED, f"{ALL_MEASURED} AND is_copy = 0"),
)

# Replies that were written together have a reason of their own.
migration(
    "m022_shared_replies",
    "ALTER TABLE turn RENAME COLUMN no_speedup TO earlier",
    "ALTER TABLE turn ADD COLUMN no_speedup TEXT"
    " CHECK (no_speedup IN ('load_changed', 'shared', 'too_short'))",
    "UPDATE turn SET no_speedup = earlier",
    "ALTER TABLE turn DROP COLUMN earlier",
)


def unknown_migrations(db: Database) -> list[str]:
    """Migrations applied to this database that this program does not have: it is newer."""
    with closing(Database(memory=True, execute_plugins=False)) as empty:
        known = {migration.name for migration in MIGRATIONS.pending(empty)}
    return [applied.name for applied in MIGRATIONS.applied(db) if applied.name not in known]
