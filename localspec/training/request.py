"""What a person asks of a training: the kinds of it, and the flags that each kind has.

Contract: the fields of `TrainRequest` are the flags of every kind of training, but for those that
`ONLY_FOR` limits.

Not here: the commands (cli.train), what they do (cli.train_run).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from localspec.core.flags import Flag, SeedFlag, only
from localspec.core.options import LoadOptions

PromptsFlag = Annotated[
    tuple[Path, ...], Flag("A .jsonl of prompts, turns or messages; repeatable.")
]
MadeUpFlag = Annotated[
    int,
    Flag("Number of the prompts that ship with localspec, 2000 at most.", least=0, most=1_000_000),
]

# The options that say what the target is.
TARGET = ("profile", "model", "context", "dtype", "home")
DRAFT = "draft"
# The name of the command that trains each kind, and what the command does.
KINDS = {
    DRAFT: ("distil", "Train a small draft model. With --from-chats, fit the target's draft to "
            "your own chats."),
    "medusa": ("medusa", "Train heads that draft several tokens at once from the target's last "
               "hidden state."),
    "eagle": ("eagle", "Train a one-layer head that drafts from the target's hidden states."),
    "mtp": ("mtp", "Train a module that drafts token after token from the target's last hidden "
            "state."),
}  # fmt: skip
# The flags that some kinds lack, with the kinds that have them.
ONLY_FOR = {
    "draft": {DRAFT},
    "start_from": {DRAFT},
    "hidden_size": {DRAFT},
    "layers": {DRAFT, "medusa"},
    "num_heads": {"medusa", "eagle", "mtp"},
    "ffn_size": {"eagle", "mtp"},
    "steps": {"eagle", "mtp"},
}


@dataclass(frozen=True)
class TrainRequest:
    """The flags of one training as they were given. kind: of KINDS. load: the target, and what
    drafts for it so far."""

    kind: str = DRAFT
    load: Annotated[LoadOptions, only(*TARGET, "draft", "device")] = field(
        default_factory=LoadOptions
    )
    prompts: PromptsFlag = ()
    from_chats: Annotated[bool, Flag("Learn from your own logged conversations, locally.")] = False
    made_up: MadeUpFlag = 0
    start_from: Annotated[str | None, Flag("A draft to train further: a folder or a hub id.")] = (
        None
    )
    layers: Annotated[int | None, Flag("Of a fresh draft or a head; none: 1.")] = None
    hidden_size: Annotated[int | None, Flag("Of a fresh draft; none: the target's.")] = None
    num_heads: Annotated[
        int | None, Flag("medusa: tokens drafted at once; else: attention heads of its layer.")
    ] = None
    ffn_size: Annotated[int | None, Flag("Feed-forward width of its layer.")] = None
    steps: Annotated[int | None, Flag("Draft steps in training.")] = None
    minutes: Annotated[float, Flag("For the training itself.")] = 30.0
    answer_minutes: Annotated[float, Flag("For the target's answers, at most.")] = 15.0
    out: Annotated[Path | None, Flag("Folder for a copy of the result, which lies in HOME.")] = None
    work: Annotated[
        Path | None, Flag("Answers and checkpoints; an interrupted run resumes from it.")
    ] = None
    max_answer_length: Annotated[int, Flag("Tokens of an answer, at most.")] = 256
    batch: Annotated[int, Flag("Tokens of one update.")] = 4096
    rate: Annotated[float | None, Flag("Peak learning rate.")] = None
    threads: Annotated[int | None, Flag("Threads of the processor.")] = None
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
