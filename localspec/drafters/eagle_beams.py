"""The likeliest texts of an EAGLE head, all steps in one piece of device work of fixed shape.

In each step the WIDTH likeliest texts that end in the step before get children (as in EAGLE-2). The
host reads the candidates of every step at once and makes a tree of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from localspec.core.decoding import Growth, Sequence
from localspec.core.units import counted
from localspec.drafters.drafting import HEAD_SHARE, level_of
from localspec.drafters.fixed import Buffers, Cuts, FixedDrafts, FixedWork
from localspec.drafters.tree_growth import Known
from localspec.forward.features import Features
from localspec.forward.graphs import GraphPool
from localspec.forward.heads.chain_static import ChainHead, StaticChain

NUM_CHILDREN = 8  # Candidates of one node.
WIDTH = 8  # Nodes that get children in one step.
STEPS = (1, 2, 3, 4, 6, 8)  # Numbers of steps that have work of their own.

Step = list[list[float]]  # Rows of tokens, chances, and the candidate of the step before.


@dataclass(frozen=True)
class _Key:
    cuts: Cuts
    bucket: int
    num_steps: int


class Beam(FixedWork):
    """`num_steps` steps. Buffers.out: of every step WIDTH rows of the tokens and chances of
    children, and of the candidate of the step before that they are children of,
    [steps, WIDTH, 2 children + 1]; the first step has one row."""

    def __init__(self, key: _Key, chain: StaticChain, num_numbers: int, buffers: Buffers) -> None:
        super().__init__(num_numbers, key.cuts, buffers.noise.shape[1], buffers)
        self.num_steps, self._chain = key.num_steps, chain
        self._own = torch.eye(WIDTH, dtype=torch.bool, device=buffers.out.device)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Write the candidates of every step."""
        out, penalised = self.buffers.out, self.buffers.seen  # [n, V]
        num_children = (out.shape[2] - 1) // 2
        outputs = self._chain.start(self.numbers)  # [n, d]
        origin = torch.zeros(1, device=out.device)
        worth, seen = torch.ones(1, device=out.device), self._own[:, :0]
        for depth in range(self.num_steps):
            noise = self.buffers.noise[depth : depth + 1]
            chances = self.chances(self._chain.logits(outputs), noise, penalised)
            best = chances.topk(num_children)  # [n, c]
            rows = torch.cat((best.indices.float(), best.values, origin[:, None]), dim=1)
            out[depth, : rows.shape[0]].copy_(rows)
            if depth + 1 == self.num_steps:
                return
            texts = (best.values * worth[:, None]).flatten()
            worth, chosen = texts.topk(min(WIDTH, len(texts)))
            parents = chosen // num_children
            tokens = best.indices.flatten().index_select(0, chosen)
            if self.cuts.penalty:
                penalised = penalised.index_select(0, parents).scatter(1, tokens[:, None], True)
            count = len(chosen)
            before = seen.index_select(0, parents) if depth else seen[:count]
            seen = torch.cat((before, self._own[:count, :count]), dim=1)
            outputs = self._chain.branch(tokens, outputs.index_select(0, parents), depth, seen)
            origin = chosen.float()


class Beams(FixedDrafts[_Key, Beam]):
    """The beams of `head`. features: of its target. pool: None where nothing is captured."""

    def __init__(
        self,
        head: ChainHead,
        features: Features,
        vocab_size: int,
        device: torch.device,
        pool: GraphPool | None,
    ) -> None:
        shape = (max(STEPS), WIDTH, 2 * min(NUM_CHILDREN, vocab_size) + 1)
        super().__init__(pool, vocab_size, device, shape, max(STEPS))
        self._head, self._features = head, features

    @torch.inference_mode()
    def known(self, sequence: Sequence, num_steps: int, growth: Growth) -> Known:
        """Return what may follow a text within so many steps, at most the most of STEPS;
        `FixedHead.missing` was read before."""
        cuts, tokens = self.want(sequence.sampling), sequence.tokens
        size = next(size for size in STEPS if size >= num_steps)
        end = self._head.end_of(len(tokens), WIDTH * (size - 1))
        bucket = next(each for each in self._head.buckets if each >= end)
        with self._head.begun(tokens) as numbers:
            ready = self.ready(_Key(cuts, bucket, size))
            self.set_seen(cuts, tokens)
            self.set_noise(sequence, 0, size)
            ready.work.fill(numbers, sequence.sampling, HEAD_SHARE)
            ready.replay()
        steps: list[Step] = self.buffers.out[:num_steps].tolist()  # the one wait
        if any(height != height for step in steps for row in step for height in row):
            self._head.recover()  # a damaged draft costs time, never correctness
        return _known([steps[0][:1], *steps[1:]], growth)

    def wanted(self) -> list[_Key]:
        """See FixedDrafts."""
        return [
            _Key(cuts, bucket, num_steps)
            for cuts in self.cuts
            for bucket in self._head.buckets
            for num_steps in STEPS
        ]

    def works(self, key: _Key) -> list[Beam]:
        """See FixedDrafts."""
        chain = self._head.steps(key.bucket, self._features)
        return [Beam(key, chain, self._head.num_numbers, self.buffers)]

    def phrase(self, key: _Key) -> str:
        """See FixedDrafts."""
        return f"preparing trees of {counted(key.num_steps, 'step')} within {key.bucket} of context"

    def undisturbed(self, key: _Key) -> AbstractContextManager[None]:
        """See FixedDrafts."""
        return self._head.undisturbed(WIDTH * key.num_steps)

    def probe(self, work: Beam, which: int) -> None:
        """See FixedDrafts."""
        work.fill(self._head.probe(which), work.cuts.example())

    def compared(self, work: Beam) -> torch.Tensor:
        """See FixedDrafts: chances alone, since near ties may stand in another order."""
        num_children = (self.buffers.out.shape[2] - 1) // 2
        return self.buffers.out[: work.num_steps, :, num_children:-1]


def _known(steps: list[Step], growth: Growth) -> Known:
    """Return what may follow the root, by the candidates of every step."""
    below = dict[int, Known]()  # of the candidates of a step, those that have children
    for step in reversed(steps):
        below = dict(_children(step, below, growth))
    return below[0]


def _children(step: Step, below: dict[int, Known], growth: Growth) -> Iterator[tuple[int, Known]]:
    """Yield the candidates of a step by what they are children of. below: what follows them."""
    count = len(step[0]) // 2
    for at, (*row, origin) in enumerate(step):
        tokens, heights = level_of(row[:count], row[count:])
        followed = {
            token: below[at * count + place]
            for place, token in enumerate(tokens)
            if at * count + place in below
        }
        yield int(origin), Known(tokens, heights, followed, growth.chance)
