"""The SQL of the log where it is longer than a line.

Contract: text only. The comment names the parameters in their order, then the result.
"""

from localspec.record.connection import is_figure

# id of the tip → the messages from the first to it
BRANCH = """
WITH RECURSIVE up (id, parent_id, height) AS (
    SELECT id, parent_id, 0 FROM message WHERE id = ? AND deleted_at_utc IS NULL
    UNION ALL
    SELECT message.id, message.parent_id, height + 1
    FROM message JOIN up ON message.id = up.parent_id
)
SELECT message.* FROM up JOIN message ON message.id = up.id ORDER BY height DESC
"""

# id of a conversation → its messages, parents first
MESSAGES = "SELECT * FROM message WHERE conversation_id = ? AND deleted_at_utc IS NULL ORDER BY id"

# id of a message → those that follow it directly
CHILDREN = "SELECT id FROM message WHERE parent_id = ? AND deleted_at_utc IS NULL ORDER BY id"

# ids of a conversation and of a message, NULL for none → the newest that follows it directly
NEWEST_BELOW = """
SELECT max(id) AS id FROM message
WHERE conversation_id = ? AND parent_id IS ? AND deleted_at_utc IS NULL
"""

# ids of the new parent, of the message, of the parent that it must have now
MOVE_BELOW = "UPDATE message SET parent_id = ? WHERE id = ? AND parent_id IS ?"

# id of a message → the largest id at or below it, which is a leaf, for parents are older
NEWEST_LEAF = """
WITH RECURSIVE down (id) AS (
    SELECT ?
    UNION ALL
    SELECT message.id FROM message JOIN down ON message.parent_id = down.id
    WHERE message.deleted_at_utc IS NULL
)
SELECT max(id) AS id FROM down
"""

# source, number of conversations, text → the first messages with this text or one that is not
# written, the newest first
BEGINNINGS = """
SELECT * FROM (
    SELECT message.* FROM message JOIN conversation ON conversation.id = message.conversation_id
    WHERE message.parent_id IS NULL AND message.deleted_at_utc IS NULL AND source = ?
        AND conversation.deleted_at_utc IS NULL
    ORDER BY message.id DESC LIMIT ?
)
WHERE text = ? OR is_logged = 0
"""

# id of a conversation → its messages with their parents. A reply that another one continues, and
# that nothing else follows, is the beginning of that one and no branch of its own.
SIBLING_GROUPS = """
SELECT id, parent_id FROM message
WHERE conversation_id = ? AND deleted_at_utc IS NULL AND NOT (
    id IN (SELECT continues_message_id FROM turn WHERE continues_message_id IS NOT NULL)
    AND NOT EXISTS (
        SELECT 1 FROM message AS child
        WHERE child.parent_id = message.id AND child.deleted_at_utc IS NULL))
ORDER BY id
"""

# id of a reply → the replies that it continues, the first one first, and itself
CONTINUED = """
WITH RECURSIVE back (message_id, depth) AS (
    SELECT ?, 0
    UNION ALL
    SELECT turn.continues_message_id, depth + 1
    FROM turn JOIN back ON turn.message_id = back.message_id
    WHERE turn.continues_message_id IS NOT NULL
)
SELECT message_id FROM back ORDER BY depth DESC
"""

# → the list of the page's conversations, pinned ones first, then by the newest message
HISTORY = """
SELECT conversation.id, title, is_pinned, folder_id, has_text, newest.id AS newest_id,
    num_messages, message.created_at_utc AS updated_at_utc
FROM conversation
JOIN (
    SELECT conversation_id, max(id) AS id, max(is_logged) AS has_text, count(*) AS num_messages
    FROM message WHERE deleted_at_utc IS NULL GROUP BY conversation_id
) AS newest ON newest.conversation_id = conversation.id
JOIN message ON message.id = newest.id
WHERE conversation.deleted_at_utc IS NULL AND conversation.source = 'page'
ORDER BY is_pinned DESC, newest.id DESC
"""

CONVERSATIONS = "SELECT * FROM conversation WHERE deleted_at_utc IS NULL ORDER BY id"
NEWEST_CONVERSATIONS = "SELECT id FROM conversation WHERE deleted_at_utc IS NULL ORDER BY id DESC"
# id of a conversation
NEWEST_MESSAGES = (
    "SELECT * FROM message WHERE conversation_id = ? AND deleted_at_utc IS NULL ORDER BY id DESC"
)

# most rows → the newest replies with a turn of their own and their sizes. A reply that stands on in
# a longer one is a part of that.
NEWEST_REPLIES = """
SELECT message.id, length(text) + coalesce(length(thinking), 0) AS num_characters
FROM message JOIN turn ON turn.message_id = message.id
JOIN conversation ON conversation.id = message.conversation_id
WHERE role = 'assistant' AND state <> 'draft' AND is_logged = 1 AND is_copy = 0
    AND message.deleted_at_utc IS NULL AND conversation.deleted_at_utc IS NULL
    AND message.id NOT IN (
        SELECT continues_message_id FROM turn WHERE continues_message_id IS NOT NULL)
ORDER BY message.id DESC LIMIT ?
"""

# Deletes in an order that leaves no dangling reference; each statement's number of changed rows
# counts. A deleted reply that another one continues stays: that one begins with its tokens.
_GONE = "(SELECT id FROM conversation WHERE deleted_at_utc IS NOT NULL)"
_GONE_MESSAGES = """(
    SELECT id FROM message WHERE deleted_at_utc IS NOT NULL AND id NOT IN (
        SELECT continues_message_id FROM turn JOIN message AS longer ON longer.id = turn.message_id
        WHERE continues_message_id IS NOT NULL AND longer.deleted_at_utc IS NULL))"""
PURGE = (
    f"""
    DELETE FROM step WHERE turn_id IN (SELECT id FROM turn WHERE message_id IN {_GONE_MESSAGES})
    """,
    f"""
    UPDATE turn SET continues_message_id = NULL
    WHERE message_id IN {_GONE_MESSAGES} AND continues_message_id IS NOT NULL
    """,
    f"DELETE FROM turn WHERE message_id IN {_GONE_MESSAGES}",
    f"DELETE FROM message WHERE id IN {_GONE_MESSAGES}",
    f"""
    DELETE FROM step WHERE turn_id IN (SELECT id FROM turn WHERE conversation_id IN {_GONE})
    """,
    f"DELETE FROM turn WHERE conversation_id IN {_GONE}",
    "UPDATE conversation SET tip_message_id = NULL WHERE deleted_at_utc IS NOT NULL",
    f"DELETE FROM message WHERE conversation_id IN {_GONE}",
    "DELETE FROM conversation WHERE deleted_at_utc IS NOT NULL",
)

# columns: of turn, those that are needed: the others are most of the file
_TURNS = """
SELECT turn.id AS turn_id, message.state AS state, conversation.source AS source, {columns}
FROM turn JOIN message ON message.id = turn.message_id
JOIN conversation ON conversation.id = turn.conversation_id
"""
# ids of a session and of a conversation, the first day; NULL for any. A turn of a copy is
# among those of its own conversation alone: for any other choice its number counts as 0.
TURNS = f"""{_TURNS}
WHERE conversation.deleted_at_utc IS NULL AND message.deleted_at_utc IS NULL
    AND turn.session_id = coalesce(?, turn.session_id)
    AND turn.conversation_id = coalesce(?, turn.conversation_id * (1 - turn.is_copy))
    AND turn.started_at_utc >= coalesce(?, turn.started_at_utc)
ORDER BY turn.id
"""

# → every model that turns are of
MODELS = """
SELECT DISTINCT model FROM turn JOIN conversation ON conversation.id = turn.conversation_id
WHERE deleted_at_utc IS NULL AND model <> '' ORDER BY model
"""

# tokens that a comparison needs → the gain of the 20 newest compared replies of each model to the
# person
RECENT_GAINS = f"""
SELECT model, sum(plain_reply_ms) / sum(reply_ms) AS gain, count(*) AS num_replies
FROM (
    SELECT model, plain_reply_ms, reply_ms, num_output_tokens,
        row_number() OVER (PARTITION BY model ORDER BY turn.id DESC) AS place
    FROM turn JOIN conversation ON conversation.id = turn.conversation_id
    WHERE deleted_at_utc IS NULL AND model <> '' AND source = 'page'
        AND is_copy = 0 AND {is_figure("plain_reply_ms")} AND {is_figure("reply_ms")}
)
WHERE place <= 20 GROUP BY model HAVING sum(reply_ms) > 0 AND sum(num_output_tokens) >= ?
"""

# id of a message
TURN_OF = f"{_TURNS} WHERE turn.message_id = ?"

# id of a message
TOKENS = "SELECT token_ids, provenance FROM turn WHERE message_id = ?"

# title, NULL for one that is not to be written; id of a conversation
ENTITLE = """
UPDATE conversation SET title = coalesce(?, title), title_by = 'model'
WHERE id = ? AND title_by = 'words' AND deleted_at_utc IS NULL
"""

# key, state, time
SAVE_STATE = """
INSERT INTO calibration (key, state, updated_at_utc) VALUES (?, ?, ?)
ON CONFLICT (key) DO UPDATE SET state = excluded.state, updated_at_utc = excluded.updated_at_utc
"""

# text, text_exact, thinking, id
CHECKPOINT = """
UPDATE message SET text = ?, text_exact = ?, thinking = ? WHERE id = ? AND state = 'draft'
"""

INTERRUPT = "UPDATE message SET state = 'interrupted' WHERE state = 'draft'"

# :session_id and :conversation_id. Turns first: the remaining turns decide what else stays.
KEEP_ONLY = (
    """
    DELETE FROM turn WHERE NOT (
        (:session_id IS NULL OR session_id = :session_id)
        AND (:conversation_id IS NULL OR conversation_id = :conversation_id)
        AND (:since IS NULL OR started_at_utc >= :since))
    """,
    "DELETE FROM step WHERE turn_id NOT IN (SELECT id FROM turn)",
    "DELETE FROM session WHERE id NOT IN (SELECT session_id FROM turn)",
    """
    DELETE FROM conversation WHERE NOT (
        (:conversation_id IS NULL OR id = :conversation_id)
        AND (coalesce(:session_id, :since) IS NULL
            OR id IN (SELECT conversation_id FROM turn)))
    """,
    "DELETE FROM message WHERE conversation_id NOT IN (SELECT id FROM conversation)",
    "DELETE FROM folder WHERE id NOT IN (SELECT coalesce(folder_id, 0) FROM conversation)",
    "DELETE FROM kept_settings",
    "DELETE FROM api_key",
)
