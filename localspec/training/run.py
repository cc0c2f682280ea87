"""From a target and prompts to a trained draft or head: the stages in order.

Contract: `train` leaves the result in `out` and all it can resume from in `work`; a run killed at
any moment is continued by the same call. Nothing in `out` changes before the training is over. An
earlier result there is replaced by one that is at least as good on the same held-out rows; a worse
one is put beside it. The answers are shared by all kinds; those to a person's own conversations lie
in a file of their own.

Not here: which model is meant and what is free (train_command), profiles (registration).
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from localspec.chat.template import ChatTemplate
from localspec.errors import MemoryShortage
from localspec.forward.fingerprint import NOTE, fingerprint
from localspec.forward.weights import Bits, check_folder, weight_files
from localspec.training.answer_log import AnswerLog
from localspec.training.artifact import Artifact, deliver, place_beside, require_free
from localspec.training.collect import CollectPlan, collect
from localspec.training.draft import (
    DraftRecipe,
    DraftShape,
    fresh_draft,
    load_draft,
    num_draft_weights,
    num_layer_weights,
    require_smaller,
)
from localspec.training.judging import Judgement, Rival, judge_rival
from localspec.training.prompt_files import TrainingPrompt
from localspec.training.recipe import Recipe, make_recipe
from localspec.training.recipe import num_weights as num_head_weights
from localspec.training.rows import SplitRows, split_rows
from localspec.training.schedule import Schedule
from localspec.training.target import Target, load_target, sizes_of
from localspec.training.train_loop import LoopSettings, TrainLoop
from localspec.training.work_folder import alone_in, claim, require_own

Report = Callable[[str], None]
CPU = torch.device("cpu")
FRESH_RATE, CONTINUED_RATE = 1e-3, 2e-4  # peak learning rates
ANSWERS, OWN_ANSWERS = "answers.jsonl", "answers-own-chats.jsonl"
# Rows of logits [tokens, V] in fp32 that a loss holds at once, with their gradients.
ROWS_OF_LOGITS = 12
LOGITS_BYTES = 2**31
MEMORY_BYTES_PER_WEIGHT = 16  # itself, its gradient, two moments
DISK_BYTES_PER_WEIGHT = 32  # itself, the best, two moments, twice while the checkpoint is swapped


@dataclass(frozen=True)
class TrainSettings:
    """Everything a training needs. kind: draft, or one of recipe.HEADS. options: of the kind.
    start_from: a draft that is trained further. in_use: what drafts in its place so far.
    free_bytes: what the device can still give, asked when it matters; None: unknown. num_steps:
    instead of minutes."""

    kind: str
    target: Path
    target_name: str
    prompts: Sequence[TrainingPrompt]
    out: Path
    work: Path
    minutes: float = 30.0
    answer_minutes: float = 15.0
    options: dict[str, int] = field(default_factory=dict)
    start_from: Path | None = None
    in_use: tuple[Path, ...] = ()
    is_personal: bool = False
    dtype: torch.dtype = torch.float32
    bits: Bits | None = None
    device: torch.device = CPU
    max_answer_length: int = 256
    row_length: int = 512
    batch: int = 4096
    rate: float | None = None
    seed: int = 1
    num_steps: int | None = None
    free_bytes: Callable[[], int] | None = None

    @property
    def draft_shape(self) -> DraftShape:
        return DraftShape(self.options.get("layers", 1), self.options.get("hidden_size"))


@dataclass(frozen=True)
class TrainResult:
    """folder: where it lies. judgement: of the weights as saved. rivals: what it was compared with
    on the same rows."""

    artifact: Artifact
    folder: Path
    judgement: Judgement
    rivals: tuple[Rival, ...]


def train(settings: TrainSettings, report: Report) -> TrainResult:
    """Collect, train, save. Raises LocalspecError with what is wrong and what to do."""
    num_weights = _num_new_weights(settings)
    mark = fingerprint(settings.target)
    require_free(settings.out, settings.kind, mark)
    require_own(settings.work, mark)
    _require_memory(_target_bytes(settings), settings, f"The target {settings.target_name}")
    with alone_in(settings.work):
        claim(settings.work, mark, settings.target_name)
        _require_memory(MEMORY_BYTES_PER_WEIGHT * num_weights, settings, "The training")
        _require_disk(DISK_BYTES_PER_WEIGHT * num_weights, settings)
        return _train(settings, mark, report)


def _train(settings: TrainSettings, mark: str, report: Report) -> TrainResult:
    report(f"Loading {settings.target_name}.")
    target = load_target(settings.target, settings.dtype, settings.device, settings.bits)
    if settings.kind == "draft" and settings.start_from is None:
        require_smaller(num_draft_weights(settings.draft_shape, target), target)
    rows = _collect_rows(settings, target, report)
    report(f"{len(rows.train)} rows to train on, {len(rows.held_out)} held out.")
    loop = _loop(settings, target, _recipe(settings, target), rows, mark, report)
    _require_training_memory(settings, target, loop)
    rivals = _rivals(settings, loop)  # before the memory holds gradients
    loop.train()
    judgement = _judge_as_saved(loop)
    artifact = Artifact(
        settings.kind,
        settings.target_name,
        mark,
        judgement.acceptance,
        loop.first_judgement.acceptance if settings.start_from is not None else None,
        loop.progress.num_tokens,
        loop.progress.step,
        round(loop.progress.trained_seconds / 60.0, 2),
        settings.is_personal,
    )
    folder = _place(settings.out, artifact, judgement, rivals)
    deliver(folder, artifact, loop.recipe.save)
    return TrainResult(artifact, folder, judgement, rivals)


def _collect_rows(settings: TrainSettings, target: Target, report: Report) -> SplitRows:
    """The target's answers as rows, those of earlier runs among them."""
    log = AnswerLog(settings.work / (OWN_ANSWERS if settings.is_personal else ANSWERS))
    longest = target.context_length
    plan = CollectPlan(
        settings.answer_minutes, min(settings.max_answer_length, longest // 2), seed=settings.seed
    )
    template = ChatTemplate.load(settings.target)
    answers = collect(target, template, settings.prompts, plan, log, report)
    return split_rows(answers, min(settings.row_length, longest - 1))


def _recipe(settings: TrainSettings, target: Target) -> Recipe:
    if settings.kind != "draft":
        recipe = make_recipe(settings.kind, target.teacher(), settings.options, settings.seed)
        recipe.module.to(target.device)
        return recipe
    if settings.start_from is not None:
        return DraftRecipe(load_draft(settings.start_from, target), target)
    return DraftRecipe(fresh_draft(target, settings.draft_shape, settings.seed), target)


def _loop(
    settings: TrainSettings,
    target: Target,
    recipe: Recipe,
    rows: SplitRows,
    mark: str,
    report: Report,
) -> TrainLoop:
    rate = settings.rate or (FRESH_RATE if settings.start_from is None else CONTINUED_RATE)
    minutes = settings.minutes if settings.num_steps is None else None
    name = f"{settings.kind}-personal" if settings.is_personal else settings.kind
    at_once = LOGITS_BYTES // (4 * ROWS_OF_LOGITS * target.sizes.vocab_size)
    loop_settings = LoopSettings(
        Schedule(rate, num_steps=settings.num_steps, minutes=minutes, decay_fraction=0.4),
        settings.work / name,
        tokens_per_batch=settings.batch,
        tokens_at_once=max(settings.row_length, min(settings.batch, at_once)),
        seed=settings.seed,
    )
    about = {
        "kind": settings.kind,
        "target": mark,
        "options": json.dumps(settings.options, sort_keys=True),
        "start": "" if settings.start_from is None else fingerprint(settings.start_from),
        "seed": settings.seed,
    }
    return TrainLoop(recipe, target, rows, loop_settings, about, report)


def _rivals(settings: TrainSettings, loop: TrainLoop) -> tuple[Rival, ...]:
    """What is in use and what lies in `out`, measured as the new one will be."""

    def require_memory(folder: Path) -> None:
        check_folder(folder)
        needed = 4 * _num_weights(folder)  # it is measured in fp32
        _require_memory(needed, settings, f"To compare it, the draft {folder.name}")

    old = (settings.out,) if (settings.out / NOTE).is_file() else ()
    folders = {folder.resolve(): folder for folder in (*settings.in_use, *old)}
    return tuple(
        judge_rival(settings.kind, folder, loop.target, require_memory, loop.measure)
        for folder in folders.values()
    )


@torch.no_grad()
def _judge_as_saved(loop: TrainLoop) -> Judgement:
    """Of the weights rounded to bf16, as they are written and as rivals are read."""
    for weight in loop.recipe.module.parameters():
        weight.copy_(weight.to(torch.bfloat16))
    return loop.measure(loop.recipe)


def _place(out: Path, artifact: Artifact, judgement: Judgement, rivals: Sequence[Rival]) -> Path:
    """`out`, unless what lies there is better or could not be measured: it is kept."""
    old = next((rival for rival in rivals if rival.folder.resolve() == out.resolve()), None)
    return place_beside(out, artifact) if old is not None and old.stays_before(judgement) else out


def _num_new_weights(settings: TrainSettings) -> int:
    """The least number of weights that will be trained. Raises ConfigError for options that make
    no draft or head of this target, before it is loaded."""
    if settings.start_from is not None:
        return 0  # as many as the draft has
    sizes = sizes_of(settings.target)
    if settings.kind == "draft":
        return num_layer_weights(settings.draft_shape, sizes.hidden_size)
    return num_head_weights(settings.kind, sizes, settings.options)


def _target_bytes(settings: TrainSettings) -> int:
    """Of the target's weights as they will be loaded."""
    bits = settings.bits or 8 * settings.dtype.itemsize
    return _num_weights(settings.target) * bits // 8


def _num_weights(folder: Path) -> int:
    """Counted from the headers of the weight files."""
    total = 0
    for file in weight_files(folder):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        total += sum(math.prod(e["shape"]) for key, e in header.items() if key != "__metadata__")
    return total


def _require_training_memory(settings: TrainSettings, target: Target, loop: TrainLoop) -> None:
    """Raise MemoryShortage before anything is begun that could not be finished."""
    count = sum(weight.numel() for weight in loop.trained.values())
    logits = 4 * ROWS_OF_LOGITS * loop.settings.tokens_at_once * target.sizes.vocab_size
    _require_memory(MEMORY_BYTES_PER_WEIGHT * count + logits, settings, "The training")
    _require_disk(DISK_BYTES_PER_WEIGHT * count, settings)


def _require_disk(needed: int, settings: TrainSettings) -> None:
    free = shutil.disk_usage(settings.work).free
    if needed > free:
        raise MemoryShortage(
            f"The checkpoints need {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB is free "
            f"on the disk of {settings.work}. Free some space, or name another --work."
        )


def _require_memory(needed: int, settings: TrainSettings, what: str) -> None:
    free = None if settings.free_bytes is None else settings.free_bytes()
    if free is not None and needed > free:
        raise MemoryShortage(
            f"{what} needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB is free. Close "
            "other programs, load the target with --dtype 4-bit, or choose a smaller target or a "
            "smaller head."
        )
