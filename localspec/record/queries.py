"""The SQL of the log where it is longer than a line.

Contract: text only. The comment names the parameters in their order, then the result.
"""

# id of the tip → the messages from the first to it
BRANCH = """
WITH RECURSIVE up (id, parent_id, height) AS (
    SELECT id, parent_id, 0 FROM message WHERE id = ?
    UNION ALL
    SELECT message.id, message.parent_id, height + 1
    FROM message JOIN up ON message.id = up.parent_id
)
SELECT message.* FROM up JOIN message ON message.id = up.id ORDER BY height DESC
"""

# id of a message → the largest id at or below it, which is a leaf, for parents are older
NEWEST_LEAF = """
WITH RECURSIVE down (id) AS (
    SELECT ?
    UNION ALL
    SELECT message.id FROM message JOIN down ON message.parent_id = down.id
)
SELECT max(id) AS id FROM down
"""

# id of a conversation → its messages with their parents. A reply that another one continues, and
# that nothing else follows, is the beginning of that one and no branch of its own.
SIBLING_GROUPS = """
SELECT id, parent_id FROM message
WHERE conversation_id = ? AND NOT (
    id IN (SELECT continues_message_id FROM turn WHERE continues_message_id IS NOT NULL)
    AND NOT EXISTS (SELECT 1 FROM message AS child WHERE child.parent_id = message.id))
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

# → the list of conversations, pinned ones first, then by the newest message
HISTORY = """
SELECT conversation.id, title, is_pinned, message.created_at_utc AS updated_at_utc, has_text
FROM conversation
JOIN (
    SELECT conversation_id, max(id) AS id, max(is_logged) AS has_text
    FROM message GROUP BY conversation_id
) AS newest ON newest.conversation_id = conversation.id
JOIN message ON message.id = newest.id
WHERE deleted_at_utc IS NULL
ORDER BY is_pinned DESC, newest.id DESC
"""

NEWEST_CONVERSATIONS = "SELECT id FROM conversation WHERE deleted_at_utc IS NULL ORDER BY id DESC"
# id of a conversation
NEWEST_MESSAGES = "SELECT * FROM message WHERE conversation_id = ? ORDER BY id DESC"

# Deletes in an order that leaves no dangling reference; conversations last, so that the number of
# rows changed by the last statement is theirs.
_GONE = "(SELECT id FROM conversation WHERE deleted_at_utc IS NOT NULL)"
PURGE = (
    f"""
    DELETE FROM step WHERE turn_id IN (SELECT id FROM turn WHERE conversation_id IN {_GONE})
    """,
    f"DELETE FROM turn WHERE conversation_id IN {_GONE}",
    "UPDATE conversation SET tip_message_id = NULL WHERE deleted_at_utc IS NOT NULL",
    f"DELETE FROM message WHERE conversation_id IN {_GONE}",
    "DELETE FROM conversation WHERE deleted_at_utc IS NOT NULL",
)

# ids of a session and of a conversation, NULL for any
TURNS = """
SELECT turn.id AS turn_id, message.state AS state, turn.*
FROM turn JOIN message ON message.id = turn.message_id
JOIN conversation ON conversation.id = turn.conversation_id
WHERE conversation.deleted_at_utc IS NULL
    AND turn.session_id = coalesce(?, turn.session_id)
    AND turn.conversation_id = coalesce(?, turn.conversation_id)
ORDER BY turn.id
"""

# id of a message
TURN_OF = """
SELECT turn.id AS turn_id, message.state AS state, turn.*
FROM turn JOIN message ON message.id = turn.message_id
WHERE turn.message_id = ?
"""

# key, state, time
SAVE_STATE = """
INSERT INTO calibration (key, state, updated_at_utc) VALUES (?, ?, ?)
ON CONFLICT (key) DO UPDATE SET state = excluded.state, updated_at_utc = excluded.updated_at_utc
"""

# text, text_exact, id
CHECKPOINT = "UPDATE message SET text = ?, text_exact = ? WHERE id = ? AND state = 'draft'"

INTERRUPT = "UPDATE message SET state = 'interrupted' WHERE state = 'draft'"

# :session_id and :conversation_id. Turns first: the remaining turns decide what else stays.
KEEP_ONLY = (
    """
    DELETE FROM turn WHERE NOT (
        (:session_id IS NULL OR session_id = :session_id)
        AND (:conversation_id IS NULL OR conversation_id = :conversation_id))
    """,
    "DELETE FROM step WHERE turn_id NOT IN (SELECT id FROM turn)",
    "DELETE FROM session WHERE id NOT IN (SELECT session_id FROM turn)",
    """
    DELETE FROM conversation WHERE NOT (
        (:conversation_id IS NULL OR id = :conversation_id)
        AND (:session_id IS NULL OR id IN (SELECT conversation_id FROM turn)))
    """,
    "DELETE FROM message WHERE conversation_id NOT IN (SELECT id FROM conversation)",
)
