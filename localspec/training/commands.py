"""`train` and its subcommands: a draft or a head for a target, `accepted` and `report`.

Contract: as of localspec.cli: parse flags, call one function, print its result. The fields of
`TrainRequest` are the flags of every kind of training, but for those that `ONLY_FOR` limits. A
person's own conversations are read only with --from-chats, from the local log, and everything made
of them stays in HOME.

Not here: logic (train_command). Heavy imports stand inside the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from localspec.flags import JsonFlag, SeedFlag, finish, loading_only, taking
from localspec.options import LoadOptions

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train a draft or a head for a target.",
)

PromptsFlag = Annotated[
    list[Path] | None, typer.Option(help="A .jsonl of prompts, turns or messages; repeatable.")
]
MadeUpFlag = Annotated[
    int,
    typer.Option(
        min=0, max=1_000_000, help="Number of the prompts that ship with localspec, 2000 at most."
    ),
]
ThreadsFlag = Annotated[int | None, typer.Option(help="Threads of the processor.")]
TARGET = ("profile", "model", "context", "dtype", "home")  # the flags that say what it is

DRAFT = "draft"
COMMANDS = {  # kind -> command and what it does
    DRAFT: ("distil", "Train a small draft model. With --from-chats, fit the target's draft to "
            "your own chats."),
    "medusa": ("medusa", "Train heads that draft several tokens at once from the target's last "
               "hidden state."),
    "eagle": ("eagle", "Train a one-layer head that drafts from the target's hidden states."),
    "mtp": ("mtp", "Train a module that drafts token after token from the target's last hidden "
            "state."),
}  # fmt: skip
ONLY_FOR = {
    "start_from": {DRAFT},
    "hidden_size": {DRAFT},
    "layers": {DRAFT, "medusa"},
    "num_heads": {"medusa", "eagle", "mtp"},
    "ffn_size": {"eagle", "mtp"},
    "steps": {"eagle", "mtp"},
}


@dataclass(frozen=True)
class TrainRequest:
    """The flags of one training as they were given. kind: of COMMANDS. load: the target, and what
    drafts for it so far."""

    kind: str = DRAFT
    load: LoadOptions = field(default_factory=LoadOptions)
    prompts: PromptsFlag = None
    from_chats: Annotated[
        bool,
        typer.Option("--from-chats", help="Learn from your own logged conversations, locally."),
    ] = False
    made_up: MadeUpFlag = 0
    start_from: Annotated[
        str | None, typer.Option(help="A draft to train further: a folder or a hub id.")
    ] = None
    layers: Annotated[int | None, typer.Option(help="Of a fresh draft or a head; none: 1.")] = None
    hidden_size: Annotated[
        int | None, typer.Option(help="Of a fresh draft; none: the target's.")
    ] = None
    num_heads: Annotated[
        int | None,
        typer.Option(help="medusa: tokens drafted at once; else: attention heads of its layer."),
    ] = None
    ffn_size: Annotated[int | None, typer.Option(help="Feed-forward width of its layer.")] = None
    steps: Annotated[int | None, typer.Option(help="Draft steps in training.")] = None
    minutes: Annotated[float, typer.Option(help="For the training itself.")] = 30.0
    answer_minutes: Annotated[float, typer.Option(help="For the target's answers, at most.")] = 15.0
    out: Annotated[Path | None, typer.Option(help="Folder of the result; none: in HOME.")] = None
    work: Annotated[
        Path | None,
        typer.Option(help="Answers and checkpoints; an interrupted run resumes from it."),
    ] = None
    max_answer_length: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 256
    batch: Annotated[int, typer.Option(help="Tokens of one update.")] = 4096
    rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None
    threads: ThreadsFlag = None
    seed: SeedFlag = 1

    @property
    def options(self) -> dict[str, int]:
        """The sizes that were given; the kind has defaults for the others."""
        if self.kind == DRAFT:
            layers = 1 if self.layers is None else self.layers
            sizes = {"layers": layers, "hidden_size": self.hidden_size}
        else:
            sizes = {
                "num_heads": self.num_heads,
                "num_layers": self.layers,
                "ffn_size": self.ffn_size,
                "num_steps": self.steps,
            }
        return {name: size for name, size in sizes.items() if size is not None}


def _command(kind: str) -> Callable[..., None]:
    """The command that trains one kind, with the flags that the kind has."""
    of_others = [name for name, kinds in ONLY_FOR.items() if kind not in kinds]

    @loading_only(*TARGET, "device", *(["draft"] if kind == DRAFT else []))
    @taking("given", TrainRequest, ["kind", "load", *of_others])
    def command(*, given: TrainRequest, options: LoadOptions, as_json: JsonFlag = False) -> None:
        from localspec.training.train_command import run_training

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
    from localspec.training.train_command import measure_acceptance

    result, text = measure_acceptance(
        options, prompts or (), made_up, temperatures, max_tokens, out, seed
    )
    finish(result, text, as_json)


@app.command()
@loading_only(*TARGET, "device")
def report(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of results; none: all in HOME.")
    ] = None,
    threads: ThreadsFlag = None,
    *,
    options: LoadOptions,
    as_json: JsonFlag = False,
) -> None:
    """Say what a trained head or draft would gain or lose on this machine."""
    from localspec.training.train_command import report_gains

    result, text = report_gains(folders or (), options, threads)
    finish(result, text, as_json)
