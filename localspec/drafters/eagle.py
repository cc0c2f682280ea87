"""An EAGLE head drafts a tree from the target's hidden states.

Contract: a tree grows best-first: each step is one forward of the head, in which the best nodes so
far get children. What the head wrote for a draft is erased when the draft is done; accepted tokens
are read anew with the target's own states. Tokens are the head's likeliest and not drawn, at every
temperature (probs None).

A confidence is the head's probability under the request's temperature and repetition penalty,
temperature 1 when greedy: a token that was not drawn is accepted with the target's probability
under those, which this softmax of the head estimates. top-k, top-p and min-p are left to the
target: they change the likeliest tokens little and cost a sort of every row.

Not here: how the head follows the text (head_drafter), which nodes pay (tree_growth).
Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).
"""

from __future__ import annotations

import torch

from localspec.core import DraftPlan, Proposal, SamplingParams, Sequence
from localspec.drafters.head_drafter import HeadDrafter
from localspec.drafters.parts import Parts
from localspec.drafters.tree_growth import ROOT, Ranked, TreeGrowth, usual_growth
from localspec.engine.sampling import distributions
from localspec.forward.heads.autoregressive import AutoregressiveHead
from localspec.forward.heads.eagle import KIND, read_eagle

NUM_CHILDREN = 8  # candidates of one node
WIDTH = 8  # nodes that get children in one step
USUAL = usual_growth(0.02, 0.05)  # where nothing was measured


class EagleDrafter(HeadDrafter):
    """Drafts a tree with an EAGLE head."""

    name = KIND
    shapes_itself = True

    @classmethod
    def build(cls, parts: Parts) -> EagleDrafter:
        folder = parts.head(KIND, "EAGLE head")
        return cls(parts.target, read_eagle(folder, parts.target))

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        if self.signal(sequence) is None or plan.num_draft_tokens < 1:
            return Proposal()
        tokens = sequence.tokens
        assert self._target.cache.length == len(tokens) - 1, "the target has read all but the root"
        root = self._head.start(tokens, self._features)  # [1, d]
        try:
            return _Draft(sequence, plan, self._head, root).grow()
        finally:
            self._head.forget(len(tokens) - 1)


class _Draft:
    """One tree while it grows. A node's row is made when it gets children."""

    def __init__(
        self, sequence: Sequence, plan: DraftPlan, head: AutoregressiveHead, root: torch.Tensor
    ) -> None:
        self._sequence = sequence
        self._plan = plan
        self._head = head
        self._sampling = SamplingParams(
            temperature=sequence.sampling.temperature or 1.0,
            repetition_penalty=sequence.sampling.repetition_penalty,
        )
        self._growth = plan.growth or USUAL
        self._tree = TreeGrowth(self._growth, plan.num_draft_tokens, max_opened=WIDTH)
        self._outputs = root  # [1 + rows, d], the root's and those of the rows so far
        self._rows = {ROOT: 0}  # node -> its place among them

    def grow(self) -> Proposal:
        wanted, outputs, num_steps = [ROOT], self._outputs, 0
        while wanted:
            self._open(wanted, outputs)
            num_steps += 1
            self._tree.grow()
            wanted = self._tree.wanted()[: self._head.room]
            if wanted:
                outputs = self._run(wanted)
        return self._tree.proposal(num_steps)

    def _run(self, nodes: list[int]) -> torch.Tensor:
        """The head's outputs for nodes, from those of their parents: [n, d]."""
        tree, num_before = self._tree, len(self._rows) - 1
        parents = [self._rows[tree.nodes[node].parent] for node in nodes]
        self._rows |= {node: 1 + num_before + index for index, node in enumerate(nodes)}
        blocked = torch.ones(len(nodes), num_before + len(nodes), dtype=torch.bool)
        places = list[int]()
        for index, node in enumerate(nodes):
            path = tree.path(node)
            blocked[index, [self._rows[step] - 1 for step in path]] = False
            places.append(len(self._sequence.tokens) - 2 + len(path))
        tokens = [tree.nodes[node].token for node in nodes]
        made = self._head.branch(tokens, self._outputs[parents], places, blocked)
        self._outputs = torch.cat((self._outputs, made))
        return made

    def _open(self, nodes: list[int], outputs: torch.Tensor) -> None:
        """Tell the tree what may follow the nodes, whose outputs are [n, d]. One host copy."""
        histories = ([*self._sequence.tokens, *self._tree.text(node)] for node in nodes)
        rows = distributions(self._head.logits(outputs), self._sampling, histories)  # [n, V]
        best = rows.topk(min(NUM_CHILDREN, self._plan.num_draft_tokens, rows.shape[1]), dim=-1)
        heights, ids = torch.stack((best.values.double(), best.indices.double())).tolist()
        for node, node_heights, node_ids in zip(nodes, heights, ids, strict=True):
            # A damaged head gives NaN: it costs time, never correctness.
            pairs = [(int(t), c) for t, c in zip(node_ids, node_heights, strict=True) if c > 0.0]
            tokens, confidences = [token for token, _ in pairs], [c for _, c in pairs]
            self._tree.open(node, Ranked(tokens, confidences, self._growth.chance))
