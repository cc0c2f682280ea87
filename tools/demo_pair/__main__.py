"""`python -m tools.demo_pair`: train a target and a draft from text, as the demo pair was."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from localspec.cli.flags import JsonFlag, run_app
from localspec.cli.output import finish, to_stderr
from localspec.core.flags import Flag, SeedFlag
from localspec.training.work_folder import resumable
from tools.demo_pair.pipeline import train
from tools.demo_pair.settings import PairSettings


def pair(
    corpus: Annotated[tuple[Path, ...], Flag("Corpus files, .jsonl.xz; repeatable.")],
    held_out: Annotated[tuple[Path, ...], Flag("Held-out files; repeatable.")],
    out: Annotated[Path, Flag("Where target/ and draft/ are written.")],
    work: Annotated[Path, Flag("Checkpoints; an interrupted run resumes from it.")],
    minutes: Annotated[float, Flag("For the target.")] = 60.0,
    draft_minutes: Annotated[float, Flag("For the draft.")] = 8.0,
    layers: Annotated[int, Flag("Of the target.")] = 12,
    hidden_size: Annotated[int, Flag("Of both models.")] = 256,
    start_from: Annotated[
        Path | None, Flag("An exported target to continue from; none: a new one.")
    ] = None,
    device: Annotated[str, Flag("cpu, cuda or mps.")] = "cpu",
    seed: SeedFlag = 1,
    as_json: JsonFlag = False,
) -> None:
    """Train a target and a draft from text."""
    settings = PairSettings(
        corpus,
        held_out,
        out,
        work,
        target_minutes=minutes,
        draft_minutes=draft_minutes,
        target_layers=layers,
        hidden_size=hidden_size,
        start_from=start_from,
        device=device,
        seed=seed,
    )
    with resumable(work, to_stderr):
        made = asdict(train(settings, to_stderr))
    finish({**made, "out_dir": str(out)}, f"The pair is in {out}.", as_json)


if __name__ == "__main__":
    run_app({"": pair}, "python -m tools.demo_pair")
