"""What `train distil`, its sisters and `train report` do, from flags to a registered result.

Contract: finds the target, the device, the prompts, the person's own conversations (only when
asked to) and what drafts so far, and trains. Returns JSON data and the sentence to print.

Not here: training itself (heads.run), whether the result is offered (offer), flags (commands).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from localspec.bench.suite import listed_numbers, to_stderr
from localspec.config import Settings, settings_for
from localspec.errors import ConfigError, ModelError, StoreError
from localspec.forward.fingerprint import NOTE, fingerprint
from localspec.forward.heads.files import head_kind
from localspec.forward.heads.mtp_native import ships_mtp
from localspec.forward.model import kv_shape
from localspec.forward.weights import read_config
from localspec.machine.compatibility import require_compatible
from localspec.machine.hardware import Hardware, confirmed_by_torch, free_bytes_now, probe
from localspec.machine.sources import Source, resolve
from localspec.options import LoadOptions
from localspec.placement import Place, place_for, require_threads
from localspec.record.log_file import read_replies
from localspec.training.accepted import AcceptedSettings, measure_accepted
from localspec.training.gain import Bench, gains, gains_of_all, render
from localspec.training.offer import register, said
from localspec.training.places import require_writable, resumable
from localspec.training.questions import Conversation, made_up, read_prompts
from localspec.training.registry import describe, slug
from localspec.training.run import OWNER, HeadSettings, train_head


@dataclass(frozen=True)
class Errand:
    """Flags as they were given. kind: draft, or a kind of head. made_up: how many requests of
    ours. start_from: a draft that learns on. options: of the kind."""

    kind: str
    load: LoadOptions
    prompts: Sequence[Path] = ()
    from_chats: bool = False
    made_up: int = 0
    start_from: str | None = None
    minutes: float = 30.0
    answer_minutes: float = 15.0
    out: Path | None = None
    work: Path | None = None
    max_answer_length: int = 256
    batch: int = 4096
    rate: float | None = None
    device: str | None = None
    threads: int | None = None
    seed: int = 1
    options: dict[str, int] = field(default_factory=dict)


def run_errand(errand: Errand) -> tuple[dict[str, Any], str]:
    """Train and register. Raises LocalspecError."""
    _require_sense(errand)
    settings = settings_for(errand.load.home)
    conversations = _conversations(errand, settings)
    source, place = _target(errand.load, errand.device, errand.threads)
    start = _start(errand, source)
    name = _name(settings, source)
    kind_folder = f"{errand.kind}-personal" if errand.from_chats else errand.kind
    own = settings.home / (
        Path("drafts", name, "personal" if errand.from_chats else "distilled")
        if errand.kind == "draft"
        else Path("heads", name, kind_folder)
    )
    out = (errand.out or own).expanduser()
    work = (errand.work or settings.home / "training" / name).expanduser()
    _require_places(errand, out, work, settings.profile_folders[0])
    wanted = HeadSettings(
        errand.kind,
        source.target,
        source.target_name,
        conversations,
        out,
        work,
        errand.minutes,
        errand.answer_minutes,
        errand.options,
        start,
        _in_use(errand, source),
        errand.from_chats,
        place.dtype,
        place.bits,
        place.device,
        errand.max_answer_length,
        batch=errand.batch,
        rate=errand.rate,
        seed=errand.seed,
        free_bytes=lambda: free_bytes_now(place.hardware),
    )
    with resumable(work, to_stderr):
        trained = train_head(wanted, to_stderr)
    profile, notice = register(settings, source.target_name, source.target, trained)
    result = {
        **asdict(trained.made),
        "out": str(trained.folder),
        "rivals": [rival.as_dict() for rival in trained.rivals],
        "profile": profile,
        "notice": notice,
    }
    return result, said(trained, profile, notice)


def report_gains(
    folders: Sequence[Path], load: LoadOptions, device: str | None, threads: int | None
) -> tuple[dict[str, Any], str]:
    """Measure what results would gain here. Without folders every result in HOME is looked at,
    and one that cannot be measured keeps none of the others from it. Raises LocalspecError."""
    source, place = _target(load, device, threads)
    bench = Bench(source.target, fingerprint(source.target), place.dtype, place.device, place.bits)
    left_out = list[str]()
    if folders:
        measured = gains(bench, [folder.expanduser() for folder in folders], to_stderr)
    else:
        found = _all_made(settings_for(load.home), source)
        measured, left_out = gains_of_all(bench, found, to_stderr)
    where = {"device": place.hardware.device_name, "dtype": place.precision}
    result = {**where, "gains": [gain.as_dict() for gain in measured], "left_out": left_out}
    heading = f"Measured on {place.hardware.device_name}, {place.precision}."
    return result, "\n\n".join([heading, *map(render, measured), *left_out])


def _all_made(settings: Settings, source: Source) -> list[Path]:
    """Every result in HOME for this target. Raises ConfigError where there is none."""
    name = _name(settings, source)
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


def accepted_of(
    load: LoadOptions,
    prompts: Sequence[Path],
    num_made_up: int,
    temperatures: str,
    max_tokens: int,
    out: Path | None,
    seed: int,
) -> tuple[dict[str, Any], str]:
    """Measure what drafts are accepted, and keep it. Raises LocalspecError."""
    given = listed_numbers(temperatures)
    conversations = [one for path in prompts for one in read_prompts(path.expanduser())]
    conversations += made_up(num_made_up)
    if not conversations:
        raise ConfigError(
            "There is nothing to ask the target. Give --prompts with a .jsonl file or --made-up "
            "with a number of requests of ours."
        )
    own = settings_for(load.home)
    place = out or own.home / "accepted" / f"{_name(own, resolve(load))}.json"
    settings = AcceptedSettings(load, conversations, given, max_tokens, place.expanduser())
    origin, measured = measure_accepted(settings, to_stderr)
    result = {**asdict(origin), "drafters": measured, "out": str(settings.out)}
    return result, (
        f"{settings.out} holds what {len(measured)} drafters of {origin.target} were accepted over "
        f"{origin.num_prompts} prompts. A profile names it beside the model: "
        f'accepted = "{settings.out}".'
    )


def _require_sense(errand: Errand) -> None:
    if not errand.prompts and not errand.from_chats and errand.made_up < 1:
        raise ConfigError(
            "There is nothing to ask the target. Give --prompts with a .jsonl file, --made-up with "
            "a number of requests of ours, or --from-chats to learn from your own conversations."
        )
    numbers = {
        "--minutes": errand.minutes,
        "--batch": errand.batch,
        "--max-answer-length": errand.max_answer_length,
        "--rate": 1.0 if errand.rate is None else errand.rate,
    }
    for flag, value in numbers.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{flag} is {value}, but must be more than 0.")
    if not 0 <= errand.answer_minutes < float("inf"):
        raise ConfigError(f"--answer-minutes is {errand.answer_minutes}, but must be 0 or more.")


def _require_places(errand: Errand, out: Path, work: Path, profiles: Path) -> None:
    """Raises StoreError for a folder that could not be written when it is needed."""
    part = out.parent / f".{out.name}.part"  # beside it, as a result is written
    require_writable(out, part, "--home" if errand.out is None else "--out")
    require_writable(work, work / OWNER, "--home" if errand.work is None else "--work")
    require_writable(profiles, profiles / "some.toml", "--home")


def _conversations(errand: Errand, settings: Settings) -> list[Conversation]:
    found = [one for path in errand.prompts for one in read_prompts(path.expanduser())]
    found += made_up(errand.made_up)
    if errand.from_chats:
        if not settings.database.is_file():
            raise StoreError(
                f"There is no log at {settings.database}. Chat first, or name its --home."
            )
        replies = read_replies(settings.database)
        if not replies:
            raise StoreError(
                f"The log at {settings.database} holds no finished replies yet. Chat for a while "
                "and come back, or train from --prompts."
            )
        chats = {reply.conversation_id for reply in replies}
        to_stderr(
            f"Found {len(replies)} replies in {len(chats)} conversations of your own. They are "
            "read from this computer's log and stay on it."
        )
        found += [
            Conversation(f"chat:{one.conversation_id}", one.before, logged=one.text)
            for one in replies
        ]
    return found


def _target(load: LoadOptions, device: str | None, threads: int | None) -> tuple[Source, Place]:
    """Raises ModelError for a target that cannot chat, which no draft or head would change."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(require_threads("--threads", threads))
    source = resolve(load)
    place = place_for(load, source, _on(device), torch)
    kv_shape(read_config(source.target), place.context_length)  # refuses what the chat refuses
    return source, place


def _on(device: str | None) -> Hardware:
    """The machine, with the device that was asked for."""
    found = confirmed_by_torch(probe(), torch)
    if device is None or device == found.device:
        return found
    if device != "cpu":
        raise ConfigError(
            f"The device {device!r} was asked for, and this computer has {found.device_name} "
            f"({found.device}). Leave --device out, or give cpu."
        )
    return replace(found, device="cpu", gpu=None)


def _start(errand: Errand, source: Source) -> Path | None:
    """The draft that learns on: the one named, or with one's own chats the target's draft."""
    if errand.kind != "draft":
        return None
    start = source.draft if errand.from_chats else None
    if errand.start_from is not None:
        start = resolve(LoadOptions(model=errand.start_from, home=errand.load.home)).target
    if start is not None:
        require_compatible(source.target, start)
    return start


def _name(settings: Settings, source: Source) -> str:
    """The target's, as folders of HOME have it: no other target's results lie under it."""
    return slug(describe(settings, source.target_name, source.target).model_id)


def _in_use(errand: Errand, source: Source) -> tuple[Path, ...]:
    """What drafts so far in the place of what is to be trained, the profile's draft or its heads
    of that kind. Heads that cannot be read are among them: that is said of them later."""
    if errand.kind == "draft":
        usual = resolve(replace(errand.load, draft=None, fetches=False))
        if usual.draft is None and usual.draft_refusal != Source.draft_refusal:
            to_stderr(f"The draft in use so far cannot be judged: {usual.draft_refusal}")
        return () if usual.draft is None else (usual.draft,)
    native = (source.target,) if errand.kind == "mtp" and ships_mtp(source.target) else ()
    return (*(each for each in source.heads if _kind(each) in (errand.kind, None)), *native)


def _kind(folder: Path) -> str | None:
    try:
        return head_kind(folder)
    except ModelError:
        return None
