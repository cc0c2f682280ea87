"""A head's draft in pieces of fixed shape: read the newest rows, choose, step, and choose again.

A draft without a stop rule whose length is one of the head's sizes is one piece, and the host waits
once, for its tokens. Under a stop rule it waits once in RULED_SIZE tokens. A block drafter chooses
all its tokens in one piece, whatever is drafted of them.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from localspec.core.units import counted
from localspec.drafters.chunk import sizes_of
from localspec.drafters.drafting import Drafting
from localspec.drafters.fixed import Buffers, Cuts, FixedDrafts, FixedWork
from localspec.forward.features import Features
from localspec.forward.graphs import GraphPool
from localspec.forward.heads.fixed import FixedHead, FixedSteps


@dataclass(frozen=True)
class _Key:
    """resumes: the draft was begun by another piece."""

    cuts: Cuts
    bucket: int
    size: int
    resumes: bool


@dataclass(frozen=True)
class _Reached:
    """Where a draft stands between two pieces. token: the newest, [1]. row: the output that it was
    chosen from, [1, d]."""

    token: torch.Tensor
    row: torch.Tensor


class HeadChunk(FixedWork):
    """A piece of a draft. Its numbers are those of the head, and how many tokens are drafted
    already. Buffers.out: tokens and confidences, [2, most]."""

    def __init__(
        self,
        key: _Key,
        steps: FixedSteps,
        num_numbers: int,
        vocab_size: int,
        buffers: Buffers,
        reached: _Reached,
    ) -> None:
        super().__init__(num_numbers + 1, key.cuts, vocab_size, buffers)
        self.size, self._resumes = key.size, key.resumes
        self._steps, self._reached = steps, reached

    @torch.inference_mode()
    def __call__(self) -> None:
        """Draft: tokens and confidences into the buffers."""
        numbers, token, row = self.numbers, self._reached.token, self._reached.row
        if self._resumes:
            self._steps.resume(numbers[:-1], numbers[-1:])
            row = self._steps.extend(token, row)
        else:
            row = self._steps.start(numbers[:-1])
        for step in range(self.size):
            if step:
                row = self._steps.extend(token, row)
            token = self._draft(row, step)
        self._reached.token.copy_(token)
        self._reached.row.copy_(row)

    def _draft(self, row: torch.Tensor, step: int) -> torch.Tensor:
        noise, out, seen = self.buffers.noise, self.buffers.out, self.buffers.seen
        logits = self._steps.logits(row)  # [1, V]
        heights, tokens = self.chances(logits, noise[step : step + 1], seen).max(dim=-1)  # [1]
        stated = self._steps.stated()
        # A damaged draft ends where its chances are no numbers, whatever it states.
        confidences = heights if stated is None else torch.where(heights.isnan(), heights, stated)
        out[0, step : step + 1].copy_(tokens)
        out[1, step : step + 1].copy_(confidences)
        if self.cuts.penalty:
            seen.index_fill_(1, tokens, True)
        return tokens


class HeadChunks(FixedDrafts[_Key, HeadChunk]):
    """Drafts chains with `head`. features: of its target. pool: None where nothing is captured."""

    def __init__(
        self,
        head: FixedHead,
        features: Features,
        vocab_size: int,
        device: torch.device,
        pool: GraphPool | None,
    ) -> None:
        most = max(head.draft_sizes)
        super().__init__(pool, vocab_size, device, (2, most), most)
        self._head, self._features = head, features
        self._reached = _Reached(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(1, head.width, dtype=head.kept_dtype, device=device),
        )

    @torch.inference_mode()
    def draft_on(self, draft: Drafting) -> None:
        """Draft until the draft ends, after the last token of its sequence; `FixedHead.missing` was
        read before."""
        cuts, tokens = self.want(draft.sequence.sampling), draft.sequence.tokens
        with self._head.begun(tokens) as numbers:
            made = self._made(draft, cuts, numbers)
        while self._take(draft, made):
            made = self._made(draft, cuts, numbers)

    def _made(self, draft: Drafting, cuts: Cuts, numbers: list[int]) -> torch.Tensor:
        """Return the next tokens and their confidences, [2, count], as many as are read at once."""
        made, sequence = list[torch.Tensor](), draft.sequence
        done, count = len(draft.tokens), draft.num_unread
        if not self._head.can_resume:
            count = draft.plan.num_draft_tokens - done
        self.set_seen(cuts, [*sequence.tokens, *draft.tokens])
        for size in sizes_of(count, self._head.draft_sizes):
            end = self._head.end_of(len(sequence.tokens), done + size)
            bucket = next(each for each in self._head.buckets if each >= end)
            ready = self.ready(_Key(cuts, bucket, size, resumes=done > 0))
            self.set_noise(sequence, done, size)
            ready.work.fill([*numbers, done], sequence.sampling, draft.share)
            ready.replay()
            made.append(self.buffers.out[:, :size].clone())
            done += size
        return (made[0] if len(made) == 1 else torch.cat(made, dim=1))[:, :count]

    def _take(self, draft: Drafting, made: torch.Tensor) -> bool:
        """Read tokens and add those that count; False when the draft ends."""
        tokens, confidences = made.tolist()  # the one wait
        if any(map(math.isnan, confidences)):  # a damaged draft costs time, never correctness
            self._head.recover()
        return draft.take_all(tokens, confidences)

    def wanted(self) -> list[_Key]:
        """See FixedDrafts."""
        ways = (False, True) if self._head.can_resume else (False,)
        return [
            _Key(cuts, bucket, size, resumes)
            for cuts in self.cuts
            for bucket in self._head.buckets
            for size in self._head.draft_sizes
            for resumes in ways
        ]

    def works(self, key: _Key) -> list[HeadChunk]:
        """See FixedDrafts."""
        steps, count = self._head.steps(key.bucket, self._features), self._head.num_numbers
        return [HeadChunk(key, steps, count, self.vocab_size, self.buffers, self._reached)]

    def phrase(self, key: _Key) -> str:
        """See FixedDrafts."""
        tokens = counted(key.size, "token")
        more = "further " if key.resumes else ""
        return f"preparing {more}drafts of {tokens} by the head within {key.bucket} of context"

    def undisturbed(self, key: _Key) -> AbstractContextManager[None]:
        """See FixedDrafts."""
        return self._head.undisturbed(key.size)

    def probe(self, work: HeadChunk, which: int) -> None:
        """See FixedDrafts."""
        self._reached.token.fill_(1 + which)
        self._reached.row.fill_(0.5 + which)
        work.fill([*self._head.probe(which), 1], work.cuts.example())

    def compared(self, work: HeadChunk) -> torch.Tensor:
        """See FixedDrafts."""
        return self.buffers.out[:, : work.size]
