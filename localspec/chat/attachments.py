"""Text files attached to a message: read, named and fenced.

Contract: `with_attachments` returns the message followed by each file, under its name, in a fence
that nothing in the file can close. A name is shown and never opened: folders, control characters
and characters that change the direction of writing are removed. UTF-8, and UTF-16 with a byte order
mark, are read; other encodings and files with NUL or many control characters are refused by name.
Nothing is cut. Pure; raises RequestError.

Not here: choosing files (the page), the length of the context (service.context_usage).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.core.errors import RequestError
from localspec.core.visible import one_line

MAX_FILES = 10
MAX_FILE_BYTES = 1_000_000
MAX_TOTAL_BYTES = 2_000_000
MAX_NAME_LENGTH = 100
MAX_CONTROL_SHARE = 0.02  # of the characters; text files have hardly any

# The longer mark first: UTF-32's begins with UTF-16's.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
FENCES = re.compile(r"`{3,}")


@dataclass(frozen=True)
class Attachment:
    """A file's text. name: on the person's machine; only shown."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode("utf-8", "replace"))


def with_attachments(text: str, files: Sequence[Attachment]) -> str:
    """The message followed by the files; the message itself where there are none."""
    _refuse_too_much(files)
    parts = [fenced(shown_name(one.name), plain(one.name, one.text)) for one in files]
    return "\n\n".join([*([text] if text.strip() else []), *parts]) if parts else text


def text_of(name: str, data: bytes) -> str:
    """The text of a file, as `plain`."""
    encoding = next((each for mark, each in MARKS if data.startswith(mark)), "utf-8")
    try:
        return plain(name, data.decode(encoding))
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{shown_name(name)} is not a text in UTF-8 or UTF-16 (byte {error.start + 1} "
            "does not fit). Only text, PDF and DOCX files can be attached. If it is a text, save "
            "it as UTF-8 and attach it again."
        ) from None


def plain(name: str, text: str) -> str:
    """The text with LF line ends."""
    if "\0" in text or _control_share(text) > MAX_CONTROL_SHARE:
        raise RequestError(
            f"{shown_name(name)} is not a text file: it has binary characters. Only text, PDF and "
            "DOCX files can be attached."
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def shown_name(name: str) -> str:
    """The last part of a path, as a line of plain text."""
    last = re.split(r"[/\\]", name)[-1]
    return one_line(last.replace("`", "'"))[:MAX_NAME_LENGTH] or "file"


def check_size(name: str, num_bytes: int) -> None:
    """Raise RequestError for a text of more bytes than a file may have."""
    if num_bytes > MAX_FILE_BYTES:
        raise too_much(
            name, f"holds {num_bytes:,} bytes of text, but a file may have {MAX_FILE_BYTES:,}"
        )


def too_much(name: str, what: str) -> RequestError:
    return RequestError(f"{name} {what}. Attach the part that matters.")


def _refuse_too_much(files: Sequence[Attachment]) -> None:
    if len(files) > MAX_FILES:
        raise RequestError(
            f"{len(files)} files are attached, but a message takes {MAX_FILES}. Remove some."
        )
    for file in files:
        check_size(shown_name(file.name), file.num_bytes)
    total = sum(file.num_bytes for file in files)
    if total > MAX_TOTAL_BYTES:
        raise RequestError(
            f"The files have {total:,} bytes together, but a message takes {MAX_TOTAL_BYTES:,}. "
            "Attach fewer, or the parts that matter."
        )


def _control_share(text: str) -> float:
    num_controls = sum(c < " " and c not in "\t\n\r\f\x1b" for c in text)
    return num_controls / len(text) if text else 0.0


def fenced(name: str, text: str) -> str:
    longest = max((len(found) for found in FENCES.findall(text)), default=2)
    fence = "`" * (longest + 1)
    end = "" if text.endswith("\n") or not text else "\n"
    return f"File `{name}`:\n\n{fence}\n{text}{end}{fence}"
