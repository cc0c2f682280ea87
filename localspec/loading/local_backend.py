"""The composition root: what a person asked for -> a backend that answers.

Contract: `open_local_backend` checks, plans memory, loads target, draft and drafters, and
restores what the controller learnt on this combination. A drafter that cannot be had is a
status with its reason, never an error; only the target is indispensable.

Not here: the decisions themselves (planner), measuring (engine.calibrate), the page.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.chat.local import Loaded, LocalBackend
from localspec.chat.slots import Slot
from localspec.chat.template import ChatTemplate
from localspec.chat.template_process import template_process
from localspec.controller.controller import SPLIT_TARGET, identity
from localspec.controller.shipped_acceptance import read_accepted
from localspec.core.backend import Description, Report
from localspec.core.errors import ConfigError
from localspec.core.options import FASTEST, KERNELS, SAME_BITS, USUAL_PARALLEL, LoadOptions
from localspec.core.units import gib
from localspec.drafters.registry import REGISTRY
from localspec.formats.folder_files import check_folder, notices_of
from localspec.loading.capture import capturable, pool_of
from localspec.loading.drafters import (
    Gathered,
    beside_bytes,
    build_drafters,
    gather,
    lost_parts,
    marks_of,
    slot_beside,
)
from localspec.loading.fitting import (
    check_target,
    experts_notice,
    keep_out_of_ram,
    load_at,
    with_experts,
)
from localspec.loading.placement import (
    Place,
    draft_places,
    place_for,
    require_movable_draft,
    return_memory,
)
from localspec.loading.prefixes import keep_texts
from localspec.loading.torch_start import quiet_torch
from localspec.machine.hardware import free_bytes_now, hardware_for, probe
from localspec.machine.model import Model
from localspec.machine.nvml import NO_LIBRARY, energy_counter
from localspec.machine.sources import resolve, with_head_as_draft

if TYPE_CHECKING:
    from localspec.controller.controller import Controller
    from localspec.core.decoding import Drafter
    from localspec.drafters.parts import Parts
    from localspec.engine.threads import Threads
    from localspec.forward.load import Opened
    from localspec.forward.model import LanguageModel

EQUAL_WITHIN_ROUNDING = (
    "Here one token and several at once are computed equal within rounding, not to the bit: in a "
    "near tie a reply may go on otherwise with drafting than without."
)
OF_ROUNDED_ROWS = (
    "LLM.int8 rounds what a layer reads to 8 bits too, by all tokens that it reads at once. Its "
    "output lies about 1 % off that of the 8-bit weights, and one token and several at once differ "
    "by as much, so a reply may go on otherwise with drafting than without. In 4 bits they are "
    "equal within rounding."
)
QUANTISED_HEAD = (
    "The output head is kept in 4 bits, as asked (on a GPU the embedding too), which changes what "
    "the model says. Drafting changes nothing beyond that: replies are exactly those of the model "
    "as it is loaded."
)
QUANTISED_AGAIN = (
    "The 4-bit weights of its files were unpacked and quantised a second time: torch's kernel for "
    "4 bits in groups does not take their layout, or does not run on this device."
)
NO_TEMPLATE = (
    "This model has no chat template, so it was not trained to chat: it continues the text of the "
    "conversation as it stands. Its instruct or chat variant would answer."
)
THOUGHT_IS_TEXT = (
    "What ends a thought is no token of its own in this model, so Thinking tokens cannot end one: "
    "they are added to Max tokens, and thought and answer share both."
)
THREADS = re.compile(r" \| \d+ threads")  # in what earlier versions called a combination
SPENT_ON_SLOTS = 0.25  # of the free memory, where nobody asked for slots


def open_local_backend(
    options: LoadOptions,
    state: Mapping[str, Any] | None,
    report: Report,
    past: Sequence[str] = (),
    beside_page: bool = False,
    replies: Sequence[str] | None = None,
    prefix_folder: Path | None = None,
) -> LocalBackend:
    """Load what `options` ask for. Raises ConfigError, ModelError, MemoryShortage.

    state: a snapshot of an earlier run, by combination of target, draft, precision, device and
    torch; only that of this combination is restored. report: called with a phrase before each long
    phase. past: texts of earlier conversations, for drafters that look texts up. beside_page: a
    page is drawn on the same processor. replies: of the log, for the tokens that drafts are made
    of; None for no log. prefix_folder: keeps what is read of logged chats; None for memory alone.
    """
    texts = _Texts(past, replies)
    with _set_aside_from_garbage():
        return _opened(options, state, report, texts, beside_page, prefix_folder)


@contextmanager
def _set_aside_from_garbage() -> Iterator[None]:
    """Load without passes of the garbage collector, and spare it what was loaded.

    A full pass looks at some 450,000 objects of torch and transformers, which takes 0.2 s, in the
    middle of a reply as well. What an earlier load has left is freed first."""
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class _Texts:
    """Texts of earlier conversations. past: of all messages. replies: of models, None for no
    log."""

    past: Sequence[str]
    replies: Sequence[str] | None


@dataclass(frozen=True)
class _Begun:
    """What is loaded before anything drafts. notices: what a person should know of it."""

    source: Model
    place: Place
    target: LanguageModel
    threads: Threads | None
    template: ChatTemplate
    found: Gathered
    notices: tuple[str, ...]


def _opened(
    options: LoadOptions,
    state: Mapping[str, Any] | None,
    report: Report,
    texts: _Texts,
    beside_page: bool,
    prefix_folder: Path | None,
) -> LocalBackend:
    from localspec.engine.engine import Engine
    from localspec.formats.fingerprint import fingerprint

    options = with_head_as_draft(options, report)
    template_process()  # starts beside the import of torch
    torch = quiet_torch(report, options.kernels)
    begun = _begun(options, report, texts, beside_page, torch)
    found, place, draft = begun.found, begun.place, begun.source.draft
    drafters, statuses = build_drafters(found.parts, report)
    learnt = _learnt(options, begun, drafters, state or {}, torch)
    kernels = _kernels(options, place)
    prefixes = keep_texts(begun.source, found.parts, place, kernels, prefix_folder)
    engine = Engine(begun.target, drafters)
    beside, too_many = _beside(options, Slot(engine, learnt.controller), found.parts, place)
    lost = lost_parts(options, found, statuses)
    return LocalBackend(
        Loaded(
            engine=engine,
            controller=learnt.controller,
            beside=beside,
            threads=begun.threads,
            template=begun.template,
            description=Description(
                target=begun.source.name,
                draft=draft.name if draft is not None and "draft_model" in drafters else None,
                device=place.hardware.device_name,
                dtype=place.precision,
                context_length=place.context_length,
                drafters=(*statuses, *found.odd),
                notices=(*begun.notices, *found.notices, *lost, *learnt.notices, *too_many),
                fingerprint=fingerprint(begun.source.folder),
                kernels=kernels,
            ),
            identity=learnt.identity,
            return_memory=partial(return_memory, place.device),
            joules=energy_counter(place.hardware.gpu.uuid if place.hardware.gpu else None),
            prefixes=prefixes,
        )
    )


def _begun(
    options: LoadOptions, report: Report, texts: _Texts, beside_page: bool, torch: Any
) -> _Begun:
    """Raises ConfigError, ModelError, MemoryShortage."""
    source = resolve(options, report)
    _check_kernels(options.kernels)
    machine = probe()
    hardware = hardware_for(machine, options.device, torch)
    place = with_experts(options, source, place_for(options, source, hardware, torch))
    require_movable_draft(options, source)
    draft_at = draft_places(options, place, machine, torch)
    if not options.anyway:
        keep_out_of_ram(place)
    target, notices = _target(options, source, place, report)
    threads = _threads(target, report, beside_page, place.experts_in_ram)
    pool = pool_of(place)
    target = capturable(target, pool, _kernels(options, place) == FASTEST)
    template = ChatTemplate.load(source.folder, options.raw)
    found = gather(
        source, place, draft_at, target, template, texts.past, texts.replies, pool, report
    )
    if found.apart is not None:
        _threads(found.apart, report, beside_page)
    # A computer without an NVIDIA card has no fault; only `doctor` mentions it.
    of_machine = [notice for notice in hardware.notices if notice != NO_LIBRARY]
    told = [NO_TEMPLATE] if template.is_raw and not options.raw else template.reading.notices
    told += [THOUGHT_IS_TEXT] if template.thinks and template.thought_limit is None else []
    return _Begun(source, place, target, threads, template, found, (*of_machine, *notices, *told))


def _target(
    options: LoadOptions, source: Model, place: Place, report: Report
) -> tuple[LanguageModel, list[str]]:
    """The loaded target, and what a person should know of it."""
    from localspec.forward.recurrent import refusal_of

    report(f"loading {source.name}")
    short = check_target(source.folder, place, options.anyway)
    opened = load_at(source.folder, place, is_fastest=_kernels(options, place) == FASTEST)
    target = opened.model
    slower = "This model runs on transformers' own forward, which is slower."
    own = None if opened.notice is None else f"{slower} {opened.notice}"
    is_told = not opened.has_invariant_rows and refusal_of(target) is None
    is_by_library = place.device.type != "cpu" or opened.notice is not None
    rounded = OF_ROUNDED_ROWS if place.bits == 8 and is_by_library else EQUAL_WITHIN_ROUNDING
    head = QUANTISED_HEAD if place.quantises_head else None
    split = experts_notice(source.folder, place)
    repacked = _repacked(source, place, opened)
    told = (short, own, split, repacked, rounded if is_told else None, head, opened.unread)
    return target, [notice for notice in (*told, *notices_of(source.folder)) if notice is not None]


def _repacked(source: Model, place: Place, opened: Opened[LanguageModel]) -> str | None:
    """What became of weights that the files keep in 4 bits."""
    if opened.repacking_error is not None:
        return (
            "The 4-bit weights of its files are used as they are. Their scales and what they "
            "multiply are rounded to bf16, which changes the output of a layer by at most "
            f"{opened.repacking_error:.2%}."
        )
    if place.bits != 4 or opened.notice is not None:
        return None
    stored = check_folder(source.folder).stored
    return QUANTISED_AGAIN if stored is not None and stored.is_in_4_bits else None


def _check_kernels(kernels: str | None) -> None:
    """Raises ConfigError for a name that is none."""
    if kernels is not None and kernels not in KERNELS:
        raise ConfigError(f"--kernels {kernels!r} is none of {', '.join(KERNELS)}.")


def _kernels(options: LoadOptions, place: Place) -> str:
    """What the same bits cost is measured on a processor only, so a GPU has them when asked."""
    return options.kernels or (SAME_BITS if place.device.type == "cpu" else FASTEST)


@dataclass(frozen=True)
class _Learnt:
    """identity: of the combination that the controller's state belongs to."""

    controller: Controller
    identity: str
    notices: tuple[str, ...]


def _learnt(
    options: LoadOptions,
    begun: _Begun,
    drafters: Mapping[str, Drafter],
    state: Mapping[str, Any],
    torch: Any,
) -> _Learnt:
    """The controller, which starts from what was learnt here, else from what was shipped."""
    source, apart = begun.source, begun.found.apart
    marks = marks_of(source, begun.found.parts.heads)
    device = None if apart is None else str(apart.device)
    combination = _identity(
        source, marks, begun.place, _kernels(options, begun.place), device, torch
    )
    shipped, misfit = read_accepted(source.accepted, marks)
    controller = _controller(drafters, shipped)
    own = {THREADS.sub("", name): each for name, each in state.items()}.get(combination)
    is_lost = own is not None and not controller.restore(own)
    unread = "What was learnt earlier could not be read, so it is learnt anew." if is_lost else None
    told = tuple(each for each in (misfit, unread) if each is not None)
    return _Learnt(controller, combination, told)


def _controller(drafters: Mapping[str, Drafter], shipped: Mapping[str, Any] | None) -> Controller:
    from localspec.controller.acceptance import Acceptance
    from localspec.controller.catch_up import IN_TARGET
    from localspec.controller.controller import Controller
    from localspec.controller.costs import Costs

    known = [REGISTRY[name] for name in drafters]
    shared = {info.name: info.shares for info in known if info.shares is not None}
    shared |= {info.name: IN_TARGET for info in known if info.reads_nothing}
    return Controller(drafters, Costs(), Acceptance(), Costs(), shipped, shared)


def _beside(
    options: LoadOptions, first: Slot, parts: Parts, place: Place
) -> tuple[tuple[Slot, ...], tuple[str, ...]]:
    """Slots for the replies beside the first, as many as were asked for or as fit, and what a
    person should know of them."""
    asked = options.parallel
    usual = USUAL_PARALLEL if place.device.type == "cpu" else 1
    wanted = (asked or usual) - 1
    slot_bytes = beside_bytes(parts, first)
    free_bytes = free_bytes_now(place.hardware)
    if asked is None:
        free_bytes = int(SPENT_ON_SLOTS * free_bytes)
    fitting = min(wanted, free_bytes // max(1, slot_bytes))
    made = (slot_beside(parts, first) for _ in range(fitting))
    slots = tuple(slot for slot in made if slot is not None)
    if asked is None or len(slots) == wanted:
        return slots, ()
    why = f"each takes {gib(slot_bytes)} for its context, and {gib(free_bytes)} is free"
    if len(slots) < fitting:
        why = "this model runs on transformers, one reply at a time"
    return slots, (f"{len(slots) + 1} of {asked} replies are written at the same time: {why}.",)


def _threads(
    model: LanguageModel, report: Report, beside_page: bool, is_split: bool = False
) -> Threads | None:
    """Set the number of threads that is best for a model on the processor, or for the experts
    there if it is split between GPU and RAM; None elsewhere."""
    from localspec.engine.threads import choose_threads

    if model.device.type != "cpu" and not is_split:
        return None
    report("choosing the number of threads")
    return choose_threads(lambda: _one_step(model), beside_page)


def _one_step(model: LanguageModel) -> None:
    model.forward([1])
    model.cache.rollback(0)


def _identity(
    source: Model,
    marks: Mapping[str, str],
    place: Place,
    kernels: str,
    apart: str | None,
    torch: Any,
) -> str:
    """What learnt costs and acceptances belong to. The weights count too: a head or a draft that
    was trained again keeps its name. The number of threads does not: it is chosen by time at each
    load, and costs are measured anew in each run. apart: the device of a draft that has its own."""
    return identity(
        source.name,
        None if source.draft is None else source.draft.name,
        place.precision,
        place.hardware.device_name,
        f"torch {torch.__version__}",
        kernels,
        ", ".join(f"{part} {mark}" for part, mark in sorted(marks.items())),
        *([] if apart is None else [f"draft on {apart}"]),
        *([SPLIT_TARGET] if place.experts_in_ram else []),
    )
