"""Passes: forwards that a sequence asks for, and that sequences over the same weights may share.

`Rows` is a pass of a language model; a head has passes of its own. Whoever drives the sequences
(engine.batch) decides what runs next, and knows passes by this interface alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from localspec.forward.model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Pass(ABC):
    """What one sequence asks of a model or a head.

    is_draft: it is part of a draft; the next forward of the target waits for it. is_reading: it
    reads a text that the model has missed; it runs in pieces, and no other sequence waits for all
    of them."""

    is_draft: bool = False
    is_reading: bool = False

    @property
    @abstractmethod
    def num_rows(self) -> int: ...

    @property
    @abstractmethod
    def sharing_key(self) -> Hashable:
        """Return what passes that may run as one forward have in common."""

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """Run the pass by itself; returns one row for each output that is wanted."""

    @abstractmethod
    def together(self, parts: Sequence[Any]) -> list[torch.Tensor]:
        """Run passes of this kind and with this key, this one among them, as one forward. After an
        error no cache holds anything of it."""

    def cut(self, most_rows: int) -> tuple[Pass, Pass] | None:
        """Return a first piece of a reading and what is left; None where it is a piece already."""
        return None


@dataclass(frozen=True)
class Rows(Pass):
    """The arguments of `model.forward`."""

    model: LanguageModel
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    num_logits: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def sharing_key(self) -> Hashable:
        return self.model.sharing_key

    def forward(self) -> torch.Tensor:
        """Return logits, [num_logits, V] fp32."""
        return self.model.forward(self.tokens, self.parents, self.num_logits)

    def together(self, parts: Sequence[Rows]) -> list[torch.Tensor]:
        """See Pass."""
        return self.model.forward_rows(parts)

    def cut(self, most_rows: int) -> tuple[Rows, Rows] | None:
        """See Pass."""
        if len(self.tokens) <= most_rows:
            return None
        start = self.model.cache.length
        size = self.model.cache.piece_end(start, start + most_rows) - start
        piece, left = self.tokens[:size], self.tokens[size:]
        return replace(self, tokens=piece), replace(self, tokens=left)


@dataclass(frozen=True)
class Product(Pass):
    """A function of each row by itself, such as an output head. key: of the weights that it reads.
    function: [n, d] -> [n, ...]. rows: [n, d]."""

    key: Hashable
    function: Callable[[torch.Tensor], torch.Tensor]
    rows: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def sharing_key(self) -> Hashable:
        return self.key

    def forward(self) -> torch.Tensor:
        """Return what the function gives, [n, ...]."""
        return self.function(self.rows)

    def together(self, parts: Sequence[Product]) -> list[torch.Tensor]:
        """See Pass."""
        made = self.function(torch.cat([part.rows for part in parts]))
        return [*torch.split(made, [part.num_rows for part in parts])]


@dataclass(frozen=True)
class Ready(Pass):
    """What is known without a forward that could be shared. Drivers go on with it at once."""

    result: torch.Tensor

    @property
    def num_rows(self) -> int:
        return 0

    @property
    def sharing_key(self) -> Hashable:
        return id(self)

    def forward(self) -> torch.Tensor:
        """Return the result."""
        return self.result

    def together(self, parts: Sequence[Ready]) -> list[torch.Tensor]:
        """See Pass."""
        return [part.result for part in parts]


def forward_together(parts: Sequence[Pass]) -> list[torch.Tensor]:
    """Return what the forward of each part gives. Parts with one key run as one forward, others one
    after the other."""
    if len(parts) > 1 and len({part.sharing_key for part in parts}) == 1:
        return parts[0].together(parts)
    return [part.forward() for part in parts]
