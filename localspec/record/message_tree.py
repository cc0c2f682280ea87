"""The tree of messages: its branches, deleting a message, copying a branch or all of them.

Contract: what followed a deleted message follows its parent from then on, so that every other
reader finds a tree. The message is out of every list, search, export and statistic at once, and can
be restored until `ConversationList.purge`. A reply goes with the replies that it continues, and so
do copies. A copied reply keeps its turn, with the figures and the tokens, marked as a copy: what
was measured was measured once. Raises StoreError; each call is one transaction.

Not here: adding messages and turns (store), conversations as a whole (conversations).
"""

from __future__ import annotations

import json
from typing import Any

from localspec.record import queries
from localspec.record.connection import SharedConnection, Tables, missing
from localspec.record.rows import StoredMessage, clean, json_column, message_from, now
from localspec.record.unlogged import UnloggedTexts

COPIED = ("role", "text", "text_exact", "state", "created_at_utc", "is_logged", "model",
          "is_edited", "thinking", "deleted_at_utc")  # fmt: skip

MOST_CONVERSATIONS = 1024  # whose beginnings are looked through


class MessageTree:
    """unlogged: the texts that are not written, which go along with a copy."""

    def __init__(self, db: SharedConnection, unlogged: UnloggedTexts) -> None:
        self._db = db
        self._unlogged = unlogged

    def set_tip(self, conversation_id: int, message_id: int) -> None:
        """Remember which branch is in use."""
        with self._db.writing() as tables:
            check_belongs(tables, message_id, conversation_id)
            tables.update("conversation", conversation_id, {"tip_message_id": message_id})

    def sibling_groups(self, conversation_id: int) -> dict[int | None, tuple[int, ...]]:
        """Message ids by their parent's, each group oldest first. A reply that another one
        continues is left out: it is the beginning of that one."""
        groups = dict[int | None, tuple[int, ...]]()
        for row in self._db.rows(queries.SIBLING_GROUPS, conversation_id):
            groups[row["parent_id"]] = (*groups.get(row["parent_id"], ()), row["id"])
        return groups

    def beginnings(self, source: str, text: str) -> list[StoredMessage]:
        """The first messages that are this text, of the newest conversations of a source."""
        rows = self._db.rows(queries.BEGINNINGS, source, MOST_CONVERSATIONS, clean(text))
        found = (self._unlogged.filled(message_from(row)) for row in rows)
        return [message for message in found if message.text == text]

    def newest_leaf(self, message_id: int) -> int:
        """The end of the newest branch that passes through this message."""
        return int(self._db.rows(queries.NEWEST_LEAF, message_id)[0]["id"])

    def continued(self, message_id: int) -> list[int]:
        """The replies whose text this one begins with, oldest first, and itself."""
        return [row["message_id"] for row in self._db.rows(queries.CONTINUED, message_id)]

    def delete(self, *message_ids: int) -> None:
        """Take messages out of the tree, in this order. The newest branch beside or above one is
        used then, where it was the end of the one in use."""
        with self._db.writing() as tables:
            for message_id in message_ids:
                _delete(tables, message_id)

    def restore(self, conversation_id: int, message_id: int) -> None:
        """Undo `delete`: what followed the message, and is still where it was put, follows it."""
        with self._db.writing() as tables:
            check_belongs(tables, message_id, conversation_id)
            message = _message(tables, message_id)
            for part in _parts(tables, message_id, are_deleted=True):
                tables.update("message", part, {"deleted_at_utc": None})
            children = json_column(message["children_ids"]) or []
            for child in children:
                tables.execute(queries.MOVE_BELOW, message_id, child, message["parent_id"])
            if not children:
                row = {"tip_message_id": message_id}
                tables.update("conversation", message["conversation_id"], row)

    def copy(self, conversation_id: int, title: str, until: int | None = None) -> int:
        """A new conversation with all messages of this one, or with those from the first to
        `until`; its id."""
        with self._db.writing() as tables:
            found = tables.rows("SELECT * FROM conversation WHERE id = ?", conversation_id)
            if not found:
                raise missing("conversation", conversation_id)
            made = tables.insert(
                "conversation",
                {
                    "title": "" if self._unlogged.is_on else title,
                    "created_at_utc": now(),
                    "system_prompt": found[0]["system_prompt"],
                    "settings": found[0]["settings"],
                },
            )
            query, start = (
                (queries.MESSAGES, conversation_id) if until is None else (queries.BRANCH, until)
            )
            copies = self._copied(tables, tables.rows(query, start), made)
            tip = found[0]["tip_message_id"] if until is None else until
            tables.update("conversation", made, {"tip_message_id": copies.get(tip)})
        self._unlogged.keep_title(made, title)
        if conversation_id in self._unlogged.system_prompts:
            self._unlogged.keep_prompt(made, self._unlogged.system_prompts[conversation_id])
        return made

    def _copied(
        self, tables: Tables, messages: list[dict[str, Any]], conversation_id: int
    ) -> dict[int | None, int]:
        """The new ids by the old ones."""
        copies = dict[int | None, int]()
        for message in _with_beginnings(tables, messages):
            row = {name: message[name] for name in COPIED}
            state = "interrupted" if message["state"] == "draft" else message["state"]
            place = {"conversation_id": conversation_id, "parent_id": None}
            if message["parent_id"] is not None:
                place["parent_id"] = copies.get(message["parent_id"])
            old, new = message["id"], tables.insert("message", {**row, **place, "state": state})
            copies[old] = new
            if old in self._unlogged.texts:
                self._unlogged.keep(new, *self._unlogged.texts[old])
            if old in self._unlogged.ends:
                self._unlogged.keep_end(new, self._unlogged.ends[old])
            _copy_turn(tables, old, conversation_id, copies)
        return copies


def _with_beginnings(tables: Tables, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the replies that they continue, parents first."""
    by_id = {message["id"]: message for message in messages}
    for message in messages:
        for row in tables.rows(queries.CONTINUED, message["id"]):
            part = row["message_id"]
            by_id[part] = by_id.get(part) or _message(tables, part)
    return [by_id[number] for number in sorted(by_id)]


def _copy_turn(
    tables: Tables, message_id: int, conversation_id: int, copies: dict[int | None, int]
) -> None:
    """Copy the finished turn of a reply and its rounds. copies: new message ids by the old ones."""
    sql = "SELECT * FROM turn WHERE message_id = ? AND finished_at_utc IS NOT NULL"
    for turn in tables.rows(sql, message_id):
        place = {
            "conversation_id": conversation_id,
            "message_id": copies[message_id],
            "continues_message_id": copies.get(turn["continues_message_id"]),
            "is_copy": 1,
        }
        old = turn.pop("id")
        new = tables.insert("turn", {**turn, **place})
        for step in tables.rows("SELECT * FROM step WHERE turn_id = ?", old):
            tables.insert("step", {**step, "turn_id": new})


def _message(tables: Tables, message_id: int) -> dict[str, Any]:
    rows = tables.rows("SELECT * FROM message WHERE id = ?", message_id)
    if not rows:
        raise missing("message", message_id)
    return rows[0]


def _delete(tables: Tables, message_id: int) -> None:
    message = _message(tables, message_id)
    children = tables.rows(queries.CHILDREN, message_id)
    for child in children:
        tables.update("message", child["id"], {"parent_id": message["parent_id"]})
    for part in _parts(tables, message_id):
        found = [child["id"] for child in children] if part == message_id else []
        row = {"deleted_at_utc": now(), "children_ids": json.dumps(found)}
        tables.update("message", part, row)
    _move_tip(tables, message)


def _parts(tables: Tables, message_id: int, are_deleted: bool = False) -> list[int]:
    """A reply and those that it continues and that nothing follows: they are its beginning."""
    found = [message_id]
    for row in tables.rows(queries.CONTINUED, message_id):
        part = row["message_id"]
        is_deleted = _message(tables, part)["deleted_at_utc"] is not None
        is_a_part = part != message_id and is_deleted is are_deleted
        if is_a_part and not tables.rows(queries.CHILDREN, part):
            found.append(part)
    return found


def _move_tip(tables: Tables, message: dict[str, Any]) -> None:
    conversation_id, parent_id = message["conversation_id"], message["parent_id"]
    tips = tables.rows("SELECT tip_message_id FROM conversation WHERE id = ?", conversation_id)
    if tips[0]["tip_message_id"] != message["id"]:
        return
    beside = tables.rows(queries.NEWEST_BELOW, conversation_id, parent_id)[0]["id"]
    leaf = parent_id
    if beside is not None:
        leaf = tables.rows(queries.NEWEST_LEAF, beside)[0]["id"]
    tables.update("conversation", conversation_id, {"tip_message_id": leaf})


def check_belongs(tables: Tables, message_id: int, conversation_id: int) -> None:
    """Raise StoreError unless the message is one of this conversation."""
    if _message(tables, message_id)["conversation_id"] != conversation_id:
        raise missing("message", message_id)
