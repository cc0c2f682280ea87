"""The tokens that two vocabularies have in common, and a draft's rows in the target's ids.

Contract: two ids are one token when they stand for the same bytes, or are special tokens of the
same text. Where a vocabulary has several ids for the same bytes, the one it writes itself counts.
`translated` puts a draft's logits on the target's ids and minus infinity on all that the draft
cannot say; a softmax then renormalises over the shared part. `mass` is how much of what the draft
wants to say it can say there.

Source: token-level intersection, arXiv 2502.05202.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from localspec.drafters.parts import Vocabulary


@dataclass(frozen=True)
class SharedTokens:
    """own_of: the draft's id of each of the target's ids that it has. targets_size: V."""

    own_of: Mapping[int, int]
    targets_size: int
    own_ids: torch.Tensor  # [S]
    targets_ids: torch.Tensor  # [S]

    @classmethod
    def between(
        cls,
        own: Vocabulary,
        own_size: int,
        targets: Vocabulary,
        targets_size: int,
        device: torch.device,
    ) -> SharedTokens:
        """sizes: rows of both models' heads; ids beyond them are no tokens."""
        ours, theirs = _ids_of(own, own_size), _ids_of(targets, targets_size)
        pairs = [(theirs[key], ours[key]) for key in theirs if key in ours]
        columns = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).to(device)  # [S, 2]
        own_ids, targets_ids = columns[:, 1].contiguous(), columns[:, 0].contiguous()
        return cls(dict(pairs), targets_size, own_ids, targets_ids)

    @property
    def held_bytes(self) -> int:
        return self.own_ids.nbytes + self.targets_ids.nbytes

    def translated(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the target's ids: [V_draft] -> [V]."""
        row = logits.new_full((self.targets_size,), float("-inf"))
        row[self.targets_ids] = logits[self.own_ids]
        return row

    def mass(self, logits: torch.Tensor, temperature: float) -> float:
        """Probability of the shared tokens in a row of the draft, [V_draft]. One host copy."""
        probs = torch.softmax((logits - logits.amax()) / temperature, dim=-1)
        return float(probs[self.own_ids].sum())


def special_pairs(
    own: Vocabulary, own_size: int, targets: Vocabulary, targets_size: int
) -> dict[int, int]:
    """The draft's special id for each special id of the target with the same text."""
    ours, theirs = _specials_of(own, own_size), _specials_of(targets, targets_size)
    return {theirs[text]: ours[text] for text in theirs if text in ours}


def _specials_of(vocabulary: Vocabulary, size: int) -> dict[str, int]:
    """Special tokens that the model has a row for; one added for padding often has none."""
    return {text: index for text, index in vocabulary.markup().items() if index < size}


def _ids_of(vocabulary: Vocabulary, size: int) -> dict[bytes | str, int]:
    """One id for each token: bytes for text, its name for a special one."""
    found: dict[bytes | str, int] = {}
    for index, piece in enumerate(vocabulary.token_bytes()[:size]):
        if piece and (piece not in found or _is_written(vocabulary, piece, index)):
            found[piece] = index
    return found | _specials_of(vocabulary, size)


def _is_written(vocabulary: Vocabulary, piece: bytes, index: int) -> bool:
    """Whether encoding the text of `piece` gives this very id."""
    try:
        return vocabulary.encode(piece.decode()) == [index]
    except UnicodeDecodeError:
        return False
