"""What a drafter would have done in a reply that is written, and what that teaches.

`foretold` replays the rounds of a policy with a drafter that answers for any place of the reply
(core.hindsight). No target runs: its choice after a text is the reply's next token. `judge` does so
for one drafter alone, with lengths of the controller's choice, sums what the rounds would have
taken, and teaches their acceptance. Costs, clocks and budgets are left alone. No torch.

What one reply teaches is limited, for all its rounds are of one text, and the next text may be
accepted quite otherwise. In the made-up worlds with whole turns of good and of bad drafts an
unlimited review was worse than none: a drafter that was bad in turn after turn was believed to stay
so, and its good turns passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from localspec.controller.acceptance import THINKING, Situation, bucket_of
from localspec.controller.controller import Controller
from localspec.controller.policy import policy_of
from localspec.core.decoding import OFF, Drafter, DraftPlan, Policy, Proposal, Sequence, Verdict
from localspec.core.hindsight import Hindsight, beginning_of

# Share of a reply's rounds above which a drafter has learnt from them what there is to learn.
MOST_DRAFTED = 0.5
# Rounds of one reply that are taught, spread over it.
MOST_TAUGHT = 32.0
# Rounds that all that is known of a drafter is worth at most after a reply in which it would have
# lost, so that the next reply tries it again.
MOST_AFTER_LOSS = 4.0
# Share of a reply's plain time that reading the prompt may take a drafter. Beyond it the drafter
# would not have been chosen whatever is accepted, so the reply is no example of those it is for.
MOST_READING = 0.05

Limit = Callable[[DraftPlan, Sequence], DraftPlan]  # to what the target can check in that round


@dataclass(frozen=True)
class WrittenReply:
    """A reply that is over. kind: of text. within_reach: see Engine. rounds_at: of each drafter the
    context lengths of its rounds, of OFF those of plain rounds. num_known_tokens: of the prompt,
    held since earlier turns."""

    sequence: Sequence
    kind: str
    within_reach: Limit
    rounds_at: Mapping[str, Collection[int]]
    num_known_tokens: int = 0

    def is_mostly_of(self, drafter: str) -> bool:
        """Whether its own rounds say more of this drafter than a review."""
        num_rounds = sum(map(len, self.rounds_at.values()))
        return len(self.rounds_at.get(drafter, ())) > MOST_DRAFTED * num_rounds


@dataclass(frozen=True)
class ForetoldRound:
    """A round that was not run. sequence: with the tokens of this round. num_output_tokens: without
    the end of the text. is_thinking: whether a thought was being written before it. is_whole: False
    if the reply ended among draft tokens that might have been accepted, as where it was stopped."""

    sequence: Sequence
    plan: DraftPlan
    proposal: Proposal
    verdict: Verdict
    context_length: int
    num_output_tokens: int
    is_thinking: bool
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
        is_thinking = sequence.parts.is_thinking
        kept = sequence.append(tokens[context_length + 1 : end + 1])
        next_token = tokens[end] if end < len(tokens) else tokens[-1]
        verdict = Verdict(path, next_token)
        yield ForetoldRound(
            sequence, plan, proposal, verdict, context_length, len(kept), is_thinking, is_whole
        )


def judge(
    controller: Controller,
    drafter: Drafter,
    reply: WrittenReply,
    goes_on: Callable[[], bool] = lambda: True,
) -> Hindsight | None:
    """Return what the drafter would have done alone, and teach it, as long as `goes_on`; None for
    nothing."""
    alone = controller.beside({drafter.name: drafter})
    sampling = reply.sequence.sampling
    policy = policy_of(alone, sampling, drafter.name, None, kind=reply.kind)
    sums, lessons = _Sums(alone, drafter.name, reply), _Lessons(alone, drafter.name, reply)
    teaches = not reply.is_mostly_of(drafter.name) and not sums.reads_long
    for each in foretold(policy, drafter, reply.sequence, reply.within_reach):
        sums.add(each)
        if teaches:
            lessons.take(each)
        if not goes_on():
            break
    result = sums.result()
    if teaches and result is not None:
        lessons.end(result)
    return result


class _Lessons:
    """What one reply teaches of a drafter."""

    def __init__(self, controller: Controller, drafter: str, reply: WrittenReply) -> None:
        self._controller = controller
        self._drafter = drafter
        self._start = reply.sequence.prompt_length - 1
        self._every = len(reply.sequence.reply) / MOST_TAUGHT  # tokens
        self._drafted = reply.rounds_at.get(drafter, ())
        self._answering = Situation(bucket_of(reply.sequence.sampling), reply.kind)
        self._situations = {self._answering}
        self._num_taught = 0

    def take(self, one: ForetoldRound) -> None:
        """Teach a round, unless the drafter really drafted there or enough was taught so far."""
        is_due = one.context_length - self._start >= self._every * self._num_taught
        is_new = one.context_length not in self._drafted
        if not (is_due and is_new and one.is_whole) or one.plan.drafter == OFF:
            return
        self._num_taught += 1
        situation = self._answering._replace(kind=THINKING) if one.is_thinking else self._answering
        self._situations.add(situation)
        name, signal = self._drafter, one.plan.signal
        if one.proposal.tokens:
            self._controller.observe_acceptance(situation, name, signal, one.proposal, one.verdict)
        else:  # It was asked, and had nothing to propose.
            self._controller.acceptance.observe(
                name, signal, situation, 0, 0, num_nodes=0.0, num_steps=1.0
            )

    def end(self, result: Hindsight) -> None:
        if result.has_lost:
            for situation in self._situations:
                self._controller.acceptance.cap(self._drafter, situation, MOST_AFTER_LOSS)


class _Sums:
    """The sums over the rounds of one drafter. controller: of the drafter alone, in no turn yet."""

    def __init__(self, controller: Controller, drafter: str, reply: WrittenReply) -> None:
        self._drafter = drafter
        self._reply = reply
        self._catch_up = controller.catch_up
        self._costs = controller.costs_at(bucket_of(reply.sequence.sampling))
        self._num_tokens = self._num_drafts = self._num_drafted = self._num_accepted = 0
        self._decode_ms: float | None = 0.0
        self._plain_ms: float | None = 0.0
        if reply.num_known_tokens:
            self._catch_up.read(drafter, reply.sequence, reply.num_known_tokens - 1)

    @property
    def reads_long(self) -> bool:
        """Whether reading the prompt takes so long that the drafter was out of the question."""
        sequence = self._reply.sequence
        context = sequence.prompt_length - 1
        read_ms = self._read_ms(
            context, self._catch_up.num_missed(self._drafter, sequence, context)
        )
        plain_ms = self._costs.plain_ms(context)
        if read_ms is None or plain_ms is None:
            return False
        return read_ms > MOST_READING * plain_ms * len(sequence.reply)

    def add(self, one: ForetoldRound) -> None:
        num_drafted = len(one.proposal.tokens)
        self._num_tokens += one.num_output_tokens
        self._num_drafts += num_drafted > 0
        self._num_drafted += num_drafted
        self._num_accepted += one.num_accepted_tokens
        # Plain decoding needs a round for the end of the text too, which is no output.
        num_rounds = one.num_output_tokens + (one.sequence.finish_reason == "eos")
        plain_ms = self._costs.plain_ms(one.context_length)
        self._plain_ms = _sum(self._plain_ms, plain_ms and num_rounds * plain_ms)
        self._decode_ms = _sum(self._decode_ms, self._round_ms(one))

    def _round_ms(self, one: ForetoldRound) -> float | None:
        """Return the cost of a round, with the tokens that the drafter reads before it drafts."""
        num_drafted, context = len(one.proposal.tokens), one.context_length
        verify_ms = self._costs.verify_ms(1 + num_drafted, context)
        if not num_drafted:
            return verify_ms
        num_missed = self._catch_up.read(self._drafter, self._reply.sequence, context)
        num_steps = one.proposal.num_draft_steps
        draft_ms = self._costs.draft_ms(self._drafter, num_steps, context)
        return _sum(_sum(verify_ms, draft_ms), self._read_ms(context, num_missed))

    def _read_ms(self, context: int, num_missed: int) -> float | None:
        step_ms = self._costs.draft_ms(self._drafter, 1, context)
        return None if step_ms is None else self._catch_up.ms(self._drafter, num_missed, step_ms)

    def result(self) -> Hindsight | None:
        if not self._num_tokens:
            return None
        is_known = self._decode_ms is not None and self._plain_ms is not None
        return Hindsight(
            drafter=self._drafter,
            num_output_tokens=self._num_tokens,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            decode_ms=self._decode_ms if is_known else None,
            plain_decode_ms=self._plain_ms if is_known else None,
        )


def _sum(total: float | None, added: float | None) -> float | None:
    return None if total is None or added is None else total + added


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
