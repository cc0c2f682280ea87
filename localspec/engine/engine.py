"""Prefill and the decode loop of one sequence; owns nothing else.

Contract: tokens in, rounds out; the output is a function of prompt, sampling and seed, whatever
the drafters propose, as far as one forward of several tokens gives the logits of several forwards
of one; unless the request asks for leniency. `read` and `round` are steps: generators that yield
the passes they need, and go on with what these give. So their driver decides what runs in one
forward: `prefill` and `decode` drive one sequence alone, `Batch` several together. Invariant at the
top of every round: `target.cache.tokens == sequence.tokens[:-1]`. A drafter may scribble after that
in a cache it shares; the rollback before verification erases it.

Not here: text, choice of drafter and draft length (Policy), acceptance (verify).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import NamedTuple, cast

import torch

from localspec.core.decoding import (
    FORCED,
    OFF,
    TARGET,
    Drafter,
    DraftPlan,
    Outcome,
    Policy,
    Proposal,
    Round,
    SamplingParams,
    Sequence,
    Step,
    TokenLogprob,
    Verdict,
)
from localspec.core.errors import NumericsError
from localspec.core.filling import Filler, filled
from localspec.core.grammar import Grammar
from localspec.core.speculation import num_checked
from localspec.core.thought import ThoughtLimit
from localspec.engine.batch import DraftTimes, Forwarded, Stepwise, alone, with_times
from localspec.engine.lenient import allowed
from localspec.engine.noise import GumbelNoise
from localspec.engine.sampling import choices, masked, scores
from localspec.engine.verify import verify
from localspec.forward.cache import KVCache
from localspec.forward.graphs import CapturedDecoder, Capturing
from localspec.forward.model import PREFILL_CHUNK, LanguageModel
from localspec.forward.passes import Pass, Rows


@dataclass(frozen=True)
class Prefilled:
    """How much of a prompt was already read, of that how much came from the disk, and what reading
    took."""

    num_reused_tokens: int
    prefill_ms: float
    num_disk_tokens: int = 0


class Engine:
    """A target over one cache, and its drafters: one sequence at a time."""

    def __init__(self, target: LanguageModel, drafters: Mapping[str, Drafter]) -> None:
        self.target = target
        self.drafters = drafters

    @property
    def captures(self) -> tuple[Capturing, ...]:
        """What captures graphs, the target first: plain decoding gains from it at once."""
        own = (self.target,) if isinstance(self.target, CapturedDecoder) else ()
        of_drafters = (getattr(drafter, "captures", ()) for drafter in self.drafters.values())
        return (*own, *chain.from_iterable(of_drafters))

    def capture(self) -> Iterator[str]:
        """Capture the graphs that are missing, one at a time; yields a phrase before each."""
        for captures in self.captures:
            yield from captures.capture()

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """The caches that hold the text: the target's, and large ones of drafters."""
        own = [getattr(each, "caches", ()) for each in self.drafters.values()]
        found = {id(cache): cache for cache in (self.target.cache, *chain.from_iterable(own))}
        return tuple(found.values())

    def start(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        end_ids: frozenset[int],
        num_logprobs: int | None = None,
        prediction: tuple[int, ...] = (),
        grammar: Grammar | None = None,
        thought: ThoughtLimit | None = None,
    ) -> Sequence:
        """A turn's sequence with the noise of its seed, which only a greedy turn may lack."""
        is_fixed = sampling.seed is not None or sampling.temperature == 0.0
        assert is_fixed, "whoever makes a request draws its seed, so that it can be logged"
        noise = GumbelNoise(sampling.seed or 0, self.target.vocab_size, self.target.device)
        return Sequence(
            prompt,
            sampling,
            max_tokens,
            end_ids,
            noise,
            num_logprobs,
            prediction,
            grammar,
            thought,
        )

    def prefill(self, sequence: Sequence, cancel: threading.Event) -> Prefilled:
        """Drive `read` to its end, for a sequence that is alone."""
        return alone(self.read(sequence, cancel))

    def read(
        self,
        sequence: Sequence,
        cancel: threading.Event,
        most_rows: Callable[[], int] = lambda: PREFILL_CHUNK,
    ) -> Generator[Pass, Forwarded, Prefilled]:
        """Bring the target's cache to all tokens but the root, keeping what earlier turns left.

        most_rows: of the next forward. Stops between two when cancelled; `decode` then yields
        nothing.
        """
        started = perf_counter()
        wanted = sequence.tokens[:-1]
        cache = self.target.cache
        place = reused = cache.reuse_read(wanted)
        from_disk = min(reused, cache.num_from_disk)
        while place < len(wanted) and not cancel.is_set():
            end = cache.piece_end(place, place + (cache.piece or most_rows()))
            piece = wanted[place:end]
            logits, sequence.others = yield Rows(self.target, piece, num_logits=1)
            float(logits[0, 0])  # a GPU is only asked so far; wait, so that the time is its own
            place += len(piece)
        cache.hold()
        return Prefilled(reused, 1000.0 * (perf_counter() - started), from_disk)

    def decode(
        self, sequence: Sequence, policy: Policy, cancel: threading.Event
    ) -> Generator[Round]:
        """The rounds of a sequence that is alone, until it ends or cancel is set. Raises
        NumericsError, CacheError."""
        with self.decoding(sequence):
            while sequence.finish_reason is None and not cancel.is_set():
                yield alone(self.round(sequence, policy))

    @contextmanager
    def decoding(self, sequence: Sequence) -> Iterator[None]:
        """The context of a sequence's rounds: however they end, the cache holds its tokens."""
        try:
            yield
        except NumericsError:
            # What was written may be no numbers, and a captured forward looks beyond the end.
            self.target.cache.reuse(sequence.tokens[:-1])
            self.target.cache.zero_beyond()
            raise
        finally:
            self.target.cache.reuse(sequence.tokens[:-1])
            self.target.cache.hold()

    def round(self, sequence: Sequence, policy: Policy) -> Generator[Pass, Forwarded, Round]:
        """Plan, draft, verify, commit, learn."""
        base = len(sequence.tokens) - 1
        assert self.target.cache.length == base, "the cache must hold all tokens but the root"
        started = perf_counter()
        plan = self.within_reach(policy.plan(sequence), sequence)
        planned = perf_counter()
        proposal, drafting, drafted = Proposal(), DraftTimes(), planned
        if plan.drafter != OFF and plan.num_draft_tokens > 0:
            proposal, drafting = yield from self._propose(sequence, plan)
            drafted = perf_counter()
        self.target.cache.rollback(base)  # erases anything a self-draft wrote
        logits, others = yield self._rows(sequence, proposal)
        if others.num_sequences:
            others = others._replace(took_ms=others.took_ms + drafting.waited)
        sequence.others = others
        verdict, chosen = self._judge(sequence, proposal, logits)
        kept = self._commit(sequence, base, proposal, verdict)
        times = _Times(started, planned, drafted, perf_counter(), drafting)
        step = replace(
            _measured(plan, proposal, verdict, kept, times, base), others=sequence.others
        )
        outcome = Outcome(step, proposal, verdict, logits, chosen)
        policy.observe(sequence, outcome)
        if proposal.tokens:
            self.drafters[plan.drafter].observe(sequence, outcome)
        learning_ms = 1000.0 * (perf_counter() - times.ended)
        found = _yielded(plan, outcome, kept, learning_ms)
        if sequence.num_logprobs is not None:
            found = replace(found, logprobs=_logprobs(outcome, kept, sequence.num_logprobs))
        return (yield from self._with_closed_thought(sequence, found))

    def _with_closed_thought(
        self, sequence: Sequence, found: Round
    ) -> Generator[Pass, Forwarded, Round]:
        """End a thought that has reached its budget. The tokens that do so belong to the round; no
        policy learns from them."""
        closing = sequence.parts.closing(len(sequence.tokens))
        sequence.tokens += closing
        if not closing:
            return found
        read = yield from self.read(sequence, threading.Event())
        step = replace(
            found.step,
            num_output_tokens=found.step.num_output_tokens + len(closing),
            verify_ms=found.step.verify_ms + read.prefill_ms,
        )
        return replace(
            found,
            tokens=(*found.tokens, *closing),
            provenance=found.provenance + (FORCED,) * len(closing),
            step=step,
        )

    def within_reach(self, plan: DraftPlan, sequence: Sequence) -> DraftPlan:
        """No draft for the last token of a reply, past the end of the context, or of more tokens
        than the cache can take back."""
        cache = self.target.cache
        room = min(cache.shape.capacity - len(sequence.tokens), cache.most_rows - 1)
        limit = max(0, min(sequence.num_remaining - 1, room))
        return replace(plan, is_chain=cache.prefers_chains).shortened(limit)

    def _propose(
        self, sequence: Sequence, plan: DraftPlan
    ) -> Generator[Pass, Forwarded, tuple[Proposal, DraftTimes]]:
        """The proposal, and where the time of the draft went."""
        drafter, times = self.drafters[plan.drafter], DraftTimes()
        if isinstance(drafter, Stepwise):
            proposal, times = yield from with_times(drafter.steps(sequence, plan))
        else:
            proposal = drafter.propose(sequence, plan)
        return self._filled(sequence, plan, proposal), times

    def _filled(self, sequence: Sequence, plan: DraftPlan, proposal: Proposal) -> Proposal:
        """The proposal with what the plan lets a filler append to a chain."""
        filling = plan.filling
        if filling is None or not proposal.is_chain or not proposal.confidences:
            return proposal
        filler = cast(Filler, self.drafters[filling.drafter])
        return filled(proposal, plan.drafter, filler.fill(sequence, proposal, filling))

    def _rows(self, sequence: Sequence, proposal: Proposal) -> Rows:
        """The root and each draft token."""
        tokens = [sequence.tokens[-1], *proposal.tokens]
        if proposal.is_chain:
            return Rows(self.target, tokens)
        return Rows(self.target, tokens, [-1, *(parent + 1 for parent in proposal.parents)])

    def _judge(
        self, sequence: Sequence, proposal: Proposal, logits: torch.Tensor
    ) -> tuple[Verdict, list[int | None]]:
        """The verdict, and the target's choice after the root and after each draft token."""
        rule = sequence.sampling.leniency
        texts = [(), *proposal.texts] if proposal.tokens else [()]
        logits = masked(logits, sequence, texts)
        found = scores(logits, sequence, texts)
        chosen = choices(found)
        if rule is None or not proposal.tokens:
            return verify(proposal, chosen), chosen
        lenient = allowed(rule, proposal, sequence, logits, found)
        return verify(proposal, chosen, lenient), chosen

    def _commit(
        self, sequence: Sequence, base: int, proposal: Proposal, verdict: Verdict
    ) -> list[int]:
        """Take the accepted path and the next token into sequence and cache, cut where the turn
        ends; returns the output tokens."""
        cache = self.target.cache
        cache.keep(base, (0, *(node + 1 for node in verdict.path)))
        kept = sequence.append(
            [*(proposal.tokens[node] for node in verdict.path), verdict.next_token]
        )
        cache.rollback(min(cache.length, len(sequence.tokens) - 1))
        if not verdict.is_whole:
            cache.zero_beyond()
        return kept


class _Times(NamedTuple):
    """Moments of one round, in seconds. drafting: parts of the time in which it drafted."""

    started: float
    planned: float
    drafted: float
    ended: float
    drafting: DraftTimes


def _measured(
    plan: DraftPlan, proposal: Proposal, verdict: Verdict, kept: list[int], times: _Times, base: int
) -> Step:
    plan_ms = 1000.0 * (times.planned - times.started)
    num_accepted, fill = min(verdict.accepted_length, len(kept)), proposal.fill
    return Step(
        drafter=plan.drafter if proposal.tokens else OFF,
        num_draft_tokens=len(proposal.tokens),
        num_accepted_tokens=num_accepted,
        num_output_tokens=len(kept),
        draft_ms=1000.0 * (times.drafted - times.planned) - times.drafting.waited,
        verify_ms=1000.0 * (times.ended - times.drafted) + plan_ms + times.drafting.waited,
        context_length=base,
        is_probe=plan.is_probe and (bool(proposal.tokens) or plan.drafter == OFF),
        signal=plan.signal,
        num_lenient_tokens=sum(place < len(kept) for place in verdict.lenient),
        num_checked_tokens=num_checked(proposal.parents, verdict.path, num_accepted),
        policy_ms=plan_ms,
        num_filled_tokens=0 if fill is None else len(fill.draft.tokens),
        filler=None if fill is None else fill.drafter,
        reading_ms=times.drafting.reading,
    )


def _yielded(plan: DraftPlan, outcome: Outcome, kept: list[int], learning_ms: float) -> Round:
    """The round as others see it: with what learning from it took, and where each token came
    from."""
    proposal, verdict = outcome.proposal, outcome.verdict
    step = replace(
        outcome.step,
        verify_ms=outcome.step.verify_ms + learning_ms,
        policy_ms=outcome.step.policy_ms + learning_ms,
    )
    makers = proposal.makers or (plan.drafter,) * len(proposal.tokens)
    accepted = tuple(makers[node] for node in verdict.path[: step.num_accepted_tokens])
    provenance = accepted + (TARGET,) * (len(kept) - len(accepted))
    lenient = tuple(place for place in verdict.lenient if place < len(kept))
    return Round(tuple(kept), provenance, step, plan, lenient, proposal, verdict)


def _logprobs(outcome: Outcome, kept: list[int], count: int) -> tuple[TokenLogprob, ...]:
    """Of the tokens kept of a round, with the `count` likeliest tokens at each place. By the
    target's own logits, before penalties, temperature and cuts, so the same whatever drafted."""
    if not kept:
        return ()
    rows = [0, *(node + 1 for node in outcome.verdict.path)][: len(kept)]
    found = outcome.logits[rows].float().log_softmax(dim=-1)  # [n, V]
    own = found.gather(1, torch.tensor(kept, device=found.device)[:, None])[:, 0].tolist()
    best = found.topk(min(count, found.shape[-1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(tokens, values, strict=True)))
        for token, logprob, (tokens, values) in zip(kept, own, tops, strict=True)
    )
