"""Who is weighed in most rounds, where there are many ways to draft.

Contract: in a full look everybody is asked and weighed: every FULL_LOOK rounds, and whenever the
policy wants one. Who is far behind the best is then left out until the next, each with the signal
it had: with another one it is weighed again at once. Whose signal never changed, over LOOKS looks,
is not even asked for it. What is far behind could not have won by HYSTERESIS, and asking everybody
takes time, of which the step of a small model has little.

Where nobody is in contention at all, some rounds are not planned, so that planning takes at most
PLANNING_SHARE of the time of plain decoding (`Rest`).

Not here: weighing (controller), choosing (policy).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localspec.engine.controller import Option

FULL_LOOK = 16  # rounds from one full look to the next
SHARE = 0.9  # of the best rate: who is below it is far behind
PLANNING_SHARE = 0.005  # of a plain step: what planning may take where nobody pays
MOST_REST = 3  # rounds in a row without a plan: text that repeats must be noticed soon
PLAN_RATE = 0.1  # memory of what a plan takes: ten plans
LOOKS = 4  # looks without another signal, after which a signal counts as lasting


class Contenders:
    """Of one temperature bucket, over turns."""

    def __init__(self) -> None:
        self._far: frozenset[tuple[str, Hashable]] = frozenset()
        self._lasting: frozenset[str] = frozenset()  # far behind, whatever they would say
        self._signals: dict[str, tuple[Hashable, int]] = {}  # the last, and looks that saw it
        self._num_rounds = 0

    def begin(self, wants_all: bool) -> bool:
        """A round begins; whether it is a full look, in which nobody is left out."""
        is_full = wants_all or self._num_rounds % FULL_LOOK == 0
        self._num_rounds = 1 if is_full else self._num_rounds + 1
        if is_full:
            self._far, self._lasting = frozenset(), frozenset()
        return is_full

    def need_not_ask(self, name: str) -> bool:
        return name in self._lasting

    def is_far(self, name: str, signal: Hashable) -> bool:
        return (name, signal) in self._far

    def weigh(
        self,
        signals: Mapping[str, Hashable],
        options: Sequence[Option],
        plain_rate: float,
    ) -> list[Option]:
        """End a full look: those of the options that are in contention. signals: of everybody,
        None where there was nothing to propose."""
        for name, signal in signals.items():
            last, times = self._signals.get(name, (None, 0))
            self._signals[name] = (signal, times + 1 if signal == last else 0)
        bar = SHARE * max([plain_rate, *(option.rate for option in options)])
        behind = [option for option in options if option.rate < bar]
        self._far = frozenset((option.drafter, option.signal) for option in behind)
        self._lasting = frozenset(o.drafter for o in behind if self._signals[o.drafter][1] >= LOOKS)
        return [option for option in options if option.rate >= bar]


class Rest:
    """Of one temperature bucket, over turns: what a plan takes, and the rounds left without."""

    def __init__(self) -> None:
        self._plan_ms = 0.0
        self._left = 0

    def planned(self, plan_ms: float) -> None:
        self._plan_ms += PLAN_RATE * (plan_ms - self._plan_ms)

    def begin(self, plain_ms: float) -> None:
        """Nobody is in contention: none on a model whose step is long beside a plan."""
        self._left = min(MOST_REST, int(self._plan_ms / (PLANNING_SHARE * plain_ms)))

    def end(self) -> None:
        self._left = 0

    def goes_on(self) -> bool:
        """Whether this round needs no plan."""
        if self._left == 0:
            return False
        self._left -= 1
        return True
