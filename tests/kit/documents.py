"""PDF and DOCX files, written by the libraries that read them."""

from __future__ import annotations

import io
import zipfile

import docx
from pypdf import PdfWriter
from pypdf.generic import DictionaryObject, NameObject, StreamObject


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


def packed_docx(body: str) -> bytes:
    """A DOCX file of nothing but this body."""
    space = "http://schemas.openxmlformats.org"
    kind = "application/vnd.openxmlformats"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{space}/package/2006/content-types"><Default '
        f'Extension="rels" ContentType="{kind}-package.relationships+xml"/><Override PartName='
        f'"/word/document.xml" ContentType="{kind}-officedocument.wordprocessingml.document.main'
        '+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{space}/package/2006/relationships"><Relationship '
        f'Id="r" Type="{space}/officeDocument/2006/relationships/officeDocument" '
        'Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{space}/wordprocessingml/2006/main"><w:body>'
        f"{body}</w:body></w:document>",
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in parts.items():
            packed.writestr(name, text)
    return out.getvalue()


# A table whose one cell says that it is a thousand million cells wide: 0.9 kB.
ENDLESS = packed_docx(
    '<w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val="999999999"/></w:tcPr><w:p/></w:tc></w:tr>'
    "</w:tbl>"
)
