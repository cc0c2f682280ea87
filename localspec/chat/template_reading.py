"""How a chat template reads a conversation: tried at load with texts that can be looked for.

A template is a program. Templates of models for images may read content only as a list of parts,
some take one system message only, and a damaged one loses what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from localspec.core.backend import Message
from localspec.core.errors import RequestError

RULES, ASKED, REPLIED = "Rules of localspec.", "Question of localspec.", "Answer of localspec"
TURN = (Message("user", ASKED), Message("assistant", REPLIED))
LATER_SYSTEM = (*TURN, Message("system", RULES), Message("user", ASKED))

Apply = Callable[..., str]  # messages, add_generation_prompt; has_parts: the form of content


@dataclass(frozen=True)
class Reading:
    """has_parts: content is a list of parts, not a text. tail: what stands after a reply. lost:
    what the template does not pass on, in words. takes_later_system: a system message may follow
    other messages."""

    has_parts: bool = False
    tail: str = ""
    lost: tuple[str, ...] = ()
    takes_later_system: bool = True

    @property
    def notices(self) -> list[str]:
        """Return what a person should know of it."""
        if not self.lost:
            return []
        return [
            f"This model's chat template leaves out {' and '.join(self.lost)}, so the model never "
            "reads it. Choose another copy of the model."
        ]

    def joined(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Join the system messages that begin the conversation; those after them too, where the
        template takes none there."""
        first = list(takewhile(lambda message: message.role == "system", messages))
        rest = messages[len(first) :]
        if not self.takes_later_system:
            first += [message for message in rest if message.role == "system"]
            rest = [message for message in rest if message.role != "system"]
        if not first:
            return messages
        return [Message("system", "\n\n".join(message.content for message in first)), *rest]


PLAIN_READING = Reading()  # of a text that goes on as it stands


def reading_of(apply: Apply) -> Reading:
    """Return how a template reads. apply: renders messages with it; may raise RequestError."""
    texts = {False: _tried(apply, TURN, False)}
    if _num_read(texts[False]) < len(TURN):
        texts[True] = _tried(apply, TURN, True)
    has_parts = max(texts, key=lambda form: _num_read(texts[form]))  # of equals, a text
    text = texts[has_parts]
    given = {
        "your messages": (text, ASKED),
        "earlier replies": (text, REPLIED),
        "the system prompt": (_tried(apply, (Message("system", RULES), *TURN), has_parts), RULES),
    }
    lost = tuple(name for name, (shown, words) in given.items() if shown and words not in shown)
    is_later = RULES in _tried(apply, LATER_SYSTEM, has_parts)
    return Reading(has_parts, text.partition(REPLIED)[2], lost, is_later)


def _num_read(text: str) -> int:
    return (ASKED in text) + (REPLIED in text)


def _tried(apply: Apply, messages: Sequence[Message], has_parts: bool) -> str:
    """Return the text of these messages, "" where the template refuses them."""
    try:
        return apply(messages, False, has_parts=has_parts)
    except RequestError:
        return ""
