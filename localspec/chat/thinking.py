"""What a model thinks before it answers: the marks around it, and the one place that tells both
apart.

Contract: a reply that begins with a model's opening mark, or whose prompt ends with it, has its
text up to the closing mark as thought; all other text is the answer. No mark is in either, however
the text is cut into pieces, nor are the line breaks beside the marks. A mark anywhere else is text.

Not here: which marks a model has (template), ending a thought early (core.decoding.Sequence).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from localspec.core.backend import Message


@dataclass(frozen=True)
class Marks:
    """Around a thought. answer: what a reply without a thought begins with. closing: text that ends
    a thought early, as the models were trained to end it. are_control: made of control tokens, so
    that a part of one is no text. other_ends: further marks that end a thought, each with the part
    of it that the answer begins with."""

    open: str
    close: str
    closing: str
    answer: str = ""
    are_control: bool = False
    other_ends: tuple[tuple[str, str], ...] = ()

    @property
    def all(self) -> str:
        return f"{self.open}{self.close}{self.answer}"

    @property
    def ends(self) -> dict[str, str]:
        """What ends a thought, with the part of it that the answer begins with."""
        return {self.close: "", **dict(self.other_ends)}


THINK = Marks("<think>", "</think>", "\n</think>\n\n")
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"  # between two messages of one reply
TO_FINAL = f"{NEXT}{FINAL}"
# How gpt-oss begins the message that calls a tool. It may say something before, as a commentary.
CALLING = tuple(f"{channel} to=functions." for channel in (
    "", "<|channel|>commentary", "<|channel|>analysis",
))  # fmt: skip
CHANNELS = Marks(
    "<|channel|>analysis<|message|>", TO_FINAL, TO_FINAL, FINAL, are_control=True,
    other_ends=(
        (f"{NEXT}<|channel|>commentary<|message|>", ""), *((f"{NEXT}{one}", one) for one in CALLING)
    ),
)  # fmt: skip
KNOWN = (
    CHANNELS,
    Marks("[THINK]", "[/THINK]", "[/THINK]"),  # Magistral
    Marks("<seed:think>", "</seed:think>", "</seed:think>"),  # Seed-OSS
    Marks("<|channel>thought", "<channel|>", "\n<channel|>", are_control=True),  # Gemma 4
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


class Divided(NamedTuple):
    """A reply so far. is_open: whether a thought has begun and not ended; None: the text may still
    become either."""

    thought: str
    answer: str
    is_open: bool | None


def divided(
    text: str, marks: Marks | None, is_open: bool = False, has_ended: bool = False
) -> Divided:
    """What is certain of a text that grows: each part begins with what it was before. marks: None:
    all of it is the answer. is_open: the prompt has begun a thought already. has_ended: no more
    text comes."""
    if marks is None:
        return Divided("", text, False)
    if not is_open:
        begun, firsts = text.lstrip(), (marks.open, marks.answer)
        if begun.startswith(marks.open):
            text = begun[len(marks.open) :]
        elif marks.answer and begun.startswith(marks.answer):
            return Divided("", begun[len(marks.answer) :].lstrip("\n"), False)
        elif not any(mark.startswith(begun) for mark in firsts):
            return Divided("", text, False)
        elif has_ended:
            num_of_a_mark = max(num_begun(text, mark) for mark in firsts) * marks.are_control
            return Divided("", text[: len(text) - num_of_a_mark], None)
        else:
            return Divided("", "", None)
    thought, mark, answer = _partition(text, marks.ends)
    if not mark and (marks.are_control or not has_ended):
        thought = thought[: len(thought) - max(num_begun(thought, one) for one in marks.ends)]
    if mark or not has_ended:
        thought = thought.rstrip("\n")
    return Divided(thought.lstrip("\n"), answer.lstrip("\n"), not mark)


def _partition(text: str, ends: Mapping[str, str]) -> tuple[str, str, str]:
    """As `str.partition` at the first of several marks; what stays of it leads the last part."""
    places = [(place, mark) for mark in ends if (place := text.find(mark)) >= 0]
    if not places:
        return text, "", ""
    place, mark = min(places)
    return text[:place], mark, ends[mark] + text[place + len(mark) :]


def num_begun(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def turn_of(message: Message, has_parts: bool = False) -> dict[str, Any]:
    """Return a message as chat templates take it. has_parts: its content is a list of parts."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if has_parts and message.content:
        turn["content"] = [{"type": "text", "text": message.content}]
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
