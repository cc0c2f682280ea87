"""Files that a person attaches, as text: PDF, DOCX, and whatever is text already.

`read_file` returns the text with a summary of what was read; the first bytes of a file tell what it
is, not its name. Nothing is cut: a file that is too large, too slow, protected, damaged or without
text is refused with the reason. PDF and DOCX are read in a child process (document_child) with
limits of time and memory: a file of a kilobyte can ask for all of both.
"""

from __future__ import annotations

import base64
import threading
from dataclasses import dataclass

from localspec.chat.attachments import check_size, shown_name, text_of, too_much
from localspec.chat.limited_child import LOOK_S, ChildEnded, LimitedChild, Limits
from localspec.core.errors import RequestError

MAX_DOCUMENT_BYTES = 20_000_000
# For one file. A book of 500 pages takes a few seconds and less than a third of this memory.
LIMITS = Limits(seconds=30.0, num_bytes=768 * 2**20)
# Documents that are read at the same time, so that many together stay within bounds, too.
MAX_AT_ONCE = 2

_places = threading.Semaphore(MAX_AT_ONCE)


@dataclass(frozen=True)
class ReadFile:
    """said: what was read, "12 pages"; "" for a text."""

    name: str
    text: str
    said: str = ""


def read_file(
    name: str, data: bytes, stop: threading.Event | None = None, limits: Limits = LIMITS
) -> ReadFile:
    """Return the file's text. Raise RequestError if it cannot be attached or `stop` is set."""
    name = shown_name(name)
    if not data:
        raise RequestError(f"{name} is empty, so it was not attached.")
    if len(data) > MAX_DOCUMENT_BYTES:
        most = f"a file may have {MAX_DOCUMENT_BYTES:,}"
        raise too_much(name, f"has {len(data):,} bytes, but {most}")
    if b"%PDF-" in data[:1024]:
        return _read_in_child("pdf", name, data, stop or threading.Event(), limits)
    if data.startswith(b"PK\x03\x04") and b"word/document.xml" in data:
        return _read_in_child("docx", name, data, stop or threading.Event(), limits)
    text = text_of(name, data)
    check_size(name, len(text.encode("utf-8", "replace")))
    return ReadFile(name, text)


def _read_in_child(
    kind: str, name: str, data: bytes, stop: threading.Event, limits: Limits
) -> ReadFile:
    question = {"kind": kind, "name": name, "data": base64.b64encode(data).decode()}
    while not _places.acquire(timeout=LOOK_S):
        if stop.is_set():
            raise _unreadable(name, "it was stopped")
    try:
        with LimitedChild("localspec.chat.document_child", limits) as child:
            answer = child.ask(question, stop)
    except ChildEnded as ended:
        raise _unreadable(name, str(ended)) from None
    finally:
        _places.release()
    if "refusal" in answer:
        raise RequestError(answer["refusal"])
    if "fault" in answer:
        raise _unreadable(name, answer["fault"])
    return ReadFile(name, answer["text"], answer["summary"])


def _unreadable(name: str, reason: str) -> RequestError:
    return RequestError(
        f"{name} cannot be read: {reason}. Open it in its own program, save it again or copy its "
        "text, and attach that."
    )
