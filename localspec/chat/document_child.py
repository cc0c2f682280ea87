"""The process in which attached PDF and DOCX files are read (see documents).

A question names the kind of the file and holds its bytes in base64. The answer holds the text with
a summary of what was read, a refusal of this file as a whole sentence, or a fault as a clause. Only
the library of the kind is imported.
"""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Iterator
from typing import Any

from localspec.chat.attachments import check_size, too_much
from localspec.chat.limited_child import answer_questions
from localspec.core.errors import RequestError, first_line
from localspec.core.units import counted

MAX_UNPACKED_BYTES = 100_000_000
MAX_PAGES = 500


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a question. The libraries raise almost anything on a damaged file."""
    name, data = question["name"], base64.b64decode(question["data"])
    try:
        text, summary = READERS[question["kind"]](name, data)
        check_size(name, len(text.encode("utf-8", "replace")))
    except RequestError as error:
        return {"refusal": str(error)}
    except MemoryError:
        return {"fault": "it takes too much memory"}
    except Exception as error:
        return {"fault": first_line(error)}
    return {"text": text, "summary": summary}


def _pdf(name: str, data: bytes) -> tuple[str, str]:
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise RequestError(
            f"{name} is protected by a password. Save it without one and attach it again."
        )
    num_pages = len(reader.pages)
    if num_pages > MAX_PAGES:
        raise too_much(name, f"has {num_pages:,} pages, but at most {MAX_PAGES} are read")
    texts = [page.extract_text().strip() for page in reader.pages]
    pages = counted(num_pages, "page")
    if not any(texts):
        raise RequestError(
            f"{name} has {pages}, but no text: they are pictures, as of a scan. Let a program "
            "that recognises text (OCR) read it, then attach what it wrote."
        )
    without = f", {texts.count('')} without text" if "" in texts else ""
    return "\n\n".join(filter(None, texts)), f"{pages}{without}"


def _docx(name: str, data: bytes) -> tuple[str, str]:
    import docx

    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        num_bytes = sum(part.file_size for part in packed.infolist())
    if num_bytes > MAX_UNPACKED_BYTES:
        most = f"at most {MAX_UNPACKED_BYTES:,} are read"
        raise too_much(name, f"unpacks to {num_bytes:,} bytes, but {most}")
    blocks = [block for block in _blocks(docx.Document(io.BytesIO(data))) if block.strip()]
    if not blocks:
        raise RequestError(f"{name} holds no text, so it was not attached.")
    return "\n\n".join(blocks), counted(len(blocks), "paragraph")


def _blocks(document: object) -> Iterator[str]:
    """Paragraphs, and tables as lines with bars, in their order."""
    for block in document.iter_inner_content():  # type: ignore[attr-defined]
        rows = getattr(block, "rows", None)
        if rows is None:
            yield block.text
        else:
            yield "\n".join(" | ".join(cell.text.strip() for cell in row.cells) for row in rows)


READERS = {"pdf": _pdf, "docx": _docx}

if __name__ == "__main__":
    answer_questions(answer)
