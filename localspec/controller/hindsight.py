"""The rounds that a policy would have run over a reply that is written.

`foretold` replays them with a drafter that answers for any place of the reply (core.hindsight). No
target runs: its choice after a text is the reply's next token. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localspec.core.decoding import OFF, Drafter, DraftPlan, Policy, Proposal, Sequence, Verdict
from localspec.core.hindsight import beginning_of

Limit = Callable[[DraftPlan, Sequence], DraftPlan]  # to what the target can check in that round


@dataclass(frozen=True)
class ForetoldRound:
    """A round that was not run. sequence: with the tokens of this round. num_output_tokens: without
    the end of the text. is_whole: False if the reply ended among draft tokens that might have been
    accepted, as where it was stopped."""

    sequence: Sequence
    plan: DraftPlan
    proposal: Proposal
    verdict: Verdict
    context_length: int
    num_output_tokens: int
    is_whole: bool

    @property
    def num_accepted_tokens(self) -> int:
        return min(self.verdict.accepted_length, self.num_output_tokens)


def foretold(
    policy: Policy, drafter: Drafter, written: Sequence, within_reach: Limit
) -> Iterator[ForetoldRound]:
    """Yield the rounds in which `policy` would have written this reply with the one drafter."""
    sequence, tokens = beginning_of(written), written.tokens
    while len(sequence.tokens) < len(tokens):
        context_length = len(sequence.tokens) - 1
        plan = within_reach(policy.plan(sequence), sequence)
        proposal = Proposal()
        if plan.drafter != OFF and plan.num_draft_tokens > 0:
            proposal = drafter.propose(sequence, plan)
        path = _path(proposal, tokens[context_length + 1 :])
        end = context_length + 1 + len(path)
        is_whole = end < len(tokens) or written.finish_reason == "eos"
        is_whole = is_whole or (path[-1] if path else -1) not in proposal.parents
        kept = sequence.append(tokens[context_length + 1 : end + 1])
        next_token = tokens[end] if end < len(tokens) else tokens[-1]
        verdict = Verdict(path, next_token)
        yield ForetoldRound(sequence, plan, proposal, verdict, context_length, len(kept), is_whole)


def _path(proposal: Proposal, following: list[int]) -> tuple[int, ...]:
    """Return the nodes that spell the beginning of what follows."""
    nodes = dict[tuple[int, int], int]()
    for node, edge in enumerate(zip(proposal.parents, proposal.tokens, strict=True)):
        nodes.setdefault(edge, node)
    path, node = list[int](), -1
    for token in following:
        if (node := nodes.get((node, token), -1)) < 0:
            break
        path.append(node)
    return tuple(path)
