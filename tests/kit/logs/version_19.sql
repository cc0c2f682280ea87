CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
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
) STRICT;
CREATE TABLE conversation (
    id INTEGER PRIMARY KEY,
    title TEXT NOT NULL,
    created_at_utc TEXT NOT NULL,
    tip_message_id INTEGER REFERENCES message(id)
, is_pinned INTEGER NOT NULL DEFAULT 0 CHECK (is_pinned IN (0, 1)), deleted_at_utc TEXT, system_prompt TEXT, folder_id INTEGER REFERENCES folder(id), title_by TEXT CHECK (title_by IN ('words', 'model', 'person')), when_full TEXT CHECK (when_full IN ('ask', 'roll', 'stop')), settings TEXT, source TEXT NOT NULL DEFAULT 'page' CHECK (source IN ('page', 'api'))) STRICT;
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
, is_logged INTEGER NOT NULL DEFAULT 1 CHECK (is_logged IN (0, 1)), model TEXT, is_edited INTEGER NOT NULL DEFAULT 0 CHECK (is_edited IN (0, 1)), deleted_at_utc TEXT, children_ids TEXT, thinking TEXT) STRICT;
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
, workload TEXT, leniency TEXT, num_lenient_tokens INTEGER, continues_message_id INTEGER REFERENCES message(id), continued_from TEXT CHECK (continued_from IN ('tokens', 'text')), drafted BLOB, energy_joules REAL, decode_speedup REAL, reply_ms REAL, plain_reply_ms REAL, target_fingerprint TEXT, kernels TEXT, prompt_fingerprint TEXT, num_left_out INTEGER, stop TEXT, presence_penalty REAL, frequency_penalty REAL, no_speedup TEXT CHECK (no_speedup IN ('load_changed', 'too_short')), thinks INTEGER CHECK (thinks IN (0, 1)), thinking_budget INTEGER, num_thinking_tokens INTEGER, thinking_ms REAL, least_speedup REAL, is_raw INTEGER CHECK (is_raw IN (0, 1)), grammar TEXT) STRICT;
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
    signal TEXT, num_lenient_tokens INTEGER, plain_ms REAL,
    PRIMARY KEY (turn_id, n)
) STRICT;
CREATE TABLE calibration (
    key TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    updated_at_utc TEXT NOT NULL
) STRICT;
CREATE INDEX message_by_parent ON message (conversation_id, parent_id);
CREATE INDEX turn_by_session ON turn (session_id);
CREATE INDEX turn_by_conversation ON turn (conversation_id);
CREATE INDEX turn_by_continued ON turn (continues_message_id) WHERE continues_message_id IS NOT NULL;
CREATE INDEX message_below ON message (parent_id);
CREATE INDEX conversation_by_tip ON conversation (tip_message_id);
CREATE VIEW turn_by_temperature AS
SELECT
    model,
    draft,
    device,
    drafter,
    temperature,
    exact,
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
        AS decode_speedup,
    sum(plain_reply_ms) / nullif(sum(reply_ms) FILTER (WHERE plain_reply_ms IS NOT NULL), 0)
        AS speedup
FROM turn
WHERE num_output_tokens > 0
GROUP BY model, draft, device, drafter, temperature, exact;
CREATE TABLE folder (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    is_collapsed INTEGER NOT NULL DEFAULT 0 CHECK (is_collapsed IN (0, 1))
) STRICT;
CREATE INDEX conversation_by_folder ON conversation (folder_id);
CREATE TABLE kept_settings (
    kind TEXT NOT NULL CHECK (kind IN ('prompt', 'model')),
    name TEXT NOT NULL,
    settings TEXT NOT NULL,
    PRIMARY KEY (kind, name)
) STRICT;
CREATE TABLE api_key (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, hash TEXT NOT NULL UNIQUE, created_at_utc TEXT NOT NULL, last_used_at_utc TEXT) STRICT;
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm001_tables', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm002_indexes_and_view_by_temperature', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm003_leniency', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm004_history_and_presets', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm005_drafted_tokens_and_energy', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm006_whole_replies_made_again', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm007_messages_left_out', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm008_models_edits_and_deleted_messages', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm010_folders_titles_and_full_contexts', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm011_settings_of_chats_prompts_and_models', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm012_stop_strings', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm013_other_programs', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm014_penalties', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm015_short_replies', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm016_thoughts', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm017_use_of_keys', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm018_least_speedups', '2026-11-20 14:00:00+00:00');
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localspec', 'm019_formats', '2026-11-20 14:00:00+00:00');
