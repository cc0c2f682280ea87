"""What `plan` prints: what a person asked, this machine and the profiles -> one report.

Contract: `make_plans` gives the report, `render` its text. Named models are planned in full. When
none is named every model of the profiles is, in the order of the Models tab (recommend), each
(model, drafter) once, either planned or refused. Nothing is loaded or fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, inf

from localspec.core.config import Settings, nearest, settings_for
from localspec.core.decoding import AUTO, OFF
from localspec.core.errors import ConfigError, ModelError
from localspec.core.options import AUTO_EXPERTS, NO_DRAFT, LoadOptions
from localspec.core.precisions import FULL_BYTES, PRECISIONS
from localspec.core.speculation import Measurement
from localspec.core.units import compared, gib
from localspec.drafters.registry import label_of
from localspec.machine.gains import expected_gain
from localspec.machine.hardware import Hardware, on_device, probe
from localspec.machine.memory import GIB, Room, full_precision, other_device, room_for
from localspec.machine.model import Model
from localspec.machine.nvml import Gpu
from localspec.machine.planner import plan, preference
from localspec.machine.plans import (
    DEFAULT_CONTEXT,
    Plan,
    PlanReport,
    PlanRequest,
    Refusal,
)
from localspec.machine.profiles import find_profile, load_profiles, offered_ids
from localspec.machine.recommend import is_slow, worth_of
from localspec.machine.sources import compatibility_of, find_model
from localspec.machine.trained import trained_drafts

# What a desktop with a browser takes of a card, in bytes: drivers report 10.5 to 11.3 GiB free of
# 12, of which this is the middle.
DESKTOP_BYTES = int(1.1 * GIB)
# Models that the overview of `plan` lists at least.
OVERVIEW_MODELS = 8
DEVICE_WORDS = {"cuda": "a GPU", "mps": "the Apple GPU", "cpu": "the processor"}


def machine_for(
    device: str | None = None,
    vram_gib: Sequence[float] = (),
    here: Hardware | None = None,
    ram_gib: float | None = None,
) -> Hardware:
    """The machine to plan for: this one with the device asked for, or with one or two GPUs of so
    many GiB in place of its own (0: with none), a desktop on the larger. ram_gib: RAM that is free
    there, None for this machine's. Raises ConfigError."""
    here = here or probe()
    if ram_gib is not None:
        here = _with_ram(here, ram_gib)
    if not vram_gib:
        return on_device(here, device)
    if len(vram_gib) > 2:
        raise ConfigError(
            "--vram-gib was given more than twice. A target and a draft use two GPUs."
        )
    for each in vram_gib:
        if not 0 <= each * GIB < inf:
            raise ConfigError(f"--vram-gib is {each}, but must be 0 or more gibibytes.")
    largest = max(vram_gib)
    wanted = "cuda" if largest else "cpu"
    if device not in (None, wanted):
        raise ConfigError(
            f"--vram-gib {largest:g} plans for {DEVICE_WORDS[wanted]}, and --device {device} is "
            "another device. Leave one of them out."
        )
    if largest:
        return _with_gpus(here, [int(each * GIB) for each in sorted(vram_gib, reverse=True)])
    return on_device(here, "cpu") if here.device == "cuda" else here


def _with_ram(hardware: Hardware, ram_gib: float) -> Hardware:
    """Raises ConfigError."""
    if not 0 <= ram_gib * GIB < inf:
        raise ConfigError(f"--ram-gib is {ram_gib}, but must be 0 or more gibibytes.")
    num_bytes = int(ram_gib * GIB)
    host = replace(hardware.host, ram_available_bytes=num_bytes, ram_total_bytes=num_bytes)
    return replace(hardware, host=host)


def _with_gpus(hardware: Hardware, sizes: Sequence[int]) -> Hardware:
    """With GPUs of so many bytes, the largest first; of the kind of its own, where it has one. A
    desktop is drawn with the first, and the others are free."""
    kind = hardware.gpu or Gpu("GPU", "", None, None, None, None, None, has_display=False)
    kind = replace(kind, has_unified_memory=False, own_bytes=None, has_display=False)
    gpus = [
        replace(kind, uuid=f"planned {number}", total_bytes=size, free_bytes=size)
        for number, size in enumerate(sizes)
    ]
    left_bytes = max(0, sizes[0] - DESKTOP_BYTES)
    gpus[0] = replace(gpus[0], free_bytes=left_bytes, has_display=True)
    return replace(hardware, device="cuda", gpu=gpus[0], gpus=tuple(gpus))


def make_plans(
    options: LoadOptions,
    settings: Settings | None = None,
    hardware: Hardware | None = None,
    measurements: Sequence[Measurement] = (),
) -> PlanReport:
    """Plans for what `options` name, or for all profiles when they name nothing. hardware: None for
    this machine.

    Raises ConfigError and ModelError for names, values and folders that cannot be used.
    """
    context = options.context
    if context is not None and context < 1:
        raise ConfigError(f"A context of {context} tokens holds nothing. Ask for 1024 or more.")
    settings = settings or settings_for()
    profiles = load_profiles(settings.profile_folders)
    wanted = list(profiles.values())
    if options.profile is not None:
        wanted = [find_profile(options.profile, profiles)]
        profiles = {**profiles, wanted[0].name: wanted[0]}
    hardware = hardware or probe()
    room, asked = room_for(hardware), PRECISIONS.get(options.dtype or "")
    only = None if asked in FULL_BYTES else asked
    full = full_precision(None if only else options.dtype, hardware)
    other = other_device(hardware, options.draft_device)

    def drafts_of(target: Model) -> tuple[Model, ...]:
        return (*trained_drafts(settings.home, target.path), *target.drafts)

    def request_for(target: Model, named: Iterable[Model]) -> PlanRequest:
        found = [find_model(draft.id, profiles) for draft in named]
        drafts = tuple(
            each
            if each.head is not None
            else replace(each, compatibility=compatibility_of(target, each))
            for each in found
        )
        with_drafts = replace(target, drafts=drafts)
        learnt, experts = tuple(measurements), options.experts or AUTO_EXPERTS
        return PlanRequest(with_drafts, room, context, full, only, learnt, other, experts)

    if options.model is None and options.draft is None:
        requests, refused = [], list[Refusal]()
        for name in offered_ids(wanted):
            try:
                target = find_model(name, profiles)
                requests.append(request_for(target, drafts_of(target)[:1]))
            except ModelError as error:  # a profile's folder that is not there
                refused.append(Refusal(OFF, str(error)))
        report = _of_many(requests, refused, room.device)
    else:
        # Only a draft was named: the profile's default is the target, else the demo pair's.
        default = find_profile(options.profile or "demo", profiles).default
        target = find_model(options.model or default, profiles)
        drafts = (Model(options.draft),) if options.draft else drafts_of(target)
        report = plan(request_for(target, () if options.draft == NO_DRAFT else drafts))
    return _of_drafter(report, options.drafter)


def _of_many(requests: Sequence[PlanRequest], refused: list[Refusal], device: str) -> PlanReport:
    """The best plan of each (model, drafter). Less than half the context asked for comes last, and
    before it what a processor runs slowly. What has its experts in the RAM comes after the models
    of its generation that do not."""
    found = list[tuple[tuple[float, ...], Plan]]()
    for number, request in enumerate(requests):
        report, first = plan(request), dict[str, Plan]()
        for each in report.plans:
            first.setdefault(each.drafter, each)
        for each in first.values():
            is_short = each.context_length < (request.context_length or DEFAULT_CONTEXT) / 2
            is_for_code = "Coder" in each.target.name
            is_current, worth = worth_of(each, device, request.target.is_here)
            is_split, is_late = each.experts_in_ram, (is_short, is_slow(each, device))
            rank = (*is_late, not is_current, is_split, -worth, is_for_code, -number)
            found.append((rank, each))
        refused += [each for each in report.refused if each.drafter not in first]
    found.sort(key=lambda each: each[0])
    return PlanReport(device, tuple(each for _, each in found), tuple(refused))


def _of_drafter(report: PlanReport, drafter: str | None) -> PlanReport:
    """The report of one drafter alone, if one was asked for."""
    if drafter is None or drafter == AUTO:
        return report
    if drafter not in preference():
        raise ConfigError(
            f"There is no drafter '{drafter}' to plan for. "
            f"Did you mean '{nearest(drafter, preference())}'?"
        )
    plans = tuple(each for each in report.plans if each.drafter == drafter)
    refused = tuple(each for each in report.refused if each.drafter == drafter)
    if not plans and not refused:
        unknown = (
            f"No published head for {label_of(drafter)} is known for what was planned. Name one "
            "with --draft, or leave --drafter out."
        )
        refused = (Refusal(drafter, unknown),)
    return replace(report, plans=plans, refused=refused)


def render(report: PlanReport, room: Room, most: int = 5, other_gib: float | None = None) -> str:
    """The report for a terminal: of several models the best plan of each, of one all its plans with
    their reasons and what was refused; at most `most` of each, the rest counted. room: that was
    planned for. other_gib: of a second GPU that was planned for."""
    second = "" if other_gib is None else f", and a second one with {other_gib:.1f} GiB"
    second += "" if room.ram_bytes is None else f", and {gib(room.ram_bytes)} of RAM beside it"
    device = DEVICE_WORDS[report.device]
    lines = [f"Planning for {device} with {gib(room.free_bytes)} free{second}.", ""]
    best = {each.target.model_name: each for each in reversed(report.plans)}
    of_models = [each for each in report.plans if best[each.target.model_name] is each]
    is_overview = len(of_models) > 1
    shown, most_refused = of_models if is_overview else report.plans, most
    most = max(most, OVERVIEW_MODELS) if is_overview else most
    for number, each in enumerate(shown[:most], start=1):
        draft = f" with {each.draft_name}" if each.draft else ""
        draft += f" on {each.draft_device}" if each.draft_device else ""
        precision = f"{each.precision}{', experts in the RAM' if each.experts_in_ram else ''}"
        size = gib(each.bytes.total, ceil)
        size += f" and {gib(each.bytes.in_ram, ceil)} of RAM" if each.bytes.in_ram else ""
        lines.append(
            f"{number:3}. {each.target.name}, {precision}, {each.drafter}{draft}, context "
            f"{each.context_length}: {size}, {_gain(each, report.device)}"
        )
        if not is_overview:
            more = gib(each.bytes.further_reply, ceil)
            lines += [f"     {each.reason}", f"     Each further reply at the same time: {more}."]
    lines += _rest(len(shown), most, "models" if is_overview else "plans")
    if is_overview:
        lines += ["", "--model NAME lists the plans of one model, and what was refused."]
    if not report.plans:
        lines.append("Nothing fits.")
    if report.refused and not is_overview:
        lines += ["", "Refused:"]
        lines += [f"  {each.drafter}: {each.reason}" for each in report.refused[:most_refused]]
        lines += _rest(len(report.refused), most_refused, "refusals")
    return "\n".join(lines)


def _gain(plan: Plan, device: str) -> str:
    """As measured here, else the range that is assumed."""
    found = expected_gain(plan, device)
    if plan.drafter == OFF:
        return "without drafting"
    if found is None:
        return "gain unknown"
    if found.is_measured:
        return compared(found.low)
    return f"{found.low:.1f}x to {found.high:.1f}x faster than without drafting (assumed)"


def _rest(count: int, most: int, what: str) -> list[str]:
    return [f"     … and {count - most} more {what} (--json lists all)."] if count > most else []
