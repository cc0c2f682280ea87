"""The tokens that a turn begins from: the prompt, and of a reply gone on with its own beginning.

Contract: going on is exact. The prompt is the one the reply was first written after, and behind it
stand the reply's own ids where they are known and spell its text, those of half a character at its
end included; where a stop string cut the text, as many of them as spell it. Only otherwise, after
a crash or an import, the text is encoded again, which may divide it differently than the model
did; `source` says which. Control tokens in that text stay text, but for those that the chat format
lets the model write.

Not here: the chat format (template), decoding (engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from localspec.backend import Message
from localspec.chat.template import REPLACEMENT, ChatTemplate

MAX_CUT_TOKENS = 8  # of the ids known, how many may lie beyond the text


@dataclass(frozen=True)
class Start:
    """prompt: all ids before the first new one. begun: those of the reply among them, at its end,
    which spell `text` and at most half a character more. source: of begun; None for a reply from
    the start."""

    prompt: tuple[int, ...]
    begun: tuple[int, ...] = ()
    text: str = ""
    source: Literal["tokens", "text"] | None = None


def start_of(
    template: ChatTemplate,
    messages: tuple[Message, ...],
    continues: bool,
    begun_tokens: Sequence[int] = (),
) -> Start:
    """continues: the last message is the reply to go on with. Raises RequestError."""
    if not continues:
        return Start(tuple(template.render(messages)))
    assert messages[-1].role == "assistant", "only a reply can be gone on with"
    text, prompt = messages[-1].content, tuple(template.render(messages[:-1]))
    known = _spelling(template, text, tuple(begun_tokens))
    if known is not None:
        return Start((*prompt, *known), known, text, "tokens")
    begun = tuple(template.encode_reply(text))
    return Start((*prompt, *begun), begun, text, "text")


def _spelling(template: ChatTemplate, text: str, tokens: tuple[int, ...]) -> tuple[int, ...] | None:
    """As many of these ids as spell the text and half a character at most; None where it is not
    theirs."""
    for num in range(len(tokens), max(0, len(tokens) - MAX_CUT_TOKENS - 1), -1):
        spelled = template.decode(tokens[:num])
        if spelled.startswith(text) and not spelled[len(text) :].strip(REPLACEMENT):
            return tokens[:num]
    return None
