"""The sentences of a plan: what drafts, what it gains, and what the plan gives up.

A need is rounded up and free memory down, so no sentence claims more room than there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from localspec.core.decoding import OFF
from localspec.core.speculation import Measurement
from localspec.core.units import billions, capital, gb, gib
from localspec.drafters.registry import REGISTRY
from localspec.formats.attention import TOKEN_BY_TOKEN, chains_for, no_drafts_for
from localspec.machine.memory import (
    MTP,
    Arrangement,
    PlanBytes,
    Room,
    draft_bytes_of,
    longest_fitting,
    snapshot_bytes,
)
from localspec.machine.model import Model
from localspec.machine.plans import PlanRequest
from localspec.machine.shapes import ModelShape

# A larger draft seldom pays: Hugging Face's universal assisted generation wants 1:50 to 1:100, LM
# Studio's table of pairs begins at about 1:7.
LARGE_DRAFT_SHARE = 0.1


def what_drafts(request: PlanRequest, arrangement: Arrangement, needed: PlanBytes) -> str:
    target, draft = arrangement.target, arrangement.draft
    if arrangement.drafter == OFF:
        return "Plain decoding: nothing drafts."
    if arrangement.self_draft is not None:
        return (
            f"{copy_of(arrangement).capitalize()} of the target's own layers drafts for "
            f"{gib(needed.draft_weights, ceil)}; it shares the target's cache and needs no "
            "download."
        )
    if arrangement.drafter == MTP:
        size = gib(needed.draft_weights + needed.draft_kv, ceil)
        return (
            f"The module for multi-token prediction in its files drafts for {size}, its cache "
            "included; it needs no further download."
        )
    if draft is None:
        return (
            f"{capital(REGISTRY[arrangement.drafter].summary)}. It loads nothing and takes no "
            "memory worth counting."
        )
    held = draft_bytes_of(arrangement) or needed
    size = gib(held.draft_weights + held.draft_kv, ceil)
    if draft.head is not None:
        return (
            f"{draft.name}, {REGISTRY[draft.head.kind].summary}, drafts for {size}, the states and "
            f"keys that it holds included; {_fetched(draft)}."
        )
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


def _fetched(draft: Model) -> str:
    """Return where the files of a draft are, or how much there is to fetch."""
    return "it is on this machine" if draft.is_here else f"{gb(draft.stored_bytes)} to fetch"


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


def gain_of(request: PlanRequest, arrangement: Arrangement) -> tuple[float | None, str]:
    """Expected speedup and the words for it."""
    measured = next((e for e in request.measurements if _is_of(e, request, arrangement)), None)
    if arrangement.drafter == OFF:
        return (None if measured is None else 1.0), ""
    found = None if measured is None else measured.expected_speedup(arrangement.drafter)
    if found is None:
        return None, "Its gain is not measured yet."
    said = f"By the costs measured here {found.num_draft_tokens} draft tokens give "
    if found.value < 1.0:
        return found.value, f"{said}at best {found.value:.2f} times plain speed: off is faster."
    return found.value, f"{said}{found.value:.2f} times plain speed."


def _is_of(measured: Measurement, request: PlanRequest, arrangement: Arrangement) -> bool:
    """True if a measurement is of an arrangement. It does not say which head of a kind it had."""
    draft = arrangement.draft
    wanted = (arrangement.target.name, arrangement.precision, arrangement.experts_in_ram)
    is_target = (measured.target, measured.precision, measured.has_experts_in_ram) == wanted
    if draft is None or draft.head is None:
        return is_target and (draft is None or measured.draft == draft.name)
    heads = [each.head for each in request.target.drafts if each.head is not None]
    return is_target and [head.kind for head in heads].count(draft.head.kind) == 1


def concessions(request: PlanRequest, arrangement: Arrangement) -> Iterator[str]:
    """What a plan gives up, a sentence each."""
    target, asked = arrangement.target, request.context_length
    shape = target.shape
    if asked is not None and asked > shape.context_length:
        yield f"{target.name} holds {shape.context_length} tokens, not the {asked} asked."
    if arrangement.context_length < request.wanted_context:
        asked_for = f"{request.wanted_context} tokens"
        yield f"The context is cut to {arrangement.context_length} of {asked_for} to fit."
        yield from _longer_without(request, arrangement)
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
    if shape.num_experts and not shape.has_4_bit_experts:
        yield "Its experts cannot be quantised here, so there is no 8-bit or 4-bit plan."


def _longer_without(request: PlanRequest, arrangement: Arrangement) -> Iterator[str]:
    """Return what a drafter in the target's memory takes of the context."""
    if arrangement.drafter == OFF or arrangement.draft_on is not None:
        return
    wanted = request.wanted_context
    alone = replace(arrangement, drafter=OFF, draft=None, self_draft=None, context_length=wanted)
    without = longest_fitting(alone, request.room)
    if without is not None and without.context_length > arrangement.context_length:
        name = "the module" if arrangement.draft is None else arrangement.draft.name
        name = "the copy" if arrangement.self_draft is not None else name
        yield f"Without {name} {without.context_length} would fit."


def in_ram(arrangement: Arrangement, room: Room) -> Iterator[str]:
    """What stays in the RAM beside a GPU, a sentence each."""
    if room.device == "cpu" or room.ram_bytes is None:
        return
    shape, sizes = arrangement.target.shape, (arrangement.precision, arrangement.full)
    tables = shape.host_bytes(*sizes)
    if arrangement.experts_in_ram:
        held = shape.host_bytes(*sizes, has_experts=True) - tables
        read = gib(shape.read_expert_bytes(*sizes))
        yield (
            f"Its experts, {gib(held)}, are in the RAM and computed by the processor, and "
            f"everything else is on the GPU. A token reads {read} of them, more slowly than a GPU "
            "would: how much more slowly is measured once it runs."
        )
    if copies := snapshot_bytes(shape, arrangement.context_length, arrangement.full):
        yield f"Up to {gib(copies)} of RAM hold earlier states of a chat, to go back to."
    if tables:
        yield (
            f"Tables of {gib(tables)} stay in the RAM: a token looks up one row, and they "
            "are never computed with."
        )


def of_states(shape: ModelShape) -> str:
    """What drafts for a model that keeps a state on transformers' forward; "" for others."""
    if shape.is_native or not shape.is_recurrent:
        return ""
    is_slow = shape.family in TOKEN_BY_TOKEN
    return no_drafts_for(shape.family) if is_slow else chains_for(shape.family)


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


def title_of(arrangement: Arrangement) -> str:
    said = f"{arrangement.target.name} in {arrangement.precision}"
    if arrangement.draft is not None:
        kind = "draft" if arrangement.draft.head is None else "drafter"
        said += f" with {kind} {arrangement.draft.name}"
    if arrangement.draft_on is not None:
        said += f" on {arrangement.draft_on.name}"
    if arrangement.self_draft is not None:
        said += f" with {copy_of(arrangement)} of itself"
    if arrangement.drafter == MTP:
        said += " with its module for multi-token prediction"
    if arrangement.experts_in_ram:
        said += " with its experts in the RAM"
    return f"{said} at context {arrangement.context_length}"


def precision_at(arrangement: Arrangement) -> str:
    return f"{arrangement.precision} at context {arrangement.context_length}"


def copy_of(arrangement: Arrangement) -> str:
    return "an 8-bit copy" if arrangement.self_draft == "8-bit" else "a 4-bit copy"
