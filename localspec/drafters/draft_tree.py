"""The draft model proposes a tree: several guesses where it is unsure, a chain where it is not.

Contract: the model and its cache are those of `draft_model`. The tree grows under the plan's
prices (tree_growth); nodes that are extended together cost one forward. At temperature 0 a node's
children are the likeliest tokens, above it they are drawn without replacement from the request's
own distribution. Where siblings do not pay the tree is a chain. Without prices it takes the shape
that USUAL gives it.

The draft's cache holds slots in a row, and a forward sees all of them. So before each step the
cache is cut down to the path that all wanted nodes have in common, and what lies beyond is run
again beside the new ones: nothing on a chain, a few rows on a tree.

Not here: which nodes (tree_growth), the draft's rows one by one (draft_model), acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Several

import torch

from localspec.core import DraftPlan, Growth, Proposal, Sequence
from localspec.drafters.draft_model import catch_up
from localspec.drafters.drafting import drafted_with, fitted
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.tree_growth import (
    MAX_DRAWN,
    ROOT,
    USUAL_NODES,
    Children,
    Drawn,
    Ranked,
    TreeGrowth,
)
from localspec.engine.sampling import distributions, peaks
from localspec.errors import ModelError
from localspec.forward.model import LanguageModel

# Where nothing was measured: a step must promise a fifth of a token, a place but the first a tenth.
USUAL = Growth(lambda confidence: confidence, (0.0, *[0.1] * (USUAL_NODES - 1)), 0.2)


class DraftTreeDrafter(DrafterBase):
    """Drafts trees with `model`, whose token ids are the target's."""

    name = "draft_tree"
    shapes_itself = True

    def __init__(self, model: LanguageModel, target_vocab_size: int) -> None:
        self.model = model
        self._vocab_size = target_vocab_size

    @classmethod
    def build(cls, parts: Parts) -> DraftTreeDrafter:
        if parts.draft is None:
            raise ModelError(parts.draft_refusal)
        return cls(parts.draft, parts.target.vocab_size)

    @property
    def memory_bytes(self) -> int:
        return self.model.weight_bytes + self.model.cache.kv_bytes

    def signal(self, sequence: Sequence) -> str | None:
        room = self.model.cache.shape.capacity - len(sequence.tokens)
        return "model" if room > 0 else None

    def prepare(self, sequence: Sequence) -> None:
        if self.signal(sequence) is not None:
            catch_up(self.model, sequence)

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        room = self.model.cache.shape.capacity - len(sequence.tokens)
        size = plan.shortened(max(0, room)).num_draft_tokens
        if size == 0:  # a draft may know a shorter context than its target
            return Proposal()
        catch_up(self.model, sequence)
        tree = TreeGrowth(plan.growth or USUAL, size)
        behind = _Behind(self.model, sequence, tree)
        try:
            return self._grown(sequence, tree, behind)
        finally:
            behind.keep_a_path()

    def _grown(self, sequence: Sequence, tree: TreeGrowth, behind: _Behind) -> Proposal:
        num_steps, wanted = 0, [ROOT]
        while wanted:
            logits = behind.run(wanted)  # [w, V_draft]
            num_steps += 1
            for node, children in zip(
                wanted, self._children(sequence, tree, wanted, logits), strict=True
            ):
                tree.open(node, children)
            tree.grow()
            wanted = tree.wanted()
        return tree.proposal(num_steps)

    def _children(
        self, sequence: Sequence, tree: TreeGrowth, nodes: Several[int], logits: torch.Tensor
    ) -> list[Children]:
        """What may follow each node, by the row of logits behind it."""
        sampling = drafted_with(sequence.sampling)
        histories = list[list[int]]()
        if sampling.repetition_penalty != 1.0:
            paths = ([tree.nodes[i].token for i in tree.path(node)] for node in nodes)
            histories = [[*sequence.tokens, *path] for path in paths]
        rows = distributions(fitted(logits, self._vocab_size), sampling, histories)  # [w, V]
        heights, _ = peaks(rows)
        # A damaged draft costs time, never correctness: nothing follows a row of no numbers.
        sound = [not math.isnan(height) for height in heights]
        if sequence.sampling.temperature > 0.0:
            return [
                Drawn(row, sequence.rng) if is_sound else Ranked((), ())
                for row, is_sound in zip(rows, sound, strict=True)
            ]
        best = rows.topk(min(MAX_DRAWN, rows.shape[-1]), dim=-1)
        ranked = zip(best.indices.tolist(), best.values.tolist(), sound, strict=True)
        return [Ranked(i, c) if is_sound else Ranked((), ()) for i, c, is_sound in ranked]


class _Behind:
    """What the model says behind nodes of a tree, with its cache kept in order."""

    def __init__(self, model: LanguageModel, sequence: Sequence, tree: TreeGrowth) -> None:
        self._model = model
        self._sequence = sequence
        self._tree = tree
        self._base = len(sequence.tokens)
        self._held = list[int]()  # nodes in the slots after the sequence, in slot order

    def run(self, wanted: Several[int]) -> torch.Tensor:
        """Logits behind each wanted node, [w, V_draft]; the root is wanted first and alone."""
        if list(wanted) == [ROOT]:
            pending = self._sequence.tokens[self._model.cache.length :]
            return self._model.forward(pending, num_logits=1)
        paths = [self._tree.path(node) for node in wanted]
        self._keep(_common(paths, self._held))
        missing = sorted({node for path in paths for node in path} - set(self._held))
        place = {node: index for index, node in enumerate(missing)}
        nodes = [self._tree.nodes[node] for node in missing]
        logits = self._model.forward(
            [node.token for node in nodes], [place.get(node.parent, -1) for node in nodes]
        )
        self._held += missing
        return logits[[place[node] for node in wanted]]

    def keep_a_path(self) -> None:
        """Leave the longest path in the cache: what follows may go on from it."""
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
