"""Decide what fits for one target and in which order to prefer it, with a reason for each.

Contract: pure. A PlanRequest says what there is; the report holds every arrangement that fits,
best first, and for each that does not (at the context asked for) one sentence with the figures
and what would make it fit. A shortened context or a lower precision is stated in the plan's
reason. A need is rounded up and free memory down, so no sentence claims more room than there is.

Order: plans with less than half the wanted context come last, and before them those with experts in
the RAM, which are offered where the GPU does not hold them. On a GPU what drafts well (a draft
model, a published head, the model's own module, or whatever was measured to gain) comes before what
does not: a 4-bit target with a draft is several times as fast as a full one without. A drafter goes
before any of the context does, so it counts only where the context is as long as without it. Then
precision comes before context. Among drafters a measured gain decides; without one, the registry's
order does, and among published heads the order in which the target names them. A draft is
beside its target, on a second GPU only where that gives the target more bits or more context: the
two take turns, so a second GPU makes neither faster.

Not here: reading the machine (hardware), profiles and folders (plan_report).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import ceil, floor
from typing import Any

from localspec.core.decoding import OFF
from localspec.core.options import EXPERTS_IN_RAM, EXPERTS_ON_GPU
from localspec.core.precisions import Precision
from localspec.core.units import billions, gib
from localspec.drafters.registry import planned, published_heads
from localspec.formats.attention import TOKEN_BY_TOKEN, chains_for, no_drafts_for
from localspec.machine.memory import (
    CONTEXTS,
    DRAFT_MODEL,
    MTP,
    SELF_QUANT,
    Arrangement,
    bytes_of,
    draft_bytes_of,
    longest_fitting,
    shortage_of,
)
from localspec.machine.model import Model
from localspec.machine.plan_reasons import (
    concessions,
    gain_of,
    in_ram,
    of_states,
    precision_at,
    title_of,
    what_drafts,
)
from localspec.machine.plans import (
    Plan,
    PlanReport,
    PlanRequest,
    Refusal,
)


def plan(request: PlanRequest) -> PlanReport:
    """Everything that fits, ranked, and what was refused, for one target."""
    plans, impossible, too_large = list[Plan](), list[Refusal](), list[Refusal]()
    for drafter, choices in _choices_by_drafter(request):
        if isinstance(choices, str):
            impossible.append(Refusal(drafter, choices))
            continue
        fitting = (longest_fitting(each, request.room) for each in choices)
        plans += [_planned(request, each) for each in fitting if each is not None]
        short = next((each for each in choices if not _fits(request, each)), None)
        if short is not None:
            too_large.append(Refusal(drafter, _shortage(request, short)))
    plans.sort(key=partial(_rank, request))
    return PlanReport(request.room.device, tuple(plans), (*impossible, *too_large))


def preference() -> tuple[str, ...]:
    """Return the drafters there are plans for, in the order of preference before any measurement.
    Published heads, which are to be fetched, come after the module that ships with a target."""
    names = [info.name for info in planned()]
    place = names.index(MTP) + 1
    return (*names[:place], *published_heads(), *names[place:], OFF)


# -- what could be loaded -------------------------------------------------------------------


def _choices_by_drafter(request: PlanRequest) -> Iterator[tuple[str, list[Arrangement] | str]]:
    """For each drafter its arrangements, from the fullest precision to the smallest, or a sentence
    on why there is none. A draft_model comes once for each draft."""
    base = _bases(request)
    shape = request.target.shape
    if shape.is_recurrent and shape.family in TOKEN_BY_TOKEN:
        reason = no_drafts_for(shape.family)
        yield from ((drafter, reason) for drafter in preference() if drafter != OFF)
        yield OFF, base
        return
    if not any(draft.head is None for draft in request.target.drafts):
        yield (
            DRAFT_MODEL,
            f"No draft model is known for {request.target.name}. Name one with --draft, or add "
            "it to the model's profile.",
        )
    for draft in request.target.drafts:
        if draft.head is not None:
            with_head = [replace(each, drafter=draft.head.kind, draft=draft) for each in base]
            yield draft.head.kind, _head_objection(request.target, draft) or with_head
            continue
        with_draft = [replace(each, drafter=DRAFT_MODEL, draft=draft) for each in base]
        objection, other = _draft_objection(request, draft), request.other
        if objection is not None or other is None or not other.is_asked:
            yield DRAFT_MODEL, objection or with_draft
        if objection is not None or other is None:
            continue
        # Where both fit on one device, a second one makes neither faster.
        lacking = [each for each in with_draft if other.is_asked or not _fits(request, each)]
        if lacking:
            yield DRAFT_MODEL, [replace(each, draft_on=other) for each in lacking]
    yield MTP, _mtp_objection(request.target) or [replace(each, drafter=MTP) for each in base]
    whole = [each for each in base if each.precision == request.full]
    # A processor that computes in fp32 has no kernel for NF4, and copies run faster in 8 bits.
    copied: Precision = "8-bit" if request.full == "fp32" else "4-bit"
    with_copy = [replace(each, drafter=SELF_QUANT, self_draft=copied) for each in whole]
    yield SELF_QUANT, _self_draft_objection(request) or with_copy
    for drafter in (*(info.name for info in planned() if info.needs == "nothing"), OFF):
        yield drafter, [replace(each, drafter=drafter) for each in base]


def _bases(request: PlanRequest) -> list[Arrangement]:
    """The target alone in each precision. Its experts are in the RAM where that is asked for, or
    where no precision fits the device with them."""
    on_device = [request.arranged(precision) for precision in request.precisions]
    in_ram = [_with_experts_in_ram(each) for each in on_device if _has_ram_for(request, each)]
    if request.experts == EXPERTS_IN_RAM:
        return in_ram or on_device
    if request.experts == EXPERTS_ON_GPU or any(_fits(request, each) for each in on_device):
        return on_device
    return [*on_device, *in_ram]


def _has_ram_for(request: PlanRequest, arrangement: Arrangement) -> bool:
    """True if the experts of an arrangement can be in the RAM. Unasked only those are that are kept
    in few bits: a processor reads all bytes of the experts that a token chose."""
    shape, is_asked = arrangement.target.shape, request.experts == EXPERTS_IN_RAM
    is_beside = request.room.device == "cuda" and request.room.ram_bytes is not None
    return is_beside and shape.may_split(arrangement.precision, is_asked)


def _with_experts_in_ram(arrangement: Arrangement) -> Arrangement:
    return replace(arrangement, experts_in_ram=True)


def _draft_objection(request: PlanRequest, draft: Model) -> str | None:
    target = request.target
    num_params, num_of_target = draft.shape.num_params, target.shape.num_params
    if draft.compatibility.is_compatible is False:
        return (
            f"{draft.name} cannot draft for {target.name}: {draft.compatibility.reason}. "
            "Another draft of the target's own family would do."
        )
    if draft.shape.is_recurrent and not draft.shape.is_native:
        return (
            f"{draft.name} keeps a state that cannot take back a rejected token, so it cannot "
            f"draft for {target.name}. A draft with full attention would do."
        )
    if num_params >= num_of_target:
        return (
            f"{draft.name} ({billions(num_params)} parameters) is not smaller than "
            f"{target.name} ({billions(num_of_target)}), so it cannot save time. A smaller "
            "draft would."
        )
    return None


def _head_objection(target: Model, head: Model) -> str | None:
    if head.fault:
        return head.fault
    if target.shape.is_native:
        return None
    return (
        f"{head.name} reads the target's hidden states and runs on the native decoder only, and "
        f"{target.name} on transformers', because {target.shape.not_native or 'it keeps states'}."
    )


def _mtp_objection(target: Model) -> str | None:
    if target.shape.mtp is None:
        return (
            f"No module for multi-token prediction ships with {target.name}. Name the folder of a "
            "trained one with --heads, or choose a model that has one, such as Qwen3.5."
        )
    if not target.shape.is_native:
        return (
            f"The module for multi-token prediction that ships with {target.name} runs on the "
            f"native decoder only, and {target.name} on transformers', because "
            f"{target.shape.not_native or 'it keeps states'}."
        )
    return None


def _self_draft_objection(request: PlanRequest) -> str | None:
    name, shape = request.target.name, request.target.shape
    if shape.is_recurrent and not shape.is_native:
        return chains_for(shape.family)
    if request.room.device == "mps":
        return (
            "bitsandbytes has no proven path on Apple GPUs, so no quantised copy can be made "
            "there. On the CPU it can."
        )
    if shape.num_experts:
        return (
            f"A quantised copy of {name} would hold every expert, of which a token reads a few "
            "only: it would take the memory and save little time. A draft model would do."
        )
    if request.full not in request.precisions:
        return (
            f"A quantised copy of {name} costs about what the quantised target itself costs. "
            f"With the target in {request.full} it could pay."
        )
    return None


# -- what fits ------------------------------------------------------------------------------


def _needed(request: PlanRequest, arrangement: Arrangement) -> int:
    return bytes_of(arrangement, request.room).total


def _fits(request: PlanRequest, arrangement: Arrangement) -> bool:
    return shortage_of(arrangement, request.room) is None


def _shortage(request: PlanRequest, short: Arrangement) -> str:
    """ "... needs 21.4 GiB, 17.9 GiB is free: context 8192 or 4-bit would fit." """
    lacking = shortage_of(short, request.room)
    assert lacking is not None, "only what does not fit is refused"
    needed, free = gib(lacking.needed_bytes, ceil), gib(lacking.free_bytes, floor)
    if lacking.device is not None:
        return (
            f"{short.draft.name if short.draft else ''} needs {needed} on {lacking.device}, {free} "
            "is free there: a shorter context or a smaller draft would fit."
        )
    if lacking.is_of_ram:
        return (
            f"{title_of(short)} keeps {needed} of its weights in the RAM, and {free} of RAM is "
            "free: close other programs, or choose a smaller model."
        )
    said = f"{title_of(short)} needs {needed}, {free} is free: "
    shorter = longest_fitting(short, request.room)
    fewer = request.precisions[request.precisions.index(short.precision) + 1 :]
    if request.precisions[-1] == "4-bit":
        fewer = (*fewer, "4-bit-head")  # planned only where it is asked for
    fewer = fewer if short.self_draft is None else ()
    lower = [replace(short, precision=each, target=request.files_for(each)) for each in fewer]
    remedies = [f"context {shorter.context_length}"] if shorter else []
    remedies += [each.precision for each in lower if _fits(request, each)][:1]
    if not remedies:
        found = [longest_fitting(each, request.room) for each in lower]
        remedies = [precision_at(each) for each in found if each is not None]
    split = next((each for each in (short, *lower) if _has_ram_for(request, each)), None)
    if split is not None and not remedies and _fits(request, _with_experts_in_ram(split)):
        remedies = [f"{split.precision} with its experts in the RAM"]
    if remedies:  # only the flag gives a head in 4 bits
        named = " or ".join(remedies).replace("4-bit-head", "--dtype 4-bit-head")
        return f"{said}{named} would fit."
    shortest = min(CONTEXTS[-1], request.wanted_context)
    smallest = [replace(each, context_length=shortest) for each in (short, *lower)]
    least = min(smallest, key=partial(_needed, request))
    return (
        f"{said}even {precision_at(least)} needs {gib(_needed(request, least), ceil)}."
        f"{_split_shortage(request, split)} A smaller model would fit, or more free memory."
    )


def _split_shortage(request: PlanRequest, split: Arrangement | None) -> str:
    """Return how much RAM is lacking to have the experts of an arrangement there, "" where it is
    not the RAM that is short."""
    lacking = None if split is None else shortage_of(_with_experts_in_ram(split), request.room)
    if lacking is None or not lacking.is_of_ram:
        return ""
    needed, free = gib(lacking.needed_bytes, ceil), gib(lacking.free_bytes, floor)
    return f" With its experts in the RAM it needs {needed} there, and {free} of RAM is free."


# -- order ----------------------------------------------------------------------------------


def _rank(request: PlanRequest, each: Plan) -> tuple[Any, ...]:
    """Sort key, best first. Drafters: a measured gain, the unmeasured, off, a measured loss."""
    speedup = each.expected_speedup
    if each.drafter == OFF:
        tier = 2
    elif speedup is None:
        tier = 1
    else:
        tier = 0 if speedup > 1.0 else 3
    drafts = [draft.id for draft in request.target.drafts]
    guesses_well = each.drafter in (DRAFT_MODEL, MTP, *published_heads())
    gains = speedup > 1.0 if speedup is not None else guesses_well
    gains = gains and not _costs_context(request, each)
    is_quick = gains and request.room.device != "cpu"
    return (
        each.context_length < request.wanted_context / 2,
        each.experts_in_ram,
        not is_quick,
        request.precisions.index(each.precision),
        -each.context_length,
        tier,
        each.draft_on is not None,
        -(speedup or 0.0),
        _place_of(each.drafter),
        drafts.index(each.draft.id) if each.draft else 0,
    )


def _place_of(drafter: str) -> int:
    """Return the place of a drafter in the order of preference, one for all published heads."""
    heads = published_heads()
    return preference().index(heads[0] if drafter in heads else drafter)


def _costs_context(request: PlanRequest, plan: Plan) -> bool:
    """True if the target has a longer context without what drafts for it."""
    if plan.context_length == request.wanted_context:
        return False
    alone = request.arranged(plan.precision)
    longest = longest_fitting(replace(alone, experts_in_ram=plan.experts_in_ram), request.room)
    return longest is not None and longest.context_length > plan.context_length


# -- reasons --------------------------------------------------------------------------------


def _planned(request: PlanRequest, arrangement: Arrangement) -> Plan:
    needed = bytes_of(arrangement, request.room)
    speedup, gain = gain_of(request, arrangement)
    target = arrangement.target
    not_native = target.shape.not_native
    because = not_native and f"forward, which is slower, because {not_native}."
    parts = (
        what_drafts(request, arrangement, needed),
        gain,
        *concessions(request, arrangement),
        *in_ram(arrangement, request.room),
        because and f"{target.name} runs on transformers' own {because}",
        of_states(target.shape),
        f"{gib(request.room.free_bytes - needed.total, floor)} stays free beyond the margin.",
    )
    reason = " ".join(part for part in parts if part)
    return Plan(
        **vars(arrangement),
        bytes=needed,
        draft_bytes=draft_bytes_of(arrangement),
        expected_speedup=speedup,
        reason=reason,
    )
