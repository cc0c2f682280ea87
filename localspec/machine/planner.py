"""Decide what fits for one target and in which order to prefer it, with a reason for each.

Contract: pure. A PlanRequest says what there is; the report holds every arrangement that fits,
best first, and for each that does not (at the context asked for) one sentence with the figures
and what would make it fit. A shortened context or a lower precision is stated in the plan's
reason. A need is rounded up and free memory down, so no sentence claims more room than there is.

Order: plans with less than half the wanted context come last. On a GPU what drafts well (a draft
model, or whatever was measured to gain) comes before what does not: a 4-bit target with a draft is
several times as fast as a full one without. Then precision comes before context, and context before
the drafter. Among drafters a measured gain decides; without one, the registry's order does. A draft
is beside its target, on a second GPU only where that gives the target more bits or more context:
the two take turns, so a second GPU makes neither faster.

Not here: reading the machine (hardware), profiles and folders (plan_report).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import ceil, floor
from typing import Any

from localspec.core.decoding import OFF
from localspec.core.precisions import Precision
from localspec.core.speculation import Measurement
from localspec.core.units import billions, capital, gib
from localspec.drafters.registry import REGISTRY, planned
from localspec.formats.attention import TOKEN_BY_TOKEN, chains_for, no_drafts_for
from localspec.machine.memory import (
    CONTEXTS,
    Arrangement,
    PlanBytes,
    bytes_of,
    draft_bytes_of,
    longest_fitting,
    shortage_of,
)
from localspec.machine.model import Model
from localspec.machine.plans import (
    DRAFT_MODEL,
    SELF_QUANT,
    Plan,
    PlanReport,
    PlanRequest,
    Refusal,
)

# A larger draft seldom pays: Hugging Face's universal assisted generation wants 1:50 to 1:100, LM
# Studio's table of pairs begins at about 1:7.
LARGE_DRAFT_SHARE = 0.1


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
    """The drafters there are plans for, in the order of preference before any measurement."""
    return (*(info.name for info in planned()), OFF)


# -- what could be loaded -------------------------------------------------------------------


def _choices_by_drafter(request: PlanRequest) -> Iterator[tuple[str, list[Arrangement] | str]]:
    """For each drafter its arrangements, from the fullest precision to the smallest, or a sentence
    on why there is none. A draft_model comes once for each draft."""
    base = [request.arranged(precision) for precision in request.precisions]
    shape = request.target.shape
    if shape.is_recurrent and shape.family in TOKEN_BY_TOKEN:
        reason = no_drafts_for(shape.family)
        yield from ((drafter, reason) for drafter in preference() if drafter != OFF)
        yield OFF, base
        return
    if not request.target.drafts:
        yield (
            DRAFT_MODEL,
            f"No draft model is known for {request.target.name}. Name one with --draft, or add "
            "it to the model's profile.",
        )
    for draft in request.target.drafts:
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
    whole = [each for each in base if each.precision == request.full]
    # A processor that computes in fp32 has no kernel for NF4, and copies run faster in 8 bits.
    copied: Precision = "8-bit" if request.full == "fp32" else "4-bit"
    with_copy = [replace(each, drafter=SELF_QUANT, self_draft=copied) for each in whole]
    yield SELF_QUANT, _self_draft_objection(request) or with_copy
    for drafter in (*(info.name for info in planned() if info.needs == "nothing"), OFF):
        yield drafter, [replace(each, drafter=drafter) for each in base]


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
    if draft.shape.context_length < request.wanted_context:
        return (
            f"{draft.name} holds {draft.shape.context_length} tokens, {request.wanted_context} are "
            f"wanted: context {draft.shape.context_length} would do."
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
            f"The experts of {name} lie in fused tensors that bitsandbytes leaves at full "
            "precision, so a quantised copy would cost as much as the target. A draft model "
            "would do."
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
    said = f"{_title(short)} needs {needed}, {free} is free: "
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
        remedies = [_precision_at(each) for each in found if each is not None]
    if remedies:  # only the flag gives a head in 4 bits
        named = " or ".join(remedies).replace("4-bit-head", "--dtype 4-bit-head")
        return f"{said}{named} would fit."
    shortest = min(CONTEXTS[-1], request.wanted_context)
    smallest = [replace(each, context_length=shortest) for each in (short, *lower)]
    least = min(smallest, key=partial(_needed, request))
    return (
        f"{said}even {_precision_at(least)} needs {gib(_needed(request, least), ceil)}. A smaller "
        "model would fit, or more free memory."
    )


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
    gains = speedup > 1.0 if speedup is not None else each.drafter == DRAFT_MODEL
    is_quick = gains and request.room.device != "cpu"
    return (
        each.context_length < request.wanted_context / 2,
        not is_quick,
        request.precisions.index(each.precision),
        -each.context_length,
        tier,
        each.draft_on is not None,
        -(speedup or 0.0),
        preference().index(each.drafter),
        drafts.index(each.draft.id) if each.draft else 0,
    )


# -- reasons --------------------------------------------------------------------------------


def _planned(request: PlanRequest, arrangement: Arrangement) -> Plan:
    needed = bytes_of(arrangement, request.room)
    speedup, gain = _gain(request, arrangement)
    target = arrangement.target
    not_native = target.shape.not_native
    because = not_native and f"forward, which is slower, because {not_native}."
    parts = (
        _what_drafts(request, arrangement, needed),
        gain,
        *_concessions(request, arrangement),
        because and f"{target.name} runs on transformers' own {because}",
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


def _what_drafts(request: PlanRequest, arrangement: Arrangement, needed: PlanBytes) -> str:
    target, draft = arrangement.target, arrangement.draft
    if arrangement.drafter == OFF:
        return "Plain decoding: nothing drafts."
    if arrangement.self_draft is not None:
        return (
            f"{_copy(arrangement).capitalize()} of the target's own layers drafts for "
            f"{gib(needed.draft_weights, ceil)}; it shares the target's cache and needs no "
            "download."
        )
    if draft is None:
        return (
            f"{capital(REGISTRY[arrangement.drafter].summary)}. It loads nothing and takes no "
            "memory worth counting."
        )
    held = draft_bytes_of(arrangement) or needed
    size = gib(held.draft_weights + held.draft_kv, ceil)
    said = f"{draft.name} drafts for {size}, its own cache included; "
    said += f"{draft.compatibility.reason}.{_where(request, arrangement)}"
    num_params, num_of_target = draft.shape.num_params, target.shape.num_params
    share = num_params / num_of_target
    if share <= LARGE_DRAFT_SHARE:
        return said
    return (
        f"{said} The draft has {billions(num_params)} parameters, {share:.0%} of its "
        f"target's {billions(num_of_target)}: beyond a tenth it may cost more than it saves."
    )


def _where(request: PlanRequest, arrangement: Arrangement) -> str:
    """Where the draft is and why, where there is a choice."""
    other = request.other
    if other is None:
        return ""
    if arrangement.draft_on is None:
        return (
            " Both are on one GPU: they take turns, so a second GPU would make neither faster, "
            f"and {other.name} stays free."
        )
    if other.is_asked:
        return f" The draft is on {other.name}, as asked; only token ids pass between the two."
    together = replace(arrangement, draft_on=None, context_length=request.wanted_context)
    beside = longest_fitting(together, request.room)
    instead = "does not fit" if beside is None else f"leaves a context of {beside.context_length}"
    return (
        f" The target is on the GPU with more free memory, the draft on {other.name}: beside the "
        f"target in {arrangement.precision} it {instead}. Only token ids pass between the two."
    )


def _gain(request: PlanRequest, arrangement: Arrangement) -> tuple[float | None, str]:
    """Expected speedup and the words for it."""
    measured = next((e for e in request.measurements if _is_of(e, arrangement)), None)
    if arrangement.drafter == OFF:
        return (None if measured is None else 1.0), ""
    found = None if measured is None else measured.expected_speedup(arrangement.drafter)
    if found is None:
        return None, "Its gain is not measured yet."
    said = f"By the costs measured here {found.num_draft_tokens} draft tokens give "
    if found.value < 1.0:
        return found.value, f"{said}at best {found.value:.2f} times plain speed: off is faster."
    return found.value, f"{said}{found.value:.2f} times plain speed."


def _is_of(measured: Measurement, arrangement: Arrangement) -> bool:
    draft = arrangement.draft
    wanted = (arrangement.target.name, arrangement.precision)
    is_target = (measured.target, measured.precision) == wanted
    return is_target and (draft is None or measured.draft == draft.name)


def _concessions(request: PlanRequest, arrangement: Arrangement) -> Iterator[str]:
    """What a plan gives up, a sentence each."""
    target, asked = arrangement.target, request.context_length
    shape = target.shape
    if asked is not None and asked > shape.context_length:
        yield f"{target.name} holds {shape.context_length} tokens, not the {asked} asked."
    if arrangement.context_length < request.wanted_context:
        asked_for = f"{request.wanted_context} tokens"
        yield f"The context is cut to {arrangement.context_length} of {asked_for} to fit."
    if target.copy_of:
        yield (
            f"{target.name} is {target.copy_of} published in 4 bits: about "
            f"{gib(shape.published_bytes)} to fetch. The 16-bit files, "
            f"{gib(request.target.shape.published_bytes)}, would be quantised here."
        )
    if shape.stored_as:
        yield f"Its weights are kept as {shape.stored_as}, and {_done(request, arrangement)}."
    if arrangement.precision == "4-bit-head":
        yield (
            "4-bit weights change the answers a little, and a 4-bit output head, on a GPU with the "
            "embedding, more."
        )
    elif arrangement.precision not in (arrangement.full, shape.kept_as):
        yield (
            f"{arrangement.precision} weights change the answers a little; embeddings and output "
            f"head stay in {arrangement.full}."
        )
    if shape.num_experts:
        yield "Its experts cannot be quantised here, so there is no 8-bit or 4-bit plan."


def _done(request: PlanRequest, arrangement: Arrangement) -> str:
    """What is done to weights that the files keep in another way than they are computed in."""
    if arrangement.target.shape.kept_as is not None or arrangement.target.shape.keeps_mxfp4:
        return "loaded as they are"
    if arrangement.precision == arrangement.full:
        return "unpacked while loading"
    shape = arrangement.target.shape
    is_kept = shape.count_in_groups(request.room.device, arrangement.full)
    if is_kept and arrangement.precision != "8-bit":
        return "left in their 4 bits where the layout allows it"
    return "unpacked and quantised a second time while loading"


def _title(arrangement: Arrangement) -> str:
    said = f"{arrangement.target.name} in {arrangement.precision}"
    if arrangement.draft is not None:
        said += f" with draft {arrangement.draft.name}"
    if arrangement.draft_on is not None:
        said += f" on {arrangement.draft_on.name}"
    if arrangement.self_draft is not None:
        said += f" with {_copy(arrangement)} of itself"
    return f"{said} at context {arrangement.context_length}"


def _precision_at(arrangement: Arrangement) -> str:
    return f"{arrangement.precision} at context {arrangement.context_length}"


def _copy(arrangement: Arrangement) -> str:
    return "an 8-bit copy" if arrangement.self_draft == "8-bit" else "a 4-bit copy"
