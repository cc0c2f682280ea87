"""Decides the rounds of one turn.

Contract: a policy plans each round from what the controller has learnt and teaches it what came
of it. The adaptive one takes the option with the highest expected rate; plain decoding is one
of them. Within a round a drafter that knows its confidence goes on only while the next
token's expected gain exceeds its cost at that rate. What lost is looked at again at doubling
intervals, within PROBE_BUDGET of the time and an allowance where nothing is known, as long as what
is not known of it leaves room to win. A drafter whose guess is free is scored every round, used or
not.

Not here: what is learnt over turns (controller), drafting.
Source: the marginal rule is Dinkelbach's method on the rate, with the threshold form of SpecDec++
(arXiv 2405.19715); scoring what was not used is full information as in arXiv 2510.20064.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from itertools import chain
from typing import TYPE_CHECKING

from localspec.core import OFF, DraftPlan, Growth, Outcome, Sequence, Step
from localspec.engine.acceptance import Situation, expected_tokens
from localspec.engine.contenders import Contenders, Rest
from localspec.engine.probing import Probing
from localspec.engine.reasons import why_drafting, why_off
from localspec.engine.shadow import Shadow

if TYPE_CHECKING:
    from localspec.engine.controller import Controller, Option
    from localspec.engine.prices import Prices

HYSTERESIS = 1.03
# The best of many first estimates is mostly luck, and of a single one is not. So in a kind of text
# that is new the best of very many must promise this much over plain decoding, of n of them
# 1 - 1/n as much, and after so many rounds half of that.
CAUTION, CAUTIOUS_ROUNDS = 0.25, 200
SPREAD = 0.7  # of what an option never looked at may turn out to be, in what is expected of it
PLAIN_LOOK = 2  # rounds: the first after a draft is not like the others (controller)
PREPARED_SHARE = 0.8  # of the best rate: who is below it does not read the prompt in advance
FIRST_LENGTH_PROBE, LENGTH_PROBE_BUDGET = 32, 0.005  # at another length of what won
ASKED_MS = 0.01  # drafting that took less did not happen
UNMEASURED_LENGTH = 4  # γ of a drafter asked for by name before costs are known


class AdaptivePolicy:
    """The controller's own choice, among all drafters or for one asked for by name."""

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
        self._situation = situation
        self._allowed = allowed
        self._may_be_off = may_be_off
        self._fixed_length = fixed_length
        self._first_length = first_length
        self._probing = controller.probing_in(situation)
        self._length_probing = controller.length_probing.setdefault(
            situation, Probing(FIRST_LENGTH_PROBE, LENGTH_PROBE_BUDGET)
        )
        self._looking = self._probing  # which of them the present look is charged to
        self._contenders = controller.contenders.setdefault(situation, Contenders())
        self._shadow = Shadow(controller, situation)
        self._far: list[tuple[str, Hashable]] = []  # far behind this round, though asked
        self._is_full_look = True
        self._rest = controller.rests.setdefault(situation, Rest())
        self._rest.end()  # the one of the turn before
        self._is_planned = True  # this round
        self._off_plan = DraftPlan(OFF, 0)
        self._asked = DraftPlan(OFF, 0)
        self._num_plain_looks_left = 0
        self._look_ms, self._look_tokens = 0.0, 0  # of the look under way
        self._options: list[Option] = []
        self._settled: tuple[object, ...] | None = None  # what led to the last plan, if that is off
        self._prices: Prices | None = None
        self._plain_ms = 0.0
        self._best_rate = 0.0

    def plan(self, sequence: Sequence) -> DraftPlan:
        self._is_planned = not self._rest.goes_on()
        if not self._is_planned:
            return self._off_plan
        if not self._reads_prices(sequence):
            return self._unmeasured(sequence)
        if self._num_plain_looks_left > 0:
            self._num_plain_looks_left -= 1
            return self._asked
        is_look_due = not self._may_be_off or self._probing.is_time
        is_full = self._is_full_look = self._contenders.begin(is_look_due)
        signals = self._signals(sequence)
        state = (signals, self._prices, self._controller.acceptance.revision)
        if is_full or state != self._settled:
            self._options, contenders = self._weighed(signals)
            self._asked = self._plan(self._options, contenders)
            self._settled = state if self._asked is self._off_plan else None
            if self._settled and not contenders:
                self._rest.begin(self._plain_ms)
        far = (option for place in self._far if (option := self._option(*place)))
        self._shadow.cast(sequence, chain(self._options, far), self._asked.drafter)
        return self._asked

    def candidates(self, sequence: Sequence) -> tuple[str, ...]:
        """Those that could win if every token were accepted and that are not far behind as
        things stand: the others read what they missed when they are looked at again. The one
        asked for by name."""
        if not self._may_be_off:
            return self._allowed
        if not self._reads_prices(sequence):
            return ()
        self._is_full_look = self._contenders.begin(wants_all=True)
        options, _ = self._weighed(self._signals(sequence))
        wanted = max((option.rate for option in options), default=0.0) * PREPARED_SHARE
        hopeless = {
            o.drafter for o in options if o.curve.ceiling * self._plain_ms <= 1.0 or o.rate < wanted
        }
        return tuple(name for name in self._allowed if name not in hopeless)

    def _plan(self, options: list[Option], contenders: list[Option]) -> DraftPlan:
        """contenders: those of the options that are not far behind."""
        if not options and not self._may_be_off:  # it may still have more to say than it signals
            name, length = self._allowed[0], self._fixed_length or UNMEASURED_LENGTH
            return DraftPlan(name, length, reason=f"{name}, as you chose: nothing to go by here.")
        best = self._choose(contenders, 1.0 / self._plain_ms)
        self._best_rate = 1.0 / self._plain_ms if best is None else best.rate
        look = self._second_look(best, options) if self._may_be_off else None
        if look is not None:
            return look
        if best is not None:
            return self._drafting(best)
        if self._is_full_look:
            self._off_plan = DraftPlan(OFF, 0, reason=why_off(options, self._plain_ms))
        return self._off_plan

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        step = outcome.step
        if self._is_planned:
            self._rest.planned(step.plan_ms)
        self._controller.learn(self._situation, outcome)
        if step.num_draft_tokens == 0 and self._asked.drafter != OFF:
            self._controller.learn_of_nothing(self._situation, self._asked, step)
        self._probing.ran(step.round_ms)
        self._length_probing.ran(step.round_ms)
        if self._is_planned and self._asked.is_probe:
            self._charge(step)
        self._shadow.score(sequence)

    def _charge(self, step: Step) -> None:
        """Count a look that has ended: plain decoding's takes PLAIN_LOOK rounds, and one that
        proposed nothing has cost its asking, unless there was no room to ask."""
        asked = self._asked
        if asked.drafter != OFF and step.num_draft_tokens == 0 and step.draft_ms < ASKED_MS:
            return
        self._look_ms += step.round_ms
        self._look_tokens += step.num_output_tokens
        if self._num_plain_looks_left > 0:
            return
        loss_ms = self._look_ms - self._look_tokens / self._best_rate
        num_rounds = PLAIN_LOOK if asked.drafter == OFF else 1
        self._looking.probed((asked.drafter, asked.signal), loss_ms, self._look_ms, num_rounds)
        self._look_ms, self._look_tokens = 0.0, 0

    def _weighed(self, signals: dict[str, Hashable]) -> tuple[list[Option], list[Option]]:
        """Every drafter that has something to propose, at its best length, and of these the
        contenders. Between full looks the others are not weighed: both are the same then."""
        options: list[Option] = []
        self._far = []
        for name, signal in signals.items():
            if signal is None:
                continue
            if self._contenders.is_far(name, signal):
                self._far.append((name, signal))
            elif (option := self._option(name, signal)) is not None:
                options.append(option)
        if not self._is_full_look or not self._may_be_off:
            return options, options
        return options, self._contenders.weigh(signals, options, 1.0 / self._plain_ms)

    def _signals(self, sequence: Sequence) -> dict[str, Hashable]:
        drafters, need_not_ask = self._controller.drafters, self._contenders.need_not_ask
        return {
            name: drafters[name].signal(sequence)
            for name in self._allowed
            if not need_not_ask(name)
        }

    def _option(self, name: str, signal: Hashable) -> Option | None:
        """The controller's option; None while its cost is not known."""
        assert self._prices is not None, "prices are read before options are weighed"
        return self._controller.option(
            name, signal, self._situation, self._prices, self._fixed_length, self._first_length
        )

    def _reads_prices(self, sequence: Sequence) -> bool:
        """Take up what rounds cost now; False until it is known."""
        self._prices = self._controller.prices(self._situation.bucket, len(sequence.tokens) - 1)
        if self._prices is None:
            return False
        self._plain_ms = self._prices.plain_ms
        return True

    def _choose(self, options: list[Option], plain_rate: float) -> Option | None:
        """The best option, None for plain decoding; changes its mind only for HYSTERESIS."""
        if not options:
            return None
        best = max(options, key=lambda option: option.rate)
        rates = {option.drafter: option for option in options}
        key = (self._situation, *((option.drafter, option.signal) for option in options))
        incumbent = self._controller.incumbents.get(key)
        if incumbent == OFF and self._may_be_off and best.rate <= HYSTERESIS * plain_rate:
            return None
        if incumbent in rates and best.rate <= HYSTERESIS * rates[incumbent].rate:
            best = rates[incumbent]
        bar = plain_rate * (1.0 + self._caution())
        chosen = None if self._may_be_off and best.rate <= bar else best
        self._controller.incumbents[key] = OFF if chosen is None else chosen.drafter
        return chosen

    def _caution(self) -> float:
        seen = self._controller.acceptance.num_seen(self._situation.kind)
        among = 1.0 - 1.0 / len(self._allowed)
        return CAUTION * among * CAUTIOUS_ROUNDS / (CAUTIOUS_ROUNDS + seen)

    def _second_look(self, best: Option | None, options: list[Option]) -> DraftPlan | None:
        """Now and then a round of what lost: a drafter that could win if it got better, or
        plain decoding, whose cost is what every gain is measured against."""
        self._looking = self._probing
        other_length = None if best is None else self._other_length(best)
        if other_length is not None:
            self._looking = self._length_probing
            return other_length
        if not self._is_full_look or not self._probing.is_time:
            return None
        hopeful = [
            option
            for option in options
            if option is not best
            and self._promise(option) > self._best_rate
            and self._probing.has_waited((option.drafter, option.signal))
        ]
        may_be_plain = best is not None and self._probing.has_waited((OFF, None))
        if best and may_be_plain and (not hopeful or self._probing.num_probes % 2 == 1):
            # Believed dearer than a round that drafts, it was measured wrongly: find that out.
            took_ms = PLAIN_LOOK * min(self._plain_ms, best.round_ms)
            lost_ms = took_ms - PLAIN_LOOK / self._best_rate
            if not self._probing.is_due((OFF, None), lost_ms, took_ms):
                return None
            self._num_plain_looks_left = PLAIN_LOOK - 1
            reason = "A round of plain decoding, to keep its cost measured."
            return DraftPlan(OFF, 0, True, reason)
        if not hopeful:
            self._probing.put_off()
            return None
        option = max(hopeful, key=self._promise)
        loss_ms = option.round_ms * (1.0 - option.rate / self._best_rate)
        if not self._probing.is_due((option.drafter, option.signal), loss_ms, option.round_ms):
            return None
        reason = f"A look at {option.drafter}: it lost before, things may have changed."
        growth = self._growth(option)
        return DraftPlan(
            option.drafter, option.num_draft_tokens, True, reason, option.signal, growth=growth
        )

    def _promise(self, option: Option) -> float:
        """The rate that a look may find: the further above what is believed, the less is known."""
        known = self._controller.acceptance.evidence(option.drafter, option.signal, self._situation)
        return min(option.curve.ceiling, option.rate * (1.0 + SPREAD / math.sqrt(1.0 + known)))

    def _other_length(self, best: Option) -> DraftPlan | None:
        """A round of the best drafter at about twice or half its length: a width whose cost was
        measured wrongly would never be used again, and so never be found out."""
        probing = self._length_probing
        if self._fixed_length is not None or not probing.is_time:
            return None
        if self._shapes_itself(best):
            return None
        curve, length = best.curve.round_ms, best.num_draft_tokens
        longer, shorter = min(len(curve) - 1, 2 * length + 1), max(1, length // 2)
        tried = shorter if probing.num_probes % 2 == 1 and shorter != length else longer
        rates = self._controller.acceptance.rates(best.drafter, best.signal, self._situation)
        worth_ms = expected_tokens(rates, tried) / self._best_rate
        looked_at, loss_ms = (best.drafter, best.signal), max(0.0, curve[tried] - worth_ms)
        is_due = probing.has_waited(looked_at) and probing.is_due(looked_at, loss_ms, curve[tried])
        if not is_due:
            return None
        noun = "token" if tried == 1 else "tokens"
        reason = f"A look at {best.drafter} with {tried} {noun} a round, to keep its cost measured."
        return DraftPlan(best.drafter, tried, True, reason, best.signal)

    def _drafting(self, option: Option) -> DraftPlan:
        name, length = option.drafter, option.num_draft_tokens
        shapes_itself = self._shapes_itself(option)
        reason = why_drafting(option, self._plain_ms, shapes_itself)
        if shapes_itself:
            growth = self._growth(option)
            return DraftPlan(name, length, False, reason, option.signal, growth=growth)
        knows_confidence = self._controller.acceptance.knows_confidence(
            name, self._situation.bucket
        )
        if self._fixed_length is not None or not knows_confidence:
            return DraftPlan(name, length, False, reason, option.signal)
        # The length is an average; a confident draft may go further, an unsure one stops early.
        reach = min(len(option.curve.round_ms) - 1, 2 * length + 2)
        rule = self._marginal_rule(option)
        return DraftPlan(name, reach, False, reason, option.signal, rule)

    def _shapes_itself(self, option: Option) -> bool:
        return self._controller.drafters[option.drafter].shapes_itself

    def _growth(self, option: Option) -> Growth | None:
        """Prices at the going rate; None for a chain, and for a length that was asked for."""
        if self._fixed_length is not None or not self._shapes_itself(option):
            return None
        rate = max(option.rate, self._best_rate)
        assert self._prices is not None, "prices are read before options are weighed"
        return self._controller.growth(option, self._prices, self._situation.bucket, rate)

    def _marginal_rule(self, option: Option) -> Callable[[int, float], bool]:
        """Go on while the next token's chance to survive exceeds its cost at the going rate."""
        curve = option.curve.round_ms
        acceptance, bucket = self._controller.acceptance, self._situation.bucket
        rate = max(option.rate, 1.0 / self._plain_ms)
        survival = 1.0

        def keep_drafting(index: int, confidence: float) -> bool:
            nonlocal survival
            chance = acceptance.chance(option.drafter, bucket, confidence)
            survival *= chance
            drafted = index + 1
            if drafted + 1 >= len(curve):
                return False
            return survival * option.acceptance > rate * (curve[drafted + 1] - curve[drafted])

        return keep_drafting

    def _unmeasured(self, sequence: Sequence) -> DraftPlan:
        if self._may_be_off:
            return DraftPlan(OFF, 0, reason="Off: this machine has not been measured yet.")
        name = self._allowed[0]
        signal = self._controller.drafters[name].signal(sequence)
        reason = f"{name}, as you chose; this machine has not been measured yet."
        length = self._fixed_length or self._first_length or UNMEASURED_LENGTH
        return DraftPlan(name, length, reason=reason, signal=signal)
