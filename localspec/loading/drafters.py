"""Everything that may draft for a loaded target: draft models, heads, past texts, the drafters.

Contract: `gather` loads what the source names and says of each thing that is not to be had why;
`build_drafters` builds every registered drafter from it. A drafter that cannot be had is a status
with its reason, never an error. `marks_of` tells one set of parts from another of the same names.

Not here: choosing among them (controller.controller).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from localspec.chat.out_of_memory import fault_of
from localspec.chat.slots import Slot
from localspec.chat.template import ChatTemplate
from localspec.core.backend import DrafterStatus, Report
from localspec.core.decoding import Drafter
from localspec.core.draft_window import draft_context
from localspec.core.errors import (
    DraftMismatch,
    LocalspecError,
    MemoryShortage,
    ModelError,
    first_line,
)
from localspec.core.off_code import OffCode
from localspec.core.options import NO_DRAFT, LoadOptions
from localspec.core.units import capital, gib
from localspec.formats.folder_files import (
    check_folder,
    gguf_file,
    longest_of,
    name_of,
    weight_files,
)
from localspec.formats.gguf_module import module_near
from localspec.loading.capture import capturable, pool_of
from localspec.loading.fitting import (
    heads_without_room,
    keep_out_of_ram,
    load_at,
    refuse_shortage,
)
from localspec.loading.placement import Place, return_memory
from localspec.loading.vocabulary import tokens_note, vocabulary_of_log
from localspec.machine.compatibility import require_compatible, size_warning
from localspec.machine.model import Model

if TYPE_CHECKING:
    from localspec.drafters.parts import Parts
    from localspec.drafters.vocabularies import Foreign
    from localspec.forward.graphs import GraphPool
    from localspec.forward.model import LanguageModel

NONE_CHOSEN = "no draft model was chosen for this target; --draft names one."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gathered:
    """parts: what drafters can be built from. odd: what is to be said of heads that no drafter
    names. notices: what a person should know of what was loaded."""

    parts: Parts
    odd: tuple[DrafterStatus, ...]
    notices: tuple[str, ...]

    @property
    def apart(self) -> LanguageModel | None:
        """The draft model that runs on another device than the target; None without one."""
        foreign = self.parts.foreign
        drafts = (self.parts.draft, None if foreign is None else foreign.model)
        device = self.parts.target.device
        return next((one for one in drafts if one is not None and one.device != device), None)


class _Draft(NamedTuple):
    """A loaded draft model. moved: where it runs and why, as a sentence, where that is not beside
    the target."""

    model: LanguageModel
    place: Place
    moved: str | None


def gather(
    source: Model,
    place: Place,
    draft_places: Sequence[Place],
    target: LanguageModel,
    template: ChatTemplate,
    past: Sequence[str],
    replies: Sequence[str] | None,
    pool: GraphPool | None,
    report: Report,
) -> Gathered:
    """Load everything the source names beside the target. place: of the target. draft_places: for a
    draft model, the preferred first. replies: of earlier conversations, None for no log."""
    from localspec.drafters.parts import Parts
    from localspec.forward.decoder import narrowed
    from localspec.forward.recurrent import refusal_of

    if (why := refusal_of(target)) is not None:
        return Gathered(Parts(target, draft_refusal=why), (), ())
    draft, refusal, code = _draft(source, target, draft_places, report)
    stranger = _path_of(source.drafts) if code == "incompatible_vocabulary" else None
    foreign, foreign_refusal = _foreign(source, stranger, target, draft_places, report)
    heads, odd = heads_of(source)
    used_by = [place] if draft is None else [place, draft.place]
    counted = replies if draft or heads else None
    vocabulary = vocabulary_of_log(counted, template, target, used_by, report)
    if draft is not None and (model := narrowed(draft.model, vocabulary)) is not draft.model:
        draft = draft._replace(model=model)
        return_memory(draft.place.device)  # of the other rows
    is_apart = draft is not None and draft.place.device != target.device
    draft_pool = pool_of(draft.place) if draft is not None and is_apart else pool
    parts = Parts(
        target,
        None if draft is None else capturable(draft.model, draft_pool),
        draft_refusal=refusal,
        draft_code=code,
        pool=pool,
        heads=heads,
        foreign=None if foreign is None else foreign[0],
        foreign_refusal=foreign_refusal,
        past=tuple(tuple(template.encode_text(text)) for text in past),
        draft_pool=draft_pool,
        refused_heads=heads_without_room(source.folder, heads, place),
        bits=place.bits,
        vocabulary=vocabulary,
    )
    drafts = [each for each in (draft, foreign and foreign[1]) if each is not None]
    told = chain.from_iterable(
        (size_warning(source.name, target.weight_bytes, "The draft", one.weight_bytes), moved)
        for one, _, moved in drafts
    )
    return Gathered(parts, odd, tuple(each for each in told if each is not None))


def build_drafters(
    parts: Parts, report: Report
) -> tuple[dict[str, Drafter], tuple[DrafterStatus, ...]]:
    """Every registered drafter that can be built, and a status for each that is known."""
    from localspec.drafters.registry import REGISTRY, drafter_class
    from localspec.forward.recurrent import refusal_of

    built, statuses = dict[str, Drafter](), list[DrafterStatus]()
    for name, info in REGISTRY.items():
        why = refusal_of(parts.target, info.needs_trees, info.reads_layers)
        if why is not None:
            statuses.append(DrafterStatus(name, False, why, code=parts.draft_code))
            continue
        report(f"preparing {info.label}")
        try:
            built[name] = drafter_class(name).build(parts)
        except (LocalspecError, RuntimeError, MemoryError) as error:
            lacks_draft = info.needs == "draft" and parts.draft is None
            code = parts.draft_code if lacks_draft else _code_of(error)
            statuses.append(DrafterStatus(name, False, _reason_of(error, info.label), code=code))
        except Exception as error:  # one drafter's fault, or its file's, must not end the chat
            log.exception("%s could not be prepared", name)
            statuses.append(
                DrafterStatus(name, False, _fault_words(info.label, error), code="no_draft")
            )
        else:
            memory = built[name].memory_bytes
            said = f"ready, {gib(memory)}" if memory else "ready"
            said += tokens_note(info, built[name], parts.vocabulary)
            statuses.append(DrafterStatus(name, True, said, memory, shares=info.shares))
    return built, tuple(statuses)


def slot_beside(parts: Parts, first: Slot) -> Slot | None:
    """One more sequence beside those of `first`, with caches of its own and with those of its
    drafters that can have more than one; None where the model runs one sequence at a time. Raises
    MemoryError, RuntimeError where there is no memory for it."""
    from localspec.drafters.registry import drafter_class
    from localspec.engine.engine import Engine

    own = parts.beside()
    if own is None:
        return None
    drafters = dict[str, Drafter]()
    for name in first.engine.drafters:
        with suppress(ModelError):  # a draft model that runs one sequence at a time
            drafters[name] = drafter_class(name).build(own)
    return Slot(Engine(own.target, drafters), first.controller.beside(drafters))


def beside_bytes(parts: Parts, first: Slot) -> int:
    """What a slot beside `first` takes."""
    from localspec.drafters.parts import DrafterBase

    foreign = None if parts.foreign is None else parts.foreign.model
    models = (model for model in (parts.target, parts.draft, foreign) if model is not None)
    drafters = (one for one in first.engine.drafters.values() if isinstance(one, DrafterBase))
    held = sum(model.cache.kv_bytes for model in models)
    return held + sum(drafter.beside_bytes for drafter in drafters)


def lost_parts(
    options: LoadOptions, found: Gathered, statuses: Sequence[DrafterStatus]
) -> tuple[str, ...]:
    """Return what is to be said of a draft model and of heads that were asked for and cannot be
    used, or have no room: another drafter takes their place, and nobody would know."""
    own, parts = {Path(folder).expanduser() for folder in options.heads}, found.parts
    asked = {kind for kind, folder in parts.heads.items() if folder in own}
    unavailable = [each for each in statuses if each.name in parts.heads and not each.is_available]
    lost = [e.reason for e in unavailable if e.name in asked or e.code == "no_memory"]
    is_lost = parts.draft is None and parts.foreign is None
    if is_lost and options.draft not in (None, NO_DRAFT):
        lost.append(f"The draft model that was asked for is not used: {parts.draft_refusal}")
    elif is_lost and parts.draft_code == "no_memory":
        lost.append(f"The draft model is left out: {parts.draft_refusal}")
    return (*lost, *(each.reason for each in found.odd if own or each.code == "no_draft"))


def _reason_of(error: Exception, label: str) -> str:
    """Return why a drafter cannot be had. label: its name in a sentence."""
    if isinstance(error, LocalspecError) or fault_of(error).kind != "memory":
        return str(error)
    said = f"memory ran out while it was loaded: {first_line(error).rstrip('.')}"
    remedy = "Close other programs, or shorten --context."
    return f"{capital(label)} is left out, for {said}. The model keeps its context. {remedy}"


def _fault_words(label: str, error: Exception) -> str:
    first_line = str(error).strip().split("\n")[0]
    return (
        f"{capital(label)} could not be prepared ({type(error).__name__}: {first_line}). Fetch or "
        "train its files again, or choose another drafter."
    )


def _code_of(error: Exception) -> OffCode:
    return "no_memory" if fault_of(error).kind == "memory" else "no_draft"


def _draft(
    source: Model, target: LanguageModel, places: Sequence[Place], report: Report
) -> tuple[_Draft | None, str, OffCode]:
    """The draft model, or why there is none, in words and as a code."""
    draft = source.draft
    if draft is None:
        faults = [each.fault for each in source.drafts if each.head is None]
        return None, faults[0] if faults else NONE_CHOSEN, "no_draft"
    try:
        require_compatible(source.folder, draft.folder)
        report(f"loading {draft.name}")
        return _load_draft(draft.folder, target, places), "", "no_draft"
    except DraftMismatch as error:
        return None, str(error), "incompatible_vocabulary"
    except (ModelError, MemoryShortage) as error:
        return None, str(error), _code_of(error)


def _foreign(
    source: Model,
    stranger: Path | None,
    target: LanguageModel,
    places: Sequence[Place],
    report: Report,
) -> tuple[tuple[Foreign, _Draft] | None, str]:
    """A draft with other tokens: the one asked for before the profile's own."""
    from localspec.drafters.vocabularies import foreign

    folder = stranger or _path_of(source.foreign)
    if folder is None:
        return None, "no draft with another vocabulary was chosen; --draft may name one."
    try:
        report(f"loading {name_of(folder)}")
        loaded = _load_draft(folder, target, places)
        return (foreign(source.folder, folder, loaded.model), loaded), ""
    except (ModelError, MemoryShortage) as error:
        return None, str(error)


def _path_of(models: Sequence[Model]) -> Path | None:
    """The path of the first model; None where there is none on this machine."""
    return models[0].path if models else None


def _load_draft(folder: Path, target: LanguageModel, places: Sequence[Place]) -> _Draft:
    """On the first of these places that has room for it. Raises ModelError, MemoryShortage."""
    from localspec.forward.load import require_rollback

    require_rollback(folder)
    longest = longest_of(check_folder(folder).config)
    shorter = [
        replace(place, context_length=draft_context(place.context_length, longest))
        for place in places
    ]
    there, why = _with_room(folder, shorter)
    if there.device == target.device:
        return _Draft(load_at(folder, there, is_fastest=True).model, there, None)
    keep_out_of_ram(there)
    model = load_at(folder, there, is_fastest=True).model
    moved = f"The draft model {name_of(folder)} runs on {there.hardware.device_name}, {why}"
    return _Draft(model, there, moved)


def _with_room(folder: Path, places: Sequence[Place]) -> tuple[Place, str]:
    """The first place that has room for a draft, and why it is taken. Raises the MemoryShortage of
    the preferred one."""
    preferred, *others = places
    try:
        refuse_shortage(folder, preferred)
        return preferred, "as asked."
    except MemoryShortage as shortage:
        for place in others:
            with suppress(MemoryShortage):
                refuse_shortage(folder, place)
                return place, f"since there is no room beside the target. {shortage}"
        raise


def heads_of(source: Model) -> tuple[dict[str, Path], tuple[DrafterStatus, ...]]:
    """The first folder of each kind, and a status for each that could not be fetched, is no head or
    another target's. A target that ships modules of its own brings them along."""
    from localspec.formats.fingerprint import require_trained_for
    from localspec.formats.head_folder import head_kind
    from localspec.forward.heads.mtp_files import ships_mtp

    found = dict[str, Path]()
    odd = [
        DrafterStatus(f"head {each.name}", False, each.fault, code="no_draft")
        for each in source.drafts
        if each.head is not None
    ]
    for folder in source.heads:
        try:
            kind = head_kind(folder)
            require_trained_for(folder, source.folder)
            found.setdefault(kind, folder)
        except ModelError as error:
            odd.append(DrafterStatus(f"head {folder.name}", False, str(error)))
    if ships_mtp(source.folder):
        found.setdefault("mtp", source.folder)
    return found, tuple(odd)


def marks_of(source: Model, heads: Mapping[str, Path]) -> dict[str, str]:
    """A short hash of the weights of the target, of each draft and of each kind of head: what was
    learnt with others is not theirs. A part that cannot be read has none; its status says why."""
    from localspec.formats.fingerprint import weights_mark

    draft, foreign = _path_of(source.drafts), _path_of(source.foreign)
    models = {"target": source.path, "draft": draft, "foreign": foreign}
    found = dict[str, str]()
    for part, folder in {**models, **heads}.items():
        if folder is None:
            continue
        with suppress(ModelError, OSError):
            is_own = part in heads and folder == source.folder
            if files := _files_beside(folder) if is_own else _files_of(folder, part in heads):
                found[part] = weights_mark(files)
    return found


def _files_of(folder: Path, is_head: bool) -> list[Path]:
    """The files of a model, or of a head. Raises ModelError."""
    return sorted(folder.glob("*.safetensors")) if is_head else weight_files(folder)


def _files_beside(folder: Path) -> list[Path]:
    """The file of a module beside a target's GGUF file. A module in the target's own files is told
    by the target. Raises ModelError."""
    file = gguf_file(folder)
    near = None if file is None else module_near(file)
    return [] if near is None else [near]
