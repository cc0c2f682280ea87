"""The bytes of a chosen file as JSON objects: text, lines of JSON, or a zip with such files.

Everything is limited before it is unpacked or parsed, for a small file can unpack to a huge one.
Only the members of a zip that hold conversations are unpacked, in memory; no name of a member is
ever used as a path.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import PurePosixPath

from localspec.chat.importing.fields import NOT_AN_EXPORT, READ, Table
from localspec.core.errors import RequestError
from localspec.core.files import parsed

# Bytes of the chosen file; the page and its server refuse a larger one as well.
MAX_BYTES = 64_000_000
# Bytes of all unpacked members together: as text and as objects they take several times as much.
MAX_UNPACKED_BYTES = 128_000_000
# Members of a zip. An export with pictures has a few thousand; each takes memory to list.
MAX_MEMBERS = 20_000
# Objects and lists of one text: each takes many times its length in memory.
MAX_PARTS = 3_000_000
ZIP_STARTS = (b"PK\x03\x04", b"PK\x05\x06")
LISTED_MEMBER = b"PK\x01\x02"  # The signature of each member in the list at a zip's end.
# Names of the members to read; the first pattern that has members is taken.
MEMBERS = (
    re.compile(r"conversations(-\d+)?\.json"),
    re.compile(r".+\.conversation\.json"),
    re.compile(r".+\.jsonl?"),
)
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# What is said of a zip that cannot be read, after the reason.
UNPACK_IT = "so nothing was imported. Unpack it and choose its conversations.json."


def texts_of(data: bytes) -> Iterator[str]:
    """Yield each text of the file. Raise RequestError for a file that is too large or no text."""
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"The file has {len(data):,} bytes, but at most {MAX_BYTES:,} can be imported. Unpack "
            "a zip and choose its conversations.json, or export fewer chats at once."
        )
    for content in _members(data) if data.startswith(ZIP_STARTS) else (data,):
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise RequestError(f"The file is not a text in UTF-8. {NOT_AN_EXPORT}") from None
        if text.count("{") + text.count("[") > MAX_PARTS:
            raise RequestError(
                f"The file has more than {MAX_PARTS:,} parts, so nothing was imported. Export "
                "fewer chats at once."
            )
        yield text


def _members(data: bytes) -> Iterator[bytes]:
    if data.count(LISTED_MEMBER) > MAX_MEMBERS:
        raise RequestError(f"The zip has more than {MAX_MEMBERS:,} files, {UNPACK_IT}")
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            left = MAX_UNPACKED_BYTES
            for member in _wanted(archive.infolist()):
                content = _unpacked(archive, member, left)
                left -= len(content)
                yield content
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        raise RequestError(f"The zip is damaged or encrypted, {UNPACK_IT}") from None


def _wanted(members: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    for pattern in MEMBERS:
        wanted = [one for one in members if pattern.fullmatch(PurePosixPath(one.filename).name)]
        if wanted:
            return sorted(wanted, key=lambda member: member.filename)
    raise RequestError(
        "The zip holds no conversations.json and no other JSON. Nothing was imported. " + READ
    )


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo, max_bytes: int) -> bytes:
    if member.compress_type not in METHODS:
        raise RequestError(f"The zip is compressed by another method than Deflate, {UNPACK_IT}")
    with archive.open(member) as file:
        content = file.read(max_bytes + 1)  # the size that the zip claims proves nothing
    if len(content) > max_bytes:
        raise RequestError(
            f"The conversations of the zip have more than {MAX_UNPACKED_BYTES:,} bytes, so nothing "
            "was imported. Export fewer chats at once."
        )
    return content


def tables_of(text: str) -> Iterator[Table]:
    """Yield every object of a text: a single one, those of a list, or one a line."""
    try:
        whole = parsed(text)
    except ValueError:
        yield from _lines(text)
        return
    if not isinstance(whole, list):
        yield _checked("The file", whole)
    elif whole and all(isinstance(item, dict) and "role" in item for item in whole):
        yield Table("The file", {"messages": whole})  # a conversation without anything around it
    else:
        for number, item in enumerate(whole, 1):
            yield _checked(f"Item {number}", item)


def _lines(text: str) -> Iterator[Table]:
    has_table = False
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = parsed(line)
        except ValueError:
            if not has_table:
                raise RequestError(NOT_AN_EXPORT) from None
            raise Table(f"Line {number}", {}).wrong("no JSON, or JSON that is cut off") from None
        yield _checked(f"Line {number}", item)
        has_table = True


def _checked(where: str, item: object) -> Table:
    if not isinstance(item, dict):
        raise RequestError(NOT_AN_EXPORT)
    return Table(where, item)
