"""From a target and its questions to a trained head or draft: the stages in order.

Contract: `train_head` leaves the result in `out` and all it can resume from in `work`; a run
killed at any moment is continued by the same call. Nothing in `out` changes before the training
is over, and an earlier result there gives way to one that is at least as good on the same held-out
rows: any other is put beside it. `work` belongs to one target and to one run at a time. The
answers are shared by all kinds; a person's own conversations lie in a file of their own there.

Not here: which model is meant and what is free (commands), the profile (registry).
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
from localspec.errors import ConfigError, MemoryShortage, StoreError
from localspec.files import replacing
from localspec.forward.fingerprint import NOTE, fingerprint
from localspec.forward.weights import Bits, check_folder, weight_files
from localspec.training.answers import AnswerLog
from localspec.training.artifact import Made, beside, deliver, require_free
from localspec.training.collect import CollectPlan, collect
from localspec.training.draft import (
    DraftRecipe,
    DraftShape,
    fresh_draft,
    loaded_draft,
    num_draft_weights,
    num_layer_weights,
    require_smaller,
)
from localspec.training.judging import Judgement
from localspec.training.places import LOCK, alone_in
from localspec.training.questions import Conversation
from localspec.training.recipe import Recipe, make_recipe
from localspec.training.recipe import num_weights as num_weights_of
from localspec.training.rivals import Rival, judged
from localspec.training.rows import Rows, split_rows
from localspec.training.schedule import Schedule
from localspec.training.target import Target, load_target, sizes_of
from localspec.training.train_loop import FrameSettings, Run

Report = Callable[[str], None]
CPU = torch.device("cpu")
RATES = {"draft": 1e-3}  # peak rates; other kinds have HEAD_RATE
HEAD_RATE, ONWARD_RATE = 1e-3, 2e-4
ANSWERS, OWN_ANSWERS, OWNER = "answers.jsonl", "answers-own-chats.jsonl", "target.json"
OURS = (LOCK, f".{OWNER}")  # what may lie in a work folder before it has an owner
# Rows of logits [tokens, V] in fp32 that a loss holds at once, with their gradients.
ROWS_OF_LOGITS = 12
LOGITS_BYTES = 2**31
KEPT_FOR_EACH = 16  # bytes a trained weight takes: itself, its gradient, two moments
WRITTEN_FOR_EACH = 32  # bytes on the disk: itself, the best, two moments, twice while swapping


@dataclass(frozen=True)
class HeadSettings:
    """Everything a training is told. kind: draft, or one of recipe.RECIPES. options: of the kind.
    start_from: a draft that learns on. in_use: what drafts in its place so far. free_bytes: what
    the device can still give, asked when it matters; None: unknown. num_steps: instead of
    minutes."""

    kind: str
    target: Path
    target_name: str
    conversations: Sequence[Conversation]
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


@dataclass(frozen=True)
class Trained:
    """folder: where it lies. judgement: of the weights as saved. rivals: what it was held against,
    on the same rows."""

    made: Made
    folder: Path
    judgement: Judgement
    rivals: tuple[Rival, ...]


def train_head(settings: HeadSettings, report: Report) -> Trained:
    """Collect, train, save. Raises LocalspecError with what is wrong and what to do."""
    num_weights = _num_new_weights(settings)
    mark = fingerprint(settings.target)
    require_free(settings.out, settings.kind, mark)
    require_own(settings.work, mark)
    _require_memory(_weight_bytes(settings), settings, f"The target {settings.target_name}")
    with alone_in(settings.work):
        _claim(settings.work, mark, settings.target_name)
        _require_memory(KEPT_FOR_EACH * num_weights, settings, "The training")
        _require_disk(WRITTEN_FOR_EACH * num_weights, settings)
        return _trained(settings, mark, report)


def _trained(settings: HeadSettings, mark: str, report: Report) -> Trained:
    report(f"Loading {settings.target_name}.")
    target = load_target(settings.target, settings.dtype, settings.device, settings.bits)
    if settings.kind == "draft" and settings.start_from is None:
        require_smaller(num_draft_weights(_draft_shape(settings), target), target)
    rows = collect_rows(settings, target, report)
    report(f"{len(rows.learnt)} rows to learn from, {len(rows.held_out)} held out.")
    recipe = _recipe(settings, target)
    run = _run(settings, target, recipe, rows, mark, report)
    _require_room(settings, target, run)
    rivals = _rivals(settings, run)  # now, while the memory holds no gradients
    run.train()
    judgement = _as_saved(run)
    made = Made(
        settings.kind,
        settings.target_name,
        mark,
        judgement.acceptance,
        run.first_judgement.acceptance if settings.start_from is not None else None,
        run.progress.num_tokens,
        run.progress.step,
        round(run.progress.trained_seconds / 60.0, 2),
        settings.is_personal,
    )
    folder = _place(settings.out, made, judgement, rivals)
    deliver(folder, made, recipe.save)
    return Trained(made, folder, judgement, rivals)


def require_own(work: Path, mark: str) -> None:
    """Raise ConfigError where the work folder is another target's, or no work folder."""
    owner = work / OWNER
    if owner.is_file():
        try:
            found = json.loads(owner.read_text(encoding="utf-8"))
            other, other_name = str(found["mark"]), str(found["name"])
        except (ValueError, KeyError, TypeError):
            other, other_name = "", "an unreadable note"
        if other != mark:
            raise ConfigError(
                f"{work} holds the training for another target ({other_name}), or for earlier "
                "weights of this one. Name another --work, or delete that folder to begin anew."
            )
        return
    if work.exists() and not work.is_dir():
        raise ConfigError(f"{work} is a file. Name a folder as --work.")
    if work.is_dir() and any(not one.name.startswith(OURS) for one in work.iterdir()):
        raise ConfigError(f"{work} holds other files. Name another --work.")


def _claim(work: Path, mark: str, name: str) -> None:
    """Make the work folder this target's. Raises ConfigError where it has become another's."""
    require_own(work, mark)
    if (work / OWNER).is_file():
        return
    try:
        with replacing(work / OWNER) as part:
            part.write_text(json.dumps({"mark": mark, "name": name}) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"{work} cannot be written ({error.strerror}). Free some space there, or name another "
            "--work."
        ) from error


def collect_rows(settings: HeadSettings, target: Target, report: Report) -> Rows:
    """The target's answers as rows, those it gave in earlier runs among them."""
    log = AnswerLog(settings.work / (OWN_ANSWERS if settings.is_personal else ANSWERS))
    longest = target.context_length
    plan = CollectPlan(
        settings.answer_minutes, min(settings.max_answer_length, longest // 2), seed=settings.seed
    )
    template = ChatTemplate.load(settings.target)
    answers = collect(target, template, settings.conversations, plan, log, report)
    return split_rows(answers, min(settings.row_length, longest - 1))


def _recipe(settings: HeadSettings, target: Target) -> Recipe:
    if settings.kind != "draft":
        recipe = make_recipe(settings.kind, target.teacher(), settings.options, settings.seed)
        recipe.module.to(target.device)
        return recipe
    if settings.start_from is not None:
        return DraftRecipe(loaded_draft(settings.start_from, target), target)
    return DraftRecipe(fresh_draft(target, _draft_shape(settings), settings.seed), target)


def _draft_shape(settings: HeadSettings) -> DraftShape:
    return DraftShape(settings.options.get("layers", 1), settings.options.get("hidden_size"))


def _num_new_weights(settings: HeadSettings) -> int:
    """How many weights will be trained at the least. Raises ConfigError for options that make no
    head or draft of this target, before it is loaded."""
    if settings.start_from is not None:
        return 0  # as many as the draft has
    sizes = sizes_of(settings.target)
    if settings.kind == "draft":
        return num_layer_weights(_draft_shape(settings), sizes.hidden_size)
    return num_weights_of(settings.kind, sizes, settings.options)


def _run(
    settings: HeadSettings, target: Target, recipe: Recipe, rows: Rows, mark: str, report: Report
) -> Run:
    usual = RATES.get(settings.kind, HEAD_RATE) if settings.start_from is None else ONWARD_RATE
    rate = settings.rate or usual
    schedule = (
        Schedule(rate, num_steps=settings.num_steps, decay_fraction=0.4)
        if settings.num_steps is not None
        else Schedule(rate, minutes=settings.minutes, decay_fraction=0.4)
    )
    name = f"{settings.kind}-personal" if settings.is_personal else settings.kind
    at_once = LOGITS_BYTES // (4 * ROWS_OF_LOGITS * target.sizes.vocab_size)
    frame = FrameSettings(
        schedule,
        settings.work / name,
        tokens_per_batch=settings.batch,
        tokens_at_once=max(settings.row_length, min(settings.batch, at_once)),
        seed=settings.seed,
    )
    start = "" if settings.start_from is None else fingerprint(settings.start_from)
    about = {
        "kind": settings.kind,
        "target": mark,
        "options": json.dumps(settings.options, sort_keys=True),
        "start": start,
        "seed": settings.seed,
    }
    return Run(recipe, target, rows, frame, about, report)


def _rivals(settings: HeadSettings, run: Run) -> tuple[Rival, ...]:
    """What is in use and what lies in `out`, judged as the new one will be."""

    def make_room(folder: Path) -> None:
        check_folder(folder)
        needed = 4 * sum(map(_num_weights, weight_files(folder)))  # it is judged in fp32
        _require_memory(needed, settings, f"To judge it, the draft {folder.name}")

    old = (settings.out,) if (settings.out / NOTE).is_file() else ()
    folders = {folder.resolve(): folder for folder in (*settings.in_use, *old)}
    return tuple(judged(settings.kind, folder, run, make_room) for folder in folders.values())


@torch.no_grad()
def _as_saved(run: Run) -> Judgement:
    """Of the weights in bf16, as they are written and as its rivals were read."""
    for weight in run.recipe.module.parameters():
        weight.copy_(weight.to(torch.bfloat16))
    return run.held_out()


def _place(out: Path, made: Made, judgement: Judgement, rivals: Sequence[Rival]) -> Path:
    """`out`, unless what lies there is better or could not be judged: it is not lost."""
    old = next((rival for rival in rivals if rival.folder.resolve() == out.resolve()), None)
    is_kept = old is not None and (old.judgement is None or old.stays_before(judgement))
    return beside(out, made) if is_kept else out


def _weight_bytes(settings: HeadSettings) -> int:
    """What the target's weights take as they will be loaded."""
    counted = sum(map(_num_weights, weight_files(settings.target)))
    bits = settings.bits or 8 * settings.dtype.itemsize
    return counted * bits // 8


def _num_weights(file: Path) -> int:
    with file.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    return sum(math.prod(each["shape"]) for key, each in header.items() if key != "__metadata__")


def _require_room(settings: HeadSettings, target: Target, run: Run) -> None:
    """Raises MemoryShortage before anything is begun that could not be finished."""
    count = sum(weight.numel() for weight in run.trained.values())
    logits = 4 * ROWS_OF_LOGITS * run.settings.tokens_at_once * target.sizes.vocab_size
    _require_memory(KEPT_FOR_EACH * count + logits, settings, "The training")
    _require_disk(WRITTEN_FOR_EACH * count, settings)


def _require_disk(needed: int, settings: HeadSettings) -> None:
    free = shutil.disk_usage(settings.work).free
    if needed > free:
        raise MemoryShortage(
            f"The checkpoints need {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB is free "
            f"on the disk of {settings.work}. Free some space, or name another --work."
        )


def _require_memory(needed: int, settings: HeadSettings, what: str) -> None:
    free = None if settings.free_bytes is None else settings.free_bytes()
    if free is not None and needed > free:
        raise MemoryShortage(
            f"{what} needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB is free. Close "
            "other programs, load the target with --dtype 4-bit, or choose a smaller target or a "
            "smaller head."
        )
