"""Chooses the drafter and the draft length of each round of a turn.

Contract: maximises expected tokens per ms, R(γ) = E(γ) / T(γ), over every drafter and every γ,
plain decoding (γ = 0) among them. E comes from learnt acceptance, by drafter, signal, temperature
bucket, kind of text and turn. T comes from costs measured on this machine.

The rule
- The option with the best mean rate is taken, less a margin that shrinks with its evidence.
  Plain decoding needs no evidence; in a kind of text that is new the best of many drafters must
  promise clearly more, since the best of many first estimates is mostly luck.
- Whenever options are weighed, each is also drawn from its posterior (Thompson sampling). Where a
  draw beats the best, one round explores it, if the `Budget` pays for the expected loss. The time
  that the round really took is charged, less what its expected tokens are worth.
- A drafter that has to read tokens it missed is charged for that (`CatchUp`).
- Options are weighed every few rounds, so that this takes PLANNED of the time, and at once when a
  draft in use falls behind plain decoding. Between, drafters whose signal varies are asked for it;
  other rounds of plain decoding neither ask nor learn.
- Within a round, a drafter that knows its confidence goes on while the next token's chance to
  survive is worth more than its cost at the going rate.

Not here: what is learnt (learnt), what an option is worth (options), drafting.
Sources: R as a ratio of sums is the renewal-reward rate; Thompson 1933 for the draws; the rule
within a round is Dinkelbach's method on R, with the threshold form of SpecDec++ (arXiv 2405.19715);
scoring guesses that were not used is full information as in arXiv 2510.20064.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from localspec.core import OFF, DraftPlan, Growth, Outcome, Sequence, Step
from localspec.engine.acceptance import Situation
from localspec.engine.costs import MAX_DRAFT_TOKENS, CostSnapshot
from localspec.engine.learnt import ASKED_MS, NEARLY_CAUGHT_UP, Learnt, Peek
from localspec.engine.options import Option
from localspec.engine.reasons import (
    PLAIN_LOOK,
    UNMEASURED,
    why_drafting,
    why_exploring,
    why_off,
    why_silent,
    why_unmeasured,
)

HYSTERESIS = 1.03  # times the rate of what is in use, for something else to replace it
CAUTION, CAUTIOUS_ROUNDS = 0.25, 200  # over plain decoding in a new kind; halves by so many rounds
PLANNED = 0.005  # share of the time for weighing options, and as much for asking signals
LEAST_PERIOD, MOST_PERIOD = 4, 32  # rounds from one weighing to the next
MOST_UNASKED = 4  # rounds: a repeat in the text must be noticed soon
FAR = 0.8  # of the best rate: options below it are weighed four times more rarely
FALLEN_BEHIND = 3.0  # plain steps that drafting may lose before options are weighed again
LONGEST_TRIAL = 2  # draft tokens of an exploring round, or as many as pay on average
LIKELY_REMAINING = 64  # tokens of a reply that are likely still to come
UNMEASURED_LENGTH = 4  # γ of a drafter asked for by name before costs are known
MEMORY = 0.3  # of what planning takes: about three plans


_Weighed = tuple[int, int, CostSnapshot | None, Option | None]  # due when, and made of what


class AdaptivePolicy:
    """The controller's own choice of one turn, among all drafters or for one asked for by name."""

    def __init__(
        self,
        learnt: Learnt,
        situation: Situation,
        allowed: tuple[str, ...],
        may_be_off: bool,
        fixed_length: int | None,
        first_length: int | None = None,
    ) -> None:
        self._learnt = learnt
        self._situation = situation
        self._allowed = allowed
        self._may_be_off = may_be_off
        self._fixed_length = fixed_length
        self._first_length = first_length
        self._prices: CostSnapshot | None = None
        self._signals: dict[str, Hashable] = {}
        self._options: dict[tuple[str, Hashable], _Weighed] = {}
        self._plans: dict[tuple[str, Hashable], DraftPlan] = {}
        self._read: dict[str, int] = {}  # tokens of the turn that each drafter has read
        self._num_rounds = 0
        self._until_weighed = self._until_asked = 0  # rounds
        self._is_weighed = self._is_asked = False  # in this round
        self._plan = DraftPlan(OFF, 0)
        self._best: Option | None = None
        self._going_rate = 0.0  # tokens per ms
        self._is_exploring = False
        self._trial_tokens = 1.0  # expected of the round that explores
        self._behind_ms = 0.0  # what drafting lost to plain decoding since options were weighed
        self._quiet_rounds, self._quiet_ms = 0, 0.0  # not learnt from yet
        self._peek = Peek(learnt, situation)

    # -- deciding ----------------------------------------------------------------------------

    def plan(self, sequence: Sequence) -> DraftPlan:
        self._until_weighed -= 1
        self._until_asked -= 1
        self._is_weighed = self._until_weighed < 0
        is_priced = self._prices is not None  # without costs there is nothing to decide
        self._is_asked = self._is_weighed or (is_priced and self._until_asked < 0)
        if not self._is_asked:
            return self._plan
        if self._is_weighed and not self._reads_prices(sequence):
            return self._unmeasured(sequence)
        if self._ask_signals(sequence) or self._is_weighed:
            self._plan = self._decided(sequence)
        self._set_periods()
        return self._plan

    def candidates(self, sequence: Sequence) -> tuple[str, ...]:
        """The drafter that will be used as things stand; the one asked for by name. The others
        catch up when they are tried."""
        wanted = self._allowed
        if self._may_be_off:
            if not self._reads_prices(sequence):
                return ()
            self._is_weighed = True
            self._ask_signals(sequence)
            self._choose(sequence)
            wanted = () if self._best is None else (self._best.drafter,)
        self._read |= dict.fromkeys(wanted, len(sequence.tokens) - 1)
        return wanted

    def _decided(self, sequence: Sequence) -> DraftPlan:
        options = self._choose(sequence)
        self._is_exploring = False
        if self._is_weighed and self._may_be_off:
            self._behind_ms = 0.0
            self._peek.at(sequence, [o for o in options if o is not self._best])
            trial = self._trial(sequence, options)
            if trial is not None:
                self._is_exploring = True
                return trial
        if self._best is not None:
            return self._drafting(self._best)
        if not self._may_be_off:  # it may still have more to say than it signals
            name, length = self._allowed[0], self._fixed_length or UNMEASURED_LENGTH
            return DraftPlan(name, length, reason=why_silent(name))
        if self._is_weighed or self._plan.drafter != OFF or self._plan.is_probe:
            return DraftPlan(OFF, 0, reason=why_off(options, self._known_prices.plain_ms))
        return self._plan

    def _choose(self, sequence: Sequence) -> list[Option]:
        """Find the best option; returns all that have something to propose."""
        found = [self._option(name, signal) for name, signal in self._signals.items()]
        options = [option for option in found if option is not None]
        plain_rate = 1.0 / self._known_prices.plain_ms
        last, best, bar = self._best, None, 0.0
        if self._may_be_off:
            bar = plain_rate * (1.0 + self._caution()) * (HYSTERESIS if last is None else 1.0)
        for option in options:
            worth = self._worth(option, sequence)
            if last is not None and option.drafter == last.drafter:
                worth *= HYSTERESIS
            if worth > bar:
                best, bar = option, worth
        self._best = best
        self._going_rate = plain_rate if best is None else max(plain_rate, best.rate)
        return options

    def _caution(self) -> float:
        among = 1.0 - 1.0 / len(self._allowed)
        seen = self._learnt.acceptance.num_seen(self._situation.kind)
        return CAUTION * among * CAUTIOUS_ROUNDS / (CAUTIOUS_ROUNDS + seen)

    def _worth(self, option: Option, sequence: Sequence) -> float:
        """Its rate, less what it takes to catch up over the rounds that are likely to come."""
        if not self._may_be_off:
            return option.rate
        remaining = min(LIKELY_REMAINING, max(1, sequence.num_remaining))
        extra_ms = self._catch_up_ms(option, sequence)
        return remaining / (remaining / option.sure_rate + extra_ms)

    def _catch_up_ms(self, option: Option, sequence: Sequence) -> float:
        num_missed = len(sequence.tokens) - self._read.get(option.drafter, 0)
        step_ms = self._known_prices.step_ms[option.drafter]
        return self._learnt.catch_up.ms(option.drafter, num_missed, step_ms)

    def _trial(self, sequence: Sequence, options: list[Option]) -> DraftPlan | None:
        """A round of what lost, if a draw from its posterior wins and the budget pays for it."""
        going, plain_ms = self._going_rate, self._known_prices.plain_ms
        budget = self._learnt.budget(self._situation.bucket, plain_ms)
        if self._best is not None and budget.is_plain_due:
            # Believed dearer than a round that drafts, it was measured wrongly: find that out.
            took_ms = min(plain_ms, self._best.round_ms[1])
            if 2.0 * (took_ms - 1.0 / going) <= budget.saved_ms:
                budget.look_at_plain()
                self._trial_tokens = 1.0
                self._until_weighed = 1  # two rounds: the first after a draft shows nothing
                return DraftPlan(OFF, 0, True, PLAIN_LOOK)
        if budget.saved_ms <= 0.0:
            return None
        top_rate, top = going, None
        for option in options:
            if option is self._best or option.ceiling <= going:
                continue
            rate, length = option.drawn(self._learnt.random)
            if rate <= top_rate:
                continue
            length = min(length, max(option.length, LONGEST_TRIAL))
            took_ms = option.round_ms[length] + self._catch_up_ms(option, sequence)
            if took_ms - option.tokens(length) / going <= budget.saved_ms:
                top_rate, top = rate, (option, length)
        if top is None:
            return None
        option, length = top
        self._until_weighed, self._trial_tokens = 0, option.tokens(length)
        shapes_itself = self._shapes_itself(option.drafter)
        reason = why_exploring(option, length, shapes_itself)
        if not option.is_free:
            length = option.num_draft_tokens
        growth = self._growth(option, going) if shapes_itself else None
        return DraftPlan(option.drafter, length, True, reason, option.signal, growth=growth)

    def _drafting(self, option: Option) -> DraftPlan:
        """The plan that an option stands for, kept as long as the option."""
        key = option.drafter, option.signal
        if key in self._plans:
            return self._plans[key]
        name, length = key[0], option.num_draft_tokens
        shapes_itself, rule, growth = self._shapes_itself(name), None, None
        reason = why_drafting(option, self._known_prices.plain_ms, shapes_itself)
        acceptance, bucket = self._learnt.acceptance, self._situation.bucket
        if shapes_itself:
            growth = self._growth(option, self._going_rate)
        elif self._fixed_length is None and acceptance.knows_confidence(name, bucket):
            # The length is an average; a confident draft may go further, an unsure one stops early.
            rule = self._marginal_rule(option)
            length = min(MAX_DRAFT_TOKENS, 2 * length + 2)
        plan = DraftPlan(name, length, False, reason, option.signal, rule, growth)
        self._plans[key] = plan
        return plan

    def _shapes_itself(self, drafter: str) -> bool:
        return self._learnt.drafters[drafter].shapes_itself

    def _growth(self, option: Option, going: float) -> Growth | None:
        """Prices at the going rate; None for a length that was asked for."""
        if self._fixed_length is not None:
            return None
        prices, bucket = self._known_prices, self._situation.bucket
        return self._learnt.growth(option.drafter, prices, bucket, going)

    def _marginal_rule(self, option: Option) -> Callable[[int, float], bool]:
        """Go on while the next token's chance to survive exceeds its cost at the going rate."""
        round_ms, first, going = option.round_ms, option.rates[0], self._going_rate
        bucket, survival = self._situation.bucket, 1.0
        chance_of = partial(self._learnt.acceptance.chance, option.drafter, bucket)

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
    def _known_prices(self) -> CostSnapshot:
        assert self._prices is not None, "prices are read before options are weighed"
        return self._prices

    def _reads_prices(self, sequence: Sequence) -> bool:
        """Take up what rounds cost now; False until it is known."""
        costs = self._learnt.costs_at(self._situation.bucket)
        self._prices = costs.at(len(sequence.tokens) - 1)
        return self._prices is not None

    def _ask_signals(self, sequence: Sequence) -> bool:
        """Ask the drafters what they know before drafting: all of them when options are weighed,
        else those whose signal varies. Returns whether a signal changed."""
        learnt, signals, has_changed = self._learnt, self._signals, False
        for name in self._allowed:
            seen = learnt.signals.setdefault(name, set())
            if self._is_weighed or len(seen) > 1:
                signal = learnt.drafters[name].signal(sequence)
                if name not in signals or signals[name] != signal:
                    signals[name], has_changed = signal, True
                    seen.add(signal)
        return has_changed

    def _set_periods(self) -> None:
        """Rounds until signals are asked and options weighed again."""
        allowed_ms = PLANNED * self._known_prices.plain_ms
        learnt, name = self._learnt, self._plan.drafter
        if self._is_weighed and not self._is_exploring:
            # A draft in use teaches in every round; plain decoding teaches nothing of drafts.
            period = int(learnt.weighing_ms / allowed_ms) if name == OFF else LEAST_PERIOD
            self._until_weighed = min(MOST_PERIOD, max(LEAST_PERIOD, period)) - 1
        varies = name != OFF and len(learnt.signals.get(name, ())) > 1
        unasked = 0 if varies else int(learnt.asking_ms / allowed_ms)
        self._until_asked = min(MOST_UNASKED, unasked)

    def _option(self, name: str, signal: Hashable) -> Option | None:
        """What is learnt of it as an option, weighed anew when its time has come."""
        if signal is None:
            return None
        learnt, prices = self._learnt, self._known_prices
        revision = learnt.acceptance.revision
        due, made_at, made_of, option = self._options.get((name, signal), (-1, -1, None, None))
        if due > self._num_rounds or (made_at == revision and made_of is prices):
            return option
        option = learnt.option(
            name, signal, self._situation, prices, self._fixed_length, self._first_length
        )
        is_far = option is None or option.rate < FAR * self._going_rate
        due = self._num_rounds + LEAST_PERIOD * (4 if is_far else 1)
        self._options[name, signal] = due, revision, prices, option
        self._plans.pop((name, signal), None)
        return option

    def _unmeasured(self, sequence: Sequence) -> DraftPlan:
        if self._may_be_off:
            self._until_weighed = self._until_asked = MOST_PERIOD
            self._plan = DraftPlan(OFF, 0, reason=UNMEASURED)
            return self._plan
        name = self._allowed[0]
        signal = self._learnt.drafters[name].signal(sequence)
        length = self._fixed_length or self._first_length or UNMEASURED_LENGTH
        return DraftPlan(name, length, reason=why_unmeasured(name), signal=signal)

    # -- learning ----------------------------------------------------------------------------

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        step, plan, learnt = outcome.step, self._plan, self._learnt
        self._num_rounds += 1
        if plan.drafter == OFF and not self._is_asked and not self._is_exploring:
            self._quiet_rounds += 1
            self._quiet_ms += step.round_ms
            return
        if self._quiet_rounds:
            learnt.acceptance.tick(self._situation.kind, self._quiet_rounds)
        was_caught_up = self._was_caught_up(step, plan.drafter)
        learnt.learn(self._situation, outcome, was_caught_up)
        if plan.drafter != OFF and not step.num_draft_tokens:
            learnt.learn_of_nothing(self._situation, plan, step)
        if self._prices is not None:
            self._account(step, plan, self._prices.plain_ms)
        self._quiet_rounds, self._quiet_ms = 0, 0.0

    def _account(self, step: Step, plan: DraftPlan, plain_ms: float) -> None:
        """Charge a round that explored, and see whether drafting has fallen behind."""
        learnt, drafted = self._learnt, plan.drafter != OFF
        budget = learnt.budget(self._situation.bucket, plain_ms)
        budget.earn(step.round_ms + self._quiet_ms, plain_ms)
        budget.num_drafted += drafted
        if self._is_exploring:
            tokens = self._trial_tokens if step.num_draft_tokens else 1.0
            budget.charge(step.round_ms - tokens / self._going_rate, plain_ms)
            self._options.pop((plan.drafter, plan.signal), None)  # it is to be weighed anew
        elif drafted and self._may_be_off:
            self._behind_ms += step.round_ms - step.num_output_tokens * plain_ms
            if self._behind_ms > FALLEN_BEHIND * plain_ms:
                self._until_weighed = 0
                self._options.pop((plan.drafter, plan.signal), None)
        if self._is_weighed:
            learnt.weighing_ms += MEMORY * (step.plan_ms - learnt.weighing_ms)
        elif self._is_asked:
            learnt.asking_ms += MEMORY * (step.plan_ms - learnt.asking_ms)

    def _was_caught_up(self, step: Step, drafter: str) -> bool:
        """Whether the round's drafter had read nearly all before; notes that it has by now."""
        if drafter == OFF or step.draft_ms < ASKED_MS:
            return True
        num_missed = step.context_length + 1 - self._read.get(drafter, 0)
        self._read[drafter] = step.context_length + 1
        if num_missed <= NEARLY_CAUGHT_UP:
            return True
        costs = self._learnt.costs_at(self._situation.bucket)
        usual_ms = costs.draft_ms(drafter, step.num_draft_steps or 1, step.context_length)
        if usual_ms is not None:
            self._learnt.catch_up.observe(drafter, num_missed, step.draft_ms - usual_ms)
        return False
