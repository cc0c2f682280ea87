"""The tables, indexes and view of the log, as one script for a new file.

Tables are STRICT. Unknown is NULL. Times are in ms, sizes in bytes, timestamps in UTC and ISO 8601,
flags 0 or 1. The columns `token_ids`, `provenance`, `drafted_by`, `reading_by`, `signal`,
`leniency`, `state` of calibration, `children_ids`, `settings` and `text_exact` hold JSON. The names
of numbers are those of `TurnStats`. The order of the columns is that of the exported files. A log
opens in Datasette.
"""

TABLES = """
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

CREATE TABLE folder (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    is_collapsed INTEGER NOT NULL DEFAULT 0 CHECK (is_collapsed IN (0, 1))
) STRICT;

CREATE TABLE conversation (
    id INTEGER PRIMARY KEY,
    title TEXT NOT NULL,
    created_at_utc TEXT NOT NULL,
    tip_message_id INTEGER REFERENCES message(id),
    is_pinned INTEGER NOT NULL DEFAULT 0 CHECK (is_pinned IN (0, 1)),
    deleted_at_utc TEXT,
    -- The conversation's own prompt, where texts are not to be written or the log is of a program
    -- without `settings`.
    system_prompt TEXT,
    folder_id INTEGER REFERENCES folder(id),
    -- NULL where the author is not known; such a title is never replaced.
    title_by TEXT CHECK (title_by IN ('words', 'model', 'person')),
    -- What the person decided for a full context; NULL where they were not asked yet.
    when_full TEXT CHECK (when_full IN ('ask', 'roll', 'stop')),
    -- Texts by the names of the page's fields.
    settings TEXT,
    source TEXT NOT NULL DEFAULT 'page' CHECK (source IN ('page', 'api'))
) STRICT;

CREATE TABLE message (
    id INTEGER PRIMARY KEY,
    conversation_id INTEGER NOT NULL REFERENCES conversation(id),
    parent_id INTEGER REFERENCES message(id),
    role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
    -- Always valid UTF-8 without NUL, so that every SQLite tool can read it. Where that needed a
    -- replacement character, `text_exact` holds the true text as a JSON string.
    text TEXT NOT NULL,
    text_exact TEXT,
    state TEXT NOT NULL
        CHECK (state IN ('draft', 'complete', 'stopped', 'error', 'interrupted')),
    created_at_utc TEXT NOT NULL,
    -- 0 where logging of text was switched off; `text` is then empty.
    is_logged INTEGER NOT NULL DEFAULT 1 CHECK (is_logged IN (0, 1)),
    model TEXT,
    is_edited INTEGER NOT NULL DEFAULT 0 CHECK (is_edited IN (0, 1)),
    deleted_at_utc TEXT,
    -- Of a deleted message, the messages that followed it and now follow its parent: what undoing
    -- the deletion needs.
    children_ids TEXT,
    -- What the model thought before the reply; NULL where it did not think.
    thinking TEXT
) STRICT;

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
    -- The speedup of the whole reply; `decode_speedup` is that of its rounds alone. Each is the
    -- ratio of two columns, so that speedups can be summed before dividing.
    speedup REAL,
    ttft_ms REAL,
    prefill_ms REAL,
    decode_ms REAL,
    plain_decode_ms REAL,
    drafted_by TEXT,
    token_ids TEXT,
    provenance TEXT,
    -- NULL where the kind of text is not known; the turns of programs without it were all exact.
    workload TEXT,
    leniency TEXT,
    num_lenient_tokens INTEGER,
    -- The unfinished reply that this turn continued. Its message begins with that reply's text; its
    -- numbers and tokens are those of the new part alone.
    continues_message_id INTEGER REFERENCES message(id),
    continued_from TEXT CHECK (continued_from IN ('tokens', 'text')),
    -- What the rounds proposed, packed: as JSON it would be the largest column by far.
    drafted BLOB,
    energy_joules REAL,
    decode_speedup REAL,
    reply_ms REAL,
    plain_reply_ms REAL,
    -- These three say whether a reply that is generated again has the same weights, kernels and
    -- prompt.
    target_fingerprint TEXT,
    kernels TEXT,
    prompt_fingerprint TEXT,
    -- How many of the oldest messages the prompt was built without.
    num_left_out INTEGER,
    stop TEXT,
    presence_penalty REAL,
    frequency_penalty REAL,
    thinks INTEGER CHECK (thinks IN (0, 1)),
    thinking_budget INTEGER,
    num_thinking_tokens INTEGER,
    thinking_ms REAL,
    -- What the speedup of a reply is at least, where the speedup is not known; no total counts it.
    least_speedup REAL,
    is_raw INTEGER CHECK (is_raw IN (0, 1)),
    grammar TEXT,
    -- Of the draft tokens, those that were checked.
    num_checked_tokens INTEGER,
    -- 1 for the turn of a copied reply, whose figures stay with it; no total counts it.
    is_copy INTEGER NOT NULL DEFAULT 0 CHECK (is_copy IN (0, 1)),
    no_speedup TEXT CHECK (no_speedup IN ('load_changed', 'shared', 'too_short'))
) STRICT;

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
    num_lenient_tokens INTEGER,
    -- Plain decoding for the tokens of the round.
    plain_ms REAL,
    num_checked_tokens INTEGER,
    PRIMARY KEY (turn_id, n)
) STRICT;

CREATE TABLE calibration (
    key TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    updated_at_utc TEXT NOT NULL
) STRICT;

CREATE TABLE kept_settings (
    kind TEXT NOT NULL CHECK (kind IN ('prompt', 'model')),
    name TEXT NOT NULL,
    settings TEXT NOT NULL,
    PRIMARY KEY (kind, name)
) STRICT;

-- `hash` is the SHA-256 of the key, which is stored nowhere.
CREATE TABLE api_key (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    hash TEXT NOT NULL UNIQUE,
    created_at_utc TEXT NOT NULL,
    last_used_at_utc TEXT
) STRICT;

CREATE INDEX message_by_parent ON message (conversation_id, parent_id);
CREATE INDEX turn_by_session ON turn (session_id);
CREATE INDEX turn_by_conversation ON turn (conversation_id);
CREATE INDEX turn_by_continued ON turn (continues_message_id)
    WHERE continues_message_id IS NOT NULL;
-- These two serve walks down the tree and the checks of a deletion.
CREATE INDEX message_below ON message (parent_id);
CREATE INDEX conversation_by_tip ON conversation (tip_message_id);
CREATE INDEX conversation_by_folder ON conversation (folder_id);
"""

# Ratios of sums and not means of ratios, so that long turns weigh more. Lenient turns are separate:
# their acceptance says nothing about exact turns.
TURN_BY_TEMPERATURE = """
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
WHERE num_output_tokens > 0 AND is_copy = 0
GROUP BY model, draft, device, drafter, temperature, exact
"""
