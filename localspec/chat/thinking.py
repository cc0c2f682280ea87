"""What a model thinks before it answers: the marks around it, and the one place that tells both
apart.

Contract: a reply that begins with a model's opening mark, or whose prompt ends with it, has its
text up to the closing mark as thought; all other text is the answer. No mark is in either, however
the text is cut into pieces, nor are the line breaks beside the marks. A mark anywhere else is text.

Not here: which marks a model has (template), ending a thought early (core.Sequence).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from localspec.backend import Message


@dataclass(frozen=True)
class Marks:
    """Around a thought. answer: what a reply without a thought begins with. closing: text that ends
    a thought early, as the models were trained to end it. are_control: made of control tokens, so
    that a part of one is no text."""

    open: str
    close: str
    closing: str
    answer: str = ""
    are_control: bool = False

    @property
    def all(self) -> str:
        return f"{self.open}{self.close}{self.answer}"


THINK = Marks("<think>", "</think>", "\n</think>\n\n")
FINAL = "<|channel|>final<|message|>"
TO_FINAL = f"<|end|><|start|>assistant{FINAL}"
CHANNELS = Marks("<|channel|>analysis<|message|>", TO_FINAL, TO_FINAL, FINAL, True)  # gpt-oss
KNOWN = (
    CHANNELS,
    Marks("[THINK]", "[/THINK]", "[/THINK]"),  # Magistral
    Marks("<seed:think>", "</seed:think>", "</seed:think>"),  # Seed-OSS
    Marks("<thought>", "</thought>", "\n</thought>\n\n"),  # EXAONE
    THINK,
)
SWITCHES = ("enable_thinking", "thinking")  # names that chat templates have for it


def marks_in(source: str, added_tokens: Iterable[str]) -> Marks | None:
    """The marks that a chat template, or else a tokenizer, knows; None where it knows none."""
    added = set(added_tokens)
    named = {"<|channel|>", "<|message|>"} <= added and "analysis" in source
    if named:
        return CHANNELS
    others = KNOWN[1:]
    in_source = (one for one in others if one.open in source or one.close in source)
    return next(in_source, None) or next((one for one in others if one.open in added), None)


class Thoughts:
    """Divides a text that grows into thought and answer. marks: None: all of it is the answer.
    is_open: the prompt has begun a thought already."""

    def __init__(self, marks: Marks | None = THINK, is_open: bool = False) -> None:
        self._marks = marks or THINK
        # None: the text has not begun
        self._is_open: bool | None = True if is_open else None if marks else False
        self._held = ""  # may become a mark
        self._num_shown = 0  # characters of it that are shown already
        self._is_at_mark = is_open  # line breaks after a mark belong to it

    @property
    def is_open(self) -> bool:
        """Whether a thought has begun and not ended."""
        return self._is_open is True

    @property
    def has_answer(self) -> bool:
        """Whether the answer has begun: no thought comes any more."""
        return self._is_open is False

    def begin(self, text: str) -> tuple[str, str]:
        """Go on after this text, all of which is shown; (thought, answer) in it."""
        thought, answer = self.push(text)
        held = self._held[: len(self._held) - self._num_of_a_mark()]
        held = "" if self._is_at_mark and not held.strip("\n") else held
        self._num_shown = len(held)
        return (thought + held, answer) if self._is_open else (thought, answer + held)

    def push(self, text: str) -> tuple[str, str]:
        """(thought, answer) that are certain by now."""
        self._held += text
        if self._is_open is None:
            self._begin()
        if self._is_open is None:
            return "", ""
        thought = self._thought() if self._is_open else ""
        return thought, "" if self._is_open else self._taken(len(self._held))

    def flush(self) -> tuple[str, str]:
        """What was held, once no more text comes."""
        rest = self._taken(len(self._held) - self._num_of_a_mark())
        return (rest, "") if self._is_open else ("", rest)

    def _num_of_a_mark(self) -> int:
        """Characters at the end that are no text, though their mark is not complete."""
        if not self._marks.are_control or self._is_open is False:
            return 0
        marks = (self._marks.close,) if self._is_open else (self._marks.open, self._marks.answer)
        return max(num_begun(self._held, mark) for mark in marks)

    def _begin(self) -> None:
        begun = self._held.lstrip()
        for mark, is_open in ((self._marks.open, True), (self._marks.answer, False)):
            if mark and begun.startswith(mark):
                self._is_open, self._is_at_mark = is_open, True
                self._held = begun[len(mark) :]
                return
        if not any(mark.startswith(begun) for mark in (self._marks.open, self._marks.answer)):
            self._is_open = False

    def _thought(self) -> str:
        close = self._marks.close
        thought, mark, rest = self._held.partition(close)
        certain = thought if mark else thought[: len(thought) - num_begun(thought, close)]
        found = self._taken(len(certain.rstrip("\n")))
        if mark:
            self._is_open, self._is_at_mark, self._held, self._num_shown = False, True, rest, 0
        return found

    def _taken(self, count: int) -> str:
        """So many characters of what is held, without those that are shown already."""
        found, self._held = self._held[:count], self._held[count:]
        shown, self._num_shown = self._num_shown, max(0, self._num_shown - count)
        found = found[shown:]
        if self._is_at_mark and not shown:
            found = found.lstrip("\n")
            self._is_at_mark = not found
        return found


def num_begun(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def turn_of(message: Message) -> dict[str, Any]:
    """A message as chat templates take it."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call.call_id,
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.thinking:  # the names that chat templates have for it
        turn |= {"reasoning_content": message.thinking, "thinking": message.thinking}
    if message.role == "tool":
        turn |= {"tool_call_id": message.call_id, "name": message.name}
    return turn
