"""Heads on the target's last state guess several places at once; the best combinations are drafted.

Contract: one evaluation of the heads a round gives the distribution of each. A tree grows from them
best-first: a node at depth k holds a token of head k, whatever its ancestors are, and is worth the
product of the chances along its path. Each head guesses with the noise of its place. A repetition
penalty is left to the target: the heads do not know the tokens between. Holds no keys and values,
so there is nothing to catch up.

Source: Medusa (arXiv 2401.10774), its tree grown round by round instead of fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from localspec.core.decoding import DraftPlan, Growth, Proposal, SamplingParams, Sequence
from localspec.core.hindsight import ReviewSteps
from localspec.drafters.drafting import HEAD_SHARE, DraftSteps, Level, level_of, likeliest
from localspec.drafters.fixed import Cuts, FixedDrafts, FixedWork
from localspec.drafters.head_drafter import pool_for
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.review import itself
from localspec.drafters.tree_growth import Ranked, TreeGrowth, usual_growth
from localspec.engine.batch import Stepwise
from localspec.engine.sampling import noise_after, perturbed, warp_of
from localspec.forward.features import LAST, Features
from localspec.forward.graphs import Capturing, GraphPool
from localspec.forward.heads.ends import output_of_target
from localspec.forward.heads.medusa import MedusaHeads, read_medusa
from localspec.forward.model import LanguageModel
from localspec.forward.output_head import OutputHead
from localspec.forward.passes import Product

NO_LEVEL: Level = ([], [])
MAX_BRANCHES = 10  # of one head; later ones are hardly ever accepted


class Guessing(FixedWork):
    """One evaluation of all heads. The number is that of the token whose state they read.
    Buffers.out: tokens and chances of each place, [2, K, branches]."""

    def __init__(self, cuts: Cuts, drafts: Guesses) -> None:
        super().__init__(1, cuts, drafts.vocab_size, drafts.buffers)
        self._drafts = drafts

    @torch.inference_mode()
    def __call__(self) -> None:
        """Write the likeliest tokens of each place."""
        out, drafts = self.buffers.out, self._drafts
        row = drafts.features.slots(LAST).index_select(0, self.numbers)  # [1, d]
        logits = drafts.heads.logits(row, drafts.output)[0]  # [K, V]
        best = self.chances(logits, self.buffers.noise, self.buffers.seen).topk(out.shape[2])
        out[0].copy_(best.indices)
        out[1].copy_(best.values)


class Guesses(FixedDrafts[Cuts, Guessing]):
    """The guesses of `heads` on the states of a target, as a graph. output: that the heads share.
    pool: None where nothing is captured."""

    def __init__(
        self, heads: MedusaHeads, output: OutputHead, features: Features, pool: GraphPool | None
    ) -> None:
        count, size = heads.num_heads, output.vocab_size
        shape = (2, count, min(MAX_BRANCHES, size))
        super().__init__(pool, size, heads.weight.device, shape, count)
        self.heads, self.output, self.features = heads, output, features

    @torch.inference_mode()
    def levels(self, sequence: Sequence, newest: int, size: int) -> list[Level]:
        """Return the `size` likeliest tokens of each place at most. newest: the token whose state
        the heads read."""
        ready = self.ready(self.want(sequence.sampling))
        self.set_noise(sequence, 0, self.heads.num_heads)
        ready.work.fill([newest], sequence.sampling, HEAD_SHARE)
        ready.replay()
        found = self.buffers.out[:, :, :size].tolist()  # the one wait
        return [level_of(*level) for level in zip(*found, strict=True)]

    def want(self, sampling: SamplingParams) -> Cuts:
        """See FixedDrafts. A repetition penalty is left to the target."""
        return super().want(replace(sampling, repetition_penalty=1.0))

    def wanted(self) -> list[Cuts]:
        """See FixedDrafts."""
        return list(self.cuts)

    def works(self, key: Cuts) -> list[Guessing]:
        """See FixedDrafts."""
        return [Guessing(key, self)]

    def phrase(self, key: Cuts) -> str:
        """See FixedDrafts."""
        return "preparing the guesses of the Medusa heads"

    def undisturbed(self, key: Cuts) -> AbstractContextManager[None]:
        """See FixedDrafts; nothing is written."""
        return nullcontext()

    def probe(self, work: Guessing, which: int) -> None:
        """See FixedDrafts."""
        work.fill([which], work.cuts.example())

    def compared(self, work: Guessing) -> torch.Tensor:
        """See FixedDrafts: chances alone, since near ties may stand in another order."""
        return self.buffers.out[1]


class MedusaDrafter(Stepwise, DrafterBase):
    """Drafts with `heads` on the states of `target`. pool: where that is captured, None where
    nothing is."""

    name = "medusa"
    shapes_itself = True

    def __init__(
        self,
        heads: MedusaHeads,
        target: LanguageModel,
        output: OutputHead | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        self._heads = heads
        self._output = output or output_of_target(target)
        self._features = target.follow([LAST])
        is_waiting = target.device.type != "cpu" or pool is not None
        self._fixed = Guesses(heads, self._output, self._features, pool) if is_waiting else None

    @classmethod
    def build(cls, parts: Parts) -> MedusaDrafter:
        folder = parts.head(cls.name, "set of Medusa heads")
        target = parts.target
        heads = parts.once(cls.name, lambda: read_medusa(folder, target))
        output = output_of_target(target)
        if heads.outputs is None:
            output = parts.vocabulary.narrowed(output, target.device)
        return cls(heads, target, output, pool_for(parts, output))

    @property
    def output(self) -> OutputHead | None:
        return self._output if self._heads.outputs is None else None

    @property
    def captures(self) -> tuple[Capturing, ...]:
        return () if self._fixed is None else (self._fixed,)

    @property
    def memory_bytes(self) -> int:
        return self._heads.weight_bytes + self._output.held_bytes + self.beside_bytes

    @property
    def beside_bytes(self) -> int:
        buffers = 0 if self._fixed is None else self._fixed.buffer_bytes
        return self._features.slots(LAST).nbytes + buffers

    def signal(self, sequence: Sequence) -> str | None:
        """None while there is no state before the root."""
        return "heads" if len(sequence.tokens) > 1 else None

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """See core.hindsight. The target's states of the reply are still held."""
        return itself(self)

    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        newest = len(sequence.tokens) - 2  # the state that predicted the root
        if newest < 0 or plan.num_draft_tokens < 1:
            return Proposal()
        size = plan.num_draft_tokens
        growth = plan.growth_or(usual_growth(0.0, 0.0, size))
        if self._fixed is not None:
            levels = self._fixed.levels(sequence, newest, size)
        else:
            row = self._features.rows(LAST, newest, newest + 1)  # [1, d]
            said = partial(self._heads.logits, shared=self._output)
            (logits,) = yield Product(id(self._heads), said, row)  # [K, V]
            levels = guesses(logits, sequence, size)
        return grown(levels, size, growth, sequence.end_ids)


@torch.inference_mode()
def guesses(logits: torch.Tensor, sequence: Sequence, max_nodes: int) -> list[Level]:
    """The likeliest tokens of each place after `sequence`, by logits [K, V]."""
    warp = warp_of(sequence.sampling)
    if warp.temperature:
        noise = noise_after(sequence, range(len(logits)), logits.device)  # [K, V]
        logits = perturbed(logits, warp, noise, HEAD_SHARE)
    return likeliest(torch.softmax(logits, dim=-1), min(MAX_BRANCHES, max_nodes))


def grown(
    levels: Several[Level],
    max_nodes: int,
    growth: Growth,
    end_ids: frozenset[int] = frozenset(),
) -> Proposal:
    """The most valuable tree of at most `max_nodes` nodes. levels[k]: guesses for depth k + 1.
    end_ids: tokens that end a text."""
    root = HeadGuesses(levels, growth.chance)
    tree = TreeGrowth(growth, max_nodes, root, end_ids=end_ids)
    tree.grow()
    return tree.proposal(num_steps=1)


class HeadGuesses(Ranked):
    """The first head's guesses; below each of them stand the next head's."""

    def __init__(self, levels: Several[Level], chance: Callable[[float], float]) -> None:
        super().__init__(*(levels[0] if levels else NO_LEVEL), chance)
        self._levels = levels
        self._chance = chance

    def below(self, token: int) -> HeadGuesses:
        return HeadGuesses(self._levels[1:], self._chance)
