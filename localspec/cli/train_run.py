"""What `train distil|medusa|eagle|mtp`, `train accepted` and `train report` do, from flags to a
registered result.

Contract: finds the target, the device, the prompts, the person's own conversations (only when
asked for) and what drafts so far, then trains. Returns JSON data and the text to print.

Not here: training itself (run), whether the result is offered (registration), flags (request).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from localspec.chat.template import ChatTemplate
from localspec.cli.flags import to_stderr
from localspec.core.config import Settings, settings_for
from localspec.core.errors import ConfigError, ModelError, StoreError
from localspec.core.flag_values import listed_numbers, require_threads
from localspec.core.options import LoadOptions
from localspec.forward.fingerprint import NOTE
from localspec.forward.heads.files import head_kind
from localspec.forward.heads.mtp import ships_mtp
from localspec.forward.model import kv_shape
from localspec.forward.weights import read_config
from localspec.loading.placement import Place, place_for
from localspec.machine.compatibility import require_compatible
from localspec.machine.hardware import hardware_for, probe
from localspec.machine.sources import Source, resolve
from localspec.record.log_file import read_replies
from localspec.training.accepted import AcceptedSettings, measure_accepted
from localspec.training.prompt_files import TrainingPrompt, read_prompts, shipped_prompts
from localspec.training.registration import describe, register, slug, summary
from localspec.training.report import measure_gains, render
from localspec.training.request import DRAFT, TrainRequest
from localspec.training.run import TrainSettings, train
from localspec.training.work_folder import OWNER, require_writable, resumable


def run_training(request: TrainRequest) -> tuple[dict[str, Any], str]:
    """Train and register. Raises LocalspecError."""
    _require_numbers(request)
    settings = settings_for(request.load.home)
    prompts = _prompts(request, settings)
    source, place = _target(request.load, request.threads)
    start = _start(request, source)
    name = _folder_name(settings, source)
    out = (request.out or _default_out(request, settings.home, name)).expanduser()
    work = (request.work or settings.home / "training" / name).expanduser()
    _require_places(request, out, work, settings.profile_folders[0])
    train_settings = TrainSettings(
        request,
        source.target,
        source.target_name,
        place,
        prompts,
        out,
        work,
        start,
        _in_use(request, source),
    )
    with resumable(work, to_stderr):
        trained = train(train_settings, to_stderr)
    profile, notice = register(settings, source.target_name, source.target, trained)
    result = {
        **asdict(trained.artifact),
        "out": str(trained.folder),
        "rivals": [rival.as_dict() for rival in trained.rivals],
        "profile": profile,
        "notice": notice,
    }
    return result, summary(trained, profile, notice)


def report_gains(
    folders: Sequence[Path], load: LoadOptions, threads: int | None
) -> tuple[dict[str, Any], str]:
    """Measure what results would gain here. Without folders every result in HOME is measured, and
    one that cannot be is left out with its reason. Raises LocalspecError."""
    source, place = _target(load, threads)
    named = [folder.expanduser() for folder in folders]
    found = named or _all_results(settings_for(load.home), source)
    measured, left_out = measure_gains(source.target, place, found, to_stderr, not named)
    where = {"device": place.hardware.device_name, "dtype": place.precision}
    result = {**where, "gains": [gain.as_dict() for gain in measured], "left_out": left_out}
    heading = f"Measured on {place.hardware.device_name}, {place.precision}."
    return result, "\n\n".join([heading, *map(render, measured), *left_out])


def _all_results(settings: Settings, source: Source) -> list[Path]:
    """Every result in HOME for this target. Raises ConfigError where there is none."""
    name = _folder_name(settings, source)
    found = sorted(
        note.parent
        for each in ("drafts", "heads")
        for note in (settings.home / each / name).glob(f"*/{NOTE}")
    )
    if not found:
        raise ConfigError(
            f"Nothing was trained for {source.target_name} in {settings.home} yet. Train "
            "something, or name its folder."
        )
    return found


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
    place = out or own.home / "accepted" / f"{_folder_name(own, resolve(load))}.json"
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


def _default_out(request: TrainRequest, home: Path, name: str) -> Path:
    if request.kind == DRAFT:
        return home / "drafts" / name / ("personal" if request.from_chats else "distilled")
    return home / "heads" / name / f"{request.kind}{'-personal' * request.from_chats}"


def _require_places(request: TrainRequest, out: Path, work: Path, profiles: Path) -> None:
    """Raises StoreError for a folder that could not be written when it is needed."""
    part = out.parent / f".{out.name}.part"  # a result is written beside its place first
    require_writable(out, part, "--home" if request.out is None else "--out")
    require_writable(work, work / OWNER, "--home" if request.work is None else "--work")
    require_writable(profiles, profiles / "some.toml", "--home")


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
    return _read(request.prompts or ()) + shipped + own


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


def _target(load: LoadOptions, threads: int | None) -> tuple[Source, Place]:
    """Raises ModelError for a target that cannot chat, which no draft or head would change."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(require_threads("--threads", threads))
    source = resolve(load)
    place = place_for(load, source, hardware_for(probe(), load.device, torch), torch)
    kv_shape(read_config(source.target), place.context_length)  # refuses what the chat refuses
    if ChatTemplate.load(source.target).is_raw:
        raise ModelError(
            f"{source.target_name} has no chat template, so it gives no answers to train on. Name "
            "its instruct or chat variant."
        )
    return source, place


def _start(request: TrainRequest, source: Source) -> Path | None:
    """The draft that is trained further: the one named, or with --from-chats the target's own."""
    if request.kind != DRAFT:
        return None
    start = source.draft if request.from_chats else None
    if request.start_from is not None:
        start = resolve(LoadOptions(model=request.start_from, home=request.load.home)).target
    if start is not None:
        require_compatible(source.target, start)
    return start


def _folder_name(settings: Settings, source: Source) -> str:
    """The target's name for folders in HOME; no other target's results lie under it."""
    return slug(describe(settings, source.target_name, source.target).model_id)


def _in_use(request: TrainRequest, source: Source) -> tuple[Path, ...]:
    """What drafts so far in the place of what is to be trained: the profile's draft, or its heads
    of that kind. Heads that cannot be read are among them, so that the summary names them."""
    if request.kind == DRAFT:
        usual = resolve(replace(request.load, draft=None, fetches=False))
        if usual.draft is None and usual.draft_refusal != Source.draft_refusal:
            to_stderr(f"The draft in use so far cannot be compared: {usual.draft_refusal}")
        return () if usual.draft is None else (usual.draft,)
    native = (source.target,) if request.kind == "mtp" and ships_mtp(source.target) else ()
    return (*(each for each in source.heads if _kind(each) in (request.kind, None)), *native)


def _kind(folder: Path) -> str | None:
    try:
        return head_kind(folder)
    except ModelError:
        return None
