"""Flags that several commands share, and how a command ends.

Contract: the same name means the same everywhere; a command prints its text and, with --json, one
JSON object on the last line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

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
    if text:
        print(text)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
