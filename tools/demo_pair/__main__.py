"""`python -m tools.demo_pair`: train a target and a draft from text, as the demo pair was."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from localspec.cli.flags import JsonFlag, SeedFlag, finish, run_app, to_stderr
from localspec.training.work_folder import resumable
from tools.demo_pair.pipeline import train
from tools.demo_pair.settings import PairSettings

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def pair(
    corpus: Annotated[list[Path], typer.Option(help="Corpus files, .jsonl.xz; repeatable.")],
    held_out: Annotated[list[Path], typer.Option(help="Held-out files; repeatable.")],
    out: Annotated[Path, typer.Option(help="Where target/ and draft/ are written.")],
    work: Annotated[Path, typer.Option(help="Checkpoints; an interrupted run resumes from it.")],
    minutes: Annotated[float, typer.Option(help="For the target.")] = 60.0,
    draft_minutes: Annotated[float, typer.Option(help="For the draft.")] = 8.0,
    layers: Annotated[int, typer.Option(help="Of the target.")] = 12,
    hidden_size: Annotated[int, typer.Option(help="Of both models.")] = 256,
    start_from: Annotated[
        Path | None, typer.Option(help="An exported target to continue from; none: a new one.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    seed: SeedFlag = 1,
    as_json: JsonFlag = False,
) -> None:
    """Train a target and a draft from text."""
    settings = PairSettings(
        tuple(corpus),
        tuple(held_out),
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
    run_app(app)
