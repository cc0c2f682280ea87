"""An EAGLE head drafts a tree from the target's hidden states.

Contract: a tree grows best-first: each step is one forward of the head, in which the best nodes so
far get children. What the head wrote for a draft is erased when the draft is done; accepted tokens
are read anew with the target's own states.

Where the host would wait for each step it reads the tree when it is whole: the steps that are
expected to pay run one after the other, in each of which the WIDTH likeliest texts that end in the
step before get children (as in EAGLE-2). What of it is worth its place is decided as elsewhere.

Not here: how the head follows the text (head_drafter), which nodes pay (tree_growth).
Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from localspec.core.decoding import DraftPlan, Growth, Proposal, Sequence
from localspec.core.hindsight import ReviewSteps
from localspec.drafters.drafting import (
    HEAD_SHARE,
    DraftSteps,
    Unread,
    chances,
    level_of,
    likeliest,
)
from localspec.drafters.head_drafter import HeadDrafter
from localspec.drafters.parts import Parts
from localspec.drafters.review import itself
from localspec.drafters.tree_growth import (
    ROOT,
    SMOOTHING,
    USUAL_TYPICAL,
    Known,
    Ranked,
    TreeGrowth,
    steps_that_pay,
    usual_growth,
)
from localspec.forward.heads.autoregressive import AutoregressiveHead
from localspec.forward.heads.eagle import KIND
from localspec.forward.heads.eagle_files import read_eagle
from localspec.forward.passes import Pass
from localspec.forward.upload import indices, uploaded

NUM_CHILDREN = 8  # candidates of one node
WIDTH = 8  # nodes that get children in one step
USUAL = usual_growth(0.02, 0.05)  # where nothing was measured


class EagleDrafter(HeadDrafter[AutoregressiveHead]):
    name = KIND
    shapes_itself = True
    _typical = USUAL_TYPICAL

    @classmethod
    def build(cls, parts: Parts) -> EagleDrafter:
        folder = parts.head(KIND, "EAGLE head")
        network = parts.once(
            KIND, lambda: read_eagle(folder, parts.target).narrowed(parts.vocabulary)
        )
        return cls(parts.target, AutoregressiveHead(network, parts.target.cache.shape.capacity))

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """See core.hindsight. The target's states of the reply are still held."""
        return itself(self)

    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        if self.signal(sequence) is None or plan.num_draft_tokens < 1:
            return Proposal()
        tokens = sequence.tokens
        assert self._target.cache.length >= len(tokens) - 1, "the target has read all but the root"
        try:
            root = yield self._head.start(tokens, self._features)  # [1, d]
            if self._reads_once and sequence.grammar is None:
                return (yield from self._whole(sequence, plan, root))
            return (yield from _Draft(sequence, plan, self._head, root).grow())
        finally:
            self._head.forget(len(tokens) - 1)

    def _whole(self, sequence: Sequence, plan: DraftPlan, root: torch.Tensor) -> DraftSteps:
        growth, most = plan.growth_or(USUAL), min(plan.num_draft_tokens, self._head.room // WIDTH)
        num_steps = steps_that_pay(self._typical, growth, most)
        steps = yield from _beam(self._head, sequence, root, num_steps)
        children = _known(steps, growth)
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


Step = list[list[float]]  # rows of tokens, chances, and the candidate of the step before


@torch.inference_mode()
def _beam(
    head: AutoregressiveHead, sequence: Sequence, root: torch.Tensor, num_steps: int
) -> Generator[Pass, torch.Tensor, list[Step]]:
    """The candidates of every step, read at once. root: [1, d]."""
    unread: Unread | None = None
    outputs, found, origin = root, list[torch.Tensor](), root.new_zeros(1, dtype=torch.float32)
    worth, seen = torch.ones(1, device=root.device), None
    for depth in range(num_steps):
        logits = yield head.logits(outputs)  # [n, V]
        unread = unread or Unread(sequence, logits.shape[1], root.device, HEAD_SHARE)
        best = unread.chances(logits, depth).topk(min(NUM_CHILDREN, logits.shape[1]))  # [n, c]
        found.append(torch.cat((best.indices.float(), best.values, origin[:, None]), dim=1))
        if depth + 1 == num_steps:
            break
        texts = (best.values * worth[:, None]).flatten()
        worth, chosen = texts.topk(min(WIDTH, len(texts)))
        parents = chosen // best.values.shape[1]
        tokens = best.indices.flatten().index_select(0, chosen)
        unread.follow(tokens, parents)
        own = torch.eye(len(chosen), dtype=torch.bool, device=root.device)
        seen = own if seen is None else torch.cat((seen.index_select(0, parents), own), dim=1)
        places = [len(sequence.tokens) - 1 + depth] * len(chosen)
        outputs = yield head.branch(tokens, outputs.index_select(0, parents), places, ~seen)
        origin = chosen.float()
    rows = iter(torch.cat(found).tolist())  # the one copy
    return [[next(rows) for _ in each] for each in found]


def _known(steps: list[Step], growth: Growth) -> Known:
    """What may follow the root, by the candidates of every step."""
    below = dict[int, Known]()  # of the candidates of a step, those that have children
    for step in reversed(steps):
        made, count = dict[int, Known](), len(step[0]) // 2
        for at, (*row, origin) in enumerate(step):
            tokens, heights = level_of(row[:count], row[count:])
            children = {
                token: below[at * count + place]
                for place, token in enumerate(tokens)
                if at * count + place in below
            }
            made[int(origin)] = Known(tokens, heights, children, growth.chance)
        below = made
    return below[0]
