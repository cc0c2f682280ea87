"""The words of the planner: why a plan is as it is, and what a refused one is short of.

Contract: facts in, sentences out. A need is rounded up and free memory down, so that a sentence
never claims more room than there is.
"""

from __future__ import annotations

import math

from localspec.drafters.registry import DrafterInfo
from localspec.machine.budget import GIB, MIB, Arrangement, PlanBytes
from localspec.machine.compatibility import Compatibility
from localspec.machine.shapes import ModelShape

# A draft beyond this share of its target is seldom paid back: Hugging Face's universal assisted
# generation wants 1:50 to 1:100, LM Studio's table of pairs begins at about 1:7.
LARGE_DRAFT_SHARE = 0.1

OFF = "Plain decoding: nothing drafts."


def without_a_model(drafter: DrafterInfo) -> str:
    return (
        f"{drafter.summary[0].upper()}{drafter.summary[1:]}. It loads nothing and takes no "
        "memory worth counting."
    )


def draft_model(
    target: ModelShape, draft: ModelShape, known: Compatibility, needed: PlanBytes
) -> str:
    took = size_up(needed.draft_weights + needed.draft_kv)
    said = f"{draft.name} drafts for {took}, its own cache included; {known.reason}."
    return f"{said} {large_draft_warning(target, draft)}".rstrip()


def self_quant(arrangement: Arrangement, needed: PlanBytes) -> str:
    return (
        f"{_copy(arrangement).capitalize()} of the target's own layers drafts for "
        f"{size_up(needed.draft_weights)}; it shares the target's cache and needs no download."
    )


def large_draft_warning(target: ModelShape, draft: ModelShape) -> str:
    """A sentence when the draft is more than a tenth of its target, else empty."""
    share = draft.num_params / target.num_params
    if share <= LARGE_DRAFT_SHARE:
        return ""
    return (
        f"The draft has {billions(draft)} parameters, {share:.0%} of its target's "
        f"{billions(target)}: beyond a tenth it may cost more than it saves."
    )


def concessions(arrangement: Arrangement, wanted_context: int, asked: int | None) -> str:
    """What a plan gives up, in words; empty when it gives up nothing."""
    target, said = arrangement.target, []
    if asked is not None and asked > target.context_length:
        said.append(f"{target.name} holds {target.context_length} tokens, not the {asked} asked.")
    if arrangement.context_length < wanted_context:
        said.append(
            f"The context is cut to {arrangement.context_length} of {wanted_context} tokens to fit."
        )
    if arrangement.precision != arrangement.full:
        said.append(
            f"{arrangement.precision} weights change the answers a little; embeddings and output "
            f"head stay in {arrangement.full}."
        )
    if target.num_experts:
        said.append("Its experts cannot be quantised here, so there is no 8-bit or 4-bit plan.")
    return " ".join(said)


def _copy(arrangement: Arrangement) -> str:
    return "an 8-bit copy" if arrangement.self_draft == "8-bit" else "a 4-bit copy"


def title(arrangement: Arrangement) -> str:
    said = f"{arrangement.target.name} in {arrangement.precision}"
    if arrangement.draft is not None:
        said += f" with draft {arrangement.draft.name}"
    if arrangement.self_draft is not None:
        said += f" with {_copy(arrangement)} of itself"
    return f"{said} at context {arrangement.context_length}"


def shortage(
    what: str,
    needs_bytes: int,
    free_bytes: int,
    remedies: tuple[str, ...],
    least: str,
    least_bytes: int,
) -> str:
    """ "... needs 21.4 GiB, 17.9 GiB is free: context 8192 or 4-bit would fit." """
    said = f"{what} needs {size_up(needs_bytes)}, {size_down(free_bytes)} is free: "
    if remedies:
        return f"{said}{' or '.join(remedies)} would fit."
    return (
        f"{said}even {least} needs {size_up(least_bytes)}. A smaller model would fit, or more "
        "free memory."
    )


def size_up(num_bytes: int) -> str:
    if num_bytes >= GIB:
        return f"{math.ceil(10 * num_bytes / GIB) / 10:.1f} GiB"
    return f"{math.ceil(num_bytes / MIB)} MiB"


def size_down(num_bytes: int) -> str:
    if num_bytes >= GIB:
        return f"{math.floor(10 * num_bytes / GIB) / 10:.1f} GiB"
    return f"{max(0, math.floor(num_bytes / MIB))} MiB"


def billions(shape: ModelShape) -> str:
    count = shape.num_params
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"
