"""What drafting with a plan gains over plain decoding: as measured here, else a range.

A gain that was not measured is a range: the best draft length under careful and under hopeful
assumptions. The assumed acceptances span what is published for drafts of the same family and for
quantised copies; checking more tokens costs little on a GPU, which waits for the weights, and more
on a processor, which computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.core.decoding import OFF
from localspec.core.precisions import FULL_BYTES
from localspec.core.speculation import best_speedup
from localspec.drafters.registry import REGISTRY
from localspec.machine.head_shapes import HeadShape
from localspec.machine.memory import DRAFT_MODEL, MTP, SELF_QUANT
from localspec.machine.plans import Plan

LONGEST_DRAFT = 8
# Careful and hopeful. Of modules for multi-token prediction, as published for Qwen3.5 to 3.8: 40 to
# 55 % of drafts at 86k tokens, 72 % at the first place while thinking, 80 to 91 % in short chats.
ASSUMED_ACCEPTANCE = {DRAFT_MODEL: (0.5, 0.8), MTP: (0.5, 0.8), SELF_QUANT: (0.8, 0.95)}
# Of published heads: 3.1 to 6.2 tokens a round of eight in short replies without thinking, as their
# authors say, and less in long ones.
ASSUMED_OF_HEADS = (0.5, 0.8)
CHECK_SHARE = {"cuda": 0.03, "mps": 0.06, "cpu": 0.15}  # of a step, for each further token checked
MOST_LOOKUP_GAIN = 2.0


@dataclass(frozen=True)
class ExpectedGain:
    """Times plain speed. is_measured: low and high are then one figure, from this machine."""

    low: float
    high: float
    basis: str
    is_measured: bool = False


def expected_gain(plan: Plan, device: str) -> ExpectedGain | None:
    """None for plain decoding, and for a draft on a device of another kind that was not measured:
    nothing is known of what its steps cost beside the target's."""
    if plan.drafter == OFF:
        return None
    measured = plan.expected_speedup
    if measured is not None:
        return ExpectedGain(measured, measured, "from what was measured here", True)
    if plan.draft_on is not None and plan.draft_on.room.device != device:
        return None
    if (info := REGISTRY[plan.drafter]).needs == "nothing":
        return ExpectedGain(
            1.0,
            MOST_LOOKUP_GAIN,
            f"{info.label} gains only where text repeats: nothing in new prose, perhaps twice the "
            "speed when a given text or code is reworked",
        )
    low_cost, high_cost = _draft_costs(plan, device)
    careful, hopeful = ASSUMED_ACCEPTANCE.get(plan.drafter, ASSUMED_OF_HEADS)
    cost = f"{100 * low_cost:.0f} %"
    if high_cost > low_cost:
        cost = f"{100 * low_cost:.0f} to {100 * high_cost:.0f} %"
    check_share = max(CHECK_SHARE[device], plan.target.shape.expert_share)
    return ExpectedGain(
        assumed_speedup(careful, high_cost, check_share),
        assumed_speedup(hopeful, low_cost, check_share),
        f"assumes that {100 * careful:.0f} to {100 * hopeful:.0f} % of the drafted tokens are "
        f"accepted and that drafting one costs {cost} of a step of the target",
    )


def _draft_costs(plan: Plan, device: str) -> tuple[float, float]:
    """A draft token's cost in steps of the target, hopeful and careful: its share of the bytes
    that are read, and on a GPU that waits for launches its share of the layers."""
    if plan.drafter == MTP:
        share = plan.target.shape.drafting_share
        return share, share
    if plan.draft is not None and plan.draft.head is not None:
        share = _head_cost(plan, plan.draft.head)
        return share, share
    if plan.draft is None:
        assert plan.self_draft is not None, "what needs no model was answered before"
        copied = plan.target.shape.weight_bytes(plan.self_draft, plan.full)
        share = copied / plan.bytes.target_weights
        return share, share
    share = plan.draft_weights / plan.bytes.target_weights
    layers = plan.draft.shape.num_layers / plan.target.shape.num_layers
    return share, share if device == "cpu" else max(share, layers)


def _head_cost(plan: Plan, head: HeadShape) -> float:
    """Return the cost of a token of a published head in steps of the target: its share of the bytes
    that are read. A block drafter multiplies with the target's output head, once a block."""
    shape, num_bytes = plan.target.shape, plan.draft_weights
    if head.block_length > 1:
        num_bytes += shape.vocab_size * shape.hidden_size * FULL_BYTES[plan.full]
    return num_bytes / (plan.bytes.target_weights * shape.read_share) / head.block_length


def assumed_speedup(acceptance: float, draft_cost: float, check_share: float) -> float:
    """At the best draft length up to LONGEST_DRAFT; never below 1, for drafting that does not pay
    is switched off. Costs in steps of the target."""
    verify_cost = {1: 1.0, LONGEST_DRAFT + 1: 1.0 + LONGEST_DRAFT * check_share}
    found = best_speedup((acceptance,), draft_cost, verify_cost)
    assert found is not None, "both ends of the curve are given"
    return max(1.0, found.value)
