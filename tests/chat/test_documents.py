"""What is read of an attached file is said; what cannot be read is refused with the reason."""

from __future__ import annotations

import io
import threading
import zipfile

import pytest

from localspec.chat import documents
from localspec.chat.documents import read_file
from localspec.chat.limited_child import Limits
from localspec.core.errors import RequestError
from tests.kit.documents import ENDLESS, pdf, word


def test_a_pdf_gives_the_text_of_its_pages() -> None:
    found = read_file("a/report.pdf", pdf("first page", "second page"))
    assert (found.name, found.said) == ("report.pdf", "2 pages")
    assert found.text == "first page\n\nsecond page"
    partly = read_file("report.pdf", pdf("first page", "", "third page"))
    assert (partly.text, partly.said) == ("first page\n\nthird page", "3 pages, 1 without text")


def test_a_docx_gives_paragraphs_and_tables() -> None:
    found = read_file("letter.docx", word("Dear all,", "it is late."))
    assert found.text == "Dear all,\n\nit is late.\n\nprice | 12"
    assert found.said == "3 paragraphs"


def test_the_bytes_tell_what_a_file_is() -> None:
    assert read_file("notes.pdf", b"only a text").text == "only a text"
    assert read_file("notes", pdf("really")).text == "really"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("scan.pdf", pdf("", ""), "scan.pdf has 2 pages, but no text: they are pictures"),
        ("locked.pdf", pdf("secret", password="x"), "locked.pdf is protected by a password"),
        ("cut.pdf", pdf("text")[:120], "cut.pdf cannot be read"),
        ("cut.docx", word("text")[:-400], "cut.docx cannot be read"),
        ("empty.docx", word(), "empty.docx holds no text"),
        ("nothing.txt", b"", "nothing.txt is empty, so it was not attached"),
        ("x.png", bytes(range(256)), "x.png is not a text"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(name: str, data: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_file(name, data)


def test_a_document_that_asks_for_everything_is_refused() -> None:
    few = Limits(seconds=30.0, num_bytes=160 * 2**20)
    reason = "takes too much memory|took more than 160 MiB of memory"
    with pytest.raises(RequestError, match=rf"endless\.docx cannot be read: it ({reason})"):
        read_file("endless.docx", ENDLESS, limits=few)
    assert read_file("letter.docx", word("Dear all,")).text.startswith("Dear all,")


def test_reading_ends_when_it_is_stopped() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(RequestError, match=r"endless\.docx cannot be read: it was stopped"):
        read_file("endless.docx", ENDLESS, stop)


@pytest.mark.slow
def test_limits_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="has 501 pages, but at most 500 are read"):
        read_file("long.pdf", pdf(*["a"] * 501))
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("word/document.xml", bytes(101_000_000))
    with pytest.raises(RequestError, match="unpacks to 101,000,000 bytes"):
        read_file("bomb.docx", bomb.getvalue())
    with pytest.raises(RequestError, match="holds 1,200,012 bytes of text, but a file may have"):
        read_file("book.docx", word("a" * 1_200_000))
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 10)
    with pytest.raises(RequestError, match="has 11 bytes, but a file may have 10"):
        read_file("a.txt", b"hello world")
