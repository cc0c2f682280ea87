"""Decides the rounds of one turn.

Contract: a policy plans each round from what the controller has learnt and teaches it what came
of it. The adaptive one takes the option with the highest expected rate; plain decoding is one
of them. Within a round a drafter that knows its confidence goes on only while the next
token's expected gain exceeds its cost at that rate. What lost is looked at again at doubling
intervals, within PROBE_BUDGET of the time, and never while even full acceptance could not make
it win. A drafter whose guess is free is scored every round, used or not.

Not here: what is learnt over turns (controller), drafting.
Source: the marginal rule is Dinkelbach's method on the rate, with the threshold form of SpecDec++
(arXiv 2405.19715); scoring what was not used is full information as in arXiv 2510.20064.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localspec.core import OFF, DraftPlan, Growth, Outcome, Sequence
from localspec.engine.acceptance import expected_tokens
from localspec.engine.probing import Probing

if TYPE_CHECKING:
    from localspec.engine.controller import Controller, Option

HYSTERESIS = 1.03
PREPARED_SHARE = 0.8  # of the best rate: who is below it does not read the prompt in advance
FIRST_LENGTH_PROBE, LENGTH_PROBE_BUDGET = 32, 0.005  # at another length of what won
UNMEASURED_LENGTH = 4  # γ of a drafter asked for by name before costs are known


@dataclass(frozen=True)
class _Shadow:
    """A guess of a drafter that was not used. start: length of the sequence then."""

    option: Option
    start: int
    guess: tuple[int, ...]


class AdaptivePolicy:
    """The controller's own choice, among all drafters or for one asked for by name."""

    def __init__(
        self,
        controller: Controller,
        bucket: int,
        allowed: tuple[str, ...],
        may_be_off: bool,
        fixed_length: int | None,
        first_length: int | None = None,
    ) -> None:
        self._controller = controller
        self._bucket = bucket
        self._allowed = allowed
        self._may_be_off = may_be_off
        self._fixed_length = fixed_length
        self._first_length = first_length
        self._probing = controller.probing.setdefault(bucket, Probing())
        self._length_probing = controller.length_probing.setdefault(
            bucket, Probing(FIRST_LENGTH_PROBE, LENGTH_PROBE_BUDGET)
        )
        self._looking = self._probing  # which of them the present look is charged to
        self._curves: dict[tuple[str, int], list[float]] = {}
        self._known: dict[tuple[str, Hashable], tuple[int, list[float], Option]] = {}
        self._shadow: _Shadow | None = None
        self._asked = DraftPlan(OFF, 0)
        self._plain_ms = 0.0
        self._best_rate = 0.0

    def plan(self, sequence: Sequence) -> DraftPlan:
        context = len(sequence.tokens) - 1
        plain_ms = self._plain_at(context)
        if plain_ms is None:
            return self._unmeasured(sequence)
        self._plain_ms = plain_ms
        options = self._options(sequence, context)
        plan = self._asked = self._plan(options, context)
        self._cast_shadow(sequence, options, plan.drafter)
        return plan

    def candidates(self, sequence: Sequence) -> tuple[str, ...]:
        """Those that could win if every token were accepted and that are not far behind as
        things stand: the others read what they missed when they are looked at again. The one
        asked for by name."""
        if not self._may_be_off:
            return self._allowed
        context = len(sequence.tokens) - 1
        plain_ms = self._plain_at(context)
        if plain_ms is None:
            return ()
        options = self._options(sequence, context)
        wanted = max((option.rate for option in options), default=0.0) * PREPARED_SHARE
        hopeless = {o.drafter for o in options if o.ceiling * plain_ms <= 1.0 or o.rate < wanted}
        return tuple(name for name in self._allowed if name not in hopeless)

    def _plan(self, options: list[Option], context: int) -> DraftPlan:
        if not options and not self._may_be_off:  # it may still have more to say than it signals
            name, length = self._allowed[0], self._fixed_length or UNMEASURED_LENGTH
            return DraftPlan(name, length, reason=f"{name}, as you chose: nothing to go by here.")
        if not options:
            return DraftPlan(OFF, 0, reason="Off this round: no drafter has anything to propose.")
        best = self._choose(options, 1.0 / self._plain_ms)
        self._best_rate = 1.0 / self._plain_ms if best is None else best.rate
        look = self._second_look(best, options, context) if self._may_be_off else None
        if look is not None:
            return look
        return self._off(options) if best is None else self._drafting(best, context)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        step = outcome.step
        self._controller.learn(sequence, outcome)
        if step.num_draft_tokens == 0 and self._asked.drafter != OFF:
            self._controller.learn_of_nothing(sequence, self._asked, step)
        self._probing.ran(step.round_ms)
        self._length_probing.ran(step.round_ms)
        if step.is_probe:
            worth_ms = step.num_output_tokens / self._best_rate
            self._looking.probed(step.round_ms - worth_ms)
        self._score_shadow(sequence)

    def _options(self, sequence: Sequence, context: int) -> list[Option]:
        """Every drafter that has something to propose, at its best length."""
        found = []
        for name in self._allowed:
            signal = self._controller.drafters[name].signal(sequence)
            if signal is None:
                continue
            curve = self._curve(name, context)
            if curve is not None:
                found.append(self._option(name, signal, curve))
        return found

    def _option(self, name: str, signal: Hashable, curve: list[float]) -> Option:
        """The controller's option, kept until it would come out otherwise."""
        version = self._controller.acceptance.version(name)
        known = self._known.get((name, signal))
        if known is not None and known[0] == version and known[1] is curve:
            return known[2]
        option = self._controller.option(
            name, signal, self._bucket, curve, self._fixed_length, self._first_length
        )
        self._known[name, signal] = (version, curve, option)
        return option

    def _plain_at(self, context: int) -> float | None:
        """One plain step, kept as long as the curves: compared are costs of one moment."""
        key = (OFF, context // 64)
        if key not in self._curves:
            costs = self._controller.costs_at(self._bucket)
            plain_ms = costs.plain_ms(context)
            if plain_ms is None or not costs.is_measured:
                return None
            self._curves[key] = [plain_ms]
        return self._curves[key][0]

    def _curve(self, name: str, context: int) -> list[float] | None:
        """The controller's curve, kept for 64 tokens of context: making one is host time."""
        key = (name, context // 64)
        if key not in self._curves:
            curve = self._controller.round_curve(name, context, self._bucket)
            if curve is None:
                return None
            self._curves[key] = curve
        return self._curves[key]

    def _choose(self, options: list[Option], plain_rate: float) -> Option | None:
        """The best option, None for plain decoding; changes its mind only for HYSTERESIS."""
        best = max(options, key=lambda option: option.rate)
        rates = {option.drafter: option for option in options}
        key = (self._bucket, *sorted((o.drafter, str(o.signal)) for o in options))
        incumbent = self._controller.incumbents.get(key)
        if incumbent == OFF and self._may_be_off and best.rate <= HYSTERESIS * plain_rate:
            return None
        if incumbent in rates and best.rate <= HYSTERESIS * rates[incumbent].rate:
            best = rates[incumbent]
        chosen = None if self._may_be_off and best.rate <= plain_rate else best
        self._controller.incumbents[key] = OFF if chosen is None else chosen.drafter
        return chosen

    def _second_look(
        self, best: Option | None, options: list[Option], context: int
    ) -> DraftPlan | None:
        """Now and then a round of what lost: a drafter that could win if it got better, or
        plain decoding, whose cost is what every gain is measured against."""
        self._looking = self._probing
        other_length = None if best is None else self._other_length(best, context)
        if other_length is not None:
            self._looking = self._length_probing
            return other_length
        hopeful = [o for o in options if o is not best and o.ceiling > self._best_rate]
        is_plains_turn = best is not None and (not hopeful or self._probing.num_probes % 2 == 1)
        if is_plains_turn:
            if not self._probing.is_due(self._plain_ms - 1.0 / self._best_rate):
                return None
            reason = "A round of plain decoding, to keep its cost measured."
            return DraftPlan(OFF, 0, True, reason)
        if not hopeful:
            return None
        option = max(hopeful, key=self._promise)
        if not self._probing.is_due(option.round_ms * (1.0 - option.rate / self._best_rate)):
            return None
        reason = f"A look at {option.drafter}: it lost before, things may have changed."
        growth = self._growth(option, context)
        return DraftPlan(
            option.drafter, option.num_draft_tokens, True, reason, option.signal, growth=growth
        )

    def _promise(self, option: Option) -> float:
        """What a look may find: the rate as it stands, and the more above it the less is known."""
        known = self._controller.acceptance.num_rounds(option.drafter, option.signal, self._bucket)
        best_case = min(option.ceiling, 2.0 * self._best_rate)
        return option.rate + max(0.0, best_case - option.rate) / (1.0 + known)

    def _other_length(self, best: Option, context: int) -> DraftPlan | None:
        """A round of the best drafter at about twice or half its length: a width whose cost was
        measured wrongly would never be used again, and so never be found out."""
        probing = self._length_probing
        if self._fixed_length is not None or probing.rounds_since < probing.interval:
            return None
        if self._shapes_itself(best):
            return None
        curve, length = self._curve_of(best, context), best.num_draft_tokens
        longer, shorter = min(len(curve) - 1, 2 * length + 1), max(1, length // 2)
        tried = shorter if probing.num_probes % 2 == 1 and shorter != length else longer
        rates = self._controller.acceptance.rates(best.drafter, best.signal, self._bucket)
        worth_ms = expected_tokens(rates, tried) / self._best_rate
        if not probing.is_due(max(0.0, curve[tried] - worth_ms)):
            return None
        reason = f"A look at {best.drafter} with {tried} tokens a round, to keep its cost measured."
        return DraftPlan(best.drafter, tried, True, reason, best.signal)

    def _off(self, options: list[Option]) -> DraftPlan:
        best = max(options, key=lambda option: option.rate)
        if all(option.ceiling * self._plain_ms <= 1.0 for option in options):
            reason = f"Off: even with every token accepted {best.drafter} would not pay."
            return DraftPlan(OFF, 0, reason=reason)
        return DraftPlan(
            OFF,
            0,
            reason=f"Off: {best.drafter} would reach {best.rate * self._plain_ms:.2f}x of plain "
            f"decoding here (first draft token accepted {best.acceptance:.0%} of the time).",
        )

    def _drafting(self, option: Option, context: int) -> DraftPlan:
        length, gain = option.num_draft_tokens, option.rate * self._plain_ms
        if self._shapes_itself(option):
            reason = (
                f"{option.drafter}: {gain:.2f}x of plain decoding expected "
                f"(first draft token accepted {option.acceptance:.0%} of the time)."
            )
            growth = self._growth(option, context)
            return DraftPlan(option.drafter, length, False, reason, option.signal, growth=growth)
        tokens = "token" if length == 1 else "tokens"
        reason = (
            f"{option.drafter}: about {length} {tokens} a round, {gain:.2f}x of plain decoding "
            f"expected (first draft token accepted {option.acceptance:.0%} of the time)."
        )
        knows_confidence = self._controller.acceptance.knows_confidence(
            option.drafter, self._bucket
        )
        if self._fixed_length is not None or not knows_confidence:
            return DraftPlan(option.drafter, length, False, reason, option.signal)
        # The length is an average; a confident draft may go further, an unsure one stops early.
        reach = min(len(self._curve_of(option, context)) - 1, 2 * length + 2)
        rule = self._marginal_rule(option, context)
        return DraftPlan(option.drafter, reach, False, reason, option.signal, rule)

    def _shapes_itself(self, option: Option) -> bool:
        return self._controller.drafters[option.drafter].shapes_itself

    def _growth(self, option: Option, context: int) -> Growth | None:
        """Prices at the going rate; None for a chain, and for a length that was asked for."""
        if self._fixed_length is not None or not self._shapes_itself(option):
            return None
        rate = max(option.rate, self._best_rate)
        return self._controller.growth(option, context, self._bucket, rate)

    def _curve_of(self, option: Option, context: int) -> list[float]:
        curve = self._curve(option.drafter, context)
        assert curve is not None, "an option has a cost curve"
        return curve

    def _marginal_rule(self, option: Option, context: int) -> Callable[[int, float], bool]:
        """Go on while the next token's chance to survive exceeds its cost at the going rate."""
        curve = self._curve_of(option, context)
        acceptance, bucket, drafter = self._controller.acceptance, self._bucket, option.drafter
        rate = max(option.rate, 1.0 / self._plain_ms)
        survival = 1.0

        def keep_drafting(index: int, confidence: float) -> bool:
            nonlocal survival
            chance = acceptance.chance(drafter, bucket, confidence)
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

    def _cast_shadow(self, sequence: Sequence, options: list[Option], used: str) -> None:
        """Note what an unused free drafter would have said, to score it against what comes."""
        if self._shadow is not None and self._shadow.option.drafter == used:
            self._shadow = None  # its own rounds count from here on
        for option in options if self._shadow is None else ():
            guess = self._controller.drafters[option.drafter].foresee(sequence)
            if guess and option.drafter != used:
                self._shadow = _Shadow(option, len(sequence.tokens), guess)
                return

    def _score_shadow(self, sequence: Sequence) -> None:
        if self._shadow is None:
            return
        option, guess = self._shadow.option, self._shadow.guess
        came = sequence.tokens[self._shadow.start : self._shadow.start + len(guess)]
        pairs = enumerate(zip(came, guess, strict=False))
        agreed = next((i for i, (a, b) in pairs if a != b), len(came))
        if agreed == len(came) < len(guess):
            return  # not decided yet
        self._shadow = None
        self._controller.acceptance.observe(
            option.drafter,
            option.signal,
            self._bucket,
            len(guess),
            agreed,
            option.round_ms,
            num_used=option.num_draft_tokens,
        )
