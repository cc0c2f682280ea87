"""One reply of a server as it streams in: text, thought, probabilities, and the turn's statistics.

Contract: `add` takes the events of the stream, `count` what is known of drafts at the end, `last`
gives the last chunk. What the server did not tell is in `TurnStats.untold`.

Not here: reading the stream (server).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localspec.core.backend import Chunk, Logprob, Request
from localspec.core.decoding import FinishReason
from localspec.core.errors import LocalspecError
from localspec.core.turn_stats import TurnStats
from localspec.core.units import clean
from localspec.remote import servers
from localspec.remote.counters import Drafts

# Text that arrives within it tells how it was delivered, not how fast it was written.
SHORTEST_WRITING_S = 0.05
# Tokens of a reply for which nobody set a limit.
MOST_TOKENS = 2**20
# Events beyond one for each token that a known program may send: the first and last have none.
SPARE_EVENTS = 2
# Characters that a token has on average at most. Programs between may cut text into smaller events.
MEAN_CHARACTERS = 8
# Characters of the longest tokens, which are spaces or lines.
LONGEST_TOKEN = 256
# Events for each token, with those that say nothing, and events of a reply of no token.
EVENTS_A_TOKEN, EVENTS_BESIDE = 16, 1024
NAME = "server"  # of a draft's maker, as the log has it

# Unknown when a reply begins. What the first line names no server tells at all.
OF_DRAFTS = frozenset({"drafter", "draft_share"})  # known as soon as the counts are
UNTOLD = OF_DRAFTS | {
    "num_steps", "exact", "token_ids", "thinking_ms", "num_disk_tokens",
    "num_drafts", "num_draft_tokens", "num_checked_tokens", "num_accepted_tokens",
    "num_output_tokens", "num_prompt_tokens", "num_reused_tokens", "num_thinking_tokens",
    "decode_ms",
}  # fmt: skip
TOLD_NOTHING = "The server does not tell what it drafted."
NOT_WHOLE = "The reply did not come to its end, so what was drafted for it is not known."
WHAT_IS_KEPT = " What was written is kept. Continue it, or regenerate it."
NOT_ALONE = (
    "Its counters are of all requests together, and others ran at the same time, so what was "
    "drafted for this reply is not known."
)
FINISHED: Mapping[str, FinishReason] = {"stop": "eos", "length": "length"}


@dataclass(eq=False)
class RemoteTurn:
    """One reply under way. stats: so far. most_tokens: after which the reply is ended here, where
    the server does not do it. is_cut: whether that was so."""

    request: Request
    cancel: threading.Event
    most_tokens: int = MOST_TOKENS
    is_cut: bool = False
    num_events: int = 0
    num_texts: int = 0
    num_characters: int = 0
    stats: TurnStats = field(init=False)
    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    reason: FinishReason | None = None
    drafts: Drafts | None = None

    def __post_init__(self) -> None:
        source = "text" if self.request.continues else None
        self.stats = TurnStats(0, continued_from=source, untold=UNTOLD)  # type: ignore[arg-type]

    def add(self, event: Mapping[str, Any], kind: servers.ServerKind) -> Chunk | None:
        """What an event of the stream adds; None where that is nothing to show. Raises TypeError,
        AttributeError, KeyError or ValueError for one that is not in OpenAI's format."""
        self.num_events += 1
        if self.num_events > EVENTS_A_TOKEN * self.most_tokens + EVENTS_BESIDE:
            raise ValueError("more events than a reply can have")
        num_before = self._least_tokens(kind)
        self._count_tokens(event.get("usage") or {})
        if kind.drafts is not None:
            self.drafts = _drafts_in(event, kind.drafts) or self.drafts
        choice: Mapping[str, Any] = next(iter(event.get("choices") or ()), {})
        if choice.get("finish_reason") is not None:
            self.reason = _reason(choice)
        delta = choice.get("delta") or {}
        # a list or a number raises
        text = clean("" + (delta.get("content") or choice.get("text") or ""))
        thinking = clean("" + (delta.get("reasoning_content") or delta.get("reasoning") or ""))
        logprobs = _logprobs(choice.get("logprobs") or {})
        if not (text or thinking or logprobs):
            return None
        self.num_texts += 1
        self.num_characters += len(text) + len(thinking)
        if num_before >= self.most_tokens < self._least_tokens(kind):
            self.is_cut, self.reason = True, "length"
            return None
        return self._chunk(text, thinking, logprobs)

    def _chunk(self, text: str, thinking: str, logprobs: tuple[Logprob, ...]) -> Chunk:
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = now_s
            self.stats = replace(self.stats, ttft_ms=1000.0 * (now_s - self.started_s))
        self.stats = replace(self.stats, reply_ms=1000.0 * (now_s - self.started_s))
        written_s = now_s - self.first_s
        if written_s >= SHORTEST_WRITING_S:
            self._learn({"decode_ms": 1000.0 * written_s})
        return Chunk("decode", self.stats, text, thinking=thinking, logprobs=logprobs)

    def _least_tokens(self, kind: servers.ServerKind) -> int:
        """Return a number of tokens that the reply has at least, so that a server that ignores
        max_tokens is noticed and no other is cut."""
        is_known = kind is not servers.OTHER
        by_length = self.num_characters // MEAN_CHARACTERS
        by_events = self.num_texts - SPARE_EVENTS if is_known else min(self.num_texts, by_length)
        by_server = self.stats.told("num_output_tokens") or 0
        return int(max(by_server, by_events, self.num_characters // LONGEST_TOKEN))

    def _count_tokens(self, usage: Mapping[str, Any]) -> None:
        paths = {
            "num_output_tokens": "completion_tokens",
            "num_prompt_tokens": "prompt_tokens",
            "num_reused_tokens": "prompt_tokens_details.cached_tokens",
            "num_thinking_tokens": "completion_tokens_details.reasoning_tokens",
        }
        found = {
            name: servers.count_in(servers.at_path(usage, path)) for name, path in paths.items()
        }
        told = {name: count for name, count in found.items() if count is not None}
        if told:
            self._learn(told)

    def count(self, drafts: Drafts | str) -> None:
        """What was drafted for the whole reply, or why that is not known."""
        if isinstance(drafts, str):
            self.stats = replace(self.stats, reason=drafts)
            return
        told = {
            "num_draft_tokens": drafts.num_draft_tokens,
            "num_accepted_tokens": drafts.num_accepted_tokens,
        }
        if drafts.num_drafts is not None:
            told["num_drafts"] = drafts.num_drafts
        self._learn(told)
        made = {NAME: drafts.num_draft_tokens} if drafts.num_draft_tokens else {}
        reason = "The server drafts as it was started." if made else "The server drafted nothing."
        untold = self.stats.untold - OF_DRAFTS
        self.stats = replace(self.stats, drafted_by=made, reason=reason, untold=untold)

    def _learn(self, told: Mapping[str, float]) -> None:
        untold = self.stats.untold - told.keys()
        self.stats = replace(self.stats, **told, untold=untold)  # type: ignore[arg-type]

    def last(self, error: Exception | None) -> Chunk:
        """The end of the reply."""
        if error is not None:
            said = (
                str(error) if isinstance(error, LocalspecError) else f"localspec failed: {error!r}."
            )
            kept = "" if self.first_s is None else WHAT_IS_KEPT
            return Chunk("done", self.stats, finish_reason="error", error=said + kept)
        if self.cancel.is_set() and self.reason is None:
            return Chunk("done", self.stats, finish_reason="cancelled")
        if self.reason is None:
            return self.last(LocalspecError("The server ended the reply without a reason."))
        return Chunk("done", self.stats, finish_reason=self.reason)


def _reason(choice: Mapping[str, Any]) -> FinishReason:
    """A stop text is told apart by vLLM and SGLang only."""
    by_text = isinstance(choice.get("stop_reason") or choice.get("matched_stop"), str)
    found = FINISHED.get(str(choice["finish_reason"]), "stop")
    return "stop" if by_text else found


def _drafts_in(event: Mapping[str, Any], paths: servers.DraftPaths) -> Drafts | None:
    drafted = servers.count_in(servers.at_path(event, paths.num_draft_tokens))
    accepted = servers.count_in(servers.at_path(event, paths.num_accepted_tokens))
    if drafted is None or accepted is None:
        return None
    return Drafts(servers.count_in(servers.at_path(event, paths.num_drafts)), drafted, accepted)


def _logprobs(found: Mapping[str, Any]) -> tuple[Logprob, ...]:
    return tuple(
        Logprob(*_logprob(one), tuple(map(_logprob, one.get("top_logprobs") or ())))
        for one in found.get("content") or ()
    )


def _logprob(one: Mapping[str, Any]) -> tuple[str, float]:
    """Return a token's text and its logarithm. Raises TypeError or ValueError for other things."""
    value = one["logprob"] + 0.0
    if not math.isfinite(value):
        raise ValueError(f"a probability whose logarithm is {value}")
    return clean("" + one["token"]), value
