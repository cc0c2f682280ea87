"""Decide what fits and in which order to prefer it: one budget, ranked plans, reasons.

Contract: pure. A PlanRequest says what there is; the report holds every arrangement that fits,
best first, and for each that does not (at the context asked for) one sentence with the figures
and what would make it fit. Nothing is given up silently: a shortened context or lower precision
stands in the plan's reason.

Order: what the person asked for is given up last. Within half the wanted context, precision
comes before context, and context before the drafter; plans with less than half the context come
after. Among drafters a measured gain decides; without one, the order below and no figure.

Does not read the machine (hardware) or files (planning).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from localspec.core import OFF
from localspec.drafters.registry import REGISTRY, planned
from localspec.machine import reasons
from localspec.machine.budget import Arrangement, PlanBytes, bytes_of
from localspec.machine.plans import (
    DRAFT_MODEL,
    SELF_QUANT,
    DraftCandidate,
    Plan,
    PlanReport,
    PlanRequest,
    Refusal,
    preference,
)
from localspec.machine.shapes import Precision
from localspec.machine.speedup import Measurement, expected_speedup

# Context lengths tried below the wanted one.
CONTEXTS = (131072, 65536, 32768, 16384, 8192, 4096, 2048, 1024)


def plan(request: PlanRequest) -> PlanReport:
    """Everything that fits, ranked, and what was refused, for one target."""
    plans: list[Plan] = []
    refused = list(_refused_drafts(request)) + list(_refused_self_draft(request))
    for arm in _arms(request):
        found = [_largest_fitting(request, each) for each in arm]
        plans += [_judged(request, each) for each in found if each is not None]
        missed = next((each for each in arm if not _fits(request, each)), None)
        if missed is not None:
            refused.append(Refusal(missed.drafter, _shortage(request, missed, arm)))
    plans.sort(key=lambda each: _rank(request, each))
    return PlanReport(request.room.device, tuple(plans), tuple(refused))


# -- what could be loaded -------------------------------------------------------------------


@dataclass(frozen=True)
class _Arm:
    """An arrangement with the name of its drafter."""

    drafter: str
    arrangement: Arrangement


def precisions_for(request: PlanRequest) -> tuple[Precision, ...]:
    """Precisions of the target, fullest first."""
    if request.precisions is not None:
        return request.precisions
    if request.room.device == "mps" or request.target.num_experts:
        # bitsandbytes has no proven path on Apple GPUs and leaves fused experts as they are.
        return (request.full,)
    return (request.full, "8-bit", "4-bit")


def _arms(request: PlanRequest) -> Iterator[list[_Arm]]:
    """For each drafter, its arrangements from the fullest precision to the smallest."""
    base = [
        Arrangement(request.target, precision, request.wanted_context, request.full)
        for precision in precisions_for(request)
    ]
    for candidate in request.drafts:
        if _draft_objection(request, candidate) is None:
            yield [_Arm(DRAFT_MODEL, replace(each, draft=candidate.shape)) for each in base]
    if _self_draft_objection(request) is None:
        # On a CPU whichever of int8 and NF4 is measured cheaper runs: plan for the larger.
        copy: Precision = "8-bit" if request.room.device == "cpu" else "4-bit"
        shrinkable = [each for each in base if each.precision == request.full]
        if shrinkable:
            yield [_Arm(SELF_QUANT, replace(each, self_draft=copy)) for each in shrinkable]
    for info in planned():
        if info.needs == "nothing":
            yield [_Arm(info.name, each) for each in base]
    yield [_Arm(OFF, each) for each in base]


def _draft_objection(request: PlanRequest, candidate: DraftCandidate) -> str | None:
    draft, target = candidate.shape, request.target
    if candidate.compatibility.is_compatible is False:
        return (
            f"{draft.name} cannot draft for {target.name}: {candidate.compatibility.reason}. "
            "Another draft of the target's own family would do."
        )
    if draft.num_params >= target.num_params:
        return (
            f"{draft.name} ({reasons.billions(draft)} parameters) is not smaller than "
            f"{target.name} ({reasons.billions(target)}), so it cannot save "
            "time. A smaller draft would."
        )
    if draft.context_length < request.wanted_context:
        return (
            f"{draft.name} holds {draft.context_length} tokens, {request.wanted_context} are "
            f"wanted: context {draft.context_length} would do."
        )
    return None


def _refused_drafts(request: PlanRequest) -> Iterator[Refusal]:
    if not request.drafts:
        yield Refusal(
            DRAFT_MODEL,
            f"No draft model is known for {request.target.name}. Name one with --draft, or add "
            "it to the model's profile.",
        )
    for candidate in request.drafts:
        objection = _draft_objection(request, candidate)
        if objection is not None:
            yield Refusal(DRAFT_MODEL, objection)


def _self_draft_objection(request: PlanRequest) -> str | None:
    name = request.target.name
    if request.room.device == "mps":
        return (
            "bitsandbytes has no proven path on Apple GPUs, so no quantised copy can be made "
            "there. On the CPU it can."
        )
    if request.target.num_experts:
        return (
            f"The experts of {name} lie in fused tensors that bitsandbytes leaves at full "
            "precision, so a quantised copy would cost as much as the target. A draft model "
            "would do."
        )
    if request.full not in precisions_for(request):
        return (
            f"A quantised copy of {name} costs about what the quantised target itself costs. "
            f"With the target in {request.full} it could pay."
        )
    return None


def _refused_self_draft(request: PlanRequest) -> Iterator[Refusal]:
    objection = _self_draft_objection(request)
    if objection is not None:
        yield Refusal(SELF_QUANT, objection)


# -- what fits ------------------------------------------------------------------------------


def _needs(request: PlanRequest, arm: _Arm) -> int:
    return bytes_of(arm.arrangement, request.room).total


def _fits(request: PlanRequest, arm: _Arm) -> bool:
    return _needs(request, arm) <= request.room.free_bytes


def _contexts(request: PlanRequest) -> tuple[int, ...]:
    """The wanted context and the usual shorter ones."""
    wanted = request.wanted_context
    return (wanted, *(each for each in CONTEXTS if each < wanted))


def _at(arm: _Arm, context_length: int) -> _Arm:
    return replace(arm, arrangement=replace(arm.arrangement, context_length=context_length))


def _largest_fitting(request: PlanRequest, arm: _Arm) -> _Arm | None:
    candidates = (_at(arm, context) for context in _contexts(request))
    return next((each for each in candidates if _fits(request, each)), None)


def _shortage(request: PlanRequest, missed: _Arm, arm: list[_Arm]) -> str:
    """The sentence of a refusal: need, free memory, and what would fit."""
    shorter = _largest_fitting(request, missed)
    lower = arm[arm.index(missed) + 1 :]
    remedies = [f"context {shorter.arrangement.context_length}"] if shorter else []
    remedies += [each.arrangement.precision for each in lower if _fits(request, each)][:1]
    if not remedies:
        found = (_largest_fitting(request, each) for each in lower)
        remedies = [
            f"{each.arrangement.precision} at context {each.arrangement.context_length}"
            for each in found
            if each is not None
        ][:1]
    least = _at(arm[-1], _contexts(request)[-1])
    return reasons.shortage(
        reasons.title(missed.arrangement),
        _needs(request, missed),
        request.room.free_bytes,
        tuple(remedies),
        f"{least.arrangement.precision} at context {least.arrangement.context_length}",
        _needs(request, least),
    )


# -- why, and in which order ----------------------------------------------------------------


def _judged(request: PlanRequest, arm: _Arm) -> Plan:
    arrangement = arm.arrangement
    needed = bytes_of(arrangement, request.room)
    speedup, note = _gain(request, arm)
    spare = reasons.size_down(request.room.free_bytes - needed.total)
    parts = (
        _what(request, arm, needed),
        note,
        reasons.concessions(arrangement, request.wanted_context, request.context_length),
        f"{spare} stays free beyond the margin.",
    )
    return Plan(
        target=arrangement.target.name,
        precision=arrangement.precision,
        drafter=arm.drafter,
        draft=arrangement.draft.name if arrangement.draft else None,
        context_length=arrangement.context_length,
        bytes=needed,
        fits=True,
        expected_speedup=speedup,
        reason=" ".join(part for part in parts if part),
    )


def _what(request: PlanRequest, arm: _Arm, needed: PlanBytes) -> str:
    draft = arm.arrangement.draft
    if draft is not None:
        candidate = next(each for each in request.drafts if each.shape == draft)
        return reasons.draft_model(request.target, draft, candidate.compatibility, needed)
    if arm.drafter == SELF_QUANT:
        return reasons.self_quant(arm.arrangement, needed)
    return reasons.OFF if arm.drafter == OFF else reasons.without_a_model(REGISTRY[arm.drafter])


def _gain(request: PlanRequest, arm: _Arm) -> tuple[float | None, str]:
    """Expected speedup and the words for it."""
    measured = _measurement(request, arm)
    if measured is None:
        return None, "" if arm.drafter == OFF else "Its gain is not measured yet."
    if arm.drafter == OFF:
        return 1.0, ""
    found = expected_speedup(measured, arm.drafter)
    if found is None:
        return None, "Its gain is not measured yet."
    said = f"By the costs measured here {found.num_draft_tokens} draft tokens give "
    if found.value < 1.0:
        return found.value, f"{said}at best {found.value:.2f} times plain speed: off is faster."
    return found.value, f"{said}{found.value:.2f} times plain speed."


def _measurement(request: PlanRequest, arm: _Arm) -> Measurement | None:
    arrangement = arm.arrangement
    draft = arrangement.draft.name if arrangement.draft else None
    for each in request.measurements:
        is_target = (each.target, each.precision) == (
            arrangement.target.name,
            arrangement.precision,
        )
        if is_target and (draft is None or each.draft == draft):
            return each
    return None


def _rank(request: PlanRequest, each: Plan) -> tuple[Any, ...]:
    """Sort key, best first. Drafters: a measured gain, the unmeasured, off, a measured loss."""
    precisions = precisions_for(request)
    speedup = each.expected_speedup
    if each.drafter == OFF:
        tier = 2
    elif speedup is None:
        tier = 1
    else:
        tier = 0 if speedup > 1.0 else 3
    names = [candidate.shape.name for candidate in request.drafts]
    return (
        each.context_length < request.wanted_context / 2,
        precisions.index(each.precision),
        -each.context_length,
        tier,
        -(speedup or 0.0),
        preference().index(each.drafter),
        names.index(each.draft) if each.draft else 0,
    )
