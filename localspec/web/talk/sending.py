"""What is sent with a message, and whether it fits the context.

Contract: `Extras.of` reads the JSON that static/compose.js writes: attached files and the person's
decisions. It trusts nothing: what is not of the expected shape is left out or refused in a sentence
(RequestError). Nothing is cut here. The person chooses, and the choice comes back as `num_left_out`
or a smaller `max_tokens`.

Not here: how files become text and their limits (chat.attachments), counting tokens (ChatService),
the dialog (static/chat.js).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localspec.chat.attachments import Attachment, with_attachments
from localspec.core.decoding import LARGEST_INTEGER
from localspec.core.errors import ContextOverflow, RequestError
from localspec.core.files import parsed

SHORTEST_REPLY = 16  # tokens; a choice that leaves less room than this is not offered
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
            return cls.from_data(parsed(written)) if written else cls()
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
    name, text = str(data["name"]), data["text"]
    if text is None:
        raise RequestError(f"{name} is still being read. Send again in a moment.")
    if not isinstance(text, str):
        raise TypeError("no text")
    return Attachment(name, text)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 < value <= LARGEST_INTEGER else None


def overflow(error: ContextOverflow) -> dict[str, Any]:
    """What the dialog says, and the choices that would fit."""
    room = error.context_length - error.num_prompt_tokens
    return {
        "sentence": str(error),
        "is_by_system_prompt": error.is_by_system_prompt,
        "room": room if room >= SHORTEST_REPLY else None,
        "left_out": error.fewest_left_out,
    }
