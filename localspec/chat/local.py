"""The backend over the local engine: a conversation in, text out.

Contract: core.Backend. Renders and tokenises the conversation, refuses what does not fit before
the first chunk, turns rounds of tokens into text that never shows half a character, ends at
stop strings, and keeps the turn's statistics. One turn at a time; the caller holds the lock.

Not here: decoding (engine), storage and queueing (service), loading (load).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from localspec.backend import (
    Candidate,
    Chunk,
    Description,
    DrafterStatus,
    Message,
    OffReason,
    Request,
    TurnStats,
)
from localspec.chat import off_reasons as off
from localspec.chat.continuation import Start, start_of
from localspec.chat.out_of_memory import TurnFault, fault_of, given_up, without_weights
from localspec.chat.stops import StopStrings
from localspec.chat.template import ChatTemplate, Detokenizer
from localspec.chat.token_text import TokenTexts, drafted_tokens
from localspec.core import AUTO, OFF, Policy, Round, Sequence, Step
from localspec.errors import ContextOverflow, EngineLost, LocalspecError, RequestError

if TYPE_CHECKING:  # the engine brings torch, which the page must not wait for
    from localspec.engine.controller import Controller
    from localspec.engine.engine import Engine
    from localspec.forward.pool import Capturing


def _no_counter() -> float | None:
    return None


@dataclass(frozen=True)
class Loaded:
    """What load hands over. statuses: every drafter there is, usable or not. joules: the
    energy the card has used so far, where it counts that. return_memory: gives back to the device
    what nothing uses any more."""

    engine: Engine
    controller: Controller
    template: ChatTemplate
    statuses: tuple[DrafterStatus, ...]
    target: str
    draft: str | None
    device: str
    dtype: str
    context_length: int
    identity: str  # the combination of models and machine that learnt state belongs to
    other_states: Mapping[str, Any]  # what was learnt on other combinations, handed on as it is
    notices: tuple[str, ...] = ()
    captures: tuple[Capturing, ...] = ()  # what can be made faster in idle time
    joules: Callable[[], float | None] = _no_counter
    return_memory: Callable[[], object] = gc.collect


class _Reply:
    """The text of one reply, cut at a stop string. begun: what stands of it already."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], begun: str) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, begun) if stops else None
        self.is_stopped = False

    def push(self, tokens: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """(text to show, characters of it by each token that belongs to the reply)."""
        shown, lengths = "", list[int]()
        for token in tokens:
            text = self._detokenizer.push(token)
            if self._stops is not None:
                text, self.is_stopped = self._stops.push(text)
            shown += text
            lengths.append(len(text))
            if self.is_stopped:
                break
        return shown, tuple(lengths)

    def flush(self) -> str:
        if self.is_stopped:
            return ""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text
        shown, self.is_stopped = self._stops.push(text)
        return shown if self.is_stopped else shown + self._stops.flush()


class LocalBackend:
    """core.Backend over one engine in this process."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._engine = loaded.engine
        self._controller = loaded.controller
        self._texts = TokenTexts(loaded.template)

    def describe(self) -> Description:
        loaded = self.loaded
        costs = self._controller.costs
        return Description(
            target=loaded.target,
            draft=loaded.draft,
            device=loaded.device,
            dtype=loaded.dtype,
            context_length=loaded.context_length,
            drafters=loaded.statuses,
            target_bytes=self._engine.target.weight_bytes,
            kv_bytes=self._engine.target.cache.kv_bytes,
            calibration=costs.snapshot() if costs.is_measured else None,
            notices=(*loaded.notices, *_capture_notices(loaded)),
        )

    def is_alive(self) -> bool:
        return True  # it lives as long as this process

    def count_tokens(self, messages: tuple[Message, ...]) -> int:
        is_begun = bool(messages) and messages[-1].role == "assistant"
        return len(start_of(self.loaded.template, messages, is_begun).prompt)

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        """See core.Backend. The checks run at the call, not at the first `next`."""
        self._refuse_unknown_drafter(request.drafter)
        template, context_length = self.loaded.template, self.loaded.context_length
        start = start_of(template, request.messages, request.continues, request.begun_tokens)
        if len(start.prompt) + request.max_tokens > context_length:
            raise ContextOverflow(len(start.prompt), request.max_tokens, context_length)
        detokenizer = template.detokenizer()
        detokenizer.begin(start.begun, start.text)
        return self._turn(request, start, _Reply(detokenizer, request.stop, start.text), cancel)

    def candidates(
        self, messages: tuple[Message, ...], tokens: tuple[int, ...], count: int
    ) -> tuple[Candidate, ...]:
        from localspec.engine.candidates import best_next

        prompt = (*self.loaded.template.render(messages), *tokens)
        if len(prompt) > self.loaded.context_length:
            raise ContextOverflow(len(prompt), 0, self.loaded.context_length)
        found = best_next(self._engine, prompt, count)
        return tuple(Candidate(one.token, self._texts.of(one.token), *one[1:]) for one in found)

    def pieces(self, tokens: tuple[int, ...]) -> tuple[str, ...]:
        return self._texts.pieces(tokens)

    def calibrate(self, cancel: threading.Event) -> Iterator[str]:
        from localspec.engine.calibrate import calibrate

        # Costs are those of what will run, so what can be captured is captured before.
        made = chain.from_iterable(each.capture() for each in self.loaded.captures)
        for phrase in chain(made, calibrate(self._engine, self._controller)):
            if cancel.is_set():
                return
            yield phrase
            if cancel.is_set():  # what was just announced is not begun
                return

    def lacks_costs(self, request: Request) -> bool:
        """Whether the controller chooses in this turn among what was not measured yet."""
        is_free = request.drafter != OFF and request.num_draft_tokens is None
        return is_free and self._controller.lacks_costs(request.sampling)

    def snapshot(self) -> dict[str, Any]:
        own = {self.loaded.identity: self._controller.snapshot()}
        return {**self.loaded.other_states, **own}

    def close(self) -> None:
        self._engine.target.cache.rollback(0)

    def _refuse_unknown_drafter(self, name: str) -> None:
        if name in (AUTO, OFF) or name in self._engine.drafters:
            return
        known: Mapping[str, DrafterStatus] = {s.name: s for s in self.loaded.statuses}
        if name in known:
            raise RequestError(f"{name} is not available: {known[name].reason}")
        raise RequestError(
            f"There is no drafter called {name!r}. Choose one of: {', '.join((AUTO, OFF, *known))}."
        )

    def _turn(
        self,
        request: Request,
        start: Start,
        reply: _Reply,
        cancel: threading.Event,
    ) -> Iterator[Chunk]:
        started, joules = perf_counter(), self.loaded.joules()
        sequence = self._engine.start(
            start.prompt, request.sampling, request.max_tokens, self.loaded.template.end_ids
        )
        is_exact = request.sampling.leniency is None
        stats = TurnStats(len(start.prompt), exact=is_exact, continued_from=start.source)
        yield Chunk("prefill", stats)
        fault: TurnFault | None = None
        try:
            prefilled = self._engine.prefill(sequence, cancel)
            policy = self._controller.policy(
                request.sampling,
                request.drafter,
                request.num_draft_tokens,
                request.first_num_draft_tokens,
                request.workload,
            )
            stats = replace(
                stats,
                num_reused_tokens=prefilled.num_reused_tokens,
                prefill_ms=prefilled.prefill_ms + self._engine.prepare(sequence, policy, cancel),
            )
            for chunk in self._rounds(request, policy, reply, sequence, stats, started, cancel):
                if chunk.phase == "done":
                    chunk = replace(chunk, stats=self._with_energy(chunk.stats, joules))
                stats = chunk.stats
                yield chunk
        except (LocalspecError, RuntimeError, MemoryError) as error:
            fault = fault_of(error)
        if fault is not None:  # only now: a traceback holds every tensor of its frames
            yield self._after(fault, stats, reply.flush())

    def _after(self, fault: TurnFault, stats: TurnStats, rest: str) -> Chunk:
        """The last chunk of a turn that failed. Raises EngineLost."""
        if fault.kind == "device":
            raise EngineLost(fault.said)
        if fault.kind == "other":
            return Chunk("done", stats, rest, finish_reason="error", error=fault.said)
        relief = self._give_up_drafts()
        said = f"{fault.said} What was written is kept. {relief or ''}".rstrip()
        return Chunk(
            "done", stats, rest, finish_reason="error", error=said, is_relieved=relief is not None
        )

    def _give_up_drafts(self) -> str | None:
        """Free what drafters hold. What was freed, as a sentence; None where nothing was held."""
        kept = without_weights(self._engine.drafters)
        dropped = {n: each for n, each in self._engine.drafters.items() if n not in kept}
        if not dropped:
            self.loaded.return_memory()
            return None
        names, target = ", ".join(dropped), cast("object", self._engine.target)
        said = f"To make room these drafters were given up: {names}. The next message goes on."
        self._engine.drafters = self._controller.drafters = kept
        dropped.clear()
        captures = tuple(each for each in self.loaded.captures if each is target)
        if not captures:  # a captured forward goes on writing where it did
            self._engine.target.cache.features = None  # only heads have read them
        self.loaded = replace(
            self.loaded,
            statuses=given_up(self.loaded.statuses, kept),
            draft=None,
            notices=(*self.loaded.notices, f"Memory ran out. {said}"),
            captures=captures,
        )
        self.loaded.return_memory()
        return said

    def _rounds(
        self,
        request: Request,
        policy: Policy,
        reply: _Reply,
        sequence: Sequence,
        stats: TurnStats,
        started: float,
        cancel: threading.Event,
    ) -> Iterator[Chunk]:
        with closing(self._engine.decode(sequence, policy, cancel)) as rounds:
            for found in rounds:
                text, lengths = reply.push(found.tokens)
                cut = _shortened(found, len(lengths))
                # The end-of-text token is no output, but plain decoding needs a step for it too.
                is_ended = sequence.finish_reason == "eos" and not reply.is_stopped
                num_steps = cut.step.num_output_tokens + (1 if is_ended else 0)
                plain_ms = self._controller.plain_ms(sequence, cut.step.context_length)
                stats = _counted(stats, cut, started, plain_ms, num_steps)
                if not found.step.num_draft_tokens:
                    stats = replace(stats, off=self._why_off(request, found) or stats.off)
                yield Chunk(
                    "decode",
                    stats,
                    text,
                    cut.tokens,
                    cut.provenance,
                    cut.step,
                    lengths=lengths,
                    drafted=drafted_tokens(cut, self._texts),
                )
                if reply.is_stopped:
                    break
        rest, reason = reply.flush(), sequence.finish_reason or "cancelled"
        yield Chunk("done", stats, rest, finish_reason="stop" if reply.is_stopped else reason)

    def _why_off(self, request: Request, found: Round) -> OffReason | None:
        chosen = off.as_chosen(request.drafter, request.num_draft_tokens)
        is_measured = self._controller.is_measured(request.sampling)
        return chosen or off.of_round(found.reason, is_measured, self.loaded.statuses)

    def _with_energy(self, stats: TurnStats, joules_before: float | None) -> TurnStats:
        joules = self.loaded.joules()
        if joules is None or joules_before is None:
            return stats
        return replace(stats, energy_joules=joules - joules_before)


def _shortened(found: Round, count: int) -> Round:
    """The round as if it had ended after `count` output tokens."""
    if count == len(found.tokens):
        return found
    lenient = tuple(place for place in found.lenient if place < count)
    step: Step = replace(
        found.step,
        num_output_tokens=count,
        num_accepted_tokens=min(found.step.num_accepted_tokens, count),
        num_lenient_tokens=len(lenient),
    )
    tokens, provenance = found.tokens[:count], found.provenance[:count]
    return replace(found, tokens=tokens, provenance=provenance, step=step, lenient=lenient)


def _capture_notices(loaded: Loaded) -> tuple[str, ...]:
    found = (each.notice for each in loaded.captures)
    return tuple(dict.fromkeys(notice for notice in found if notice is not None))


def _counted(
    stats: TurnStats, found: Round, started: float, plain_ms: float | None, num_steps: int
) -> TurnStats:
    """The turn's numbers with one more round. plain_ms: of one step of plain decoding there;
    num_steps: those that it would have needed."""
    stats = stats.plus(found.step)
    if stats.ttft_ms is None and found.tokens:
        stats = replace(stats, ttft_ms=1000.0 * (perf_counter() - started))
    if found.reason and (found.step.num_draft_tokens or not stats.num_drafts):
        stats = replace(stats, reason=found.reason)
    if plain_ms is None:
        return stats
    return replace(stats, plain_decode_ms=(stats.plain_decode_ms or 0.0) + plain_ms * num_steps)
