"""What `train distil|medusa|eagle|mtp` and `train accepted` do, from flags to a result.

Contract: finds the target, the device, the prompts, the person's own conversations (only when
asked for) and what drafts so far, then trains. Returns JSON data and the text to print.

Not here: training itself (run), whether the result is offered (offering), flags (request).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from localspec.chat.template import ChatTemplate
from localspec.cli.output import to_stderr
from localspec.core.config import Settings, settings_for
from localspec.core.errors import ConfigError, ModelError, StoreError
from localspec.core.flags import listed_numbers, require_threads
from localspec.core.options import LoadOptions
from localspec.formats.head_folder import head_kind
from localspec.forward.by_transformers import read_config
from localspec.forward.heads.mtp_files import ships_mtp
from localspec.forward.model import kv_shape
from localspec.loading.placement import Place, place_for
from localspec.machine.compatibility import require_compatible
from localspec.machine.hardware import hardware_for, probe
from localspec.machine.model import Model
from localspec.machine.sources import resolve
from localspec.record.log_file import read_replies
from localspec.training.accepted import AcceptedSettings, measure_accepted
from localspec.training.artifact import slug
from localspec.training.offering import summary
from localspec.training.prompt_files import TrainingPrompt, read_prompts, shipped_prompts
from localspec.training.request import DRAFT, TrainRequest
from localspec.training.run import TrainSettings, train
from localspec.training.work_folder import require_writable, resumable


def run_training(request: TrainRequest) -> tuple[dict[str, Any], str]:
    """Train and keep the result. Raises LocalspecError."""
    _require_numbers(request)
    settings = settings_for(request.load.home)
    prompts = _prompts(request, settings)
    source, place = _target(request.load, request.threads)
    start = _start(request, source)
    out = None if request.out is None else request.out.expanduser()
    work = (request.work or settings.home / "training").expanduser()
    _require_places(request, settings.home, out, work)
    train_settings = TrainSettings(
        request,
        source.folder,
        source.name,
        place,
        prompts,
        settings.home,
        out,
        work,
        start,
        _in_use(request, source),
    )
    with resumable(work, to_stderr):
        trained = train(train_settings, to_stderr)
    result = {
        **asdict(trained.artifact),
        "out": str(out or trained.folder),
        "folder": str(trained.folder),
        "rivals": [rival.as_dict() for rival in trained.rivals],
        "notice": trained.artifact.refusal or None,
    }
    return result, summary(trained)


def measure_acceptance(
    load: LoadOptions,
    prompt_files: Sequence[Path],
    made_up: int,
    temperatures: str,
    max_tokens: int,
    out: Path | None,
    seed: int,
) -> tuple[dict[str, Any], str]:
    """Measure what is accepted of each drafter, and write it. Raises LocalspecError."""
    numbers = listed_numbers(temperatures, float)
    prompts = _read(prompt_files) + shipped_prompts(made_up, seed)
    if not prompts:
        raise ConfigError(
            "There is nothing to ask the target. Give --prompts with a .jsonl file or --made-up "
            "with a number of the prompts that ship."
        )
    own = settings_for(load.home)
    place = out or own.home / "accepted" / f"{slug(resolve(load).name)}.json"
    settings = AcceptedSettings(load, prompts, numbers, max_tokens, place.expanduser())
    origin, measured = measure_accepted(settings, to_stderr)
    result = {**asdict(origin), "drafters": measured, "out": str(settings.out)}
    return result, (
        f"{settings.out} holds the acceptance of {len(measured)} drafters of {origin.target} over "
        f"{origin.num_prompts} prompts. A profile names it beside the model: "
        f'accepted = "{settings.out}".'
    )


def _require_numbers(request: TrainRequest) -> None:
    numbers = {
        "--minutes": request.minutes,
        "--batch": request.batch,
        "--max-answer-length": request.max_answer_length,
        "--rate": 1.0 if request.rate is None else request.rate,
    }
    for flag, value in numbers.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{flag} is {value}, but must be more than 0.")
    if not 0 <= request.answer_minutes < float("inf"):
        raise ConfigError(f"--answer-minutes is {request.answer_minutes}, but must be 0 or more.")


def _require_places(request: TrainRequest, home: Path, out: Path | None, work: Path) -> None:
    """Raises StoreError for a folder that could not be written when it is needed."""
    require_writable(home, home / "trained" / "result", "--home")
    if out is not None:
        require_writable(out, out.parent / f".{out.name}.part", "--out")
    require_writable(work, work / "target", "--home" if request.work is None else "--work")


def _prompts(request: TrainRequest, settings: Settings) -> list[TrainingPrompt]:
    """All that the target is asked. Raises ConfigError, StoreError."""
    if not request.prompts and not request.from_chats and request.made_up < 1:
        raise ConfigError(
            "There is nothing to ask the target. Give --prompts with a .jsonl file, --made-up with "
            "a number of the prompts that ship, or --from-chats to learn from your own "
            "conversations."
        )
    shipped = shipped_prompts(request.made_up, request.seed)
    if len(shipped) < request.made_up:
        to_stderr(f"{len(shipped)} made-up prompts ship with localspec; all of them are used.")
    own = _own_chats(settings) if request.from_chats else []
    return _read(request.prompts) + shipped + own


def _read(files: Sequence[Path]) -> list[TrainingPrompt]:
    return [prompt for path in files for prompt in read_prompts(path.expanduser())]


def _own_chats(settings: Settings) -> list[TrainingPrompt]:
    if not settings.database.is_file():
        raise StoreError(f"There is no log at {settings.database}. Chat first, or name its --home.")
    replies = read_replies(settings.database)
    if not replies:
        raise StoreError(
            f"The log at {settings.database} holds no finished replies yet. Chat for a while "
            "and come back, or train from --prompts."
        )
    num_conversations = len({reply.conversation_id for reply in replies})
    to_stderr(
        f"Found {len(replies)} replies in {num_conversations} conversations of your own. They are "
        "read from this computer's log and stay on it."
    )
    return [
        TrainingPrompt(f"chat:{one.conversation_id}", one.before, logged=one.text)
        for one in replies
    ]


def _target(load: LoadOptions, threads: int | None) -> tuple[Model, Place]:
    """Raises ModelError for a target that cannot chat, which no draft or head would change."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(require_threads("--threads", threads))
    source = resolve(load)
    place = place_for(load, source, hardware_for(probe(), load.device, torch), torch)
    kv_shape(read_config(source.folder), place.context_length)  # refuses what the chat refuses
    if ChatTemplate.load(source.folder).is_raw:
        raise ModelError(
            f"{source.name} has no chat template, so it gives no answers to train on. Name "
            "its instruct or chat variant."
        )
    return source, place


def _start(request: TrainRequest, source: Model) -> Path | None:
    """The draft that is trained further: the one named, or with --from-chats the target's own."""
    if request.kind != DRAFT:
        return None
    start = source.draft.path if source.draft and request.from_chats else None
    if request.start_from is not None:
        start = resolve(LoadOptions(model=request.start_from, home=request.load.home)).path
    if start is not None:
        require_compatible(source.folder, start)
    return start


def _in_use(request: TrainRequest, source: Model) -> tuple[Path, ...]:
    """What drafts so far in the place of what is to be trained: the profile's draft, or its heads
    of that kind. Heads that cannot be read are among them, so that the summary names them."""
    if request.kind == DRAFT:
        usual = resolve(replace(request.load, draft=None, fetches=False))
        for draft in (each for each in usual.drafts if each.fault and each.head is None):
            to_stderr(f"The draft in use so far cannot be compared: {draft.fault}")
        return tuple(draft.path for draft in usual.drafts if draft.path is not None)
    native = (source.folder,) if request.kind == "mtp" and ships_mtp(source.folder) else ()
    return (*(each for each in source.heads if _kind(each) in (request.kind, None)), *native)


def _kind(folder: Path) -> str | None:
    try:
        return head_kind(folder)
    except ModelError:
        return None
