"""`python -m tools.demo_pair.dialogues`: write the prompts that `localspec train --made-up` uses.

Contract: the same seed writes the same file. Each line is {"messages": [...]} and ends with a
question of the person, the form that `localspec.training.prompt_files` reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Annotated

from localspec.cli.flags import run_app
from localspec.core.config import PROJECT_FOLDER
from localspec.core.flags import Flag
from tools.demo_pair.dialogues import asked


def write_prompts(
    out: Annotated[Path, Flag("The .jsonl file.")] = PROJECT_FOLDER
    / "assets"
    / "training_prompts.jsonl",
    count: Annotated[int, Flag("Number of prompts.", least=1)] = 2000,
    seed: Annotated[int, Flag("Of the generator.")] = 1,
) -> None:
    """Write prompts, one JSON object a line."""
    rng = Random(f"requests/{seed}")
    rows = [json.dumps({"messages": asked(rng)}, ensure_ascii=False) for _ in range(count)]
    out.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_app({"": write_prompts}, "python -m tools.demo_pair.dialogues")
