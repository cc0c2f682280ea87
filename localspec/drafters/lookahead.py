"""Lookahead decoding: the target guesses later tokens in the same forward that verifies.

Contract: one tree holds two things. Branches from a pool of n-grams that begin at the root, to be
verified; and a window of WIDTH columns and LEVELS levels that looks further ahead. Level 0 is a
chain of guessed tokens after the root; in each column a node of level j is a child of level j - 1.
The target's argmax after the window's nodes moves the window on (a Jacobi iteration: level 1
becomes level 0, the argmax becomes the last level) and fills the pool, as does its argmax after
every other node. A guess that is in both is one node. No weights.

The window keeps its place in the text: rounds of other drafters shift it. Another text clears
window and pool, so that a reply depends on its own turn alone. Columns without a guess are filled
from the pool, else with a token of the text.

Prices size the branches. The window pays in later rounds, and the controller judges the drafter's
rounds as a whole.

On the demo target's greedy answers to 42 prompts 15 nodes gave 2.02 tokens a round, without the
window 1.82.

Source: lookahead decoding (arXiv 2402.02057), whose visibility patterns are the ancestors of one
parents list. Here a branch may go on past the end of an n-gram into the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from localspec.core.decoding import DraftPlan, Outcome, Proposal, Sequence
from localspec.core.prefix import common_prefix_length
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.tree_growth import ROOT, Ranked, TreeGrowth, usual_growth

GRAM = 3  # tokens of one n-gram
MAX_FOLLOWERS = 4
MAX_CONTEXTS = 20_000
MAX_READ = 2048  # tokens of a new text, its newest

WIDTH, LEVELS = 4, GRAM - 1
WINDOW_SHARE = 2 / 3  # of the nodes
# Share of nodes accepted where their parent was, in the demo target's greedy answers to 42 prompts:
# followers of a context of two tokens, or of one, most recent first; the window's nodes by level.
POOL_CHANCES = {2: (0.78, 0.12, 0.12), 1: (0.35, 0.09, 0.04)}
WINDOW_CHANCES = (0.02, 0.6)
LEAST_WORTH = 0.01  # of a branch's node, where the plan gives no prices

Context = tuple[int, ...]
Column = tuple[int, ...]


class Pool:
    """Recent n-grams of what was written and of what the target would have written: for a context
    of one to GRAM - 1 tokens its followers, most recent first, at most MAX_FOLLOWERS. Beyond
    MAX_CONTEXTS the contexts that were not added to for longest are dropped."""

    def __init__(self) -> None:
        self._followers = OrderedDict[Context, list[int]]()
        self._source: list[int] = []
        self._num_read = 0

    def add(self, context: Several[int], token: int) -> None:
        """Note that `token` followed `context`, of which the last GRAM - 1 tokens count."""
        for size in range(1, min(GRAM, len(context) + 1)):
            key = tuple(context[-size:])
            known = self._followers.setdefault(key, [])
            if token in known:
                known.remove(token)
            known.insert(0, token)
            del known[MAX_FOLLOWERS:]
            self._followers.move_to_end(key)
        while len(self._followers) > MAX_CONTEXTS:
            self._followers.popitem(last=False)

    def followers(self, context: Context) -> Several[int]:
        """What followed exactly this context, most recent first."""
        return self._followers.get(context, ())

    def read(self, tokens: list[int]) -> None:
        """Add what is new of a text. The list is held and may only grow afterwards."""
        if tokens is not self._source:
            held = self._source[: self._num_read]
            self._num_read = max(common_prefix_length(held, tokens), len(tokens) - MAX_READ)
            self._source = tokens
        for place in range(max(1, self._num_read), len(tokens)):
            self.add(tokens[max(0, place - GRAM + 1) : place], tokens[place])
        self._num_read = len(tokens)


class Branches(Ranked):
    """The pool's followers of a context of at most GRAM - 1 tokens."""

    def __init__(self, pool: Pool, context: Context, chance: Callable[[float], float]) -> None:
        """chance: see core.Growth."""
        found: dict[int, float] = {}
        for size in range(min(GRAM - 1, len(context)), 0, -1):
            followers = pool.followers(context[-size:])
            for token, confidence in zip(followers, POOL_CHANCES[size], strict=False):
                found.setdefault(token, confidence)
        super().__init__(tuple(found), tuple(found.values()), chance)
        self._pool = pool
        self._context = context
        self._chance = chance

    def below(self, token: int) -> Branches:
        return Branches(self._pool, (*self._context, token)[1 - GRAM :], self._chance)


@dataclass(frozen=True)
class Sent:
    """The last proposal. length: of the text before it. columns: the window; leaves: the node of
    each column's last level."""

    proposal: Proposal
    length: int
    columns: tuple[Column, ...]
    leaves: tuple[int, ...]


class LookaheadDrafter(DrafterBase):
    """Jacobi window and n-gram pool of one text."""

    name = "lookahead"
    shapes_itself = True

    def __init__(self) -> None:
        self._source: list[int] = []
        self._pool = Pool()
        self._window: tuple[Column, ...] = ()
        self._window_at = 0  # length of the text whose root the window follows
        self._sent: Sent | None = None
        self._num_fillers = 0

    @classmethod
    def build(cls, parts: Parts) -> LookaheadDrafter:
        return cls()

    def signal(self, sequence: Sequence) -> str | None:
        """One for all rounds: rounds that find nothing fill the pool for those that do."""
        return "window"

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        tokens, size = sequence.tokens, plan.num_draft_tokens
        self._turn_to(tokens)
        width = min(WIDTH, int(size * WINDOW_SHARE) // LEVELS)
        columns = self._columns(tokens, width)
        growth = plan.growth_or(usual_growth(LEAST_WORTH, 0.0, size))
        branches = Branches(self._pool, tuple(tokens[1 - GRAM :]), growth.chance)
        tree = TreeGrowth(growth, size, branches, end_ids=sequence.end_ids)
        tree.grow(size - width * LEVELS)
        leaves = _open_window(tree, columns)
        tree.grow()  # a node that is in both leaves room for another
        # The window pays in later rounds, so no price of this round judges it.
        self._sent = Sent(tree.whole(num_steps=1), len(tokens), columns, leaves)
        return self._sent.proposal

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Move the window on and fill the pool by what the target finds likeliest after each node:
        its choice, where it draws none. A drawn token holds for its own place alone."""
        sent, self._sent = self._sent, None
        if sent is None or outcome.proposal is not sent.proposal or not sent.proposal.tokens:
            return
        if sequence.sampling.temperature == 0.0:
            best = [token or 0 for token in outcome.choices]  # [1 + n]; a damaged row says nothing
        else:
            best = outcome.logits.argmax(dim=-1).tolist()
        self._learn(sent, best)
        moved = zip(sent.columns, sent.leaves, strict=True)
        self._window = tuple((*column[1:], best[leaf + 1]) for column, leaf in moved)
        # Level 1 was two places after the root; it is level 0 of the next window.
        self._window_at = sent.length + 1

    def _learn(self, sent: Sent, best: list[int]) -> None:
        """Add the target's argmax after each node to the pool, whether the node was accepted or
        not."""
        contexts: list[Context] = [
            tuple(self._source[max(0, sent.length - GRAM + 1) : sent.length])
        ]
        self._pool.add(contexts[0], best[0])
        nodes = zip(sent.proposal.tokens, sent.proposal.parents, best[1:], strict=True)
        for token, parent, best_after in nodes:
            contexts.append((*contexts[parent + 1], token)[1 - GRAM :])
            self._pool.add(contexts[-1], best_after)

    def _columns(self, tokens: list[int], width: int) -> tuple[Column, ...]:
        """The window after the present root, filled up to `width` columns."""
        found = list(self._window[len(tokens) - self._window_at :][:width])
        while len(found) < width:
            before = found[-1][0] if found else tokens[-1]
            context: Context = (tokens[-1], before)
            column = list[int]()
            for _ in range(LEVELS):
                column.append(self._guess(context, tokens))
                context = (*context, column[-1])[1 - GRAM :]
            found.append(tuple(column))
        return tuple(found)

    def _guess(self, context: Context, tokens: list[int]) -> int:
        for size in range(GRAM - 1, 0, -1):
            followers = self._pool.followers(context[-size:])
            if followers:
                return followers[0]
        self._num_fillers += 1
        return tokens[-1 - 7 * self._num_fillers % len(tokens)]

    def _turn_to(self, tokens: list[int]) -> None:
        if tokens is not self._source:
            self._pool, self._source = Pool(), tokens
            self._window, self._window_at, self._sent = (), len(tokens), None
            self._num_fillers = 0
        self._pool.read(tokens)


def _open_window(tree: TreeGrowth, columns: tuple[Column, ...]) -> tuple[int, ...]:
    """Add the window; returns the node of each column's last level."""
    leaves, stem = list[int](), ROOT
    for column in columns:
        stem = node = tree.add(stem, column[0], WINDOW_CHANCES[0])
        for token, chance in zip(column[1:], WINDOW_CHANCES[1:], strict=True):
            node = tree.add(node, token, chance)
        leaves.append(node)
    return tuple(leaves)
