"""The types of a turn: its settings, its reply as it grows, and the request sent to the backend.

Contract: `Reply` is one turn under way; its `view` is replaced whole whenever it grows, so readers
on other threads need no lock. The rest are frozen values and pure functions over them.

Not here: running the turn (worker), storing it (journal).
"""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from localspec.chat.journal import PendingTurn
from localspec.core.backend import Chunk, Description, Message, Request
from localspec.core.decoding import AUTO, FORCED, TARGET, FinishReason, SamplingParams, Step
from localspec.core.errors import LocalspecError, RequestError
from localspec.core.filling import guesses_of
from localspec.core.hindsight import Hindsight
from localspec.core.leniency import as_data
from localspec.core.off_code import OffReason
from localspec.core.options import Offer
from localspec.core.turn_stats import TurnStats
from localspec.core.units import clean as clean
from localspec.core.workloads import AS_SET, Workload, decide
from localspec.record.drafted import TokenRecord, pack
from localspec.record.store import Store, TurnEnd, TurnSettings

SAMPLED = tuple(one.name for one in fields(SamplingParams) if one.name != "leniency")
DRAWN_SEEDS = 2**53  # the page's JavaScript holds these exactly

ServicePhase = Literal[
    "loading", "ready", "calibrating", "busy", "unloaded", "restarting", "failed"
]
TurnPhase = Literal["queued", "loading", "prefill", "decode", "done"]


@dataclass(frozen=True)
class ReplySettings:
    """What the person chose for one reply. workload: a kind of text, AUTO to recognise it.
    checking: see workloads.decide. `decided` resolves both. num_left_out: oldest messages that the
    person chose to leave out of the prompt. stop: texts that end the reply before them. max_tokens,
    thinks, thinking_budget, is_raw, grammar: see Request."""

    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = 512
    drafter: str = AUTO
    num_draft_tokens: int | None = None
    system_prompt: str = ""
    workload: str = AUTO
    checking: str = AS_SET
    first_num_draft_tokens: int | None = None
    num_left_out: int = 0
    stop: tuple[str, ...] = ()
    thinks: bool | None = None
    thinking_budget: int | None = None
    is_raw: bool = False
    grammar: str = ""


SHARED = {one.name for one in fields(Request)} & {one.name for one in fields(ReplySettings)}


@dataclass(frozen=True)
class ReplyRound:
    """One round of a reply as shown: its text, how many of its tokens were drafted, and by whom."""

    text: str
    num_tokens: int
    num_drafted: int
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True)
class TurnView:
    """A reply at one moment. position: how many replies have to end before it begins. started_s,
    ended_s: on the monotonic clock. workload: the kind of text. num_read_tokens: see Chunk.
    guesses: right and checked, of each drafter by its rounds. error: the sentence to show when the
    reply failed."""

    phase: TurnPhase
    started_s: float
    workload: str
    position: int = 0
    num_read_tokens: int = 0
    text: str = ""
    thinking: str = ""
    stats: TurnStats | None = None
    rounds: tuple[ReplyRound, ...] = ()
    guesses: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    error: str | None = None
    ended_s: float | None = None

    @property
    def seconds(self) -> float:
        return (self.ended_s or time.monotonic()) - self.started_s


@dataclass(frozen=True)
class Status:
    """The service at one moment. phrase: what it is doing, as a sentence. seconds: how long this
    phase has lasted. reply: the turn being answered, else the latest one. off: why nothing drafts
    now, None where something may. offer: a smaller plan, after memory ran out and nothing more
    could be freed. num_list_changes: of the list of chats."""

    phase: ServicePhase
    phrase: str
    seconds: float
    description: Description | None
    notices: tuple[str, ...]
    num_waiting: int
    reply: TurnView | None
    off: OffReason | None = None
    offer: Offer | None = None
    num_list_changes: int = 0


@dataclass(frozen=True)
class ShownMessage:
    """A message of a conversation as the page shows it. message_id: None until stored. siblings:
    the alternatives to it on other branches, itself included, oldest first. created_at_utc, model:
    when it was written, and by which model; None where not known. is_edited: a person rewrote the
    reply."""

    role: Literal["user", "assistant"]
    text: str
    state: str
    message_id: int | None
    error: str | None = None
    siblings: tuple[int, ...] = ()
    created_at_utc: str | None = None
    model: str | None = None
    is_edited: bool = False
    thinking: str = ""


class Reply:
    """One turn under way; `view` is what readers need. is_relieved: see Chunk. number: names it in
    this process. request: None: it is made when the turn begins. fault: an error of ours. together:
    the answers to one message that were asked for at once, this one included; they share it."""

    numbers = itertools.count(1)

    def __init__(
        self, pending: PendingTurn, settings: ReplySettings, request: Request | None = None
    ) -> None:
        self.pending = pending
        self.settings = settings
        self.request = request
        self.fault: LocalspecError | None = None
        self.cancel = threading.Event()
        self.done = threading.Event()
        self.together = [self]
        self.view = TurnView(
            "queued",
            time.monotonic(),
            settings.workload,
            text=pending.begun_text,
            thinking=pending.begun_thinking,
        )
        self.is_relieved: bool | None = None
        self.number = next(self.numbers)
        self._chunks: list[Chunk] = []
        self._wake: Callable[[], None] = lambda: None

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` now and, in any thread, when the reply grows or ends. It may not raise."""
        self._wake = wake
        wake()

    def chunks_from(self, start: int) -> list[Chunk]:
        return self._chunks[start:]

    @property
    def handle(self) -> int:
        """The conversation's stored id, or a negative stand-in until it has one."""
        return self.pending.conversation.stored_id or self.pending.conversation.handle

    def join(self, other: Reply) -> None:
        """Before it is queued: it is asked for together with the other."""
        other.together.append(self)
        self.together = other.together

    @property
    def are_all_done(self) -> bool:
        """Of those asked for together."""
        return all(one.done.is_set() for one in self.together)

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.is_relieved = chunk.is_relieved
        view = self.view
        rounds, guesses = view.rounds, view.guesses
        if chunk.step is not None and chunk.step.num_draft_tokens:
            guesses = _with_round(guesses, chunk.step)
        if chunk.text or chunk.thinking or chunk.tokens:
            rounds = (*rounds, _round(chunk))
        self.view = replace(
            view,
            phase="decode" if chunk.phase == "done" else chunk.phase,
            num_read_tokens=chunk.num_read_tokens,
            text=view.text + chunk.text,
            thinking=view.thinking + chunk.thinking,
            stats=chunk.stats,
            guesses=guesses,
            rounds=rounds,
            finish_reason=chunk.finish_reason,
            error=chunk.error,
        )
        self.pending.reply_text = self.view.text
        self.pending.reply_thinking = self.view.thinking
        self._wake()

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        self.pending.end = TurnEnd(
            text=self.view.text,
            token_ids=[token for chunk in self._chunks for token in chunk.tokens],
            provenance=[name for chunk in self._chunks for name in chunk.provenance],
            stats=self._stats(),
            steps=self._steps(),
            finish_reason=reason,
            error=error,
            drafted=self._packed_tokens(),
            thinking=self.view.thinking,
        )
        self.view = replace(
            self.view, phase="done", finish_reason=reason, error=error, ended_s=time.monotonic()
        )
        self._wake()

    def record(self, results: Sequence[Hindsight], store: Store) -> None:
        """Write how the drafters were judged by this reply, if its turn is in the log."""
        if self.pending.turn is not None:
            store.hindsight.add(self.pending.turn.turn_id, results)

    def _steps(self) -> list[Step]:
        steps = [chunk.step for chunk in self._chunks if chunk.step is not None]
        plain_ms = self._chunks[-1].plain_ms if self._chunks else ()
        if not plain_ms:
            return steps
        return [replace(step, plain_ms=ms) for step, ms in zip(steps, plain_ms, strict=True)]

    def _stats(self) -> TurnStats | None:
        """Without a speedup where the engine was lost before it compared the rounds."""
        stats = self.view.stats
        if stats is None or self._chunks[-1].plain_ms:
            return stats
        return replace(stats, plain_decode_ms=None)

    def _packed_tokens(self) -> bytes | None:
        """What the token view shows; None without rounds."""
        rounds = [chunk for chunk in self._chunks if chunk.step is not None]
        if not rounds:
            return None
        lengths = tuple(length for chunk in rounds for length in chunk.lengths)
        drafted = tuple(chunk.drafted for chunk in rounds)
        start = len(self.pending.begun_thinking) + len(self.pending.begun_text)
        return pack(TokenRecord(lengths, drafted, start))


def _round(chunk: Chunk) -> ReplyRound:
    num_drafted = sum(name not in (TARGET, FORCED) for name in chunk.provenance)
    made = {} if chunk.step is None else guesses_of(chunk.step)
    drafters = tuple(name for name, guesses in made.items() if guesses.num_accepted_tokens)
    return ReplyRound(chunk.thinking + chunk.text, len(chunk.tokens), num_drafted, drafters)


def _with_round(known: Mapping[str, tuple[int, int]], step: Step) -> dict[str, tuple[int, int]]:
    counts = dict(known)
    for name, made in guesses_of(step).items():
        right, checked = counts.get(name, (0, 0))
        counts[name] = right + made.num_accepted_tokens, checked + made.num_checked_tokens
    return counts


# settings and requests


def decided(settings: ReplySettings, workloads: Mapping[str, Workload], text: str) -> ReplySettings:
    """The settings with the kind of text, the leniency and the seed resolved for this message, so
    that its reply can be made again. Raises RequestError."""
    found = decide(workloads, settings.workload, settings.checking, text)
    return replace(
        settings,
        sampling=replace(seeded(settings.sampling), leniency=found.leniency),
        workload=found.workload.name,
        first_num_draft_tokens=found.workload.first_num_draft_tokens,
    )


def seeded(sampling: SamplingParams) -> SamplingParams:
    """With a seed: one is drawn where none was given."""
    if sampling.seed is not None:
        return sampling
    return replace(sampling, seed=secrets.randbelow(DRAWN_SEEDS))


def versions(settings: ReplySettings, num_replies: int) -> list[ReplySettings]:
    """Of several answers to one message, each with a seed of its own. Raises RequestError where
    all would be the same."""
    if num_replies > 1 and settings.sampling.temperature == 0:
        raise RequestError(
            "At temperature 0 every answer is the same. Set a higher temperature in the settings, "
            "then ask again."
        )
    return [replace(settings, sampling=one) for one in each_seeded(settings.sampling, num_replies)]


def each_seeded(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """Of so many answers to one message: where a seed is given, each has the next one."""
    first = sampling.seed
    seeds = [None if first is None else first + number for number in range(count)]
    return [replace(sampling, seed=seed) for seed in seeds]


def applicable(settings: ReplySettings, loaded: Description | None) -> ReplySettings:
    """Without a word on thinking where what is loaded cannot be told: the page hides its fields for
    it then, and they hold what other models take."""
    if loaded is None or loaded.thinks:
        return settings
    return replace(settings, thinks=None, thinking_budget=None)


def request_of(settings: ReplySettings, shown: list[ShownMessage], turn: PendingTurn) -> Request:
    """The request for the reply to the last message shown. Raises RequestError for a value out of
    range."""
    messages = prompt_messages(settings.system_prompt, shown[settings.num_left_out :])
    if turn.has_begun:
        begun = Message("assistant", turn.begun_text, thinking=turn.begun_thinking)
        messages = (*messages, begun)
    same = shared(settings)
    if settings.workload == AUTO:
        same["workload"] = ""
    return Request(messages, continues=turn.has_begun, begun_tokens=turn.begun_tokens, **same)


def shared(values: ReplySettings | Request) -> dict[str, Any]:
    """The fields that a request and the settings of a reply both have."""
    return {name: getattr(values, name) for name in SHARED}


def prompt_messages(system_prompt: str, shown: list[ShownMessage]) -> tuple[Message, ...]:
    """The conversation as the model gets it. Empty replies are left out; messages of one role that
    are then neighbours are joined, since chat formats alternate the roles."""
    messages = [Message("system", clean(system_prompt))] if system_prompt.strip() else []
    for message in shown:
        text = clean(message.text)  # an imported message may hold half a character
        if not text:
            continue
        if messages and messages[-1].role == message.role:
            text = f"{messages.pop().content}\n\n{text}"
        messages.append(Message(message.role, text, thinking=clean(message.thinking)))
    return tuple(messages)


def turn_settings(settings: ReplySettings, loaded: Description | None) -> TurnSettings:
    """The settings as the log keeps them."""
    leniency = settings.sampling.leniency
    kept = TurnSettings(
        **{name: getattr(settings.sampling, name) for name in SAMPLED},
        drafter_requested=settings.drafter,
        num_draft_tokens_requested=settings.num_draft_tokens,
        max_tokens=settings.max_tokens,
        system_prompt=settings.system_prompt,
        workload=settings.workload,
        leniency=None if leniency is None else json.dumps(as_data(leniency)),
        num_left_out=settings.num_left_out,
        stop=json.dumps(settings.stop) if settings.stop else None,
        thinks=None if settings.thinks is None else int(settings.thinks),
        thinking_budget=settings.thinking_budget,
        is_raw=int(settings.is_raw),
        grammar=settings.grammar or None,
    )
    if loaded is None:
        return kept
    return replace(
        kept,
        model=loaded.target,
        draft=loaded.draft,
        device=loaded.device,
        dtype=loaded.dtype,
        context_length=loaded.context_length,
        target_fingerprint=loaded.fingerprint,
        kernels=loaded.kernels,
    )


def unexpected(what: str, error: Exception) -> str:
    return (
        f"{what} failed by an unexpected fault ({type(error).__name__}: {error}). What was "
        "written is kept. Try again; if it happens again, restart localspec."
    )
