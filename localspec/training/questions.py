"""What the target is asked: prompt files, made-up requests, a person's own conversations.

Contract: every row of a file is used or named as wrong (ConfigError with its line); nothing is
skipped silently. A row is {"prompt": text}, {"turns": [text, ...]} (the person's messages in
order) or {"messages": [{"role", "content"}, ...]}, of which the last answer is left to the target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localspec.backend import Message
from localspec.config import PROJECT_FOLDER
from localspec.errors import ConfigError

# Written by `python -m tools.demo_pair.dialogues`.
MADE_UP = PROJECT_FOLDER / "assets" / "training_prompts.jsonl"
FORMS = '{"prompt": "..."}, {"turns": ["...", ...]} or {"messages": [{"role", "content"}, ...]}'


@dataclass(frozen=True)
class Conversation:
    """opening: messages that end with the person's. follow_ups: what the person says after each
    answer. group: conversations of one group are held out together. logged: an answer that was
    given before, to be learnt from as well."""

    group: str
    opening: tuple[Message, ...]
    follow_ups: tuple[str, ...] = ()
    logged: str | None = None


def read_prompts(path: Path) -> list[Conversation]:
    """All conversations of a file. Raises ConfigError."""
    try:
        # Not splitlines: a JSON string may hold U+2028 and its like as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The prompt file {path} cannot be read ({error}). Check the path given to --prompts."
        ) from error
    found = [
        _conversation(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise ConfigError(f"The prompt file {path} holds no prompts. Choose another file.")
    return found


def made_up(count: int) -> list[Conversation]:
    """The first `count` of the requests that ship with localspec, all of them where it is more."""
    return read_prompts(MADE_UP)[:count] if count else []


def _conversation(path: Path, number: int, line: str) -> Conversation:
    try:
        row: Any = json.loads(line)
        if "messages" in row:
            said = tuple(Message(_role(m["role"]), _text(m["content"])) for m in row["messages"])
            asked = [place for place, message in enumerate(said) if message.role == "user"]
            answer = said[-1].content if said[-1].role == "assistant" else None
            return replace(_begun(said[: asked[-1] + 1], ()), logged=answer)
        turns = [row["prompt"]] if "prompt" in row else row["turns"]
        texts = [_text(turn) for turn in turns]
        return _begun((Message("user", texts[0]),), tuple(texts[1:]))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"Line {number} of {path} is no prompt. Each line is one JSON object: {FORMS}, with "
            "text in every place."
        ) from error


def _begun(opening: tuple[Message, ...], follow_ups: Sequence[str]) -> Conversation:
    first = next(message.content for message in opening if message.role == "user")
    return Conversation(hashlib.sha256(first.encode()).hexdigest(), opening, tuple(follow_ups))


def _role(value: Any) -> Any:
    if value not in ("system", "user", "assistant"):
        raise ValueError(f"{value!r} is no role")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a message without text")
    value.encode("utf-8")  # half a character is refused here, not in the middle of a run
    return value
