"""The backend over the local engine: a conversation in, text out.

It renders and tokenises the conversation, refuses one that does not fit before the first chunk, and
turns rounds of tokens into text. When memory runs out it unloads the drafters. As many turns as
there are slots are decoded together; `candidates` and `calibrate` need the engine alone.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from localspec.chat import off_reasons
from localspec.chat.context_room import check_calls, check_drafter
from localspec.chat.grammars import Grammars
from localspec.chat.hindsight import Reviews
from localspec.chat.out_of_memory import TurnFault, fault_of, unloaded
from localspec.chat.reply_text import (
    ReplyText,
    Said,
    TokenTexts,
    drafted_tokens,
    limited,
    predicted,
    refuse_unknown_tokens,
    shortened,
    start_of,
    thought_limit_of,
    with_thought,
)
from localspec.chat.slots import (
    RunningTurn,
    Slot,
    best_slot,
    compared,
    keep_read,
    stats_before,
    with_energy,
)
from localspec.chat.template import ChatTemplate
from localspec.controller.plain_baseline import PlainBaseline
from localspec.controller.policy import policy_of
from localspec.core.backend import Candidate, Chunk, Description, Message, Request
from localspec.core.decoding import AUTO, FORCED, OFF, Round, SamplingParams, Sequence
from localspec.core.errors import ContextOverflow, EngineLost, LocalspecError, NumericsError
from localspec.core.hindsight import Hindsight
from localspec.core.off_code import OffReason
from localspec.core.turn_stats import TurnStats
from localspec.drafters.registry import label_of, labelled

if TYPE_CHECKING:  # the engine brings torch, which the page must not wait for
    from localspec.controller.controller import Controller
    from localspec.engine.batch import Forwarded, Steps
    from localspec.engine.engine import Engine, Prefilled
    from localspec.engine.threads import Threads
    from localspec.forward.passes import Pass
    from localspec.forward.prefix_store import PrefixStore


@dataclass(frozen=True)
class Loaded:
    """The parts of a loaded engine. description: without what is asked of the parts (sizes, costs,
    slots). joules: the energy the card has used so far, None without a counter. return_memory:
    frees memory that nothing uses any more. threads: None where the processor runs no rounds."""

    engine: Engine
    controller: Controller
    template: ChatTemplate
    description: Description
    identity: str  # the combination of models and machine that learnt state belongs to
    joules: Callable[[], float | None] = lambda: None
    return_memory: Callable[[], object] = gc.collect
    beside: tuple[Slot, ...] = ()  # slots for further replies; the first has engine and controller
    threads: Threads | None = None
    prefixes: PrefixStore | None = None  # what the caches keep of texts; None: nothing

    @property
    def context_length(self) -> int:
        length = self.description.context_length
        assert length is not None, "an engine of ours knows its context"
        return length


class LocalBackend:
    """backend.Backend over one engine in this process. One thread reads all replies."""

    def __init__(self, loaded: Loaded) -> None:
        from localspec.engine.batch import Batch

        self.loaded = loaded
        self._engine = loaded.engine
        self._controller = loaded.controller
        self._slots = (Slot(loaded.engine, loaded.controller), *loaded.beside)
        self._batch = Batch[Chunk]()
        self._measuring: Iterator[str] | None = None  # what a reply has interrupted
        self._reviews = Reviews()
        self._texts = TokenTexts(loaded.template)
        self._grammars = Grammars(loaded.template, loaded.engine.target.vocab_size)

    def describe(self) -> Description:
        loaded, target = self.loaded, self._engine.target
        costs = self._controller.costs
        captures = self._engine.captures
        captured = dict.fromkeys(each.notice for each in captures if each.notice is not None)
        unkept = () if loaded.prefixes is None else loaded.prefixes.notices
        return replace(
            loaded.description,
            target_bytes=target.weight_bytes,
            kv_bytes=sum(slot.engine.target.cache.kv_bytes for slot in self._slots),
            num_slots=len(self._slots),
            calibration=costs.snapshot() if costs.is_measured else None,
            notices=(*loaded.description.notices, *captured, *unkept),
            thinks=loaded.template.thinks,
            call_format=_format_name(loaded.template),
            has_idle_work=any(each.has_missing for each in captures),
        )

    def is_alive(self) -> bool:
        return True  # as long as this process lives

    def count_tokens(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> int:
        is_begun = bool(messages) and messages[-1].role == "assistant"
        return len(self.prompt_tokens(Request(messages, tools=tools, continues=is_begun)))

    def prompt_tokens(self, request: Request) -> tuple[int, ...]:
        return start_of(self.loaded.template, request, self.loaded.context_length).prompt

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        """See backend.Backend. The checks run at the call, not at the first `next`."""
        started_s, asked = perf_counter(), request
        self._reviews.drop()
        check_drafter(self.loaded.description.drafters, request.drafter)
        template = self.loaded.template
        check_calls(_format_name(template), request)
        if request.grammar or request.thinking_budget == 0:  # a thought keeps to no grammar
            request = replace(request, thinks=False)
        start = start_of(template, request, self.loaded.context_length)
        refuse_unknown_tokens(start.prompt, self._engine.target.vocab_size, template)
        marks = None if request.is_raw else template.marks
        text = ReplyText(*template.detokenizer_for(request.stop), start, marks)
        request = limited(self, template, request, start, text, self.loaded.context_length)
        grammar = self._grammars.of(request.grammar, start.begun) if request.grammar else None
        stats = stats_before(request, start)
        turn = RunningTurn(asked, request, start, text, grammar, started_s, cancel, stats)
        return self._batch.run(self._in_a_slot(turn))

    def candidates(
        self, messages: tuple[Message, ...], tokens: tuple[int, ...], count: int
    ) -> tuple[Candidate, ...]:
        """See backend.Backend. What the cache holds of the text is used as it stands: after a plain
        replay these are the logits that the replay chose by, but for the last token's own forward.
        Raises NumericsError for logits that are NaN."""
        prompt = (*self.loaded.template.render(messages), *tokens)
        if len(prompt) > self.loaded.context_length:
            raise ContextOverflow(len(prompt), 0, self.loaded.context_length)
        slot = best_slot(self._slots, AUTO, prompt)
        assert slot is not None, "the caller has the engine to itself"
        engine, target = slot.engine, slot.engine.target
        engine.prefill(engine.start(prompt, SamplingParams(), 1, frozenset()), threading.Event())
        logits = target.forward([prompt[-1]])[0].float()  # [V]
        target.cache.reuse(list(prompt[:-1]))
        if logits.isnan().any():
            raise NumericsError(
                "The model returned values that are not numbers here, so its candidates cannot be "
                "compared. Load it with --dtype fp32."
            )
        best = logits.topk(min(count, len(logits)))
        chances = logits.softmax(dim=-1)[best.indices]
        found = zip(best.indices.tolist(), best.values.tolist(), chances.tolist(), strict=True)
        return tuple(
            Candidate(token, self._texts.of(token), logit, chance) for token, logit, chance in found
        )

    def calibrate(self, cancel: threading.Event) -> Iterator[str]:
        from localspec.engine.calibrate import calibrate

        if self._measuring is None:
            self._measuring = calibrate(self._engine, self._controller)
        for phrase in self._measuring:
            if cancel.is_set():
                return
            yield labelled(phrase)
            if cancel.is_set():  # the announced measurement is not begun
                return
        self._measuring = None

    def review(self, request: Request, cancel: threading.Event) -> Iterator[Hindsight]:
        return self._reviews.review(request, cancel)

    def lacks_costs(self, request: Request) -> bool:
        """Whether the controller chooses in this turn among drafters without measured costs."""
        drafter, length = request.drafter, request.num_draft_tokens
        is_free = drafter != OFF and (length is None or (drafter == AUTO and length != 0))
        return is_free and self._controller.lacks_costs(request.sampling)

    def keep_read(self, disk_bytes: int | None, cancel: threading.Event) -> Iterator[str]:
        return keep_read(self._slots, self.loaded.prefixes, disk_bytes, cancel)

    def forget(self, chat: int) -> None:
        if self.loaded.prefixes is not None:
            self.loaded.prefixes.forget(chat)

    def snapshot(self) -> dict[str, Any]:
        return {self.loaded.identity: self._controller.snapshot()}

    def close(self) -> None:
        for slot in self._slots:
            slot.engine.target.cache.rollback(0)

    def _in_a_slot(self, turn: RunningTurn) -> Steps[Chunk]:
        """The steps of a turn, once there is a slot for it."""
        while (slot := best_slot(self._slots, turn.request.drafter, turn.start.prompt)) is None:
            if turn.cancel.is_set():
                yield Chunk("done", turn.stats, finish_reason="cancelled")
                return
            yield None
        slot.take(turn.request.kept_with, self.loaded.prefixes)
        try:
            yield from self._steps(slot, turn)
        finally:
            slot.is_free = True

    def _steps(self, slot: Slot, turn: RunningTurn) -> Steps[Chunk]:
        joules = self.loaded.joules()
        yield Chunk("prefill", turn.stats)
        fault: TurnFault | None = None
        try:
            sequence = self._sequence(slot, turn)
            yield from self._read(slot, turn, sequence)
            slot.tell_kept(sequence)
            yield from self._decode(slot, turn, sequence, joules)
        except (LocalspecError, RuntimeError, MemoryError) as error:
            fault = fault_of(error)
        if fault is not None:  # only now: a traceback holds every tensor of its frames
            yield self._failed(fault, turn.stats, turn.text.flush())

    def _sequence(self, slot: Slot, turn: RunningTurn) -> Sequence:
        request, template = turn.request, self.loaded.template
        assert request.max_tokens is not None, "it was limited by the context"
        return slot.engine.start(
            turn.start.prompt,
            request.sampling,
            request.max_tokens,
            frozenset() if request.ignores_end else template.end_ids,
            request.num_logprobs,
            predicted(template, turn.start, request.prediction, self.loaded.context_length),
            turn.grammar,
            thought_limit_of(template, request, turn.start, turn.text),
        )

    def _read(
        self, slot: Slot, turn: RunningTurn, sequence: Sequence
    ) -> Generator[Pass | Chunk, Forwarded, None]:
        """Read the prompt, and say between two forwards how far it is read."""
        reading = slot.engine.read(sequence, turn.cancel, lambda: self._batch.num_rows_read)
        try:
            rows = next(reading)
            cache = slot.engine.target.cache
            turn.stats = replace(turn.stats, num_reused_tokens=cache.length)
            while True:
                rows = reading.send((yield rows))
                yield Chunk("prefill", turn.stats, num_read_tokens=cache.length)
        except StopIteration as end:
            read: Prefilled = end.value
            turn.stats = replace(turn.stats, **asdict(read))

    def _decode(
        self, slot: Slot, turn: RunningTurn, sequence: Sequence, joules: float | None
    ) -> Steps[Chunk]:
        """Round after round to the end of the reply. joules: used before the turn began."""
        request, threads = turn.request, self.loaded.threads
        policy = policy_of(
            slot.controller,
            request.sampling,
            request.drafter,
            request.num_draft_tokens,
            request.first_num_draft_tokens,
            request.workload,
        )
        baseline = slot.baseline(request.sampling)
        with slot.engine.decoding(sequence):
            while turn.goes_on(sequence):
                found = yield from slot.engine.round(sequence, policy)
                if threads is not None and not found.step.others.num_sequences:
                    threads.observe(slot.controller.load(request.sampling))
                yield self._chunk(turn, found, sequence, baseline)
        plain_ms = () if baseline is None else baseline.end_turn()
        rest, reason = turn.text.flush(), sequence.finish_reason or "cancelled"
        stats = with_energy(turn.stats, joules, self.loaded.joules())
        turn.stats = stats = compared(stats, baseline)
        self._reviews.keep(turn, slot, sequence)
        yield Chunk(
            "done",
            stats,
            rest.text,
            finish_reason="stop" if turn.text.is_stopped else reason,
            plain_ms=plain_ms if stats.num_draft_tokens else (),
            thinking=rest.thinking,
        )

    def _chunk(
        self,
        turn: RunningTurn,
        found: Round,
        sequence: Sequence,
        baseline: PlainBaseline | None,
    ) -> Chunk:
        """What a round gave, as text; counts it."""
        reply, stats = turn.text, turn.stats
        turn.rounds_at[found.step.drafter].add(found.step.context_length)
        num_forced = found.provenance.count(FORCED)
        said = reply.push(found.tokens, num_forced)
        cut = shortened(found, len(said.lengths))
        stats = with_thought(stats.plus(cut.step), said, cut.step)
        if stats.ttft_ms is None and cut.tokens:
            stats = replace(stats, ttft_ms=turn.passed_ms)
        stats = stats.explained(cut.step, labelled(cut.plan.reason))
        if baseline is not None:
            # Plain decoding needs a round for the end-of-text token too, no output token.
            is_ended = sequence.finish_reason == "eos" and not reply.is_stopped
            num_own = cut.step.num_output_tokens - num_forced
            baseline.observe(cut.step, num_own + is_ended)
        if not found.step.num_draft_tokens:
            stats = replace(stats, off=self._why_off(turn.request, found) or stats.off)
        turn.stats = compared(replace(stats, reply_ms=turn.passed_ms), baseline)
        return Chunk(
            "decode",
            turn.stats,
            said.text,
            cut.tokens,
            cut.provenance,
            cut.step,
            lengths=said.lengths,
            drafted=drafted_tokens(cut, self._texts),
            logprobs=self._texts.logprobs(cut.logprobs),
            thinking=said.thinking,
        )

    def _why_off(self, request: Request, found: Round) -> OffReason | None:
        chosen = off_reasons.as_chosen(request.drafter, request.num_draft_tokens)
        return chosen or off_reasons.of_round(found.plan, self.loaded.description.drafters)

    # when memory runs out

    def _failed(self, fault: TurnFault, stats: TurnStats, rest: Said) -> Chunk:
        """The last chunk of a turn that failed. Raises EngineLost."""
        if fault.kind == "device":
            raise EngineLost(fault.message)
        error, is_relieved = fault.message, None
        if fault.kind == "memory":
            freed = self._free_drafters()
            error = f"{error} What was written is kept. {freed or ''}".rstrip()
            is_relieved = freed is not None
        return Chunk(
            "done",
            stats,
            rest.text,
            finish_reason="error",
            error=error,
            is_relieved=is_relieved,
            thinking=rest.thinking,
        )

    def _free_drafters(self) -> str | None:
        """Free the memory of the drafters that hold some beside the target's. What was freed, as a
        sentence; None where they held none."""
        drafters = self._engine.drafters
        names = [name for name, drafter in drafters.items() if drafter.memory_bytes]
        if names:
            self._measuring = None  # it holds them too
            for slot in self._slots:
                slot.engine.drafters = slot.controller.drafters = {
                    name: each for name, each in slot.engine.drafters.items() if name not in names
                }
                if not self._engine.captures:  # a captured forward still writes to them
                    slot.engine.target.cache.features = None  # only heads read them
            named = ", ".join(map(label_of, names))
            freed = f"To free memory, these drafters were unloaded: {named}. Send the next message."
            known = self.loaded.description
            left = (unloaded(each) if each.name in names else each for each in known.drafters)
            notices = (*known.notices, f"Memory ran out. {freed}")
            known = replace(known, drafters=tuple(left), draft=None, notices=notices)
            self.loaded = replace(self.loaded, description=known)
        del drafters  # they hold the memory that is returned now
        self.loaded.return_memory()
        return freed if names else None


def _format_name(template: ChatTemplate) -> str | None:
    return None if template.call_format is None else template.call_format.name
