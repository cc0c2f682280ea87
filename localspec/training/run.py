"""From a target and prompts to a trained draft or head: the stages in order.

`train` leaves the result in HOME, a copy of it in `out`, and all it can resume from in a folder of
the target below `work`; a run killed at any moment is continued by the same call. The answers are
shared by all kinds of training; those to a person's own conversations lie in a file of their own.

Not here: which model is meant and what is free (cli.train_run), what is offered (offering).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from localspec.chat.template import ChatTemplate
from localspec.core.backend import Report
from localspec.core.errors import MemoryShortage
from localspec.core.units import gib
from localspec.formats.fingerprint import fingerprint
from localspec.forward.by_transformers import read_config
from localspec.loading.fitting import refuse_shortage
from localspec.loading.placement import Place
from localspec.machine.hardware import free_bytes_now
from localspec.machine.trained import Artifact
from localspec.training.artifact import copy_to, keep, require_free
from localspec.training.collect import AnswerLog, CollectPlan, collect
from localspec.training.draft import DraftRecipe, fresh_draft, load_draft, num_layer_weights
from localspec.training.judging import Judgement, Rival, judge_rival
from localspec.training.offering import why_not_offered
from localspec.training.prompt_files import TrainingPrompt
from localspec.training.recipe import Recipe, head_plan, make_recipe
from localspec.training.request import DRAFT, TrainRequest
from localspec.training.rows import SplitRows, split_rows
from localspec.training.target import Target, load_target, sizes_of
from localspec.training.train_loop import LoopSettings, Schedule, TrainLoop
from localspec.training.work_folder import alone_in, work_folder

FRESH_RATE, CONTINUED_RATE = 1e-3, 2e-4  # peak learning rates
ANSWERS, OWN_ANSWERS = "answers.jsonl", "answers-own-chats.jsonl"
# Rows of logits [tokens, V] in fp32 that a loss holds at once, with their gradients.
ROWS_OF_LOGITS = 12
LOGITS_BYTES = 2**31
MEMORY_BYTES_PER_WEIGHT = 16  # itself, its gradient, two moments
DISK_BYTES_PER_WEIGHT = 32  # itself, the best, two moments, twice while the checkpoint is swapped


@dataclass(frozen=True)
class TrainSettings:
    """A request with everything found that it names. place: of the target. out: where a copy of the
    result goes, None for none. work: the folder below which the target has its own. start_from: a
    draft that is trained further. in_use: what drafts in its place so far. num_steps: instead of
    the request's minutes."""

    request: TrainRequest
    target: Path
    target_name: str
    place: Place
    prompts: Sequence[TrainingPrompt]
    home: Path
    out: Path | None
    work: Path
    start_from: Path | None = None
    in_use: tuple[Path, ...] = ()
    row_length: int = 512
    num_steps: int | None = None

    @property
    def kind(self) -> str:
        return self.request.kind


@dataclass(frozen=True)
class TrainResult:
    """folder: where it lies in HOME. judgement: of the weights as saved. rivals: what it was
    compared with on the same rows."""

    artifact: Artifact
    folder: Path
    judgement: Judgement
    rivals: tuple[Rival, ...]


def train(settings: TrainSettings, report: Report) -> TrainResult:
    """Collect, train, save. Raises LocalspecError with what is wrong and what to do."""
    num_weights = _num_new_weights(settings)
    mark = fingerprint(settings.target)
    if settings.out is not None:
        require_free(settings.out, settings.home, mark)
    refuse_shortage(settings.target, settings.place)
    settings = replace(settings, work=work_folder(settings.work, mark))
    with alone_in(settings.work):
        _require_room(num_weights, 0, settings)
        result = _train(settings, mark, report)
    if settings.out is not None:
        copy_to(settings.out, result.folder)
    return result


def _train(settings: TrainSettings, mark: str, report: Report) -> TrainResult:
    report(f"Loading {settings.target_name}.")
    place = settings.place
    target = load_target(settings.target, place.dtype, place.device, place.bits)
    recipe = _recipe(settings, target)
    rows = _collect_rows(settings, target, report)
    report(f"{len(rows.train)} rows to train on, {len(rows.held_out)} held out.")
    loop = _loop(settings, target, recipe, rows, mark, report)
    count = sum(weight.numel() for weight in loop.trained.values())
    logits = 4 * ROWS_OF_LOGITS * loop.settings.tokens_at_once * target.sizes.vocab_size
    _require_room(count, logits, settings)
    rivals = _rivals(settings, loop)  # before the memory holds gradients
    loop.train()
    judgement = _judge_as_saved(loop)
    first = loop.progress.first if settings.start_from is not None else None
    before = None if first is None else first.acceptance
    artifact = Artifact(
        settings.kind,
        settings.target_name,
        mark,
        judgement.acceptance,
        before,
        loop.progress.num_tokens,
        loop.progress.step,
        round(loop.progress.trained_seconds / 60.0, 2),
        settings.request.from_chats,
        datetime.now(UTC).isoformat(),
        why_not_offered(judgement, before, rivals),
    )
    folder = keep(settings.home, settings.work, artifact, loop.recipe.save)
    return TrainResult(artifact, folder, judgement, rivals)


def _recipe(settings: TrainSettings, target: Target) -> Recipe:
    request = settings.request
    if settings.start_from is not None:
        return DraftRecipe(load_draft(settings.start_from, target), target)
    if settings.kind == DRAFT:
        return DraftRecipe(fresh_draft(target, request.options, request.seed), target)
    recipe = make_recipe(settings.kind, target.teacher(), request.options, request.seed)
    recipe.module.to(target.device)
    return recipe


def _collect_rows(settings: TrainSettings, target: Target, report: Report) -> SplitRows:
    """The target's answers as rows, those of earlier runs among them."""
    request, longest = settings.request, target.context_length
    log = AnswerLog(settings.work / (OWN_ANSWERS if request.from_chats else ANSWERS))
    max_length = min(request.max_answer_length, longest // 2)
    plan = CollectPlan(request.answer_minutes, max_length, seed=request.seed)
    template = ChatTemplate.load(settings.target)
    answers = collect(target, template, settings.prompts, plan, log, report)
    return split_rows(answers, min(settings.row_length, longest - 1))


def _loop(
    settings: TrainSettings,
    target: Target,
    recipe: Recipe,
    rows: SplitRows,
    mark: str,
    report: Report,
) -> TrainLoop:
    request, start = settings.request, settings.start_from
    rate = request.rate or (FRESH_RATE if start is None else CONTINUED_RATE)
    minutes = request.minutes if settings.num_steps is None else None
    at_once = LOGITS_BYTES // (4 * ROWS_OF_LOGITS * target.sizes.vocab_size)
    loop_settings = LoopSettings(
        Schedule(rate, num_steps=settings.num_steps, minutes=minutes, decay_fraction=0.4),
        settings.work / f"{settings.kind}{'-personal' * request.from_chats}",
        tokens_per_batch=request.batch,
        tokens_at_once=max(settings.row_length, min(request.batch, at_once)),
        seed=request.seed,
    )
    about = {
        "kind": settings.kind,
        "target": mark,
        "options": json.dumps(request.options, sort_keys=True),
        "start": "" if start is None else fingerprint(start),
        "seed": request.seed,
    }
    return TrainLoop(recipe, target, rows, loop_settings, about, report)


def _rivals(settings: TrainSettings, loop: TrainLoop) -> tuple[Rival, ...]:
    """What is in use, measured as the new result will be."""
    return tuple(
        judge_rival(settings.kind, folder, loop.target, settings.place, loop.measure)
        for folder in settings.in_use
    )


@torch.no_grad()
def _judge_as_saved(loop: TrainLoop) -> Judgement:
    """Of the weights rounded to bf16, as they are written and as rivals are read."""
    for weight in loop.recipe.module.parameters():
        weight.copy_(weight.to(torch.bfloat16))
    return loop.measure(loop.recipe)


def _num_new_weights(settings: TrainSettings) -> int:
    """The least number of weights that will be trained. Raises ConfigError for options that make
    no draft or head of this target, before it is loaded."""
    if settings.start_from is not None:
        return 0  # as many as the draft has
    options = settings.request.options
    if settings.kind == DRAFT:
        return num_layer_weights(read_config(settings.target).get_text_config(), options)
    return head_plan(settings.kind, sizes_of(settings.target), options).num_weights


def _require_room(num_weights: int, logits_bytes: int, settings: TrainSettings) -> None:
    """Raise MemoryShortage before anything is begun that could not be finished."""
    needed = MEMORY_BYTES_PER_WEIGHT * num_weights + logits_bytes
    free = free_bytes_now(settings.place.hardware)
    if needed > free:
        raise MemoryShortage(
            f"The training needs {gib(needed)} and {gib(free)} is free. Close other programs, load "
            "the target with --dtype 4-bit, or choose a smaller target or a smaller head."
        )
    needed = DISK_BYTES_PER_WEIGHT * num_weights
    free = shutil.disk_usage(settings.work).free
    if needed > free:
        raise MemoryShortage(
            f"The checkpoints need {gib(needed)} and {gib(free)} is free on the disk of "
            f"{settings.work}. Free disk space, or name another --work."
        )
