"""Reads what the target is asked: files of prompts, and the prompts that ship with localspec.

Contract: every row of a file is used or named as wrong (ConfigError with its line). A row is
{"prompt": text}, {"turns": [text, ...]} (the person's messages in order) or
{"messages": [{"role", "content"}, ...]}, whose last answer is replaced by the target's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from localspec.core.backend import Message
from localspec.core.config import PROJECT_FOLDER
from localspec.core.prompt_rows import read_prompt_rows

SHIPPED = PROJECT_FOLDER / "assets" / "training_prompts.jsonl"  # by tools.demo_pair.dialogues
DEFAULT_SEED = 1  # of the command line
FORMS = '{"prompt": "..."}, {"turns": ["...", ...]} or {"messages": [{"role", "content"}, ...]}'


@dataclass(frozen=True)
class TrainingPrompt:
    """opening: messages that end with the person's. follow_ups: the person's message after each
    answer. group: prompts of one group are held out together. logged: an answer that was given
    before and is trained on as well."""

    group: str
    opening: tuple[Message, ...]
    follow_ups: tuple[str, ...] = ()
    logged: str | None = None


def read_prompts(path: Path) -> list[TrainingPrompt]:
    """All prompts of a file. Raises ConfigError."""
    return read_prompt_rows(path, _prompt, FORMS)


def shipped_prompts(count: int, seed: int) -> list[TrainingPrompt]:
    """The first `count` of the prompts that ship with localspec, or all of them. seed: of their
    order; DEFAULT_SEED keeps the file's."""
    if seed == DEFAULT_SEED:
        return read_prompt_rows(SHIPPED, _prompt, FORMS, count)
    found = read_prompts(SHIPPED)
    Random(seed).shuffle(found)
    return found[:count]


def _prompt(row: Any) -> TrainingPrompt:
    if "messages" in row:
        messages = tuple(Message(_role(m["role"]), _text(m["content"])) for m in row["messages"])
        last_asked = max(i for i, message in enumerate(messages) if message.role == "user")
        answer = messages[-1].content if messages[-1].role == "assistant" else None
        return replace(_grouped(messages[: last_asked + 1], ()), logged=answer)
    turns = [row["prompt"]] if "prompt" in row else row["turns"]
    texts = [_text(turn) for turn in turns]
    return _grouped((Message("user", texts[0]),), texts[1:])


def _grouped(opening: tuple[Message, ...], follow_ups: Sequence[str]) -> TrainingPrompt:
    """Prompts with the same first message form one group."""
    first = next(message.content for message in opening if message.role == "user")
    return TrainingPrompt(hashlib.sha256(first.encode()).hexdigest(), opening, tuple(follow_ups))


def _role(value: Any) -> Any:
    if value not in ("system", "user", "assistant"):
        raise ValueError(f"{value!r} is no role")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a message without text")
    value.encode("utf-8")  # refuse half a surrogate pair here, not in the middle of a training
    return value
