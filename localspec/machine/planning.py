"""Put the planner to work: what a person asked, this machine, the profiles -> one report.

Contract: `make_plans` gives the report, `plan_report` the same as plain data for `plan --json`
and the page, `render` as text. Named models are planned in full. When none is named the whole
catalogue is: the largest model first, each (model, drafter) once, either planned or refused.

Nothing is loaded or fetched; torch is imported only if the driver hides a GPU's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localspec.config import Profile, Settings, find_profile, load_profiles, nearest, settings_for
from localspec.core import AUTO, OFF
from localspec.errors import ConfigError, ModelError
from localspec.machine.budget import Room
from localspec.machine.hardware import Hardware, confirmed_by_torch, probe
from localspec.machine.models import KnownModel, compatibility_of, find_model
from localspec.machine.planner import plan
from localspec.machine.plans import (
    DEFAULT_CONTEXT,
    DraftCandidate,
    Plan,
    PlanReport,
    PlanRequest,
    Refusal,
    preference,
)
from localspec.machine.reasons import size_down, size_up
from localspec.machine.shapes import Precision
from localspec.machine.speedup import Measurement
from localspec.options import LoadOptions

# torch's names of the precisions a person may ask for, and the planner's own.
FULL_PRECISIONS: Mapping[str, Precision] = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
}


def plan_report(
    options: LoadOptions,
    settings: Settings | None = None,
    vram_gib: float | None = None,
    hardware: Hardware | None = None,
    measurements: Sequence[Measurement] = (),
) -> dict[str, Any]:
    """`make_plans` as plain data: {"device", "plans", "refused"}."""
    return make_plans(options, settings, vram_gib, hardware, measurements).as_dict()


def make_plans(
    options: LoadOptions,
    settings: Settings | None = None,
    vram_gib: float | None = None,
    hardware: Hardware | None = None,
    measurements: Sequence[Measurement] = (),
) -> PlanReport:
    """Plans for what `options` name, or for the catalogue when they name nothing.

    vram_gib: free GPU memory to plan for, 0 for no GPU; None takes what is free now.
    Raises ConfigError and ModelError for names, values and folders that cannot be used.
    """
    settings = settings or settings_for()
    profiles = load_profiles(settings.profile_folders)
    if options.profile is not None:
        chosen = find_profile(options.profile, profiles)
        profiles = {**profiles, chosen.name: chosen}
    hardware = hardware or probe()
    room, full = room_for(hardware, vram_gib), full_precision(options.dtype, hardware, vram_gib)
    wish = _Wish(room, full, _checked_context(options.context), tuple(measurements))
    if options.model is None and options.draft is None:
        report = _catalogue_report(_catalogue(profiles, options.profile), wish, profiles)
        return _of_drafter(report, options.drafter)
    target = find_model(options.model or _default_model(options, profiles), profiles)
    drafts = (options.draft,) if options.draft else target.drafts
    return _of_drafter(plan(_request(wish, target, drafts, profiles)), options.drafter)


# -- the room -------------------------------------------------------------------------------


def room_for(hardware: Hardware, vram_gib: float | None = None) -> Room:
    """The memory to plan for: as given, or as the machine has it free."""
    if vram_gib is not None and not 0 <= vram_gib < math.inf:
        raise ConfigError(f"--vram-gib is {vram_gib}, but must be 0 or more gibibytes.")
    if vram_gib:
        gpu = hardware.gpu
        return Room(
            device="cuda",
            free_bytes=int(vram_gib * 2**30),
            total_bytes=None,
            num_cuda_cores=gpu.num_cuda_cores if gpu else None,
            has_display=hardware.has_display or hardware.host.draws_with_gpu,
        )
    if vram_gib == 0 and hardware.device == "cuda":
        hardware = replace(hardware, device="cpu", gpu=None)
    if hardware.free_bytes is None:  # the driver hides it; torch may know
        hardware = confirmed_by_torch(hardware)
    gpu = hardware.gpu
    return Room(
        device=hardware.device,
        free_bytes=hardware.free_bytes or 0,
        total_bytes=hardware.total_bytes,
        num_cuda_cores=gpu.num_cuda_cores if gpu else None,
        has_display=hardware.has_display,
    )


def full_precision(
    dtype: str | None, hardware: Hardware, vram_gib: float | None = None
) -> Precision:
    """What unquantised weights are kept in: as asked, else what the device computes in."""
    if dtype is not None:
        if dtype not in FULL_PRECISIONS:
            raise ConfigError(
                f"'{dtype}' is no precision. Did you mean '{nearest(dtype, FULL_PRECISIONS)}'? "
                "8-bit and 4-bit are planned beside it."
            )
        return FULL_PRECISIONS[dtype]
    if vram_gib or (hardware.device == "cuda" and vram_gib is None):
        return "bf16"
    if hardware.device == "mps":
        return "fp16"
    return "bf16" if hardware.host.multiplies_bf16 else "fp32"


def _checked_context(context: int | None) -> int | None:
    if context is not None and context < 1:
        raise ConfigError(f"A context of {context} tokens holds nothing. Ask for 1024 or more.")
    return context


# -- one model ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wish:
    """What holds for every model planned in one report."""

    room: Room
    full: Precision
    context_length: int | None
    measurements: tuple[Measurement, ...]


def _request(
    wish: _Wish, target: KnownModel, drafts: Sequence[str], profiles: Mapping[str, Profile]
) -> PlanRequest:
    candidates = []
    for name in drafts:
        draft = find_model(name, profiles)
        candidates.append(DraftCandidate(draft.shape, compatibility_of(target, draft)))
    return PlanRequest(
        target=target.shape,
        room=wish.room,
        context_length=wish.context_length,
        drafts=tuple(candidates),
        full=wish.full,
        measurements=wish.measurements,
    )


def _default_model(options: LoadOptions, profiles: Mapping[str, Profile]) -> str:
    """The target when only a draft is named: the profile's default, else the demo pair's."""
    return find_profile(options.profile or "demo", profiles).default


def _of_drafter(report: PlanReport, drafter: str | None) -> PlanReport:
    """The report of one drafter alone, if one was asked for."""
    if drafter is None or drafter == AUTO:
        return report
    if drafter not in preference():
        raise ConfigError(
            f"There is no drafter '{drafter}' to plan for. "
            f"Did you mean '{nearest(drafter, preference())}'?"
        )
    return replace(
        report,
        plans=tuple(each for each in report.plans if each.drafter == drafter),
        refused=tuple(each for each in report.refused if each.drafter == drafter),
    )


# -- the catalogue --------------------------------------------------------------------------


def _catalogue(profiles: Mapping[str, Profile], chosen: str | None) -> list[str]:
    wanted = [find_profile(chosen, profiles)] if chosen else list(profiles.values())
    entries = [entry for profile in wanted for entry in profile.models.values()]
    # What ships in a folder only to draft for another is not offered as a target.
    helpers = {draft for entry in entries if entry.folder for draft in entry.drafts}
    return [entry.id for entry in entries if entry.id not in helpers]


def _catalogue_report(
    names: Sequence[str], wish: _Wish, profiles: Mapping[str, Profile]
) -> PlanReport:
    plans: list[Plan] = []
    refused: list[Refusal] = []
    sizes: dict[str, int] = {}
    for name in names:
        try:
            target = find_model(name, profiles)
            request = _request(wish, target, target.drafts[:1], profiles)
        except ModelError as error:  # a profile's folder that is not there
            refused.append(Refusal(OFF, str(error)))
            continue
        report = plan(request)
        sizes[target.shape.name] = target.shape.num_params
        kept = _first_of_each_drafter(report.plans)
        planned = {each.drafter for each in kept}
        plans += kept
        refused += [each for each in report.refused if each.drafter not in planned]
    # Between models the planner has no measure of quality; size is the honest stand-in. A plan
    # with less than half the context asked for comes after those that keep it.
    wanted = wish.context_length or DEFAULT_CONTEXT
    plans.sort(key=lambda each: (each.context_length < wanted / 2, -sizes[each.target]))
    return PlanReport(wish.room.device, tuple(plans), tuple(refused))


def _first_of_each_drafter(plans: Sequence[Plan]) -> list[Plan]:
    seen: dict[str, Plan] = {}
    for each in plans:
        seen.setdefault(each.drafter, each)
    return list(seen.values())


# -- what was measured ----------------------------------------------------------------------


def measurement_from_costs(
    target: str,
    precision: Precision,
    costs: Mapping[str, Any],
    acceptance: Mapping[str, tuple[float, ...]],
    context_length: int,
    draft: str | None = None,
) -> Measurement:
    """A Measurement from the cost table's plain data (`verify_ms` and `draft_step_ms`, each by
    context length as text), taken at the measured context nearest to `context_length`."""

    def near(points: Mapping[str, float]) -> float:
        return points[min(points, key=lambda at: abs(int(at) - context_length))]

    return Measurement(
        target=target,
        precision=precision,
        verify_ms={int(width): near(points) for width, points in costs["verify_ms"].items()},
        draft_step_ms={name: near(points) for name, points in costs["draft_step_ms"].items()},
        acceptance=dict(acceptance),
        draft=draft,
    )


# -- as text --------------------------------------------------------------------------------


def render(report: PlanReport, free_bytes: int, most: int = 12) -> str:
    """The report for a terminal: at most `most` plans and as many refusals, the rest counted."""
    lines = [f"Planning for {report.device} with {size_down(free_bytes)} free.", ""]
    for number, each in enumerate(report.plans[:most], start=1):
        gain = "–" if each.expected_speedup is None else f"{each.expected_speedup:.2f}×"
        draft = f" with {each.draft}" if each.draft else ""
        lines.append(
            f"{number:3}. {each.target}, {each.precision}, {each.drafter}{draft}, context "
            f"{each.context_length}: {size_up(each.bytes.total)}, gain {gain}"
        )
        lines.append(f"     {each.reason}")
    lines += _rest(len(report.plans), most, "plans")
    if not report.plans:
        lines.append("Nothing fits.")
    if report.refused:
        lines += ["", "Refused:"]
        lines += [f"  {each.drafter}: {each.reason}" for each in report.refused[:most]]
        lines += _rest(len(report.refused), most, "refusals")
    return "\n".join(lines)


def _rest(count: int, most: int, what: str) -> list[str]:
    return [f"     … and {count - most} more {what} (--json lists all)."] if count > most else []
