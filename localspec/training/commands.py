"""`train` and its subcommands: a draft or a head for a target, `accepted` and `report`.

Contract: as of localspec.cli: parse flags, call one function, print its result. Progress goes to
stderr. A person's own conversations are read only with --from-chats, from the local log, and
everything made of them stays in HOME.

Not here: logic (train_command). Heavy imports stand inside the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from localspec.errors import ConfigError
from localspec.flags import (
    ContextFlag,
    DraftFlag,
    DtypeFlag,
    JsonFlag,
    ModelFlag,
    ProfileFlag,
    SeedFlag,
    finish,
)
from localspec.options import LoadOptions

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train a draft or a head for a target.",
)

HomeFlag = Annotated[
    Path | None, typer.Option(help="Folder of the log and of the results; none: the usual place.")
]
PromptsFlag = Annotated[
    list[Path] | None, typer.Option(help="A .jsonl of prompts, turns or messages; repeatable.")
]
ChatsFlag = Annotated[
    bool, typer.Option("--from-chats", help="Learn from your own logged conversations, locally.")
]
MadeUpFlag = Annotated[
    int,
    typer.Option(
        min=0, max=1_000_000, help="Number of the prompts that ship with localspec, 2000 at most."
    ),
]
OutFlag = Annotated[Path | None, typer.Option(help="Folder of the result; none: in HOME.")]
WorkFlag = Annotated[
    Path | None, typer.Option(help="Answers and checkpoints; an interrupted run resumes from it.")
]
MinutesFlag = Annotated[float, typer.Option(help="For the training itself.")]
AnswerFlag = Annotated[float, typer.Option(help="For the target's answers, at most.")]
ThreadsFlag = Annotated[int | None, typer.Option(help="Threads of the processor.")]
DeviceFlag = Annotated[str | None, typer.Option(help="cpu, cuda or mps; none: the best here.")]
RateFlag = Annotated[float | None, typer.Option(help="Peak learning rate.")]
BatchFlag = Annotated[int, typer.Option(help="Tokens of one update.")]
LengthFlag = Annotated[int, typer.Option(help="Tokens of an answer, at most.")]

HEADS = {
    "medusa": "Train heads that draft several tokens at once from the target's last hidden state.",
    "eagle": "Train a one-layer head that drafts from the target's hidden states.",
    "mtp": "Train a module that drafts token after token from the target's last hidden state.",
}
OPTIONS = {
    "medusa": {"num_heads", "num_layers"},
    "eagle": {"num_heads", "ffn_size", "num_steps"},
    "mtp": {"num_heads", "ffn_size", "num_steps"},
}
NUM_HEADS_HELP = "medusa: tokens drafted at once; eagle, mtp: attention heads of its layer."


@app.command()
def distil(
    prompts: PromptsFlag = None,
    from_chats: ChatsFlag = False,
    made_up: MadeUpFlag = 0,
    start_from: Annotated[
        str | None, typer.Option(help="A draft to train further: a folder or a hub id.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Of a fresh draft.")] = 1,
    hidden_size: Annotated[
        int | None, typer.Option(help="Of a fresh draft; none: the target's.")
    ] = None,
    profile: ProfileFlag = None,
    model: ModelFlag = None,
    draft: DraftFlag = None,
    minutes: MinutesFlag = 30.0,
    answer_minutes: AnswerFlag = 15.0,
    out: OutFlag = None,
    work: WorkFlag = None,
    max_answer_length: LengthFlag = 256,
    batch: BatchFlag = 4096,
    rate: RateFlag = None,
    dtype: DtypeFlag = None,
    context: ContextFlag = None,
    device: DeviceFlag = None,
    threads: ThreadsFlag = None,
    seed: SeedFlag = 1,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a small draft model. With --from-chats, fit the target's draft to your own chats."""
    from localspec.training.train_command import TrainRequest, run_training

    request = TrainRequest(
        "draft",
        LoadOptions(profile, model, draft, context=context, dtype=dtype, home=home),
        prompts or (),
        from_chats,
        made_up,
        start_from,
        minutes,
        answer_minutes,
        out,
        work,
        max_answer_length,
        batch,
        rate,
        device,
        threads,
        seed,
        _given(layers=layers, hidden_size=hidden_size),
    )
    result, text = run_training(request)
    finish(result, text, as_json)


def _head_command(kind: str) -> Callable[..., None]:
    """The command that trains one kind of head; all kinds share their flags."""

    def command(
        prompts: PromptsFlag = None,
        from_chats: ChatsFlag = False,
        made_up: MadeUpFlag = 0,
        num_heads: Annotated[int | None, typer.Option(help=NUM_HEADS_HELP)] = None,
        layers: Annotated[int | None, typer.Option(help="medusa: of each head.")] = None,
        ffn_size: Annotated[int | None, typer.Option(help="eagle, mtp: of its layer.")] = None,
        steps: Annotated[
            int | None, typer.Option(help="eagle, mtp: draft steps in training.")
        ] = None,
        profile: ProfileFlag = None,
        model: ModelFlag = None,
        minutes: MinutesFlag = 30.0,
        answer_minutes: AnswerFlag = 15.0,
        out: OutFlag = None,
        work: WorkFlag = None,
        max_answer_length: LengthFlag = 256,
        batch: BatchFlag = 4096,
        rate: RateFlag = None,
        dtype: DtypeFlag = None,
        context: ContextFlag = None,
        device: DeviceFlag = None,
        threads: ThreadsFlag = None,
        seed: SeedFlag = 1,
        home: HomeFlag = None,
        as_json: JsonFlag = False,
    ) -> None:
        from localspec.training.train_command import TrainRequest, run_training

        options = _given(num_heads=num_heads, num_layers=layers, ffn_size=ffn_size, num_steps=steps)
        _require_known(kind, options)
        request = TrainRequest(
            kind,
            LoadOptions(profile, model, context=context, dtype=dtype, home=home),
            prompts or (),
            from_chats,
            made_up,
            None,
            minutes,
            answer_minutes,
            out,
            work,
            max_answer_length,
            batch,
            rate,
            device,
            threads,
            seed,
            options,
        )
        result, text = run_training(request)
        finish(result, text, as_json)

    return command


for _kind, _words in HEADS.items():
    app.command(_kind, help=_words)(_head_command(_kind))


@app.command()
def accepted(
    prompts: PromptsFlag = None,
    made_up: MadeUpFlag = 0,
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,0.7,1",
    max_tokens: Annotated[int, typer.Option(help="Of each reply.")] = 48,
    out: Annotated[
        Path | None, typer.Option(help="The file; none: accepted/TARGET.json in HOME.")
    ] = None,
    profile: ProfileFlag = None,
    model: ModelFlag = None,
    draft: DraftFlag = None,
    context: ContextFlag = None,
    dtype: DtypeFlag = None,
    seed: SeedFlag = 1,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure the acceptance of every drafter, as a start for first chats on other machines."""
    from localspec.training.train_command import measure_acceptance

    load = LoadOptions(profile, model, draft, context=context, dtype=dtype, home=home)
    result, text = measure_acceptance(
        load, prompts or (), made_up, temperatures, max_tokens, out, seed
    )
    finish(result, text, as_json)


@app.command()
def report(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of results; none: all in HOME.")
    ] = None,
    profile: ProfileFlag = None,
    model: ModelFlag = None,
    dtype: DtypeFlag = None,
    context: ContextFlag = None,
    device: DeviceFlag = None,
    threads: ThreadsFlag = None,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what a trained head or draft would gain or lose on this machine."""
    from localspec.training.train_command import report_gains

    load = LoadOptions(profile, model, context=context, dtype=dtype, home=home)
    result, text = report_gains(folders or (), load, device, threads)
    finish(result, text, as_json)


def _given(**options: int | None) -> dict[str, int]:
    """The options that were given; the kind has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None}


def _require_known(kind: str, options: dict[str, int]) -> None:
    for name, value in options.items():
        if name not in OPTIONS[kind]:
            raise ConfigError(
                f"{kind} has no {name.replace('_', ' ')} to choose. Leave that flag out."
            )
        if value < 1:
            raise ConfigError(f"{name.replace('_', ' ')} is {value}, but must be 1 or more.")
