"""After how many layers a target may best leave off, by what its exits agree with and cost here.

Contract: the candidates lie between an eighth and a half of the layers. What one step to each of
them costs is timed once, when `Exits` is made. How often each names the token that the target
itself finds likeliest is counted on text: `score` runs the newest cached tokens once more, in one
forward, and asks the head about every candidate's rows. Neither keeps any state on the device.
`best` weighs both: the most expected tokens for the time, at the best draft length, with
verification taken at the price of one plain step. That is an estimate to choose an exit by; what
drafting with it is worth is learnt and judged by the controller.

Source: choosing the exit from the prompt's own positions follows DEL (arXiv 2504.05598) in spirit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from localspec.forward.decoder import Decoder, Segment
from localspec.forward.partial import EarlyExit

MAX_CANDIDATES = 6
MAX_LENGTH = 8  # of a draft, in the estimate
SCORED_TOKENS = 64
FEWEST_TOKENS = 8  # that say anything about agreement
FADE = 0.8  # of what was counted before, at each scoring
TIMED_STEPS = 5
HYSTERESIS = 1.05  # what was learnt of acceptance belongs to one exit


def candidates(num_layers: int) -> tuple[int, ...]:
    """Numbers of layers to leave after, evenly spread; none for a model of a single layer."""
    low, high = max(1, num_layers // 8), num_layers // 2
    count = min(MAX_CANDIDATES, high - low + 1)
    if count < 2:
        return (low,) if count == 1 else ()
    return tuple(low + round(i * (high - low) / (count - 1)) for i in range(count))


def tokens_per_ms(agreement: float, step_ms: float, plain_ms: float) -> float:
    """The most that drafting with such steps may bring."""
    best, expected, survival = 0.0, 1.0, 1.0
    for length in range(1, MAX_LENGTH + 1):
        survival *= agreement
        expected += survival
        best = max(best, expected / (length * step_ms + plain_ms))
    return best


@dataclass
class Tally:
    """One exit. agreed, tried: faded counts of positions."""

    step_ms: float
    agreed: float = 0.0
    tried: float = 0.0

    @property
    def agreement(self) -> float:
        """With one position of each kind assumed before any is seen."""
        return (self.agreed + 1.0) / (self.tried + 2.0)


class Exits:
    """The exits of one target."""

    def __init__(self, target: Decoder, step_ms: dict[int, float], plain_ms: float) -> None:
        self.tallies = {depth: Tally(ms) for depth, ms in step_ms.items()}
        self.plain_ms = plain_ms
        self._target = target

    @classmethod
    def measured(cls, target: Decoder, text: Sequence[int]) -> Exits:
        """Time the candidates after `text`, and score them on it; the cache is emptied."""
        target.cache.rollback(0)
        target.run([Segment(target.cache, text, num_logits=1)])
        depths = candidates(target.cache.shape.num_layers)
        times = {depth: _step_ms(EarlyExit(target, depth), text[-1]) for depth in depths}
        found = cls(target, times, _step_ms(Decoder(target.weights, target.cache), text[-1]))
        found.score()
        target.cache.rollback(0)
        return found

    def score(self) -> None:
        """Count how far the exits agree over the newest cached tokens, which are run again."""
        cache = self._target.cache
        tokens = cache.tokens[-SCORED_TOKENS:]
        if len(tokens) < FEWEST_TOKENS:
            return
        cache.rollback(cache.length - len(tokens))
        output = self._target.run(
            [Segment(cache, tokens)], keep=[depth - 1 for depth in self.tallies]
        )
        own = output.logits[0].argmax(dim=-1)  # [n]
        for depth, tally in self.tallies.items():
            rows = self._target.weights.final_norm(output.hidden[depth - 1])  # [n, d]
            same = self._target.head(rows).argmax(dim=-1) == own
            tally.agreed = FADE * tally.agreed + float(same.sum())
            tally.tried = FADE * tally.tried + len(tokens)

    def best(self, current: int | None = None) -> int:
        """The depth to draft with; `current` unless another is clearly better."""
        rates = {
            depth: tokens_per_ms(tally.agreement, tally.step_ms, self.plain_ms)
            for depth, tally in self.tallies.items()
        }
        found = max(rates, key=lambda depth: rates[depth])
        if current in rates and rates[found] <= HYSTERESIS * rates[current]:
            return current
        return found


def _step_ms(model: Decoder, token: int) -> float:
    """Median time of one step of one token; the first is not counted."""
    base, times = model.cache.length, list[float]()
    for _ in range(TIMED_STEPS + 1):
        started = perf_counter()
        float(model.forward([token])[0, 0])  # waits for the device
        times.append(1000.0 * (perf_counter() - started))
        model.cache.rollback(base)
    return max(median(times[1:]), 1e-6)  # a step too short for the clock is no division by zero
