"""The tables, view and indexes of the first log; every later change is a migration (schema).

Contract: text only, which may never change. Unknown is NULL.
"""

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
