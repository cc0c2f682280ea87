"""The backend over the local engine: a conversation in, text out.

Contract: core.Backend. Renders and tokenises the conversation, refuses what does not fit before
the first chunk, turns rounds of tokens into text that never shows half a character, ends at
stop strings, and keeps the turn's statistics. One turn at a time; the caller holds the lock.

Not here: decoding (engine), storage and queueing (service), loading (machine.load).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any

from localspec.backend import Chunk, Description, DrafterStatus, Message, Request, TurnStats
from localspec.chat.template import ChatTemplate, Detokenizer, StopStrings
from localspec.core import AUTO, OFF, FinishReason, Policy, Round, Sequence, Step
from localspec.errors import ContextOverflow, LocalspecError, RequestError

if TYPE_CHECKING:  # the engine brings torch, which the page must not wait for
    from localspec.engine.controller import Controller
    from localspec.engine.engine import Engine
    from localspec.forward.pool import Capturing


@dataclass(frozen=True)
class Loaded:
    """What machine.load hands over. statuses: every drafter there is, usable or not."""

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


class _Reply:
    """The text of one reply, cut at a stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self.is_stopped = False

    def push(self, tokens: tuple[int, ...]) -> tuple[str, int]:
        """(text to show, how many of the tokens belong to the reply)."""
        shown = ""
        for count, token in enumerate(tokens, 1):
            text = self._detokenizer.push(token)
            if self._stops is not None:
                text, self.is_stopped = self._stops.push(text)
            shown += text
            if self.is_stopped:
                return shown, count
        return shown, len(tokens)

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

    def count_tokens(self, messages: tuple[Message, ...]) -> int:
        return len(self.loaded.template.render(messages))

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        """See core.Backend. The checks run at the call, not at the first `next`."""
        self._refuse_unknown_drafter(request.drafter)
        prompt = tuple(self.loaded.template.render(request.messages))
        if len(prompt) + request.max_tokens > self.loaded.context_length:
            raise ContextOverflow(len(prompt), request.max_tokens, self.loaded.context_length)
        reply = _Reply(self.loaded.template.detokenizer(), request.stop)
        return self._turn(request, prompt, reply, cancel)

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
        prompt: tuple[int, ...],
        reply: _Reply,
        cancel: threading.Event,
    ) -> Iterator[Chunk]:
        started = perf_counter()
        sequence = self._engine.start(
            prompt, request.sampling, request.max_tokens, self.loaded.template.end_ids
        )
        stats = TurnStats(len(prompt), exact=request.sampling.leniency is None)
        yield Chunk("prefill", stats)
        try:
            prefilled = self._engine.prefill(sequence, cancel)
            policy = self._controller.policy(
                request.sampling,
                request.drafter,
                request.num_draft_tokens,
                request.first_num_draft_tokens,
            )
            stats = replace(
                stats,
                num_reused_tokens=prefilled.num_reused_tokens,
                prefill_ms=prefilled.prefill_ms + self._engine.prepare(sequence, policy),
            )
            for chunk in self._rounds(policy, reply, sequence, stats, started, cancel):
                stats = chunk.stats
                yield chunk
        except (LocalspecError, RuntimeError, MemoryError) as error:
            rest = reply.flush()
            yield Chunk("done", stats, rest, finish_reason="error", error=_sentence(error))

    def _rounds(
        self,
        policy: Policy,
        reply: _Reply,
        sequence: Sequence,
        stats: TurnStats,
        started: float,
        cancel: threading.Event,
    ) -> Iterator[Chunk]:
        with closing(self._engine.decode(sequence, policy, cancel)) as rounds:
            for found in rounds:
                text, count = reply.push(found.tokens)
                cut = _shortened(found, count)
                # The end-of-text token is no output, but plain decoding needs a step for it too.
                is_ended = sequence.finish_reason == "eos" and not reply.is_stopped
                num_steps = cut.step.num_output_tokens + (1 if is_ended else 0)
                plain_ms = self._controller.plain_ms(sequence, cut.step.context_length)
                stats = _counted(stats, cut, started, plain_ms, num_steps)
                yield Chunk("decode", stats, text, cut.tokens, cut.provenance, cut.step)
                if reply.is_stopped:
                    break
        reason: FinishReason = sequence.finish_reason or "cancelled"
        rest = reply.flush()
        yield Chunk("done", stats, rest, finish_reason="stop" if reply.is_stopped else reason)


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


def _sentence(error: Exception) -> str:
    if isinstance(error, LocalspecError):
        return str(error)
    first_line = str(error).strip().split("\n")[0] or type(error).__name__
    return (
        f"The engine stopped: {first_line} What was written is kept. Send again; if it happens "
        "again, shorten the context or choose a smaller model."
    )


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
