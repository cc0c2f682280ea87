"""The seam between an engine and the rest: what is loaded, requests, chunks of replies.

Contract: the local engine, an engine in another process, a server of somebody's and the fake of
the tests are all a `Backend`; the page, the log and the command line use only that. Unknown is
None, never 0.

Not here: the figures of a turn (turn_stats), the types of the engine and the drafters (decoding).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from localspec.core.decoding import AUTO, LARGEST_INTEGER, FinishReason, SamplingParams, Step
from localspec.core.errors import LocalspecError, RequestError
from localspec.core.hindsight import Hindsight
from localspec.core.off_code import OffCode
from localspec.core.precisions import PRECISIONS
from localspec.core.turn_stats import TurnStats

Role = Literal["system", "user", "assistant", "tool"]
LARGEST_FIXED_LENGTH = 64  # γ
Phase = Literal["loading", "prefill", "decode", "done"]
Report = Callable[[str], None]  # told a phrase for the person before each long part of some work


@dataclass(frozen=True)
class ToolCall:
    """What the model asks of a tool. arguments: JSON text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """tool_calls: of a reply that asked for some. call_id, name: of a tool's message, the call that
    it answers and the tool. thinking: before a reply; the chat format may show it again."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    thinking: str = ""


@dataclass(frozen=True)
class Request:
    """One turn asked of a backend.

    messages: the whole conversation, the person's newest message last. max_tokens: None: as many as
    the context has room for.
    drafter: AUTO, OFF or a drafter's name. num_draft_tokens: fixed γ; None lets the
    controller choose it each round. first_num_draft_tokens: γ until acceptance is learnt.
    workload: the kind of text, by which acceptance is learnt separately; "" where it is unknown.
    continues: the last message is a reply to be continued; the chunks hold its new part only.
    begun_tokens: the ids of that reply where they are known; its text is encoded again where they
    are not, or do not spell it. is_raw: the text of the only message is continued as it stands,
    without the chat format. num_logprobs: how many of the likeliest tokens are wanted beside the
    probability of each output token; None: neither. prediction: a text that the reply is expected
    to repeat in large parts, as the old version of a file to be edited; it only feeds drafts.
    tools: descriptions of functions, in OpenAI's format, that the chat format is to show the model.
    grammar: what the reply is held to (see chat.grammars), "" for any text.
    thinks: whether the model may think first; None: as its chat format says. thinking_budget: ends
    a thought, sooner where the context is full, and at 0 there is none; max_tokens is then of the
    answer alone. is_ceiling: max_tokens is of the whole reply, and may be more than the context has
    room for; the reply then ends with the context. ignores_end: what the model ends its reply with
    is a token like any other. kept_with: the number of the logged chat with which what the model
    reads of it may be kept on the disk; None: it is not written.
    """

    messages: tuple[Message, ...]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = 512
    stop: tuple[str, ...] = ()
    drafter: str = AUTO
    num_draft_tokens: int | None = None
    first_num_draft_tokens: int | None = None
    workload: str = ""
    continues: bool = False
    begun_tokens: tuple[int, ...] = ()
    is_raw: bool = False
    num_logprobs: int | None = None
    prediction: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    grammar: str = ""
    thinks: bool | None = None
    thinking_budget: int | None = None
    is_ceiling: bool = False
    ignores_end: bool = False
    kept_with: int | None = None

    @property
    def system_prompt(self) -> str:
        return "".join(one.content for one in self.messages[:1] if one.role == "system")

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max tokens is {self.max_tokens}, but a reply needs at least 1.")
        for name in ("max_tokens", "thinking_budget"):
            if (value := getattr(self, name) or 0) > LARGEST_INTEGER:
                raise RequestError(f"{name} is {value}, but it must be smaller than 2^63.", name)
        if "" in self.stop:
            raise RequestError("A stop string is empty. Remove it, or enter a text.")
        if not 0 <= (self.num_draft_tokens or 0) <= LARGEST_FIXED_LENGTH:
            raise RequestError(
                f"The fixed γ is {self.num_draft_tokens}, but it must lie between 0 and "
                f"{LARGEST_FIXED_LENGTH}. Choose one in this range, or leave it to be chosen.",
                "num_draft_tokens",
            )


DraftOutcome = Literal["accepted", "rejected", "not_reached"]


class DraftedToken(NamedTuple):  # up to 15 a round; a frozen dataclass takes three times as long
    """One token that a round proposed, and its outcome.

    text: of this token alone, U+FFFD where it is only a part of a character, "" where it was not
    verified. parent: index in the round's draft of the token before, -1 for the first.
    confidence: the drafter's own probability that it is right. not_reached: an earlier token was
    rejected, a sibling was accepted, or the reply had ended.
    """

    token: int
    text: str
    parent: int
    confidence: float | None
    outcome: DraftOutcome


BYTES_AS_TEXT = "surrogateescape"  # each byte as a character that no text holds


class Logprob(NamedTuple):
    """`core.TokenLogprob` with texts. The text of a part of a character is its bytes, by the error
    handler BYTES_AS_TEXT, or U+FFFD where they are not known."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


class Candidate(NamedTuple):
    """One of the target's likeliest next tokens, before any warp of its logits."""

    token: int
    text: str
    logit: float
    probability: float


@dataclass(frozen=True)
class Chunk:
    """What a backend yields: at least one per phase, then one per round.

    text, thinking: new text of the answer and of the thought before it, complete characters only.
    tokens, provenance: the new output ids (without end-of-text) and TARGET or the drafter's
    name for each, or FORCED. lengths: how many characters of thinking and text together each of
    these tokens completed; the rest belongs to the token before. drafted: what this round proposed.
    step: the round behind this chunk, None outside decoding.
    finish_reason: set on the last chunk only. error: the sentence to show when it is "error".
    is_relieved: None unless memory ran out; True: memory was freed; False: none can be any more.
    plain_ms: on the last chunk, plain decoding of the tokens of each round; empty where none was
    drafted, or the turn cannot be compared. logprobs: of each token, where they were asked for.
    num_read_tokens: of a long prompt, those that have been read, and those that were kept.
    """

    phase: Phase
    stats: TurnStats
    text: str = ""
    tokens: tuple[int, ...] = ()
    provenance: tuple[str, ...] = ()
    step: Step | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    lengths: tuple[int, ...] = ()
    drafted: tuple[DraftedToken, ...] = ()
    is_relieved: bool | None = None
    plain_ms: tuple[float, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    thinking: str = ""
    num_read_tokens: int = 0


@dataclass(frozen=True)
class DrafterStatus:
    """A drafter as the person sees it: whether it can be chosen, and why or why not. code: of a
    reason why not that a page tells apart, None for the others. shares: drafters with the same word
    hold one model among them (drafters.registry)."""

    name: str
    is_available: bool
    reason: str
    memory_bytes: int | None = None
    code: OffCode | None = None
    shares: str | None = None


@dataclass(frozen=True)
class Server:
    """A server that answers instead of an engine of ours. name: of its program, with the version
    where it tells it. models: all that it offers. limits: what cannot be asked of it, a sentence
    each."""

    name: str
    url: str
    models: tuple[str, ...]
    limits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """What a backend has loaded. calibration: measured costs as plain data, None before.
    fingerprint: of the target's files. kernels: the choice among them, None where there is none.
    num_slots: replies that it decodes together; kv_bytes are of all. thinks: whether the model may
    think before it answers, and can be told not to. server: None for an engine of ours; dtype and
    context_length are None only where a server does not tell them. call_format: how the
    target writes calls of tools (chat.tool_formats); None where that is not read.
    has_idle_work: `calibrate` has something to do, such as graphs that a reply asked for."""

    target: str
    draft: str | None
    device: str
    dtype: str | None
    context_length: int | None
    drafters: tuple[DrafterStatus, ...]
    target_bytes: int | None = None
    kv_bytes: int | None = None
    calibration: Mapping[str, Any] | None = None
    notices: tuple[str, ...] = ()
    fingerprint: str | None = None
    kernels: str | None = None
    num_slots: int = 1
    thinks: bool = False
    server: Server | None = None
    call_format: str | None = "tool_call"
    has_idle_work: bool = False

    @property
    def precision(self) -> str | None:
        return PRECISIONS.get(self.dtype or "", self.dtype)

    @property
    def held_bytes(self) -> int | None:
        """All that is held: target, context and drafters; a model that several drafters share is
        counted once. None where nothing is known."""
        held = dict[str, int]()
        for each in self.drafters:
            part = each.shares or each.name
            held[part] = max(held.get(part, 0), each.memory_bytes or 0)
        return sum(part or 0 for part in (self.target_bytes, self.kv_bytes, *held.values())) or None


class Backend(Protocol):
    """The one seam between an engine (local, child process, remote, fake) and the rest."""

    def describe(self) -> Description: ...

    def is_alive(self) -> bool:
        """False once the engine is lost; all calls then raise EngineLost."""
        ...

    def count_tokens(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> int:
        """Prompt tokens of a conversation. A last message of the assistant counts as a reply to be
        continued. tools: as in `Request`. Raises NotCounted where a server does not tell it, and
        EngineLost also where no answer comes in a few seconds."""
        ...

    def prompt_tokens(self, request: Request) -> tuple[int, ...] | None:
        """The ids of a request's prompt. None where a server does not tell them. Raises as
        `count_tokens`, and ContextOverflow."""
        ...

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        """Chunks of one reply; as many replies as there are slots (Description.num_slots) may be
        asked for at the same time. `cancel` is honoured within one round; closing the iterator
        has the same effect. The first chunk says that the request was taken; LocalspecError is
        raised before it for one that cannot be served. Later failures end the stream with
        finish_reason "error", except that EngineLost is raised at whatever moment the engine is
        lost."""
        ...

    def candidates(
        self, messages: tuple[Message, ...], tokens: tuple[int, ...], count: int
    ) -> tuple[Candidate, ...]:
        """The target's `count` likeliest tokens after this conversation and these output tokens,
        best first. Raises ContextOverflow, RequestError."""
        ...

    def calibrate(self, cancel: threading.Event) -> Iterator[str]:
        """Capture graphs and measure costs on this machine, one phrase of progress per graph or
        measurement. May be cancelled between two of them; what was done stays."""
        ...

    def review(self, request: Request, cancel: threading.Event) -> Iterator[Hindsight]:
        """What each drafter would have done alone in the newest reply, if that answered this
        request and nothing was asked since; nothing where that is not known. It ends at its share
        of the reply's time, and within one forward when cancelled. No later reply depends on
        it."""
        ...

    def keep_read(self, disk_bytes: int | None, cancel: threading.Event) -> Iterator[str]:
        """Keep what was read of the texts of the last replies, one phrase of progress a step, so
        that it is not read again. disk_bytes: of all that is kept of logged chats on the disk; None
        writes nothing. May be cancelled between steps; the rest is kept another time."""
        ...

    def forget(self, chat: int) -> None:
        """Delete from the disk what was read of a logged chat alone."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Controller state and costs as plain JSON data, by combination of models and machine, for
        the record to keep beside those of others."""
        ...

    def close(self) -> None: ...


def chunks_of(
    backend: Backend, request: Request, cancel: threading.Event
) -> Generator[Chunk, None, None]:
    """The chunks of a whole reply. Raises LocalspecError for one that failed. Closing it ends the
    reply."""
    with closing(backend.generate(request, cancel)) as chunks:  # type: ignore[type-var]
        for chunk in chunks:
            if chunk.error is not None:
                raise LocalspecError(chunk.error)
            yield chunk
