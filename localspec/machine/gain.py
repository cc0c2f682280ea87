"""What drafting may gain before anything was measured: a range, its assumptions beside it.

Contract: pure. A measured figure replaces the range at once. The range is the best draft length
under assumptions that are careful at one end and hopeful at the other; it is never below 1, for
drafting that does not pay is switched off.

Source of the formula: Leviathan et al. 2023 (arXiv 2211.17192). The assumed acceptances span what
is published for drafts of the same family and for quantised copies; a check of more tokens costs
little on a GPU, where it waits for the weights, and more on a processor, where it computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.core import OFF
from localspec.drafters.registry import REGISTRY
from localspec.machine.plans import DRAFT_MODEL, SELF_QUANT, Plan
from localspec.machine.shapes import ModelShape, Precision
from localspec.machine.speedup import expected_tokens

LONGEST_DRAFT = 8
ACCEPTED = {DRAFT_MODEL: (0.5, 0.8), SELF_QUANT: (0.8, 0.95)}  # careful, hopeful
CHECK_SHARE = {"cuda": 0.03, "mps": 0.06, "cpu": 0.15}  # of a step, for each further token checked
LOOKUP_MOST = 2.0


@dataclass(frozen=True)
class Gain:
    """Times plain speed. is_measured: low and high are then one figure, from this machine."""

    low: float
    high: float
    basis: str
    is_measured: bool = False


def expected_gain(
    plan: Plan, target: ModelShape, draft: ModelShape | None, device: str, full: Precision
) -> Gain | None:
    """None for plain decoding."""
    if plan.drafter == OFF:
        return None
    if plan.expected_speedup is not None:
        return Gain(
            plan.expected_speedup, plan.expected_speedup, "from what was measured here", True
        )
    if (info := REGISTRY[plan.drafter]).needs == "nothing":
        return Gain(
            1.0,
            LOOKUP_MOST,
            f"{info.label} gains only where text repeats: nothing in new prose, perhaps twice the "
            "speed when a given text or code is reworked",
        )
    low_cost, high_cost = _step_costs(plan, target, draft, device, full)
    few, many = ACCEPTED[plan.drafter]
    check = CHECK_SHARE[device]
    cost = f"{100 * low_cost:.0f} %"
    if high_cost > low_cost:
        cost = f"{100 * low_cost:.0f} to {100 * high_cost:.0f} %"
    return Gain(
        best_speedup(few, high_cost, check),
        best_speedup(many, low_cost, check),
        f"assumes that {100 * few:.0f} to {100 * many:.0f} % of the drafted tokens are accepted "
        f"and that drafting one costs {cost} of a step of the target",
    )


def _step_costs(
    plan: Plan, target: ModelShape, draft: ModelShape | None, device: str, full: Precision
) -> tuple[float, float]:
    """A drafted token's cost in steps of the target, hopeful and careful: its share of the bytes
    that are read, and on a GPU that waits for launches its share of the layers."""
    target_bytes = target.weight_bytes(plan.precision, full)
    if plan.drafter == SELF_QUANT or draft is None:
        copy: Precision = "8-bit" if device == "cpu" else "4-bit"
        share = target.weight_bytes(copy, full) / target_bytes
        return share, share
    share = draft.weight_bytes(full) / target_bytes
    if device == "cpu":
        return share, share
    return share, max(share, draft.num_layers / target.num_layers)


def best_speedup(acceptance: float, step_cost: float, check_share: float) -> float:
    """At the best draft length, none included."""
    options = [
        expected_tokens((acceptance,), length) / (1.0 + length * (step_cost + check_share))
        for length in range(1, LONGEST_DRAFT + 1)
    ]
    return max(1.0, *options)
