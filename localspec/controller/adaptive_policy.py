"""Chooses the drafter and the draft length of each round of a turn.

Contract: maximises expected tokens per ms, R(γ) = E(γ) / T(γ), over every drafter and every γ,
plain decoding (γ = 0) among them. E comes from the acceptance counted by drafter, signal,
temperature, kind of text and turn; T from the costs measured on this machine.

The rule
- Take the option with the highest rate at a low quantile of its acceptance's posterior: an estimate
  of other texts may be too high here, and the best of many estimates is partly luck. Plain decoding
  needs no evidence.
- Whenever options are weighed, each is also drawn from the same posterior (Thompson sampling).
  Where a draw beats the best, one round explores it, if the `Budget` pays for the expected loss.
  What the round really lost is charged.
- A drafter that has to read tokens it missed, as of the prompt, must earn that within a third of
  the tokens that the reply has (`CatchUp`). The first token waits for no reading.
- Options are weighed every PERIOD rounds, and at once when a signal changes. Every round teaches.
- Within a round, a drafter that states confidences goes on while the next token's chance to be
  reached is worth more than its cost at the going rate. By the same rule a lookup appends to it.

Not here: what is learnt (controller), what an option is worth (options), drafting.
Sources: R as a ratio of sums is the renewal-reward rate; Thompson 1933 for the draws; a limit on
what may be lost against a known choice as in conservative bandits (arXiv 1602.04282); the rule
within a round is Dinkelbach's method on R, with the threshold form of SpecDec++ (arXiv 2405.19715).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from functools import partial

from localspec.controller.acceptance import THINKING, Situation
from localspec.controller.controller import Controller
from localspec.controller.costs import MAX_DRAFT_TOKENS
from localspec.controller.load import Load
from localspec.controller.options import (
    PLAIN_FIRST,
    PLAIN_LOOK,
    Option,
    unmeasured,
    why_drafting,
    why_silent,
    why_unmeasured,
    without_drafting,
)
from localspec.controller.prices import Prices
from localspec.core.decoding import OFF, DraftPlan, Growth, Outcome, Sequence, Step

PERIOD = 4  # Options are weighed every so many rounds.
CAUTION = 0.2  # A choice counts on acceptance so many standard deviations below its mean.
# Drafting must be better by this share for each plain round that it lost in this turn. Without it a
# steep machine where texts turn from good to bad gets 1.225 of the best fixed way instead of 1.252.
DOUBT = 0.1
MOST_LOST = 6.0  # More lost rounds count no further: a disturbed round may take minutes.
SECOND_LOOKS = 2  # So many cheap rounds refute a cost that was measured too high.
SURELY_REMAINING = 3  # A reply goes on for so many tokens, and for a third of those it has.
READING = 0.05  # Catching up for a trial may take this share of the reply so far.
UNMEASURED_LENGTH = 4  # The length of a drafter asked for by name before costs are known.

_Weighed = tuple[tuple[int, Prices], Option | None]  # made of what, and the option


class AdaptivePolicy:
    """The controller's own choice of one turn, among all drafters or for one asked for by name."""

    def __init__(
        self,
        controller: Controller,
        situation: Situation,
        allowed: tuple[str, ...],
        may_be_off: bool,
        fixed_length: int | None,
        first_length: int | None = None,
    ) -> None:
        self._controller = controller
        self._answering = self._situation = situation
        self._thinking = situation._replace(kind=THINKING)
        self._allowed = allowed
        self._may_be_off = may_be_off
        self._fixed_length = fixed_length
        self._first_length = first_length
        self._budget = controller.budget(situation.bucket)
        self._prices: Prices | None = None
        self._load, self._plain_ms = Load(), math.inf  # of those prices
        self._signals: dict[str, Hashable] = {}
        self._varying = list[str]()  # drafters whose signal changes within texts
        self._options: dict[tuple[str, Hashable], _Weighed] = {}
        self._until_weighed = 0  # rounds
        self._is_weighed = False  # in this round
        self._plan = DraftPlan(OFF, 0)
        self._best: Option | None = None
        self._going_rate = 0.0  # tokens per ms
        self._is_exploring = False
        self._lost = 0.0  # Plain rounds that drafting lost in this turn and did not gain back.
        self._num_others = 0  # sequences beside this one that the prices are for

    # -- deciding ----------------------------------------------------------------------------

    def plan(self, sequence: Sequence) -> DraftPlan:
        # What is accepted in a thought says little of the answer: weigh anew between them.
        situation = self._thinking if sequence.parts.is_thinking else self._answering
        if situation is not self._situation:
            self._situation, self._until_weighed = situation, 0
            self._options.clear()
        self._until_weighed -= 1
        self._is_weighed = self._until_weighed < 0
        if self._is_weighed:
            if not self._reads_prices(sequence):
                return self._unmeasured(sequence)
            self._until_weighed = PERIOD - 1
            self._ask_signals(sequence, self._allowed)
            self._plan = self._decided(sequence)
        elif self._varying and self._ask_signals(sequence, self._varying):
            self._plan = self._decided(sequence)
        return self._plan

    def _decided(self, sequence: Sequence) -> DraftPlan:
        options = self._choose(sequence)
        self._is_exploring = False
        if self._is_weighed and self._may_be_off:
            plain_first = self._plain_first(sequence)
            trial = plain_first or self._trial(sequence, options)
            if trial is not None:
                self._is_exploring = plain_first is None
                return trial
        if self._best is not None:
            return self._drafting(self._best)
        if not self._may_be_off:  # it may still propose something
            name, length = self._allowed[0], self._fixed_length or UNMEASURED_LENGTH
            return DraftPlan(name, length, reason=why_silent(name))
        if self._is_weighed or self._plan.drafter != OFF or self._plan.is_probe:
            return without_drafting(options, self._plain_ms)
        return self._plan

    def _choose(self, sequence: Sequence) -> list[Option]:
        """Find the best option; returns all that have something to propose."""
        found = [self._option(name, signal) for name, signal in self._signals.items()]
        options = [option for option in found if option is not None]
        plain_rate = 1.0 / self._plain_ms
        best, bar = None, plain_rate if self._may_be_off else 0.0
        for option in options:
            if option.rate <= bar:  # it is worth less than its rate
                continue
            worth = option.rate
            if self._may_be_off:
                sure_rate = option.at(-CAUTION)[0] / (1.0 + DOUBT * self._lost)
                worth = self._earned(sure_rate, option, sequence)
            if worth > bar:
                best, bar = option, worth
        self._best = best
        self._going_rate = plain_rate if best is None else max(plain_rate, best.rate)
        return options

    def _earned(self, rate: float, option: Option, sequence: Sequence) -> float:
        """The rate, less what catching up takes, spread over the tokens that surely come: so a
        drafter reads a prompt late, or not at all for a short reply."""
        catch_up_ms = self._catch_up_ms(option, sequence)
        if not catch_up_ms:
            return rate
        surely = max(SURELY_REMAINING, (len(sequence.tokens) - sequence.prompt_length) // 3)
        remaining = min(surely, max(1, sequence.num_remaining))
        return remaining / (remaining / rate + catch_up_ms)

    def _catch_up_ms(self, option: Option, sequence: Sequence) -> float:
        catch_up, name = self._controller.catch_up, option.drafter
        num_missed = catch_up.num_missed(name, sequence, len(sequence.tokens) - 1)
        if not num_missed:
            return 0.0
        return catch_up.ms(name, num_missed, self._known_prices.step_ms[name])

    def _reads_long(self, option: Option, sequence: Sequence) -> bool:
        """Whether catching up takes more than what the first token of a reply, and a trial, may
        wait for."""
        catch_up_ms = self._catch_up_ms(option, sequence)
        if not catch_up_ms:
            return False
        num_decoded = len(sequence.tokens) - sequence.prompt_length
        return catch_up_ms > self._plain_ms * max(1.0, READING * num_decoded)

    def _plain_first(self, sequence: Sequence) -> DraftPlan | None:
        """The first token of a reply does not wait until a drafter has read the prompt."""
        is_first = len(sequence.tokens) == sequence.prompt_length
        if self._best is None or not is_first or not self._reads_long(self._best, sequence):
            return None
        self._until_weighed = 0
        return PLAIN_FIRST

    def _trial(self, sequence: Sequence, options: list[Option]) -> DraftPlan | None:
        """A round of what lost, if a draw from its posterior wins and the budget pays for it."""
        going, plain_ms, budget = self._going_rate, self._plain_ms, self._budget
        if self._best is not None and budget.is_plain_due and not self._num_others:
            # If plain decoding is believed dearer than a round that drafts, this shows the fault.
            took_ms = min(plain_ms, self._best.round_ms[1])
            if self._may_lose(2.0 * (took_ms - 1.0 / going)):
                budget.look_at_plain()
                self._until_weighed = 1  # two rounds: the first after a draft shows nothing
                return PLAIN_LOOK
        if budget.saved <= 0.0:
            return None
        top_rate, top = going, None
        for option in options:
            if option is self._best or option.ceiling <= going:
                continue
            rate, _ = option.at(self._controller.random.gauss(0.0, 1.0))
            if rate <= top_rate or self._reads_long(option, sequence):
                continue
            length = option.length
            took_ms = option.round_ms[length] + self._catch_up_ms(option, sequence)
            if self._may_lose(took_ms - option.tokens(length) / going):
                top_rate, top = rate, option
        top = top or self._second_look(sequence, options)
        if top is None:
            return None
        self._until_weighed = 0
        return self._drafting(top, is_trial=True)

    def _may_lose(self, expected_ms: float) -> bool:
        """Whether the budget pays for a round that is expected to lose so much."""
        return expected_ms <= self._budget.saved * self._plain_ms

    def _second_look(self, sequence: Sequence, options: list[Option]) -> Option | None:
        """A drafter whose believed cost rules it out, whatever is accepted of it. Its cost may have
        been measured while another program was computing, so a run of the program spends a few
        rounds on it."""
        looks = self._controller.second_looks
        for option in options:
            is_ruled_out = option.ceiling * self._plain_ms <= 1.0
            is_looked_at = looks[option.drafter] >= SECOND_LOOKS
            if is_ruled_out and not is_looked_at and not self._reads_long(option, sequence):
                took_ms = option.round_ms[1] + self._catch_up_ms(option, sequence)
                if self._may_lose(took_ms - 1.0 / self._going_rate):
                    looks[option.drafter] += 1
                    return option
        return None

    def _drafting(self, option: Option, is_trial: bool = False) -> DraftPlan:
        name, length = option.drafter, option.num_draft_tokens
        shapes_itself, rule, growth, filling = self._shapes_itself(name), None, None, None
        reason = why_drafting(option, shapes_itself, not self._may_be_off, is_trial)
        controller, bucket, going = self._controller, self._situation.bucket, self._going_rate
        if shapes_itself:
            growth = self._growth(option, going)
        elif self._fixed_length is None:
            if self._may_be_off:  # else a person named what drafts
                filling = controller.filling(name, self._known_prices, bucket, going)
            if controller.acceptance.knows_confidence(name, bucket):
                # The length is a mean: a confident draft goes further, an unsure one stops early.
                rule = self._marginal_rule(option)
                length = min(MAX_DRAFT_TOKENS, 2 * length + 2)
        return DraftPlan(
            name, length, is_trial, reason, option.signal, rule, growth, filling=filling
        )

    def _shapes_itself(self, drafter: str) -> bool:
        return self._controller.drafters[drafter].shapes_itself

    def _growth(self, option: Option, going: float) -> Growth | None:
        """Prices at the going rate; None for a length that was asked for."""
        if self._fixed_length is not None:
            return None
        prices, bucket = self._known_prices, self._situation.bucket
        return self._controller.growth(option.drafter, prices, bucket, going)

    def _marginal_rule(self, option: Option) -> Callable[[int, float], bool]:
        """Go on while the next token's chance to be reached exceeds its cost at the going rate."""
        round_ms, first, going = option.round_ms, option.first_rate, self._going_rate
        bucket, survival = self._situation.bucket, 1.0
        chance_of = partial(self._controller.acceptance.chance, option.drafter, bucket)

        def keep_drafting(index: int, confidence: float) -> bool:
            nonlocal survival
            survival = (survival if index else 1.0) * chance_of(confidence)
            length = index + 1
            if length + 1 >= len(round_ms):
                return False
            return survival * first > going * (round_ms[length + 1] - round_ms[length])

        return keep_drafting

    # -- what it is decided by ---------------------------------------------------------------

    @property
    def _known_prices(self) -> Prices:
        assert self._prices is not None, "prices are read before options are weighed"
        return self._prices

    def _reads_prices(self, sequence: Sequence) -> bool:
        """Read what rounds cost now; False until it is known."""
        costs = self._controller.costs_at(self._situation.bucket)
        self._num_others = sequence.others.num_sequences
        self._load = costs.load
        self._prices = costs.at(len(sequence.tokens) - 1, sequence.others)
        if self._prices is None:
            return False
        self._plain_ms = self._prices.plain_ms
        return True

    def _ask_signals(self, sequence: Sequence, drafters: Iterable[str]) -> bool:
        """Ask these drafters what they know before drafting. True if a signal changed."""
        controller, signals, has_changed = self._controller, self._signals, False
        for name in drafters:
            signal = controller.drafters[name].signal(sequence)
            if name not in signals or signals[name] != signal:
                signals[name], has_changed = signal, True
                controller.signals.setdefault(name, set()).add(signal)
        if has_changed:
            self._varying = [name for name in signals if len(controller.signals[name]) > 1]
        return has_changed

    def _option(self, name: str, signal: Hashable) -> Option | None:
        """The option of a drafter, made anew when its counts or the costs have changed."""
        if signal is None:
            return None
        controller, prices = self._controller, self._known_prices
        made_of = controller.acceptance.revisions[name], prices
        known = self._options.get((name, signal))
        if known is not None and known[0] == made_of:
            return known[1]
        option = controller.option(
            name, signal, self._situation, prices, self._fixed_length, self._first_length
        )
        self._options[name, signal] = made_of, option
        return option

    def _unmeasured(self, sequence: Sequence) -> DraftPlan:
        if self._may_be_off:
            self._until_weighed = PERIOD
            self._plan = unmeasured()
            return self._plan
        name = self._allowed[0]
        signal = self._controller.drafters[name].signal(sequence)
        length = self._fixed_length or self._first_length or UNMEASURED_LENGTH
        self._plan = DraftPlan(name, length, reason=why_unmeasured(name), signal=signal)
        return self._plan

    # -- learning ----------------------------------------------------------------------------

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        step, plan = outcome.step, self._plan
        if step.others.num_sequences != self._num_others:
            self._until_weighed = 0
        self._controller.observe(self._situation, sequence, plan, outcome)
        if self._prices is not None:
            # Plain decoding needs a round for the end of the text too, which is no output.
            num_tokens = step.num_output_tokens + (sequence.finish_reason == "eos")
            self._account(step, plan, num_tokens)

    def _own_ms(self, step: Step) -> float:
        """What a round took in quiet, of the time of all sequences. A forward that several share is
        no measure of one of them, so its part is taken as priced."""
        if not step.others.num_sequences:
            return (step.draft_ms + step.verify_ms) / self._load.value
        return step.draft_ms + self._known_prices.verified_ms(
            min(step.num_draft_tokens, MAX_DRAFT_TOKENS)
        )

    def _account(self, step: Step, plan: DraftPlan, num_tokens: int) -> None:
        """Enter a round of so many tokens into the budget."""
        budget, took_ms = self._budget, self._own_ms(step)
        plain_ms = self._plain_ms
        budget.earn(took_ms / plain_ms)
        if plan.drafter == OFF:
            return
        gained = num_tokens - took_ms / plain_ms
        budget.num_drafted += 1
        self._lost = min(MOST_LOST, max(0.0, self._lost - gained))
        if self._is_exploring:
            if self._num_others:  # who asked for all waits for the slowest: one ahead gains nothing
                num_tokens = min(1, num_tokens)
            budget.explored((num_tokens / self._going_rate - took_ms) / plain_ms)
