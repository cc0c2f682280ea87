"""The draft model proposes a tree: several guesses where it is unsure, a chain where it is not.

Contract: the model and its cache are those of `draft_model`. The tree grows under the plan's
prices (tree_growth); nodes that are extended together cost one forward. A node's children are the
best few by the draft's logits and the turn's noise. Where siblings do not pay the tree is a chain.
Without prices it takes the shape that USUAL gives it.

The draft's cache holds slots in a row, and a forward sees all of them. So before each step the
cache is cut down to the path that all wanted nodes have in common, and the nodes beyond it are run
again beside the new ones: none on a chain, a few on a tree.

Where a device captures, reading each step would cost more than it brings. There one chunk drafts
the chain of the likeliest tokens (chunk), and the tree is that chain with the other candidates of
each place beside it.

Not here: which nodes (tree_growth), drafting a chain (draft_model), acceptance (engine.verify).
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Several
from copy import copy
from typing import Self

import torch

from localspec.core.decoding import DraftPlan, Growth, Proposal, Sequence
from localspec.core.errors import ModelError
from localspec.core.hindsight import ReviewSteps
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.drafting import (
    Drafting,
    DraftSteps,
    Level,
    catch_up,
    chances,
    likeliest,
)
from localspec.drafters.parts import Parts
from localspec.drafters.review import itself
from localspec.drafters.tree_growth import (
    SMOOTHING,
    USUAL_NODES,
    USUAL_TYPICAL,
    Known,
    Ranked,
    TreeGrowth,
    steps_that_pay,
)
from localspec.forward.graphs import Capturing
from localspec.forward.model import LanguageModel
from localspec.forward.passes import Pass, Rows
from localspec.forward.upload import indices

NUM_CHILDREN = 4  # candidates of one node
# Where nothing was measured: a step must promise a fifth of a token, a place but the first a tenth.
USUAL = Growth(lambda confidence: confidence, (0.0, *[0.1] * (USUAL_NODES - 1)), 0.2)


class DraftTreeDrafter(DraftModelDrafter):
    name = "draft_tree"
    shapes_itself = True
    _typical = USUAL_TYPICAL

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Raises ModelError for a draft model that cannot run a tree."""
        model = parts.loaded_draft()
        if not model.cache.takes_trees:
            raise ModelError(
                "the small model follows one text in each of its forwards, so it cannot draft a "
                "tree. Its chain of tokens (draft_model) it can draft."
            )
        chunks = parts.chunks(model, NUM_CHILDREN)
        return cls(model, parts.target.vocab_size, chunks)

    @property
    def captures(self) -> tuple[Capturing, ...]:
        """Its own chunks; `draft_model` captures the model's steps."""
        return () if self.chunks is None else (self.chunks,)

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """See core.hindsight. One pass does not tell what the model says beside the text. A copy
        answers: how many steps a tree takes at once follows the trees before it."""
        return itself(copy(self))

    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        size = plan.shortened(self.room_after(sequence)).num_draft_tokens
        if size == 0:
            return Proposal()
        text = self.text_of(sequence)
        yield from catch_up(self.model, text)
        growth = plan.growth_or(USUAL)
        if self.chunks is not None and sequence.grammar is None:
            return self._beside_a_chain(sequence, text, growth, size, self.chunks)
        ends, forced = sequence.end_ids, sequence.forced_after
        tree = TreeGrowth(growth, size, end_ids=ends, forced=forced)
        steps = _Steps(self.model, text, tree)
        try:
            return (yield from self._grown(sequence, tree, steps))
        finally:
            steps.keep_a_path()

    def _beside_a_chain(
        self,
        sequence: Sequence,
        text: Several[int],
        growth: Growth,
        size: int,
        chunks: ChunkedDraft,
    ) -> Proposal:
        num_steps = steps_that_pay(self._typical, growth, size)
        plan = DraftPlan(self.name, num_steps)
        draft = Drafting(sequence, plan, self.target_vocab_size, text=text)
        tree = TreeGrowth(
            growth, size, _chained(chunks.levels(draft), growth), end_ids=sequence.end_ids
        )
        tree.grow()
        self._typical += SMOOTHING * (tree.typical - self._typical)
        return tree.proposal(num_steps)

    def _grown(self, sequence: Sequence, tree: TreeGrowth, steps: _Steps) -> DraftSteps:
        num_steps, wanted = 0, tree.start()
        while wanted:
            logits = yield from steps.run(wanted)  # [w, V_draft]
            num_steps += 1
            texts = [tree.text(node) for node in wanted]
            rows = chances(logits, self.target_vocab_size, sequence, texts)  # [w, V]
            for node, level in zip(wanted, likeliest(rows, NUM_CHILDREN), strict=True):
                tree.open(node, Ranked(*level))
            tree.grow()
            wanted = tree.wanted()
        return tree.proposal(num_steps)


def _chained(levels: Several[Level], growth: Growth) -> Known:
    """levels: the candidates of each place; the first of them have children."""
    found = Known((), (), {})
    for tokens, confidences in reversed(levels):
        found = Known(tokens, confidences, dict.fromkeys(tokens[:1], found), growth.chance)
    return found


class _Steps:
    """The model's forwards over nodes of a tree, with its cache kept in order."""

    def __init__(self, model: LanguageModel, text: Several[int], tree: TreeGrowth) -> None:
        """text: what the model reads of the sequence."""
        self._model = model
        self._text = text
        self._tree = tree
        self._base = len(text)
        self._held = list[int]()  # nodes in the slots after the text, in slot order

    def run(self, wanted: Several[int]) -> Generator[Pass, torch.Tensor, torch.Tensor]:
        """Logits after each wanted node, [w, V_draft]; the first one is wanted alone."""
        if self._model.cache.length < self._base:
            (first,) = wanted
            self._held = self._tree.path(first)
            missing = self._text[self._model.cache.length :]
            return (yield Rows(self._model, [*missing, *self._tree.text(first)], num_logits=1))
        paths = [self._tree.path(node) for node in wanted]
        self._keep(_common(paths, self._held))
        missing = sorted({node for path in paths for node in path} - set(self._held))
        place = {node: index for index, node in enumerate(missing)}
        nodes = [self._tree.nodes[node] for node in missing]
        parents = [place.get(node.parent, -1) for node in nodes]
        logits = yield Rows(self._model, [node.token for node in nodes], parents)
        self._held += missing
        return logits.index_select(0, indices([place[node] for node in wanted], logits.device))

    def keep_a_path(self) -> None:
        """Leave the longest path in the cache: the next draft may go on from it."""
        if self._model.cache.length < self._base:  # the first forward failed
            return
        paths = [self._tree.path(node) for node in self._held]
        self._keep(max(paths, key=len, default=[]))

    def _keep(self, path: list[int]) -> None:
        self._model.cache.keep(self._base, [self._held.index(node) for node in path])
        self._held = path


def _common(paths: list[list[int]], held: list[int]) -> list[int]:
    """The beginning that all paths share, as far as it is held; a wanted node itself is not."""
    shared = list[int]()
    for nodes in zip(*paths, strict=False):
        if len(set(nodes)) > 1 or nodes[0] not in held:
            break
        shared.append(nodes[0])
    return shared
