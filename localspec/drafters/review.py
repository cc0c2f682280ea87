"""How drafters are judged by a finished reply (core.hindsight).

A draft model that reads the reply once, each row after the true tokens before it, names at each
place the token that it would have drafted there. A draft is right up to its first wrong token, so
the rows tell how far a draft from any place would have been accepted, and with what confidences. A
drafter whose drafts depend on the text alone, or on states that the target keeps, can instead be
asked at each place as it stands.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable
from collections.abc import Sequence as Several

import torch

from localspec.core.decoding import Drafter, DraftPlan, Proposal, Sequence
from localspec.core.draft_window import read_part, start_of
from localspec.core.hindsight import ReviewSteps, beginning_of
from localspec.drafters.drafting import Drafting, chances
from localspec.drafters.parts import DrafterBase
from localspec.engine.sampling import peaks
from localspec.forward.model import PREFILL_CHUNK, LanguageModel
from localspec.forward.passes import Pass, Rows

# Rows of the reply in one forward: few, since each needs logits over all tokens, and a message that
# comes meanwhile waits for the forward.
READ_ROWS = 64


class ChainReview(DrafterBase):
    """What `drafter` would draft at each place of one reply.

    choices, confidences: of the place of each reply token, the token that the drafter names there
    after the true ones before it, and its chance. After a wrong token a draft goes on from that
    one, which no such row knows. What it would add is never accepted; its confidences are taken
    from the true text."""

    shapes_itself = False

    def __init__(
        self,
        drafter: Drafter,
        prompt_length: int,
        vocab_size: int,
        choices: Several[int],
        confidences: Several[float],
    ) -> None:
        self.name = drafter.name
        self.block_length = drafter.block_length
        self._drafter = drafter
        self._prompt_length = prompt_length
        self._vocab_size = vocab_size
        self.choices = choices
        self.confidences = confidences

    def signal(self, sequence: Sequence) -> Hashable:
        return self._drafter.signal(sequence)

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        draft = Drafting(sequence, plan, self._vocab_size)
        if draft.is_full:
            return Proposal()
        first = len(sequence.tokens) - self._prompt_length
        places = slice(first, first + plan.num_draft_tokens)
        draft.take_all(self.choices[places], self.confidences[places])
        return draft.proposal()


def itself(drafter: Drafter) -> ReviewSteps:
    """Return the steps of a drafter that answers for earlier places as it stands."""
    yield from ()
    return drafter


def teacher_forced(
    drafter: Drafter, model: LanguageModel, sequence: Sequence, vocab_size: int, share: float
) -> ReviewSteps:
    """Read the reply with the draft model, whose cache is then ready for the next turn.

    vocab_size: of the target. share: of the noise (drafting)."""
    tokens, start = sequence.tokens, sequence.prompt_length
    asked, end = beginning_of(sequence), len(tokens) - 1
    choices, confidences = list[int](), list[float]()
    place = start - 1
    while place < end:
        until = _end_of_piece(place, min(place + READ_ROWS, end), model.cache.shape.capacity)
        yield from _read(model, read_part(tokens[: place + 1], model.cache.shape.capacity)[:-1])
        logits = yield Rows(model, tokens[place:until])  # [n, V_draft]
        texts = [tokens[start : at + 1] for at in range(place, until)]
        heights, best = _chosen(logits, vocab_size, asked, texts, share)
        choices += best
        confidences += heights
        place = until
    return ChainReview(drafter, start, vocab_size, choices, confidences)


def _end_of_piece(place: int, most: int, capacity: int) -> int:
    """Return up to which token the model reads behind the same beginning as at `place`."""
    start = start_of(place + 1, capacity)
    ends = range(place + 1, most + 1)
    return next((end - 1 for end in ends if start_of(end, capacity) != start), most)


def _read(model: LanguageModel, text: Several[int]) -> Generator[Pass, torch.Tensor]:
    """Let the model's cache hold the text, in pieces of one forward."""
    place = model.cache.reuse(text)
    while place < len(text):
        until = model.cache.piece_end(place, min(place + PREFILL_CHUNK, len(text)))
        yield Rows(model, text[place:until], num_logits=1)
        place = until


def _chosen(
    logits: torch.Tensor, vocab_size: int, asked: Sequence, texts: list[list[int]], share: float
) -> tuple[list[float], list[int]]:
    """Return the chance and the id of the token that each row chooses after its text."""
    return peaks(chances(logits, vocab_size, asked, texts, share))
