"""The target drafts for itself with its first layers, its own norm and its own head.

Contract: no weights and no cache beside the target's. The first layers run token by token in the
target's cache from where it stands. The engine's rollback before verification erases the tokens,
and verification runs all layers for them. A draft is made as by `draft_model`. The model and its
config are never edited.

How many layers to run is measured (`Exits`): once on a short text when built, then on the newest
tokens of the prompt at the start of each of the first turns and of every eighth later turn (turns
of sequences that are decoded together count alike). Within a turn it stays. The signal names it, so
that acceptance is learnt apart for each exit. Candidates lie between an eighth and a half of the
layers. The step of each is timed once. How often each names the token that the target finds
likeliest is counted by running the newest cached tokens once more. The best exit has the highest
expected rate at its best draft length, with verification priced at one plain step: an estimate to
choose an exit by, no more.

Source: LayerSkip (arXiv 2404.16710), whose verification reuses the rows of the first layers; here
that saves no time, since their weights are read for the newest row all the same. Draft & Verify
(arXiv 2309.08168); choosing the exit from the prompt's own positions as in DEL (arXiv 2504.05598).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from collections.abc import Sequence as Several
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Self

from localspec.core.decoding import DraftPlan, Sequence
from localspec.core.errors import ModelError
from localspec.core.speculation import best_length
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.drafting import HEAD_SHARE, DraftSteps, room_of
from localspec.drafters.parts import Parts
from localspec.forward.decoder import Decoder

MAX_CANDIDATES = 6
MAX_LENGTH = 8  # of a draft, in the estimate
SCORED_TOKENS = 64
FEWEST_TOKENS = 8  # fewer are not scored
FADE = 0.8  # of earlier counts, at each scoring
TIMED_STEPS = 5
HYSTERESIS = 1.05  # a change of exit gives up what was learnt of its acceptance
FIRST_TURNS = 8  # at the start of each of which the exits are compared
LATER_TURNS = 8  # later they are compared once in so many turns


class EarlyExit(Decoder):
    """A model of the first `depth` blocks of `whole`, its final norm and its head, over the same KV
    cache, without a weight of its own. It writes keys and values of these layers only, so its
    tokens must be rolled back before the whole decoder runs."""

    def __init__(self, whole: Decoder, depth: int) -> None:
        assert 0 < depth < len(whole.weights.blocks), "an exit lies between first and last block"
        weights = replace(whole.weights, blocks=whole.weights.blocks[:depth])
        super().__init__(weights, whole.cache, whole.is_fastest, reader=whole)
        self._key = id(whole.weights), depth

    @property
    def sharing_key(self) -> Hashable:
        """Return the same for all exits after this layer of one target."""
        return self._key

    @property
    def written_features(self) -> None:
        """None: it has no states of upper layers, and verification writes those of all."""
        return None


class EarlyExitDrafter(DraftModelDrafter):
    """Drafts with `model`, the first `depth` layers of the target in its own cache."""

    name = "early_exit"
    share = HEAD_SHARE

    def __init__(self, target: Decoder, exits: Exits, chunks: ChunkedDraft | None = None) -> None:
        super().__init__(target, target.vocab_size, chunks)
        self._target = target
        self._exits = exits
        self._sequence: Sequence | None = None  # of the turn that it drafts for
        self._models = cache(partial(EarlyExit, target))  # one of each depth, with its graphs
        self._leave_after(exits.best())

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Time the exits. Raises ModelError where a target's layers cannot be run apart."""
        target = parts.target
        if not isinstance(target, Decoder):
            raise ModelError(
                "this target runs on transformers, whose layers cannot be run one part after the "
                "other. Leaving early needs a model of Llama's shape that is not quantised by "
                "bitsandbytes; use another drafter."
            )
        if not candidates(target.num_layers):
            raise ModelError("a target of one layer has no earlier exit. Use another drafter.")
        exits = parts.once(cls.name, lambda: Exits.measured(target, _text(parts, target)))
        return cls(target, exits.of(target), parts.chunks(target))

    @property
    def memory_bytes(self) -> int:
        return 0 if self.chunks is None else self.chunks.buffer_bytes

    def signal(self, sequence: Sequence) -> str | None:
        return f"exit {self.depth}" if self.room_after(sequence) else None

    def room_after(self, sequence: Sequence) -> int:
        """See DraftModelDrafter."""
        return room_of(self.model, len(sequence.tokens))

    def text_of(self, sequence: Sequence) -> Several[int]:
        """Return the whole sequence, which the target's cache holds."""
        return sequence.tokens

    def review(self, sequence: Sequence) -> None:
        """It drafts in the target's cache, which must keep what the target wrote there."""

    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        held = self.model.cache.length
        assert held == len(sequence.tokens) - 1, "the shared cache must stand at the root"
        if sequence is not self._sequence:
            self._sequence = sequence
            self._compare_exits()
        return (yield from super().steps(sequence, plan))

    def _compare_exits(self) -> None:
        """In the first turns and seldom later, on the text that the target's cache holds."""
        if self._exits.is_due():
            self._exits.score()
        best = self._exits.best(self.depth)
        if best != self.depth:
            self._leave_after(best)

    def _leave_after(self, depth: int) -> None:
        self.depth = depth
        self.model = model = self._models(depth)
        if self.chunks is not None:
            self.chunks.model = model


def candidates(num_layers: int) -> tuple[int, ...]:
    """Numbers of layers to leave after, evenly spread; none for a model of a single layer."""
    low, high = max(1, num_layers // 8), num_layers // 2
    count = min(MAX_CANDIDATES, high - low + 1)
    if count < 2:
        return (low,) if count == 1 else ()
    return tuple(low + round(i * (high - low) / (count - 1)) for i in range(count))


def tokens_per_ms(agreement: float, step_ms: float, plain_ms: float) -> float:
    """The highest rate that drafting with such steps may have."""
    round_ms = [length * step_ms + plain_ms for length in range(MAX_LENGTH + 1)]
    return best_length([agreement], round_ms)[1]


@dataclass(eq=False)
class Tally:
    """What is known of one exit. agreed, tried: counts of positions, older ones faded."""

    step_ms: float
    agreed: float = 0.0
    tried: float = 0.0

    @property
    def agreement(self) -> float:
        """One agreeing and one disagreeing position are assumed before any is counted."""
        return (self.agreed + 1.0) / (self.tried + 2.0)


class Exits:
    def __init__(self, target: Decoder, step_ms: dict[int, float], plain_ms: float) -> None:
        self.tallies = {depth: Tally(ms) for depth, ms in step_ms.items()}
        self.plain_ms = plain_ms
        self._target = target
        self._turns = itertools.count(1)

    @classmethod
    def measured(cls, target: Decoder, text: Several[int]) -> Exits:
        """Time the candidates after `text`, and score them on it; the cache is emptied."""
        target.cache.rollback(0)
        target.forward(text, num_logits=1)
        depths = candidates(target.num_layers)
        times = {depth: _step_ms(EarlyExit(target, depth), text[-1]) for depth in depths}
        uncaptured = Decoder(target.weights, target.cache, target.is_fastest)
        found = cls(target, times, _step_ms(uncaptured, text[-1]))
        found.score()
        target.cache.rollback(0)
        return found

    def of(self, target: Decoder) -> Exits:
        """Those of the same weights over another cache: what is counted, and the turns, are shared,
        since a text is run again while all sequences wait."""
        found = copy(self)
        found._target = target
        return found

    def is_due(self) -> bool:
        """A turn begins: whether the exits are to be scored in it."""
        turn = next(self._turns)
        return turn <= FIRST_TURNS or turn % LATER_TURNS == 0

    def score(self) -> None:
        """Count how often the exits agree on the newest cached tokens, which are run again."""
        cache = self._target.cache
        num_tokens = min(cache.length - cache.earliest, SCORED_TOKENS)
        if num_tokens < FEWEST_TOKENS:
            return
        output = self._target.look_back(num_tokens, [depth - 1 for depth in self.tallies])
        own = output.logits.argmax(dim=-1)  # [n]
        for depth, tally in self.tallies.items():
            rows = self._target.weights.final_norm(output.hidden[depth - 1])  # [n, d]
            same = self._target.head(rows).argmax(dim=-1) == own
            tally.agreed = FADE * tally.agreed + float(same.sum())
            tally.tried = FADE * tally.tried + num_tokens

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
    return max(median(times[1:]), 1e-6)  # rates divide by it


def _text(parts: Parts, target: Decoder) -> list[int]:
    """Tokens to measure on before the first turn: of an earlier conversation, else made up."""
    size = max(1, min(SCORED_TOKENS, target.cache.shape.capacity - 1))
    past = [token for token in (parts.past[-1] if parts.past else ()) if token < target.vocab_size]
    made_up = [(1 + 7 * i * i) % target.vocab_size for i in range(size)]
    return past[-size:] if len(past) >= size else made_up
