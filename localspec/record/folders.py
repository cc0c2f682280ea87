"""Folders in the list of conversations.

Contract: any thread; raises StoreError; each call is one transaction. A folder that is deleted
gives its conversations back to the top of the list.

Not here: which conversation lies in which (conversations).
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.record.connection import SharedConnection
from localspec.record.rows import visible_line


@dataclass(frozen=True)
class Folder:
    """is_collapsed: its conversations are not shown in the list."""

    id: int
    name: str
    is_collapsed: bool = False


class Folders:
    def __init__(self, db: SharedConnection) -> None:
        self._db = db

    def all(self) -> list[Folder]:
        """By name."""
        rows = self._db.rows("SELECT * FROM folder ORDER BY name COLLATE NOCASE, id")
        return [Folder(row["id"], row["name"], bool(row["is_collapsed"])) for row in rows]

    def add(self, name: str) -> int:
        """The new id. Raises RequestError for an empty name."""
        return self._db.insert("folder", {"name": visible_line(name, "name")})

    def rename(self, folder_id: int, name: str) -> None:
        """Raises RequestError for an empty name."""
        self._db.update("folder", folder_id, {"name": visible_line(name, "name")})

    def fold(self, folder_id: int, is_collapsed: bool) -> None:
        self._db.update("folder", folder_id, {"is_collapsed": int(is_collapsed)})

    def delete(self, folder_id: int) -> None:
        with self._db.writing() as tables:
            tables.execute(
                "UPDATE conversation SET folder_id = NULL WHERE folder_id = ?", folder_id
            )
            tables.delete("folder", folder_id)
