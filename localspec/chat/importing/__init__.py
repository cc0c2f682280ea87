"""Conversations out of a file that localspec or another program exported.

The whole file is read before anything is stored. Our own JSONL has to be right everywhere; other
programs' formats change, so what is not known in them is left out and named. A format is one reader
here: `fits` says whether an object of the file is of the format, `read` makes a conversation of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from localspec.chat.importing import chatgpt, claude, lm_studio, messages, open_webui
from localspec.chat.importing.entries import Report
from localspec.chat.importing.fields import NOT_AN_EXPORT, Table
from localspec.chat.importing.file import MAX_BYTES, tables_of, texts_of
from localspec.chat.importing.own import KINDS, own_conversations
from localspec.core.errors import RequestError
from localspec.record.conversations import Imported

__all__ = ["MAX_BYTES", "Report", "read_conversations"]

Fits = Callable[[dict[str, Any]], bool]
Read = Callable[[dict[str, Any], Report], Imported | None]
FORMATS: tuple[tuple[Fits, Read], ...] = (
    (chatgpt.fits, chatgpt.read),
    (claude.fits, claude.read),
    (open_webui.fits, open_webui.read),
    (lm_studio.fits, lm_studio.read),
    (messages.fits, messages.read),
    (messages.fits_sharegpt, messages.read_sharegpt),
)


def read_conversations(data: bytes, report: Report | None = None) -> list[Imported]:
    """Return every conversation of the file that has a message, the newest of another program's
    last. Raise RequestError for a file that holds none or is damaged. report: is told what was not
    imported."""
    report, own, others = report or Report(), list[Imported](), list[Imported]()
    for text in texts_of(data):
        tables = tables_of(text)
        first = next(tables, None)
        if first is None:
            continue
        if first.values.get("type") in KINDS:
            own.extend(own_conversations(chain((first,), tables)))
        else:
            others.extend(_of_others(chain((first,), tables), report))
    others.sort(key=lambda imported: max(one.created_at_utc for one in imported.messages))
    if not own and not others:
        fact = "The file holds no conversation with a message. Nothing was imported."
        raise RequestError(f"{fact} {report.said()}".strip())
    return [*own, *others]


def _of_others(tables: Iterable[Table], report: Report) -> list[Imported]:
    """Return the conversations that a reader knows. Raise RequestError if no reader knows any."""
    conversations, is_known = list[Imported](), False
    for table in tables:
        read = next((read for fits, read in FORMATS if fits(table.values)), None)
        if read is None:
            report.leave_out("objects that are no chat")
            continue
        is_known = True
        if conversation := read(table.values, report):
            conversations.append(conversation)
    if not is_known:
        raise RequestError(NOT_AN_EXPORT)
    return conversations
