"""The questions the log is asked, where they are more than one line of SQL.

Contract: text only; parameters stand as ? or :name in the order the comment gives.
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

# id of a message → ids with the same parent
SIBLINGS = """
SELECT other.id FROM message AS this JOIN message AS other
    ON other.conversation_id = this.conversation_id AND other.parent_id IS this.parent_id
WHERE this.id = ? ORDER BY other.id
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

# :session_id and :conversation_id, NULL for any
TURNS = """
SELECT turn.id AS turn_id, message.state AS state, turn.*
FROM turn JOIN message ON message.id = turn.message_id
WHERE (:session_id IS NULL OR turn.session_id = :session_id)
    AND (:conversation_id IS NULL OR turn.conversation_id = :conversation_id)
ORDER BY turn.id
"""

# key, state, time
SAVE_STATE = """
INSERT INTO calibration (key, state, updated_at_utc) VALUES (?, ?, ?)
ON CONFLICT (key) DO UPDATE SET state = excluded.state, updated_at_utc = excluded.updated_at_utc
"""

# text, text_exact, id. Also out of 'interrupted': another process that opened the log meanwhile
# took this living draft for a dead one. Never out of an ending.
CHECKPOINT = """
UPDATE message SET text = ?, text_exact = ?, state = 'draft'
WHERE id = ? AND state IN ('draft', 'interrupted')
"""

# :session_id and :conversation_id. Turns first: the rows that remain decide what else stays.
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
