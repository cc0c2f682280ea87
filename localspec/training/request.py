"""What a person asks of a training: the kinds of it, and the flags that each kind has.

Contract: the fields of `TrainRequest` are the flags of every kind of training, but for those that
`ONLY_FOR` limits.

Not here: the commands (cli.train), what they do (cli.train_run).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from localspec.core.flag_values import LARGEST_SEED
from localspec.core.options import LoadOptions

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
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED)] = 1

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
