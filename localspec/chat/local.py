"""The backend over the local engine: a conversation in, text out.

Contract: backend.Backend. Renders and tokenises the conversation, refuses one that does not fit
before the first chunk, turns rounds of tokens into text without half characters, ends at stop
strings, and keeps the turn's statistics. One turn at a time; the caller makes sure of it.

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
from localspec.chat import off_reasons
from localspec.chat.out_of_memory import TurnFault, fault_of, unloaded_statuses, without_weights
from localspec.chat.reply_text import ReplyText, Start, TokenTexts, drafted_tokens, start_of
from localspec.chat.template import ChatTemplate
from localspec.core import AUTO, OFF, Policy, Round, Sequence, Step
from localspec.errors import ContextOverflow, EngineLost, LocalspecError, RequestError

if TYPE_CHECKING:  # the engine brings torch, which the page must not wait for
    from localspec.engine.controller import Controller
    from localspec.engine.engine import Engine
    from localspec.forward.graphs import Capturing


def _no_counter() -> float | None:
    return None


@dataclass(frozen=True)
class Loaded:
    """The parts of a loaded engine. statuses: every known drafter, usable or not. joules: the
    energy the card has used so far, None without a counter. return_memory: frees memory that
    nothing uses any more."""

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
    other_states: Mapping[str, Any]  # learnt on other combinations; saved again unchanged
    notices: tuple[str, ...] = ()
    captures: tuple[Capturing, ...] = ()  # forwards that can be captured in idle time
    joules: Callable[[], float | None] = _no_counter
    return_memory: Callable[[], object] = gc.collect


class LocalBackend:
    """backend.Backend over one engine in this process."""

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
        return True  # as long as this process lives

    def count_tokens(self, messages: tuple[Message, ...]) -> int:
        is_begun = bool(messages) and messages[-1].role == "assistant"
        return len(start_of(self.loaded.template, messages, is_begun).prompt)

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        """See backend.Backend. The checks run at the call, not at the first `next`."""
        self._refuse_unknown_drafter(request.drafter)
        template, context_length = self.loaded.template, self.loaded.context_length
        start = start_of(template, request.messages, request.continues, request.begun_tokens)
        if len(start.prompt) + request.max_tokens > context_length:
            raise ContextOverflow(len(start.prompt), request.max_tokens, context_length)
        text = ReplyText(template.detokenizer(), request.stop, start)
        return self._turn(request, start, text, cancel)

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

        # Capture first: the costs must be those of the forwards that will run.
        made = chain.from_iterable(each.capture() for each in self.loaded.captures)
        for phrase in chain(made, calibrate(self._engine, self._controller)):
            if cancel.is_set():
                return
            yield phrase
            if cancel.is_set():  # the announced measurement is not begun
                return

    def lacks_costs(self, request: Request) -> bool:
        """Whether the controller chooses in this turn among drafters without measured costs."""
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
        text: ReplyText,
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
            for chunk in self._rounds(request, policy, text, sequence, stats, started, cancel):
                if chunk.phase == "done":
                    chunk = replace(chunk, stats=self._with_energy(chunk.stats, joules))
                stats = chunk.stats
                yield chunk
        except (LocalspecError, RuntimeError, MemoryError) as error:
            fault = fault_of(error)
        if fault is not None:  # only now: a traceback holds every tensor of its frames
            yield self._failed(fault, stats, text.flush())

    def _failed(self, fault: TurnFault, stats: TurnStats, rest: str) -> Chunk:
        """The last chunk of a turn that failed. Raises EngineLost."""
        if fault.kind == "device":
            raise EngineLost(fault.message)
        if fault.kind == "other":
            return Chunk("done", stats, rest, finish_reason="error", error=fault.message)
        freed = self._free_drafters()
        error = f"{fault.message} What was written is kept. {freed or ''}".rstrip()
        return Chunk(
            "done", stats, rest, finish_reason="error", error=error, is_relieved=freed is not None
        )

    def _free_drafters(self) -> str | None:
        """Free the memory of the drafters. What was freed, as a sentence; None where they held
        none."""
        kept = without_weights(self._engine.drafters)
        dropped = {n: each for n, each in self._engine.drafters.items() if n not in kept}
        if not dropped:
            self.loaded.return_memory()
            return None
        names, target = ", ".join(dropped), cast("object", self._engine.target)
        freed = f"To free memory, these drafters were unloaded: {names}. Send the next message."
        self._engine.drafters = self._controller.drafters = kept
        dropped.clear()
        captures = tuple(each for each in self.loaded.captures if each is target)
        if not captures:  # a captured forward still writes to them
            self._engine.target.cache.features = None  # only heads read them
        self.loaded = replace(
            self.loaded,
            statuses=unloaded_statuses(self.loaded.statuses, kept),
            draft=None,
            notices=(*self.loaded.notices, f"Memory ran out. {freed}"),
            captures=captures,
        )
        self.loaded.return_memory()
        return freed

    def _rounds(
        self,
        request: Request,
        policy: Policy,
        reply: ReplyText,
        sequence: Sequence,
        stats: TurnStats,
        started: float,
        cancel: threading.Event,
    ) -> Iterator[Chunk]:
        with closing(self._engine.decode(sequence, policy, cancel)) as rounds:
            for found in rounds:
                text, lengths = reply.push(found.tokens)
                cut = _shortened(found, len(lengths))
                # Plain decoding needs a step for the end-of-text token too, which is no output.
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
        chosen = off_reasons.as_chosen(request.drafter, request.num_draft_tokens)
        is_measured = self._controller.is_measured(request.sampling)
        return chosen or off_reasons.of_round(found.reason, is_measured, self.loaded.statuses)

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
    """The turn's statistics with one more round. plain_ms: one step of plain decoding at this
    context. num_steps: the steps that plain decoding would have needed."""
    stats = stats.plus(found.step)
    if stats.ttft_ms is None and found.tokens:
        stats = replace(stats, ttft_ms=1000.0 * (perf_counter() - started))
    if found.reason and (found.step.num_draft_tokens or not stats.num_drafts):
        stats = replace(stats, reason=found.reason)
    if plain_ms is None:
        return stats
    return replace(stats, plain_decode_ms=(stats.plain_decode_ms or 0.0) + plain_ms * num_steps)
