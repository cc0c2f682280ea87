"""`train` and its subcommands: a draft or a head for a target, and `accepted`.

Contract: as of localspec.cli.main: parse flags, call one function, print its result. A person's own
conversations are read only with --from-chats, from the local log, and everything made of them stays
in HOME.

Not here: the flags (training.request), logic (train_run). Heavy imports stand inside the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from localspec.cli.flags import JsonFlag, SeedFlag, finish, loading_only, taking
from localspec.core.errors import ConfigError
from localspec.core.options import LoadOptions
from localspec.training.request import (
    COMMANDS,
    DRAFT,
    ONLY_FOR,
    MadeUpFlag,
    PromptsFlag,
    TrainRequest,
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train a draft or a head for a target.",
)
TARGET = ("profile", "model", "context", "dtype", "home")  # the flags that say what it is


def _command(kind: str) -> Callable[..., None]:
    """The command that trains one kind, with the flags that the kind has."""
    of_others = [name for name, kinds in ONLY_FOR.items() if kind not in kinds]

    @loading_only(*TARGET, "device", *(["draft"] if kind == DRAFT else []))
    @taking("given", TrainRequest, ["kind", "load", *of_others])
    def command(*, given: TrainRequest, options: LoadOptions, as_json: JsonFlag = False) -> None:
        from localspec.cli.train_run import run_training

        result, text = run_training(replace(given, kind=kind, load=options))
        finish(result, text, as_json)

    return command


for _kind, (_name, _words) in COMMANDS.items():
    app.command(_name, help=_words)(_command(_kind))


@app.command()
@loading_only(*TARGET, "draft")
def accepted(
    prompts: PromptsFlag = None,
    made_up: MadeUpFlag = 0,
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,0.7,1",
    max_tokens: Annotated[int, typer.Option(help="Of each reply.")] = 48,
    out: Annotated[
        Path | None, typer.Option(help="The file; none: accepted/TARGET.json in HOME.")
    ] = None,
    seed: SeedFlag = 1,
    *,
    options: LoadOptions,
    as_json: JsonFlag = False,
) -> None:
    """Measure the acceptance of every drafter, as a start for first chats on other machines."""
    from localspec.cli.train_run import measure_acceptance

    result, text = measure_acceptance(
        options, prompts or (), made_up, temperatures, max_tokens, out, seed
    )
    finish(result, text, as_json)


@app.command(
    hidden=True,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def report() -> None:
    """Name the command that took its place."""
    raise ConfigError(
        "`train report` is part of bench now. What the draft or head in a folder gains here: "
        "python -m localspec bench --heads DIR"
    )
