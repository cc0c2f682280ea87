"""What is read of an attached file is said; what cannot be read is refused with the reason."""

from __future__ import annotations

import io
import zipfile

import docx
import pytest
from pypdf import PdfWriter
from pypdf.generic import DictionaryObject, NameObject, StreamObject

from localspec.chat import documents
from localspec.chat.documents import read_file
from localspec.errors import RequestError


def pdf(*texts: str, password: str | None = None) -> bytes:
    """A page for each text; an empty one has only a picture's place."""
    writer = PdfWriter()
    font = DictionaryObject({
        NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1"),
        NameObject("/BaseFont"): NameObject("/Helvetica"),
    })  # fmt: skip
    for text in texts:
        page = writer.add_blank_page(300, 300)
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = StreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode() if text else b"")
        page[NameObject("/Contents")] = stream
    if password is not None:
        writer.encrypt(password)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def word(*paragraphs: str) -> bytes:
    document = docx.Document()
    for text in paragraphs:
        document.add_paragraph(text)
    if paragraphs:
        table = document.add_table(rows=1, cols=2)
        table.rows[0].cells[0].text, table.rows[0].cells[1].text = "price", "12"
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


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


@pytest.mark.slow
def test_limits_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_PAGES", 1)
    with pytest.raises(RequestError, match="has 2 pages, but at most 1 are read"):
        read_file("long.pdf", pdf("a", "b"))
    monkeypatch.setattr(documents, "MAX_READ_S", -1.0)
    with pytest.raises(RequestError, match="takes longer than"):
        read_file("slow.pdf", pdf("a"))
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("word/document.xml", bytes(101_000_000))
    with pytest.raises(RequestError, match="unpacks to 101,000,000 bytes"):
        read_file("bomb.docx", bomb.getvalue())
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 10)
    with pytest.raises(RequestError, match="has 11 bytes, but a file may have 10"):
        read_file("a.txt", b"hello world")
