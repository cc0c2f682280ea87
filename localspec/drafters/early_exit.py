"""The target drafts for itself with its first layers, its own norm and its own head.

Contract: no weights and no cache beside the target's. The first layers run token by token in the
target's cache from where it stands; the engine's rollback before verification erases the tokens,
and verification of a chain goes on from the rows these layers have begun instead of running them
again (forward.partial, forward.begun). Sampling, confidence and the end of a draft are those of
`draft_model.autoregress`. The model and its config are never edited.

How many layers is measured (exits): once on a short text when built, then on the newest tokens of
a prompt at the start of each of the first turns, and of every eighth later; within a turn it
stays. The signal names it, so that acceptance is learnt apart for each.

Source: LayerSkip (arXiv 2404.16710); Draft & Verify (arXiv 2309.08168).
"""

from __future__ import annotations

from localspec.core import DraftPlan, Outcome, Proposal, Sequence
from localspec.drafters.draft_model import autoregress
from localspec.drafters.exits import SCORED_TOKENS, Exits, candidates
from localspec.drafters.parts import Parts
from localspec.errors import ModelError
from localspec.forward.decoder import Decoder
from localspec.forward.model import LanguageModel
from localspec.forward.partial import EarlyExit

FIRST_TURNS = 8  # after each of which the exits are compared
LATER_TURNS = 8  # and then once in so many


class EarlyExitDrafter:
    """Drafts with `model`, the first `depth` layers of the target in its own cache."""

    name = "early_exit"
    shapes_itself = False

    def __init__(self, target: Decoder, exits: Exits) -> None:
        self.depth = exits.best()
        self.model: LanguageModel = EarlyExit(target, self.depth)
        self._target = target
        self._exits = exits
        self._num_turns = 0

    @classmethod
    def build(cls, parts: Parts) -> EarlyExitDrafter:
        """Time the exits. Raises ModelError where a target's layers cannot be run apart."""
        target = parts.target
        if not isinstance(target, Decoder):
            raise ModelError(
                "this target runs on transformers, whose layers cannot be run one part after the "
                "other. Leaving early needs a model of Llama's shape that is not quantised by "
                "bitsandbytes; use another drafter."
            )
        if not candidates(target.cache.shape.num_layers):
            raise ModelError("a target of one layer has no earlier exit. Use another drafter.")
        return cls(target, Exits.measured(target, _text(parts, target)))

    @property
    def memory_bytes(self) -> int:
        return 0

    def signal(self, sequence: Sequence) -> str | None:
        return f"exit {self.depth}" if self._room(sequence) > 0 else None

    def prepare(self, sequence: Sequence) -> None:
        """Now and then compare the exits on the prompt, which the target's cache holds."""
        self._num_turns += 1
        if self._num_turns <= FIRST_TURNS or self._num_turns % LATER_TURNS == 0:
            self._exits.score()
            self._leave_after(self._exits.best(self.depth))

    def foresee(self, sequence: Sequence) -> tuple[int, ...]:
        return ()

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        held = self.model.cache.length
        assert held == len(sequence.tokens) - 1, "the shared cache must stand at the root"
        shortened = plan.shortened(max(0, self._room(sequence)))
        return autoregress(self.model, sequence, shortened, self.model.vocab_size)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Nothing: the target's cache is always up to date."""

    def _leave_after(self, depth: int) -> None:
        if depth != self.depth:
            self.depth = depth
            self.model = EarlyExit(self._target, depth)

    def _room(self, sequence: Sequence) -> int:
        return self.model.cache.shape.capacity - len(sequence.tokens)


def _text(parts: Parts, target: Decoder) -> list[int]:
    """Tokens to measure on before anybody wrote: of an earlier conversation, else made up."""
    size = max(1, min(SCORED_TOKENS, target.cache.shape.capacity - 1))
    past = [token for token in (parts.past[-1] if parts.past else ()) if token < target.vocab_size]
    made_up = [(1 + 7 * i * i) % target.vocab_size for i in range(size)]
    return past[-size:] if len(past) >= size else made_up
