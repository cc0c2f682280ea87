"""What a head offers to drafts of fixed shapes, which a graph can hold (drafters.fixed)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from localspec.forward.features import Features
from localspec.forward.passes import Pass

DRAFT_SIZES = (1, 2, 4, 8)  # Tokens of a piece of a draft: any length is a sum of these.


class FixedSteps(Protocol):
    """The steps of a head within one stretch of what is kept of a text: tensors in, tensors out,
    without work on the host. They run in order, from `start` or `resume` on."""

    def start(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the output that a draft starts from, [1, d]. numbers: see FixedHead.begun."""
        ...

    def resume(self, numbers: torch.Tensor, num_drafted: torch.Tensor) -> None:
        """Go on behind so many drafted tokens, [1], in place of `start`."""
        ...

    def extend(self, token: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the output after a token [1], [1, d]. rows: the output before it, [1, d]."""
        ...

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [1, V] fp32 of the newest output."""
        ...

    def stated(self) -> torch.Tensor | None:
        """Return the head's own chance of the newest output's token, [1] fp32; None where it is the
        height of the token's chance among all."""
        ...


class FixedHead(Protocol):
    """A head over one text. num_numbers: whole numbers that describe a text. width: of an output.
    draft_sizes: how many tokens a piece of work may draft. can_resume: True if a draft may go on
    after its first piece. buckets: stretches that have work of their own, ascending. kept_dtype: of
    an output."""

    num_numbers: int
    can_resume: bool

    @property
    def width(self) -> int: ...

    @property
    def kept_dtype(self) -> torch.dtype: ...

    @property
    def draft_sizes(self) -> tuple[int, ...]: ...

    @property
    def buckets(self) -> tuple[int, ...]: ...

    def end_of(self, num_tokens: int, num_rows: int) -> int:
        """Return the length of the stretch that a draft needs after so many tokens, the root among
        them. num_rows: that it writes behind them."""
        ...

    def missing(self, tokens: Sequence[int], features: Features) -> Pass | None:
        """Keep what belongs to `tokens`, and give the reading of what is more than
        `FixedSteps.start` takes; None where that takes all."""
        ...

    def begun(self, tokens: Sequence[int]) -> AbstractContextManager[list[int]]:
        """Give the numbers that describe a text; `missing` came before. The first piece of a draft
        runs inside."""
        ...

    def steps(self, bucket: int, features: Features) -> FixedSteps:
        """Return the steps within one stretch."""
        ...

    def probe(self, which: int) -> list[int]:
        """Return made-up numbers at the beginning of the stretch; others for each number."""
        ...

    def undisturbed(self, num_rows: int) -> AbstractContextManager[None]:
        """Restore afterwards what a probe writes. num_rows: behind its text."""
        ...

    def recover(self) -> None:
        """Erase what is no number beyond the text, which a mask would not hide."""
        ...
