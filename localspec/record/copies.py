"""A consistent copy of the log in a file of its own, whole or in part.

Contract: what was deleted is never in a copy. The copy is private to its owner, and on the disk
when the call returns. Raises StoreError; OSError if the file cannot be made.

Not here: other formats (export).
"""

from __future__ import annotations

import os
from pathlib import Path

from localspec.record import queries
from localspec.record.connection import SharedConnection
from localspec.record.opening import connect, create_private
from localspec.record.search import REBUILD, has_fts5


def copy_log(
    db: SharedConnection, path: Path, session_id: int | None, conversation_id: int | None
) -> None:
    """Write to `path` (absent or empty): everything, or only the turns of a session or of a
    conversation with the conversations they are in."""
    with db.reading() as tables:
        create_private(path)
        tables.execute("VACUUM INTO ?", str(path))
        has_deleted = tables.rows("SELECT 1 FROM conversation WHERE deleted_at_utc IS NOT NULL")
    if has_deleted or session_id is not None or conversation_id is not None:
        with db.explained():
            _keep_only(path, session_id, conversation_id)
    with path.open("rb+") as copy:
        os.fsync(copy.fileno())  # VACUUM INTO does not


def _keep_only(path: Path, session_id: int | None, conversation_id: int | None) -> None:
    """Delete what lies outside the scope from a copy, and its pages with it."""
    conn = connect(str(path)).conn
    try:
        conn.execute("BEGIN IMMEDIATE")
        for purge in queries.PURGE:
            conn.execute(purge)
        if session_id is not None or conversation_id is not None:
            scope = {"session_id": session_id, "conversation_id": conversation_id}
            for statement in queries.KEEP_ONLY:
                conn.execute(statement, scope)
        if has_fts5(conn):
            conn.execute(REBUILD)  # deleting leaves its words behind
        conn.execute("COMMIT")
        conn.execute("VACUUM")
    finally:
        conn.close()
