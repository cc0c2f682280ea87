"""An output head: how normalised rows become logits over the tokens of a model.

A head may know a part of the tokens alone: those that the authors of a published drafter chose
(d2t), or those that a person's replies are made of (`DraftVocabulary`). A token that the head does
not know stands in the logits all the same, at its id, and has no chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from localspec.core.errors import ModelError
from localspec.core.units import gib
from localspec.forward.upload import indices
from localspec.weights.linear import OUTPUTS_OF_A_BLOCK, Linear, bytes_of

TOGETHER = OUTPUTS_OF_A_BLOCK  # Tokens of a vocabulary come in multiples, for kernels of few bits.


@dataclass(frozen=True)
class OutputHead:
    """layer: rows [n, d] to [n, k]. vocab_size: of the model whose tokens these are, V. ids: which
    of the V tokens each output is, [k]; None where k is V. scale: of the outputs. cap: the bound
    that logits tend to, None for none. own_bytes: of weights that are no model's."""

    layer: Linear
    vocab_size: int
    ids: torch.Tensor | None = None
    scale: float = 1.0
    cap: float | None = None
    own_bytes: int = 0

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] fp32 of rows [n, d]; -inf for tokens that the head does not know."""
        return self.logits(rows).float()

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the same in the precision of the layer."""
        known = self.layer(rows)
        known = known if self.scale == 1.0 else known * self.scale
        known = known if self.cap is None else torch.tanh(known / self.cap) * self.cap
        if self.ids is None:
            return known
        everything = known.new_full((known.shape[0], self.vocab_size), float("-inf"))
        return everything.index_copy_(1, self.ids, known)

    @property
    def held_bytes(self) -> int:
        """Bytes of the head that are no model's."""
        return self.own_bytes + bytes_of(self.ids)


class DraftVocabulary:
    """The tokens that drafters choose among.

    ids: of the tokens, ascending; () for all. reason: why all, as a clause; "" where nobody asked.
    has_room: True if so many bytes of a device may be spent on rows beside those of a model."""

    def __init__(
        self,
        ids: Sequence[int] = (),
        reason: str = "",
        has_room: Callable[[int, torch.device], bool] = lambda num_bytes, device: True,
    ) -> None:
        self._ids, self._reason, self._has_room = tuple(ids), reason, has_room
        # Drafters that borrow one layer share its rows. A layer that nothing else holds is freed.
        self._taken = WeakKeyDictionary[Linear, Linear]()

    def narrowed(self, head: OutputHead, device: torch.device) -> OutputHead:
        """Return the head with the rows of these tokens alone. Return the head itself where it
        knows a part of the tokens already, and where no rows can be taken."""
        known = [token for token in self._ids if token < head.vocab_size]
        if len(known) < len(self._ids):  # a smaller vocabulary than the target's
            known = known[: len(known) // TOGETHER * TOGETHER]
        if not known or head.ids is not None:
            return head
        ids = indices(known, device)
        try:
            layer = self._rows_of(head, ids)
        except ModelError as error:
            self._reason = str(error).rstrip(".")
            return head
        return replace(head, layer=layer, ids=ids, own_bytes=layer.weight_bytes)

    def note(self, head: OutputHead) -> str:
        """Return what a person should know of the tokens that a head chooses among; "" for
        nothing."""
        if head.ids is not None:
            return f"chooses among {len(head.ids):,} of {head.vocab_size:,} tokens"
        return f"chooses among all tokens: {self._reason}" if self._reason else ""

    def _rows_of(self, head: OutputHead, ids: torch.Tensor) -> Linear:
        """Raises ModelError where there is no room for them, or the format gives none away."""
        layer = self._taken.get(head.layer)
        if layer is None:
            num_bytes = head.layer.weight_bytes * len(ids) // head.vocab_size
            if not self._has_room(num_bytes, ids.device):
                raise ModelError(
                    f"There is no room for the rows of those in use, {gib(num_bytes)}."
                )
            layer = self._taken[head.layer] = head.layer.of_outputs(ids)
        return layer
