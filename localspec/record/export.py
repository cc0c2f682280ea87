"""Exports of the log: CSV, JSONL, Markdown, or a consistent copy of the database.

Contract: `export` writes one moment of the log, whole, or leaves `out` as it was. Files are private
to their owner (0600), UTF-8, and use the names of `backend.TurnStats`. Unknown is an empty cell,
null, or a dash.

    csv       one row for each turn: settings, numbers, machine, prompt and reply
    jsonl     one object a line with its "type": export (with the version of the format), session,
              conversation, message (parents first, all branches), turn (with tokens, provenance
              and steps); texts are exact. Conversations can be imported from it
    markdown  a report for people (markdown)
    All of them have what a model thought apart from its reply, under "thinking".
    sqlite    the database itself

Not here: SQL. Formula rule: OWASP, "CSV injection".
"""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TextIO

from localspec.core.errors import StoreError
from localspec.core.figures import figure_names
from localspec.core.files import replacing
from localspec.record import queries
from localspec.record.connection import connect, diagnose
from localspec.record.contents import Contents, Scope, reading
from localspec.record.markdown import markdown_lines
from localspec.record.opening import SIDE_FILES, create_private, lock_of
from localspec.record.rows import (
    SessionInfo,
    TurnSettings,
    clean,
    counts,
    finite_json_column,
)
from localspec.record.search import REBUILD, has_fts5
from localspec.record.store import Store

__all__ = [
    "CSV_COLUMNS", "EXPORT_VERSION", "Format", "Scope", "export", "export_to_send", "sweep_unsent",
]  # fmt: skip

EXPORT_VERSION = 1  # of the JSONL format, which can be imported again
Format = Literal["csv", "jsonl", "markdown", "sqlite"]
UNSENT, UNSENT_PREFIX = ".localspec-exports", "export-"  # files on their way to a browser
NUM_REMEMBERED = 32  # conversations, whose turns may alternate
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")

# The turn's device is more exact than the session's.
MACHINE_COLUMNS = tuple(one.name for one in fields(SessionInfo) if one.name != "device")
CSV_COLUMNS = (
    "turn_id", "session_id", "conversation_id", "message_id", "conversation_title", "source",
    "started_at_utc", "finished_at_utc", "state", "finish_reason", "error", "continues_message_id",
    *(one.name for one in fields(TurnSettings)),
    *figure_names(),
    *MACHINE_COLUMNS,
    "prompt", "thinking", "reply",
)  # fmt: skip


def export(store: Store, scope: Scope, format: Format, out: Path) -> None:
    """Write `scope` to `out`, replacing what is there. Raises StoreError, and leaves `out` as it
    was, if the log cannot be read or `out` cannot be written."""
    _refuse_the_log_itself(store, out)
    if format == "sqlite":
        _replace(out, lambda path: _copy(store, path, scope))
        return
    with reading(store, scope) as contents:

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8", newline="") as file:
                _WRITERS[format](file, contents)

        _replace(out, write)


@contextmanager
def _said_of(out: Path) -> Iterator[None]:
    """Raise StoreError, with the reason in words, for a fault of the disk."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"The export {out} cannot be written: {diagnose(error).fact}. Choose a file in a "
            "folder that exists, may be written and has room."
        ) from error


def export_to_send(store: Store, scope: Scope, format: Format) -> Path:
    """Return a new file with `scope`, alone in a private folder that the caller removes once the
    file is sent. The folder lies beside the log, or with the system's temporary files while the log
    is kept in memory. Raise StoreError as `export`."""
    place = None if store.path is None else store.path.parent / UNSENT
    with _said_of(place or Path(tempfile.gettempdir())):
        if place is not None:
            place.mkdir(mode=0o700, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=UNSENT_PREFIX, dir=place))
    try:
        export(store, scope, format, folder / "export")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / "export"


def sweep_unsent(store: Store) -> None:
    """Remove the files of `export_to_send` that a killed program left. Only for the one program
    that has the sole use of the log."""
    if store.path is not None:
        for folder in (store.path.parent / UNSENT).glob(f"{UNSENT_PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _refuse_the_log_itself(store: Store, out: Path) -> None:
    if store.path is None:
        return
    side_files = [store.path.with_name(f"{store.path.name}{end}") for end in SIDE_FILES]
    of_log = {one.resolve() for one in (store.path, lock_of(store.path), *side_files)}
    if out.resolve() in of_log or (out.exists() and out.samefile(store.path)):
        raise StoreError(
            f"{out} is the log itself or belongs to it. Choose another file for the export."
        )


def _copy(store: Store, path: Path, scope: Scope) -> None:
    """A copy without what is outside the scope or was deleted, and without the pages it was on."""
    try:
        store.backup(path)
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, sqlite3.Error) and cause.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise cause from error  # the copy has no room; the log needs none to be read
        raise
    with closing(connect(str(path)).conn) as conn:
        conn.execute("BEGIN IMMEDIATE")
        num_deleted = sum(conn.execute(statement).rowcount for statement in queries.PURGE)
        if scope != Scope():
            for statement in queries.KEEP_ONLY:
                conn.execute(statement, asdict(scope))
        if num_deleted or scope != Scope():
            if has_fts5(conn):
                conn.execute(REBUILD)  # deleting leaves its words behind
            conn.execute("COMMIT")
            conn.execute("VACUUM")


def _replace(out: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a private file beside `out`, then rename it into place."""
    with _said_of(out):
        if not out.absolute().parent.is_dir():  # a typing error must not make folders
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with replacing(out) as part:
            part.unlink(missing_ok=True)  # of an export that was killed
            create_private(part)
            write(part)


def _write_csv(file: TextIO, contents: Contents) -> None:
    # A log may have columns that only another version of localspec knew.
    writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore")
    writer.writeheader()
    for row in _csv_rows(contents):
        writer.writerow({name: csv_cell(value) for name, value in row.items()})


def _csv_rows(contents: Contents) -> Iterator[dict[str, Any]]:
    sessions = {session["id"]: session for session in contents.sessions}
    titles = {conversation.id: conversation.title for conversation in contents.conversations}
    messages = lru_cache(NUM_REMEMBERED)(
        lambda conversation_id: {one.id: one for one in contents.store.messages(conversation_id)}
    )
    for turn in contents.turns:
        session, its = sessions[turn["session_id"]], messages(turn["conversation_id"])
        reply = its[turn["message_id"]]
        asked = None if reply.parent_id is None else its[reply.parent_id].text
        yield {
            **turn,
            **{name: session[name] for name in MACHINE_COLUMNS},
            "conversation_title": titles[turn["conversation_id"]],
            "prompt": asked,
            "thinking": reply.thinking,
            "reply": reply.text,
        }


def csv_cell(value: object) -> object:
    """The value as a spreadsheet can safely open it: text never starts a formula, numbers stay
    numbers, a flag is 0 or 1."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        text = clean(value)
        return f"'{text}" if text.startswith(FORMULA_STARTS) else text
    return value


def _write_jsonl(file: TextIO, contents: Contents) -> None:
    for record in _records(contents):
        file.write(json.dumps(record) + "\n")


def _records(contents: Contents) -> Iterator[Mapping[str, Any]]:
    yield {"type": "export", "format": "localspec", "version": EXPORT_VERSION}
    for session in contents.sessions:
        yield {"type": "session", **session}
    for conversation in contents.conversations:
        yield {"type": "conversation", **asdict(conversation)}
        for message in contents.store.messages(conversation.id):
            yield {"type": "message", **asdict(message)}
    for turn in contents.turns:
        token_ids, provenance = contents.store.reply_tokens(turn["message_id"]) or (None, None)
        steps = [_step_record(step) for step in contents.store.step_rows(turn["turn_id"])]
        tokens = {"token_ids": token_ids, "provenance": provenance}
        drafted_by = counts(turn["drafted_by"])
        made = {"drafted_by": drafted_by, "reading_by": finite_json_column(turn["reading_by"])}
        yield {"type": "turn", **turn, **made, **tokens, "steps": steps}


def _step_record(step: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in step.items() if name != "turn_id"}
    signal = finite_json_column(step["signal"])
    return {**kept, "is_probe": bool(step["is_probe"]), "signal": signal}


def _write_markdown(file: TextIO, contents: Contents) -> None:
    file.writelines(f"{line}\n" for line in markdown_lines(contents))


_WRITERS: Mapping[str, Callable[[TextIO, Contents], None]] = {
    "csv": _write_csv,
    "jsonl": _write_jsonl,
    "markdown": _write_markdown,
}
