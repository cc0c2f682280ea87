"""Logs as earlier versions of the program left them."""

from __future__ import annotations

# What the first two migrations made and the program of that time wrote: replies without leniency.
VERSION_2 = """
INSERT INTO session (started_at_utc) VALUES ('2026-11-20T14:00:00.000+00:00');
INSERT INTO conversation (title, created_at_utc) VALUES ('old', '2026-11-20T14:00:00.000+00:00');
INSERT INTO message (conversation_id, role, text, state, created_at_utc)
    VALUES (1, 'user', 'asked', 'complete', '2026-11-20T14:00:01.000+00:00');
INSERT INTO message (conversation_id, parent_id, role, text, state, created_at_utc)
    VALUES (1, 1, 'assistant', 'answered', 'complete', '2026-11-20T14:00:02.000+00:00');
INSERT INTO turn (session_id, conversation_id, message_id, started_at_utc, model, drafter,
    temperature, exact, num_output_tokens, num_drafts, num_draft_tokens, num_accepted_tokens,
    decode_ms, token_ids, provenance)
    VALUES (1, 1, 2, '2026-11-20T14:00:02.000+00:00', 'm', 'ngram', 0.5, 1, 4, 1, 3, 3, 9.0,
    '[1, 2, 3, 4]', '["ngram", "ngram", "ngram", "target"]');
INSERT INTO step VALUES (1, 0, 'ngram', 3, 3, 4, 1.0, 8.0, 5, 0, NULL);
UPDATE conversation SET tip_message_id = 2;
"""


# What the program before history and search wrote: a branch, and a text that SQLite cannot hold.
VERSION_3 = f"""
{VERSION_2.replace("5, 0, NULL", "5, 0, NULL, NULL")}
INSERT INTO message (conversation_id, parent_id, role, text, text_exact, state, created_at_utc)
    VALUES (1, 1, 'assistant', 'an\ufffdother', '"an\\u0000other"', 'stopped',
    '2026-11-20T14:00:03Z');
INSERT INTO turn (session_id, conversation_id, message_id, started_at_utc, system_prompt, workload)
    VALUES (1, 1, 3, '2026-11-20T14:00:03Z', 'Be brief.', 'code');
INSERT INTO message (conversation_id, parent_id, role, text, state, created_at_utc)
    VALUES (1, 3, 'user', 'and then?', 'complete', '2026-11-20T14:00:04Z');
UPDATE conversation SET tip_message_id = 4;
"""
