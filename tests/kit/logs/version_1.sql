CREATE TABLE session (
    id INTEGER PRIMARY KEY, started_at_utc TEXT NOT NULL, app_version TEXT, device TEXT, gpu TEXT,
    driver TEXT, vram_total_bytes INTEGER, ram_total_bytes INTEGER, torch TEXT, transformers TEXT,
    bitsandbytes TEXT, python TEXT, platform TEXT
) STRICT;
CREATE TABLE conversation (
    id INTEGER PRIMARY KEY, title TEXT NOT NULL, created_at_utc TEXT NOT NULL,
    tip_message_id INTEGER REFERENCES message(id)
) STRICT;
CREATE TABLE message (
    id INTEGER PRIMARY KEY, conversation_id INTEGER NOT NULL REFERENCES conversation(id),
    parent_id INTEGER REFERENCES message(id),
    role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
    text TEXT NOT NULL, text_exact TEXT,
    state TEXT NOT NULL CHECK (state IN ('draft', 'complete', 'stopped', 'error', 'interrupted')),
    created_at_utc TEXT NOT NULL
) STRICT;
CREATE TABLE turn (
    id INTEGER PRIMARY KEY, session_id INTEGER NOT NULL REFERENCES session(id),
    conversation_id INTEGER NOT NULL REFERENCES conversation(id),
    message_id INTEGER NOT NULL UNIQUE REFERENCES message(id), started_at_utc TEXT NOT NULL,
    finished_at_utc TEXT, model TEXT, draft TEXT, device TEXT, dtype TEXT, context_length INTEGER,
    drafter_requested TEXT, num_draft_tokens_requested INTEGER, temperature REAL, top_k INTEGER,
    top_p REAL, min_p REAL, repetition_penalty REAL, seed INTEGER, max_tokens INTEGER,
    system_prompt TEXT, finish_reason TEXT, error TEXT, drafter TEXT, reason TEXT,
    exact INTEGER CHECK (exact IN (0, 1)), num_prompt_tokens INTEGER, num_reused_tokens INTEGER,
    num_output_tokens INTEGER, num_steps INTEGER, num_drafts INTEGER, num_draft_tokens INTEGER,
    num_accepted_tokens INTEGER, acceptance_rate REAL, draft_share REAL,
    mean_accepted_length REAL, mean_num_draft_tokens REAL, tokens_per_second REAL, speedup REAL,
    ttft_ms REAL, prefill_ms REAL, decode_ms REAL, plain_decode_ms REAL, drafted_by TEXT,
    token_ids TEXT, provenance TEXT
) STRICT;
CREATE TABLE step (
    turn_id INTEGER NOT NULL REFERENCES turn(id), n INTEGER NOT NULL, drafter TEXT NOT NULL,
    num_draft_tokens INTEGER NOT NULL, num_accepted_tokens INTEGER NOT NULL,
    num_output_tokens INTEGER NOT NULL, draft_ms REAL, verify_ms REAL, context_length INTEGER,
    is_probe INTEGER NOT NULL CHECK (is_probe IN (0, 1)), signal TEXT, PRIMARY KEY (turn_id, n)
) STRICT;
CREATE TABLE calibration (
    key TEXT PRIMARY KEY, state TEXT NOT NULL, updated_at_utc TEXT NOT NULL
) STRICT;
CREATE TABLE _sqlite_migrations (
    id INTEGER PRIMARY KEY, migration_set TEXT, name TEXT, applied_at TEXT
);
CREATE UNIQUE INDEX idx__sqlite_migrations_migration_set_name
    ON _sqlite_migrations (migration_set, name);
INSERT INTO _sqlite_migrations (migration_set, name, applied_at)
    VALUES ('localspec', 'm001_tables', '2026-11-20 14:00:00+00:00');
