"""What may be chosen for a round: its expected rate, the plans without a draft, and the words that
give a plan's reason.

Contract: an `Option` is one drafter with one signal at its best length; `option_of` makes it from
the estimate of its acceptance and the cost of its rounds. The `why_` functions say a plan for a
person. What a draft is expected to gain is no part of it, since the rounds that follow may
contradict it: what was gained is measured. Pure.

Not here: which option is taken (policy).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from random import Random

from localspec.controller.acceptance import PRIOR_WEIGHT, Estimate
from localspec.controller.cost_snapshot import CostSnapshot
from localspec.controller.costs import MAX_DRAFT_TOKENS
from localspec.core.decoding import OFF, DraftPlan
from localspec.core.off_code import OffCode
from localspec.core.speculation import NEGLIGIBLE, best_length, expected_tokens
from localspec.core.units import compared, counted

MARGIN = 0.15  # share of the rate of an untried option that is not counted on
PROOF = 4.0  # rounds of evidence that halve it
DRAW_SHARPNESS = 0.5  # share of the evidence in a draw: acceptance differs from turn to turn
USUAL_NODES = 4  # of a drafter that shapes its drafts, until its rounds have shown it
UNKNOWN_STEPS = 0.25  # of such a drafter, a token

PAUSED = "Drafting paused: not measured enough yet to know that it helps."
PLAIN_FIRST = DraftPlan(OFF, 0, reason="The first token waits for no drafter to read the prompt.")
PLAIN_LOOK = DraftPlan(OFF, 0, True, "A round without drafting, to keep its cost measured.")


@dataclass(frozen=True)
class Option:
    """num_draft_tokens: its length; of a drafter that shapes its drafts, the most it may draft.
    rate: expected tokens per ms. rates: acceptance by position. evidence: rounds behind it.
    round_ms[γ]: cost of its rounds. ceiling: tokens per ms if every draft token were accepted.
    length: the γ of `model_rate`, which `rate` corrects by what its rounds really gave. is_free:
    whether the controller chooses γ."""

    drafter: str
    signal: Hashable
    num_draft_tokens: int
    rate: float
    rates: list[float]
    evidence: float
    round_ms: list[float]
    ceiling: float
    length: int
    model_rate: float
    is_free: bool

    @property
    def sure_rate(self) -> float:
        """The rate less a margin that shrinks with the evidence."""
        return self.rate * (1.0 - MARGIN * PROOF / (PROOF + self.evidence))

    def drawn(self, random: Random) -> tuple[float, int]:
        """(rate, length) for an acceptance drawn from the posterior. The draw is of the first
        position; the others follow it as powers: r ** (log drawn / log mean)."""
        mean = min(0.99, max(0.01, self.rates[0]))
        weight = DRAW_SHARPNESS * self.evidence + PRIOR_WEIGHT
        found = random.betavariate(mean * weight, (1.0 - mean) * weight)
        power = math.log(min(0.999, max(0.001, found))) / math.log(mean)
        rates, survival = list[float](), 1.0
        for rate in self.rates:
            rates.append(min(0.999, rate) ** power)
            survival *= rates[-1]
            if survival < NEGLIGIBLE:
                break
        if self.is_free:
            length, rate = best_length(rates, self.round_ms)
        else:
            length = self.length
            rate = expected_tokens(rates, length) / self.round_ms[length]
        return self.rate * rate / self.model_rate, length

    def tokens(self, length: int) -> float:
        """Expected of a round of this length."""
        return self.rate / self.model_rate * expected_tokens(self.rates, length)


def option_of(
    drafter: str,
    signal: Hashable,
    prices: CostSnapshot,
    belief: Estimate,
    shapes_itself: bool,
    fixed_length: int | None = None,
    first_length: int | None = None,
    block_length: int | None = None,
) -> Option:
    """The drafter at its best length, or at the one asked for. first_length: the length of a chain
    before its first round. block_length: see core.decoding.Drafter."""
    rates, evidence, levels = belief
    counts = levels[0][0]
    steps_a_token = UNKNOWN_STEPS if shapes_itself else 1.0
    if counts.drafted > 0.0:
        steps_a_token = counts.steps / counts.drafted
    if block_length is not None:  # one step, which `rounds` charges for any draft
        steps_a_token = 0.0
    most = min(MAX_DRAFT_TOKENS, block_length or MAX_DRAFT_TOKENS)
    round_ms, ceiling = prices.rounds(drafter, round(steps_a_token, 2), most)
    if fixed_length is not None:
        length = min(fixed_length, most)
    else:
        length = USUAL_NODES if shapes_itself else best_length(rates, round_ms)[0]
    model_rate = expected_tokens(rates, length) / round_ms[length]
    rate, num_draft_tokens = model_rate, fixed_length or length
    if fixed_length is None:
        rate = _observed_rate(drafter, prices, belief, length, steps_a_token)
        if shapes_itself:
            num_draft_tokens = MAX_DRAFT_TOKENS
        elif first_length is not None and evidence == 0.0:
            num_draft_tokens = min(first_length, most)
    is_free = fixed_length is None and not shapes_itself
    return Option(
        drafter, signal, num_draft_tokens, rate, rates, evidence, round_ms, ceiling, length,
        model_rate, is_free,
    )  # fmt: skip


def _observed_rate(
    drafter: str, prices: CostSnapshot, belief: Estimate, length: int, steps_a_token: float
) -> float:
    """Tokens per ms of the drafter's own rounds; where they are few, of the expected round.

    What its rounds really gave is weighed against the expectation by position: positions late in
    a draft are reached by confident drafts only, and look better than they are."""
    tokens, drafted = expected_tokens(belief.rates, length), float(length)
    steps = max(1.0, steps_a_token * length)
    for counts, weight in belief.levels:
        if (own_rounds := counts.num_rounds - counts.shipped) > 0.0:
            total = own_rounds + weight
            tokens = (counts.tokens + weight * tokens) / total
            drafted = (counts.drafted + weight * drafted) / total
            steps = (counts.steps + counts.silent_steps + weight * steps) / total
    return tokens / prices.round_ms(drafter, min(drafted, MAX_DRAFT_TOKENS), steps)


def unmeasured() -> DraftPlan:
    return _off("measuring", "this machine has not been measured yet.")


def without_drafting(options: Sequence[Option], plain_ms: float) -> DraftPlan:
    """options: those that had something to propose. plain_ms: one plain round."""
    if not options:
        return _off("nothing_to_propose", "no drafter has anything to propose.")
    best = max(options, key=lambda option: option.rate)
    if all(option.ceiling * plain_ms <= 1.0 for option in options):
        why = f"even with every token accepted {best.drafter} would not be faster."
    elif (gain := best.rate * plain_ms) > 1.0:
        return DraftPlan(OFF, 0, reason=PAUSED, off="does_not_pay")
    else:
        why = f"with {best.drafter} it would be {compared(gain)}."
    return _off("does_not_pay", why)


def _off(code: OffCode, why: str) -> DraftPlan:
    return DraftPlan(OFF, 0, reason=f"Off: {why}", off=code)


def why_drafting(option: Option, shapes_itself: bool, is_chosen: bool) -> str:
    """shapes_itself: the drafter decides how much it drafts. is_chosen: a person named it."""
    about = "" if shapes_itself else f", about {counted(option.num_draft_tokens, 'token')} a round"
    if is_chosen:
        return f"Drafting with {option.drafter}{about}, as you chose."
    return f"Drafting with {option.drafter}, the best bet so far."


def why_exploring(option: Option, length: int, shapes_itself: bool) -> str:
    about = "" if shapes_itself else f" with {counted(length, 'token')} a round"
    return f"Trying {option.drafter}{about}: little is known of it here, and it may be faster."


def why_unmeasured(drafter: str) -> str:
    return f"{drafter}, as you chose; this machine has not been measured yet."


def why_silent(drafter: str) -> str:
    return f"{drafter}, as you chose: it has nothing to propose here."
