"""`train` and its subcommands: a draft or a head for a target, and `accepted`.

Contract: as of localspec.cli.main: parse flags, call one function, print its result. A person's own
conversations are read only with --from-chats, from the local log, and everything made of them stays
in HOME.

Not here: the flags (training.request), logic (train_run). Heavy imports stand inside the commands.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from localspec.cli.flags import MAX_TOKENS, TEMPERATURES, Command, JsonFlag
from localspec.cli.output import finish
from localspec.core.flags import Flag, SeedFlag, only, without
from localspec.core.options import LoadOptions
from localspec.training.request import (
    KINDS,
    ONLY_FOR,
    TARGET,
    MadeUpFlag,
    PromptsFlag,
    TrainRequest,
)


def _command(kind: str, words: str) -> Callable[..., None]:
    """Return the command that trains one kind, with the flags that the kind has."""
    of_others = [name for name, kinds in ONLY_FOR.items() if kind not in kinds]

    def command(
        request: Annotated[TrainRequest, without(*of_others)], as_json: JsonFlag = False
    ) -> None:
        from localspec.cli.train_run import run_training

        result, text = run_training(replace(request, kind=kind))
        finish(result, text, as_json)

    command.__doc__ = words
    return command


def accepted(
    options: Annotated[LoadOptions, only(*TARGET, "draft")],
    prompts: PromptsFlag = (),
    made_up: MadeUpFlag = 0,
    temperatures: Annotated[str, TEMPERATURES] = "0,0.7,1",
    max_tokens: Annotated[int, MAX_TOKENS] = 48,
    out: Annotated[Path | None, Flag("The file; none: accepted/TARGET.json in HOME.")] = None,
    seed: SeedFlag = 1,
    as_json: JsonFlag = False,
) -> None:
    """Measure the acceptance of every drafter, as a start for first chats on other machines."""
    from localspec.cli.train_run import measure_acceptance

    result, text = measure_acceptance(
        options, prompts, made_up, temperatures, max_tokens, out, seed
    )
    finish(result, text, as_json)


COMMANDS: dict[str, Command] = {
    **{f"train {name}": _command(kind, words) for kind, (name, words) in KINDS.items()},
    "train accepted": accepted,
    "train report": "`train report` is part of bench now. What the draft or head in a folder gains "
    "here: python -m localspec bench --heads DIR",
}
