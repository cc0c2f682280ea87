"""`python -m tools.demo_pair.dialogues`: write the prompts that `localspec train --made-up` uses.

Contract: the same seed writes the same file. Each line is {"messages": [...]} and ends with a
question of the person, the form that `localspec.training.prompt_files` reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from localspec.core.config import PROJECT_FOLDER
from tools.demo_pair.dialogues import asked


def write_prompts(
    out: Annotated[Path, typer.Option(help="The .jsonl file.")] = PROJECT_FOLDER
    / "assets"
    / "training_prompts.jsonl",
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the generator.")] = 1,
) -> None:
    """Write prompts, one JSON object a line."""
    rng = Random(f"requests/{seed}")
    rows = [json.dumps({"messages": asked(rng)}, ensure_ascii=False) for _ in range(count)]
    out.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(write_prompts)
