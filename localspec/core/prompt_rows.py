"""Read prompt files: one JSON object a line (.jsonl).

Contract: `read_prompt_rows` returns every row that was asked for or raises ConfigError with the
line at fault; no line is skipped silently. What a row means is the caller's `parse`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from localspec.core.errors import ConfigError
from localspec.core.files import parsed

Parsed = TypeVar("Parsed")
MAX_CHARACTERS = 200_000_000  # a device may have no end


def read_prompt_rows(
    path: Path, parse: Callable[[Any], Parsed], forms: str, limit: int | None = None
) -> list[Parsed]:
    """The first `limit` rows of a file in its order, None for all. Empty lines are not rows.

    parse: makes a prompt of the JSON value of a line; its ValueError, LookupError or TypeError
    means that the line is no prompt. forms: how a line must look, for the message. Raises
    ConfigError.
    """
    try:
        # Not splitlines: a JSON string may contain U+2028 and similar characters unescaped.
        with path.open(encoding="utf-8") as file:
            lines = file.read(MAX_CHARACTERS).split("\n")
            if file.read(1):
                raise ValueError(f"it has more than {MAX_CHARACTERS:,} characters")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The prompt file {path} cannot be read ({error}). Check the path given to --prompts."
        ) from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"The prompt file {path} holds no prompts. Choose another file.")
    found = list[Parsed]()
    for number, line in numbered[:limit]:
        try:
            found.append(parse(parsed(line)))
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"Line {number} of {path} is no prompt. Each line is one JSON object: {forms}, "
                "with text in every place."
            ) from error
    return found
