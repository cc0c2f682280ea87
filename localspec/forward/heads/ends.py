"""Embedding and output head of a published head, and the vocabulary that it drafts from.

Published files hold copies of the target's own, or none. A copy is recognised and not held twice.
A head may know a part of the vocabulary alone (`d2t`: what to add to a draft id to get the
target's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from localspec.forward.decoder import Decoder
from localspec.forward.heads.files import HeadSettings
from localspec.forward.model import LanguageModel
from localspec.forward.output_head import OutputHead
from localspec.forward.upload import indices
from localspec.weights.linear import Linear, QuantisedLinear

COMPARED_ROWS = 8  # Rows by which an output head is compared with the target's.
COMPARED_TOKENS = 4096  # Rows of an embedding that are compared at once; all would be a GB.

Tokens = Sequence[int] | torch.Tensor  # ids; a tensor lies on the device
Embed = Callable[[Tokens], torch.Tensor]


class ModuleHead(QuantisedLinear):
    """The output head of a target on the forward of transformers, as a layer. It gives no rows
    away."""

    has_invariant_rows = False
    weight_bytes = 0  # The target counts them.

    def __init__(self, target: LanguageModel) -> None:
        self._target = target

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._target.head(rows)


def output_of_target(target: LanguageModel) -> OutputHead:
    """Return the target's own output head."""
    if isinstance(target, Decoder):
        return target.weights.output
    return OutputHead(ModuleHead(target), target.vocab_size)


def embedding_of(
    table: torch.Tensor | None, target: LanguageModel, scale: float = 1.0
) -> tuple[Embed, int]:
    """Return the embedding, and the bytes of one that is not the target's.

    table: [V, d], None where the files hold none. scale: of the rows that a forward reads."""
    if table is None:
        return target.embed, 0
    scale = float(torch.tensor(scale).to(table.dtype))  # as transformers rounds Gemma's
    if _is_targets_embedding(table, target, scale):
        return target.embed, 0

    def embed(ids: Tokens) -> torch.Tensor:
        rows = F.embedding(indices(ids, table.device), table)
        return rows if scale == 1.0 else rows * scale

    return embed, table.nbytes


def output_of(
    own: Linear | None,
    ids: torch.Tensor | None,
    target: LanguageModel,
    cap: float | None = None,
) -> OutputHead:
    """Return the output head of a published head.

    own: of the files, None where they hold none. ids: the target's id of each token, None where
    they are the same. cap: the bound that the logits of `own` tend to."""
    if own is None:
        return output_of_target(target)
    head = OutputHead(own, target.vocab_size, ids, cap=cap, own_bytes=own.weight_bytes)
    if ids is None and _is_targets_head(head, target):
        return output_of_target(target)
    return head


def target_ids(
    config: HeadSettings, offsets: torch.Tensor | None, size: int, target: LanguageModel
) -> torch.Tensor | None:
    """Return the target's id of each token that the head knows, None where they are the same.

    offsets: d2t. size: of the head's vocabulary. Raises ModelError for a map that leads outside the
    target's vocabulary."""
    vocab_size = target.vocab_size
    if offsets is None:
        if size != vocab_size:
            raise config.unfit(
                f"it knows {size} of {vocab_size} tokens, without a d2t to tell which"
            )
        return None
    if offsets.shape != (size,) or offsets.dtype not in (torch.int64, torch.int32):
        raise config.unfit(f"its d2t is {offsets.dtype} {list(offsets.shape)}, not int64 [{size}]")
    ids = torch.arange(size) + offsets.long()
    if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(set(ids.tolist())) != size:
        raise config.unfit(f"its d2t does not name {size} different tokens of the {vocab_size}")
    return ids.to(target.device)


def _is_targets_embedding(table: torch.Tensor, target: LanguageModel, scale: float) -> bool:
    if table.shape[0] != target.vocab_size:
        return False
    for first in range(0, table.shape[0], COMPARED_TOKENS):
        rows = table[first : first + COMPARED_TOKENS]
        rows = rows if scale == 1.0 else rows * scale
        if not torch.equal(rows, target.embed(range(first, first + len(rows)))):
            return False
    return True


def _is_targets_head(own: OutputHead, target: LanguageModel) -> bool:
    """True for a copy of the target's own, as in DeepSpec's files: 1.2 GB beside an 8B."""
    rows = target.embed(range(min(COMPARED_ROWS, target.vocab_size)))
    return torch.equal(own(rows), target.head(rows))
