"""Files that a person attaches, as text: PDF, DOCX, and whatever is text already.

Contract: `read_file` gives the text with a phrase that says what was read; the first bytes of a
file tell what it is, not its name. Nothing is cut: a file that is too large, too slow, protected,
damaged or without text is refused with the reason. Raises RequestError. The libraries are imported
when a file of their kind is read.

Not here: how files stand in a message, and how many it takes (attachments).
"""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localspec.chat.attachments import MAX_FILE_BYTES, shown_name, text_of
from localspec.errors import RequestError, first_line
from localspec.units import counted

MAX_DOCUMENT_BYTES = 20_000_000
MAX_UNPACKED_BYTES = 100_000_000
MAX_PAGES = 500
MAX_READ_S = 30.0  # looked at between two pages


@dataclass(frozen=True)
class ReadFile:
    """said: what was read, "12 pages"; "" for a text."""

    name: str
    text: str
    said: str = ""


def read_file(name: str, data: bytes) -> ReadFile:
    """The file's text. Raises RequestError."""
    name = shown_name(name)
    if not data:
        raise RequestError(f"{name} is empty, so it was not attached.")
    if len(data) > MAX_DOCUMENT_BYTES:
        most = f"a file may have {MAX_DOCUMENT_BYTES:,}"
        raise _too_much(name, f"has {len(data):,} bytes, but {most}")
    if b"%PDF-" in data[:1024]:
        found = _guarded(name, data, _pdf)
    elif data.startswith(b"PK\x03\x04") and b"word/document.xml" in data:
        found = _guarded(name, data, _docx)
    else:
        found = ReadFile(name, text_of(name, data))
    if (num_bytes := len(found.text.encode("utf-8", "replace"))) > MAX_FILE_BYTES:
        held = f"holds {num_bytes:,} bytes of text"
        raise _too_much(name, f"{held}, but a file may have {MAX_FILE_BYTES:,}")
    return found


def _too_much(name: str, what: str) -> RequestError:
    return RequestError(f"{name} {what}. Attach the part that matters.")


def _guarded(name: str, data: bytes, read: Callable[[str, bytes], ReadFile]) -> ReadFile:
    """The libraries raise almost anything on a damaged file."""
    try:
        return read(name, data)
    except RequestError:
        raise
    except (Exception, RecursionError) as error:
        raise RequestError(
            f"{name} cannot be read: {first_line(error)}. Open it in its own program, save it "
            "again or copy its text, and attach that."
        ) from error


def _pdf(name: str, data: bytes) -> ReadFile:
    from pypdf import PdfReader

    started_s = time.monotonic()
    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise RequestError(
            f"{name} is protected by a password. Save it without one and attach it again."
        )
    num_pages = len(reader.pages)
    if num_pages > MAX_PAGES:
        raise _too_much(name, f"has {num_pages:,} pages, but at most {MAX_PAGES} are read")
    texts = []
    for page in reader.pages:
        texts.append(page.extract_text().strip())
        if time.monotonic() - started_s > MAX_READ_S:
            raise _too_much(name, f"takes longer than {MAX_READ_S:.0f} s to read")
    pages = counted(num_pages, "page")
    if not any(texts):
        raise RequestError(
            f"{name} has {pages}, but no text: they are pictures, as of a scan. Let a program "
            "that recognises text (OCR) read it, then attach what it wrote."
        )
    without = f", {texts.count('')} without text" if "" in texts else ""
    return ReadFile(name, "\n\n".join(filter(None, texts)), f"{pages}{without}")


def _docx(name: str, data: bytes) -> ReadFile:
    import docx

    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        num_bytes = sum(part.file_size for part in packed.infolist())
    if num_bytes > MAX_UNPACKED_BYTES:
        most = f"at most {MAX_UNPACKED_BYTES:,} are read"
        raise _too_much(name, f"unpacks to {num_bytes:,} bytes, but {most}")
    blocks = [block for block in _blocks(docx.Document(io.BytesIO(data))) if block.strip()]
    if not blocks:
        raise RequestError(f"{name} holds no text, so it was not attached.")
    return ReadFile(name, "\n\n".join(blocks), counted(len(blocks), "paragraph"))


def _blocks(document: object) -> Iterator[str]:
    """Paragraphs, and tables as lines with bars, in their order."""
    for block in document.iter_inner_content():  # type: ignore[attr-defined]
        rows = getattr(block, "rows", None)
        if rows is None:
            yield block.text
        else:
            yield "\n".join(" | ".join(cell.text.strip() for cell in row.cells) for row in rows)
