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
from functools import partial

import torch

from localspec.core.decoding import DraftPlan, Growth, Proposal, Sequence
from localspec.core.hindsight import ReviewSteps
from localspec.drafters.drafting import HEAD_SHARE, DraftSteps, Level, likeliest
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.review import itself
from localspec.drafters.tree_growth import Ranked, TreeGrowth, usual_growth
from localspec.engine.batch import Stepwise
from localspec.engine.sampling import noise_after, perturbed, warp_of
from localspec.forward.features import LAST
from localspec.forward.heads.ends import output_of_target
from localspec.forward.heads.medusa import MedusaHeads, read_medusa
from localspec.forward.model import LanguageModel
from localspec.forward.output_head import OutputHead
from localspec.forward.passes import Product

NO_LEVEL: Level = ([], [])
MAX_BRANCHES = 10  # of one head; later ones are hardly ever accepted


class MedusaDrafter(Stepwise, DrafterBase):
    """Drafts with `heads` on the states of `target`."""

    name = "medusa"
    shapes_itself = True

    def __init__(
        self, heads: MedusaHeads, target: LanguageModel, output: OutputHead | None = None
    ) -> None:
        self._heads = heads
        self._output = output or output_of_target(target)
        self._features = target.follow([LAST])

    @classmethod
    def build(cls, parts: Parts) -> MedusaDrafter:
        folder = parts.head(cls.name, "set of Medusa heads")
        target = parts.target
        heads = parts.once(cls.name, lambda: read_medusa(folder, target))
        if heads.outputs is not None:
            return cls(heads, target)
        output = parts.vocabulary.narrowed(output_of_target(target), target.device)
        return cls(heads, target, output)

    @property
    def output(self) -> OutputHead | None:
        return self._output if self._heads.outputs is None else None

    @property
    def memory_bytes(self) -> int:
        return self._heads.weight_bytes + self._output.held_bytes + self.beside_bytes

    @property
    def beside_bytes(self) -> int:
        return self._features.slots(LAST).nbytes

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
        row = self._features.rows(LAST, newest, newest + 1)  # [1, d]
        said = partial(self._heads.logits, shared=self._output)
        (logits,) = yield Product(id(self._heads), said, row)  # [K, V]
        size = plan.num_draft_tokens
        growth = plan.growth_or(usual_growth(0.0, 0.0, size))
        return grown(guesses(logits, sequence, size), size, growth, sequence.end_ids)


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
