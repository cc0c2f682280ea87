"""An EAGLE head drafts a tree from the target's hidden states.

Contract: a tree grows best-first: each step is one forward of the head, in which the best nodes so
far get children. What the head wrote for a draft is erased when the draft is done; accepted tokens
are read anew with the target's own states.

Where the host would wait for each step it reads the tree when it is whole: the steps that are
expected to pay run at once (eagle_beams). What of it is worth its place is decided as elsewhere.

Not here: how the head follows the text (head_drafter), which nodes pay (tree_growth).
Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).
"""

from __future__ import annotations

from copy import copy

import torch

from localspec.core.decoding import DraftPlan, Proposal, Sequence
from localspec.core.hindsight import ReviewSteps
from localspec.drafters.drafting import HEAD_SHARE, DraftSteps, chances, likeliest
from localspec.drafters.eagle_beams import NUM_CHILDREN, STEPS, WIDTH, Beams
from localspec.drafters.head_drafter import HeadDrafter, pool_for
from localspec.drafters.parts import Parts
from localspec.drafters.review import itself
from localspec.drafters.tree_growth import (
    ROOT,
    SMOOTHING,
    USUAL_TYPICAL,
    Ranked,
    TreeGrowth,
    steps_that_pay,
    usual_growth,
)
from localspec.forward.graphs import GraphPool
from localspec.forward.heads.autoregressive import AutoregressiveHead
from localspec.forward.heads.chain_static import ChainHead
from localspec.forward.heads.eagle import KIND
from localspec.forward.heads.eagle_files import read_eagle
from localspec.forward.passes import Pass
from localspec.forward.upload import indices, uploaded

USUAL = usual_growth(0.02, 0.05)  # where nothing was measured


class EagleDrafter(HeadDrafter[ChainHead, Beams]):
    name = KIND
    shapes_itself = True
    _typical = USUAL_TYPICAL

    @classmethod
    def build(cls, parts: Parts) -> EagleDrafter:
        folder = parts.head(KIND, "EAGLE head")
        head = parts.once(KIND, lambda: read_eagle(folder, parts.target).narrowed(parts.vocabulary))
        chain = ChainHead(head, parts.target.cache.shape.capacity)
        pool = pool_for(parts, head.output, head.network.layer.reads_host)
        return cls(parts.target, chain, pool=pool)

    def _fixed_drafts(self, pool: GraphPool | None) -> Beams:
        target = self._target
        return Beams(self._head, self._features, target.vocab_size, target.device, pool)

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """See core.hindsight. The target's states of the reply are still held. A copy answers: how
        many steps a tree takes at once follows the trees before it, and those are no real ones."""
        return itself(copy(self))

    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        if self.signal(sequence) is None or plan.num_draft_tokens < 1:
            return Proposal()
        tokens = sequence.tokens
        assert self._target.cache.length >= len(tokens) - 1, "the target has read all but the root"
        try:
            if self._fixed is not None and sequence.grammar is None:
                if (missing := self._head.missing(tokens, self._features)) is not None:
                    yield missing
                return self._whole(sequence, plan, self._fixed)
            root = yield self._head.start(tokens, self._features)  # [1, d]
            return (yield from _Draft(sequence, plan, self._head, root).grow())
        finally:
            self._head.forget(len(tokens) - 1)

    def _whole(self, sequence: Sequence, plan: DraftPlan, beams: Beams) -> Proposal:
        growth, most = plan.growth_or(USUAL), min(plan.num_draft_tokens, max(STEPS))
        num_steps = steps_that_pay(self._typical, growth, most)
        children = beams.known(sequence, num_steps, growth)
        tree = TreeGrowth(growth, plan.num_draft_tokens, children, end_ids=sequence.end_ids)
        tree.grow()
        self._typical += SMOOTHING * (tree.typical - self._typical)
        return tree.proposal(num_steps)


class _Draft:
    """One tree while it grows. A node's row is made when it gets children."""

    def __init__(
        self, sequence: Sequence, plan: DraftPlan, head: AutoregressiveHead, root: torch.Tensor
    ) -> None:
        self._sequence = sequence
        self._plan = plan
        self._head = head
        self._growth = plan.growth_or(USUAL)
        self._tree = TreeGrowth(
            self._growth, plan.num_draft_tokens, max_opened=WIDTH, end_ids=sequence.end_ids
        )
        self._outputs = root  # [1 + rows, d], the root's and those of the rows so far
        self._rows = {ROOT: 0}  # node -> its place among them

    def grow(self) -> DraftSteps:
        wanted, outputs, num_steps = [ROOT], self._outputs, 0
        while wanted:
            logits = yield self._head.logits(outputs)  # [n, V]
            self._open(wanted, logits)
            num_steps += 1
            self._tree.grow()
            wanted = self._tree.wanted()[: self._head.room]
            if wanted:
                outputs = yield self._branch(wanted)
                self._outputs = torch.cat((self._outputs, outputs))
        return self._tree.proposal(num_steps)

    def _branch(self, nodes: list[int]) -> Pass:
        """The head's outputs for nodes, from those of their parents: [n, d]."""
        tree, num_before = self._tree, len(self._rows) - 1
        parents = [self._rows[tree.nodes[node].parent] for node in nodes]
        self._rows |= {node: 1 + num_before + index for index, node in enumerate(nodes)}
        blocked, places = list[list[bool]](), list[int]()
        for node in nodes:
            path = tree.path(node)
            seen = {self._rows[step] - 1 for step in path}
            blocked.append([row not in seen for row in range(num_before + len(nodes))])
            places.append(len(self._sequence.tokens) - 2 + len(path))
        device, tokens = self._outputs.device, [tree.nodes[node].token for node in nodes]
        outputs = self._outputs.index_select(0, indices(parents, device))
        hidden = uploaded(blocked, torch.bool, device) if any(map(any, blocked)) else None
        return self._head.branch(tokens, outputs, places, hidden)

    def _open(self, nodes: list[int], logits: torch.Tensor) -> None:
        """Tell the tree what may follow the nodes, whose logits are [n, V]. One host copy."""
        texts = [self._tree.text(node) for node in nodes]
        rows = chances(logits, logits.shape[1], self._sequence, texts, HEAD_SHARE)  # [n, V]
        levels = likeliest(rows, min(NUM_CHILDREN, self._plan.num_draft_tokens))
        for node, level in zip(nodes, levels, strict=True):
            self._tree.open(node, Ranked(*level, self._growth.chance))
