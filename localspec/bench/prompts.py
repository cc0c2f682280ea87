"""Prompt files: one JSON object a line, `{"id", "task", "turns": [...]}`; the first turn is used.

Contract: `load_prompts` returns all that was asked for or raises ConfigError with the line at
fault; nothing is skipped silently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import ConfigError

OWN_PROMPTS = Path(__file__).resolve().parents[2] / "assets" / "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One message to answer. task: the kind of work, rows are made for each."""

    id: str
    task: str
    text: str


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, in its order; None takes all. Raises ConfigError."""
    try:
        # Not splitlines: a JSON string may hold U+2028 and its like as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The prompt file {path} cannot be read ({error}). Check the path given to --prompts."
        ) from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    found = [_prompt(path, number, line) for number, line in numbered[:limit]]
    if not found:
        raise ConfigError(f"The prompt file {path} holds no prompts. Choose another file.")
    _refuse_twins(path, found)
    return found


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        row: Any = json.loads(line)
        prompt = Prompt(row["id"], row["task"], row["turns"][0])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _at_fault(path, number) from error
    if not all(isinstance(v, str) and v.strip() for v in (prompt.id, prompt.task, prompt.text)):
        raise _at_fault(path, number)
    return prompt


def _at_fault(path: Path, number: int) -> ConfigError:
    return ConfigError(
        f'Line {number} of {path} is no prompt. Each line is one JSON object: {{"id": ..., '
        '"task": ..., "turns": [...]}, with text in all three.'
    )


def _refuse_twins(path: Path, prompts: list[Prompt]) -> None:
    """Results are paired by id, so two prompts of one id could not be told apart."""
    seen = set[str]()
    for prompt in prompts:
        if prompt.id in seen:
            raise ConfigError(f"{path} has the id {prompt.id!r} twice. Give each prompt its own.")
        seen.add(prompt.id)
