"""What may be chosen for a round: its expected rate, the plans without a draft, and the words that
give a plan's reason.

An `Option` is one drafter with one signal; `option_of` makes it from the estimate of its acceptance
and the prices of its rounds. What it is believed to give depends on how far from its mean the
acceptance is taken: at the mean, at the low quantile that a choice counts on, or at a draw. What a
draft is expected to gain is no part of a plan's words, since the rounds that follow may contradict
it: what was gained is measured.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from localspec.controller.acceptance import PRIOR_WEIGHT, Estimate
from localspec.controller.costs import MAX_DRAFT_TOKENS
from localspec.controller.prices import Prices
from localspec.core.decoding import OFF, DraftPlan
from localspec.core.off_code import OffCode
from localspec.core.speculation import expected_tokens
from localspec.core.units import compared, counted

USUAL_NODES = 4  # The tokens of a drafter that shapes its drafts, until its rounds have shown it.
SHARPNESS = 0.5  # The posterior counts this share of the evidence: turns differ from each other.
UNKNOWN_STEPS = 0.25  # The steps of such a drafter for a token, until its rounds have shown it.

PAUSED = "Drafting paused: not measured enough yet to know that it helps."
PLAIN_FIRST = DraftPlan(OFF, 0, reason="The first token waits for no drafter to read the prompt.")
PLAIN_LOOK = DraftPlan(OFF, 0, True, "A round without drafting, to keep its cost measured.")


@dataclass(frozen=True)
class Option:
    """rate: expected tokens per ms in quiet, at its best length. num_draft_tokens: that length; of
    a drafter that shapes its drafts, the most it may draft. first_rate: acceptance of the first
    position, log_first_rate: its logarithm, deviation: its standard deviation. survivals[γ - 1]:
    chance that γ draft tokens are accepted. round_ms[γ]: price of its rounds. ceiling: tokens per
    ms if every draft token were accepted. scale: tokens that its rounds really gave to those
    expected by position. length: the γ of `rate`. fixed: the only length there is, or that is
    judged; None where the controller chooses γ."""

    drafter: str
    signal: Hashable
    rate: float
    num_draft_tokens: int
    first_rate: float
    log_first_rate: float
    deviation: float
    survivals: Sequence[float]
    round_ms: Sequence[float]
    ceiling: float
    scale: float
    length: int
    fixed: int | None

    def at(self, deviations: float) -> tuple[float, int]:
        """Return (rate, length) where the first position's acceptance lies so many standard
        deviations from its mean. The other positions follow it as powers."""
        first = self.first_rate + deviations * self.deviation
        first = 0.001 if first < 0.001 else 0.999 if first > 0.999 else first
        power = math.log(first) / self.log_first_rate
        rate, length = _best(self.survivals, self.round_ms, power, self.fixed)
        return self.scale * rate, length

    def tokens(self, length: int) -> float:
        """Expected of a round of this length."""
        return self.scale * (1.0 + sum(self.survivals[:length]))


def _best(
    survivals: Sequence[float], round_ms: Sequence[float], power: float, fixed: int | None
) -> tuple[float, int]:
    """Return the highest rate over all lengths and its length, or that of the fixed length."""
    best, best_rate, expected = 1, 0.0, 1.0
    for length, survival in enumerate(survivals, 1):
        expected += survival**power
        if fixed is None:
            if expected > best_rate * round_ms[length]:
                best, best_rate = length, expected / round_ms[length]
        elif length == fixed:
            return expected / round_ms[length], length
    return best_rate, best


def option_of(
    drafter: str,
    signal: Hashable,
    prices: Prices,
    belief: Estimate,
    shapes_itself: bool,
    fixed_length: int | None = None,
    first_length: int | None = None,
    block_length: int | None = None,
) -> Option:
    """Return the drafter at its best length, or at the one asked for. first_length: the length of a
    chain before its first round. block_length: see core.decoding.Drafter."""
    rates, evidence, levels = belief
    counts = levels[0][0]
    steps_a_token = UNKNOWN_STEPS if shapes_itself else 1.0
    if counts.drafted > 0.0:
        steps_a_token = counts.steps / counts.drafted
    if block_length is not None:  # one step, which `rounds` charges for any draft
        steps_a_token = 0.0
    most = min(MAX_DRAFT_TOKENS, block_length or MAX_DRAFT_TOKENS)
    survivals = tuple(accumulate(rates[:most], mul))
    round_ms, ceiling = prices.rounds(drafter, round(steps_a_token, 2), most)
    fixed = USUAL_NODES if shapes_itself else None
    if fixed_length is not None:
        fixed = min(fixed_length, most)
    model_rate, length = _best(survivals, round_ms, 1.0, fixed)
    scale, num_draft_tokens = 1.0, fixed_length or length
    if fixed_length is None:
        scale = _observed_rate(drafter, prices, belief, length, steps_a_token) / model_rate
        if shapes_itself:
            num_draft_tokens = MAX_DRAFT_TOKENS
        elif first_length is not None and evidence == 0.0:
            num_draft_tokens = min(first_length, most)
    first = min(0.99, max(0.01, rates[0]))
    deviation = math.sqrt(first * (1.0 - first) / (1.0 + PRIOR_WEIGHT + SHARPNESS * evidence))
    return Option(
        drafter, signal, scale * model_rate, num_draft_tokens, first, math.log(first), deviation,
        survivals, round_ms, ceiling, scale, length, fixed,
    )  # fmt: skip


def _observed_rate(
    drafter: str, prices: Prices, belief: Estimate, length: int, steps_a_token: float
) -> float:
    """Tokens per ms of the drafter's own rounds; where they are few, of the expected round.

    What its rounds really gave is weighed against the expectation by position: positions late in
    a draft are reached by confident drafts only, and look better than they are."""
    tokens, drafted = expected_tokens(belief.rates, length), float(length)
    steps = max(1.0, steps_a_token * length)
    for counts, weight in belief.levels:
        if counts.num_rounds > 0.0:
            total = counts.num_rounds + weight
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


def why_drafting(option: Option, shapes_itself: bool, is_chosen: bool, is_trial: bool) -> str:
    """shapes_itself: the drafter decides how much it drafts. is_chosen: a person named it."""
    tokens = counted(option.num_draft_tokens, "token")
    if is_trial:
        about = "" if shapes_itself else f" with {tokens} a round"
        return f"Trying {option.drafter}{about}: little is known of it here, and it may be faster."
    if is_chosen:
        about = "" if shapes_itself else f", about {tokens} a round"
        return f"Drafting with {option.drafter}{about}, as you chose."
    return f"Drafting with {option.drafter}, the best bet so far."


def why_unmeasured(drafter: str) -> str:
    return f"{drafter}, as you chose; this machine has not been measured yet."


def why_silent(drafter: str) -> str:
    return f"{drafter}, as you chose: it has nothing to propose here."
