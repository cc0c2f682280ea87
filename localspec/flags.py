"""Flags that several commands share, and how a command ends.

Contract: the same name means the same everywhere; a command prints its text and, with --json, one
JSON object on the last line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from localspec.errors import StoreError

ProfileFlag = Annotated[str | None, typer.Option(help="A model family of profiles/models.")]
ModelFlag = Annotated[str | None, typer.Option(help="Target: a folder or a hub id.")]
DraftFlag = Annotated[str | None, typer.Option(help="Draft model: a folder or a hub id.")]
HeadsFlag = Annotated[list[str] | None, typer.Option(help="Folder of a trained head; repeatable.")]
DrafterFlag = Annotated[str | None, typer.Option(help="auto, off or a drafter's name.")]
ContextFlag = Annotated[int | None, typer.Option(help="Tokens of context to make room for.")]
DtypeFlag = Annotated[str | None, typer.Option(help="float32, bfloat16, float16, 8-bit or 4-bit.")]
SeedFlag = Annotated[int, typer.Option(min=0, max=2**62)]
HomeFlag = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the log and of what was learnt. None: the usual one where a log is read, "
        "else a cold start."
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")]


def finish(result: dict[str, Any], text: str, as_json: bool) -> None:
    """Print it. Raises StoreError where the output goes to a place that is full."""
    parts = [text] if text else []
    if as_json:
        parts.append(json.dumps(result, ensure_ascii=False))
    try:
        print(*parts, sep="\n", end="\n" * bool(parts), flush=True)
    except BrokenPipeError:  # whoever read it has read enough
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or exiting fails again
        raise StoreError(
            f"The output cannot be written: {error.strerror}. Send it to another place."
        ) from error
