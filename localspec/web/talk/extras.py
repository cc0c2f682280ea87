"""What the page adds to a message as it is sent: attached files, and the person's decisions.

Contract: `Extras.of` reads the JSON that static/compose.js writes, and takes it as a stranger's:
what is not of the expected shape is left out or refused in a sentence (RequestError).

Not here: how files become text, and their limits (chat/attachments).
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from localspec.chat.attachments import Attachment, with_attachments
from localspec.errors import RequestError

NOT_WHOLE = "The attached files did not arrive whole. Attach them once more and send again."


@dataclass(frozen=True)
class Extras:
    """files: in the order in which they were attached. edits: the message that the sent one
    replaces. num_left_out, max_tokens: what the person chose when the context was too small."""

    files: tuple[Attachment, ...] = ()
    edits: int | None = None
    num_left_out: int = 0
    max_tokens: int | None = None

    @classmethod
    def of(cls, written: str | None) -> Extras:
        """Raises RequestError."""
        try:
            return cls.from_data(json.loads(written)) if written else cls()
        except ValueError as error:
            raise RequestError(NOT_WHOLE) from error

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Extras:
        """Raises RequestError."""
        try:
            files = tuple(_file(one) for one in data.get("files", ()))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise RequestError(NOT_WHOLE) from error
        return cls(
            files,
            _count(data.get("edits")),
            _count(data.get("left_out")) or 0,
            _count(data.get("max_tokens")),
        )

    def joined(self, text: str) -> str:
        """The message with its files. Raises RequestError for a file that cannot be used."""
        return with_attachments(text, self.files)


def _file(data: dict[str, Any]) -> Attachment:
    try:
        content = base64.b64decode(data["data"], validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
    return Attachment(str(data["name"]), content)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
