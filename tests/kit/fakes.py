"""Stand-ins for what is slow or may fail: a backend with a script, a store that breaks on demand.

Contract: `FakeBackend` keeps the promises of `core.Backend` (phases, rounds, cancel within one
round, errors as a last chunk) without any model; its numbers are made from the script alone, so
tests can say what a page must show. `python -m tests.kit.fakes` serves the page on it.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localspec.chat.context_room import max_tokens_of
from localspec.chat.off_reasons import as_chosen
from localspec.chat.reply_text import ReplyText, Start
from localspec.chat.thinking import THINK
from localspec.core.backend import (
    Candidate,
    Chunk,
    Description,
    DraftedToken,
    DrafterStatus,
    Logprob,
    Message,
    Request,
)
from localspec.core.decoding import OFF, TARGET, Step
from localspec.core.errors import StoreError
from localspec.core.hindsight import Hindsight
from localspec.core.turn_stats import TurnStats
from localspec.record.store import SessionInfo, Store, Turn, TurnEnd

REPLY = """Speculative decoding lets a **small draft model** guess a few tokens ahead. The large \
model checks all of them in *one* forward pass, keeps the ones it agrees with, and adds one of \
its own.

1. The draft proposes, say, five tokens.
2. The target verifies them together.
3. Everything up to the first disagreement is kept.

```python
def speedup(alpha: float, gamma: int, cost: float) -> float:
    expected = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return expected / (gamma * cost + 1)
```

The text is *exactly* what the large model alone would have written, only sooner."""


@dataclass
class Script:
    """What the fake does.

    reply, round_s: a value, or a function of the request. accepted: accepted tokens of the rounds
    in turn, repeated. plain_ms: one plain step, None before calibration. fail_at_round, fault:
    raise the fault before that round. keep_s: how long it takes to keep what was read.
    """

    reply: str | Callable[[Request], str] = REPLY
    prefill_s: float = 0.02
    round_s: float | Callable[[Request], float] = 0.03
    plain_ms: float | None = 26.0
    num_draft_tokens: int = 5
    accepted: tuple[int, ...] = (5, 3, 4, 0, 5, 2, 5)
    drafter: str = "draft_model"
    reason: str = "the small model was the fastest of four in what was measured here."
    fail_at_round: int | None = None
    fault: Exception | None = None
    calibration: tuple[str, ...] = ()
    calibration_step_s: float = 0.1
    hindsight: tuple[Hindsight, ...] = ()
    keep_s: float = 0.0
    context_length: int = 4096
    num_slots: int = 1
    drafters: tuple[DrafterStatus, ...] = (
        DrafterStatus("draft_model", True, "one layer, distilled from the target", 3_400_000),
        DrafterStatus("ngram", True, "looks the next words up in this chat", 40_000),
        DrafterStatus(
            "self_quant", False, "a 4-bit copy needs 0.9 GiB more memory; shorten the context"
        ),
    )


# A short reply at a pace at which faults can strike between its words.
FIVE_WORDS = Script(
    reply="One two three four five.", round_s=lambda request: 0.003, prefill_s=0.0, calibration=()
)


class Verbatim:
    """A detokenizer whose tokens are texts."""

    def begin(self, tokens: object, shown: str) -> None:
        """Nothing to catch up with."""

    def push(self, token: str) -> str:
        return token

    def flush(self) -> str:
        return ""


@dataclass
class FakeBackend:
    """A backend that follows its script. num_rounds, num_calls: what it was asked to do."""

    script: Script = field(default_factory=Script)
    num_rounds: int = 0
    requests: list[Request] = field(default_factory=list)
    num_measured: int = 0
    is_closed: bool = False
    kept: list[int | None] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)

    def describe(self) -> Description:
        return Description(
            has_idle_work=self.num_measured < len(self.script.calibration),
            target="demo-12m",
            draft="demo-draft-1m",
            device="cpu",
            dtype="float32",
            context_length=self.script.context_length,
            drafters=self.script.drafters,
            target_bytes=49_800_000,
            kv_bytes=9_400_000,
            num_slots=self.script.num_slots,
            thinks=True,
        )

    def is_alive(self) -> bool:
        return True

    def count_tokens(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> int:
        texts = [*(message.content for message in messages), *map(str, tools)]
        return sum(len(_pieces(text)) + 4 for text in texts)

    def prompt_tokens(self, request: Request) -> tuple[int, ...]:
        texts = [message.content for message in request.messages]
        return tuple(_token_id(piece) for text in texts for piece in _pieces(text))

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        self.requests.append(request)
        num_prompt_tokens = self.count_tokens(request.messages, request.tools)
        room = max_tokens_of(self, request, num_prompt_tokens, self.script.context_length)
        return self._generate(replace(request, max_tokens=room), cancel, num_prompt_tokens)

    def _generate(
        self, request: Request, cancel: threading.Event, num_prompt_tokens: int
    ) -> Iterator[Chunk]:
        script, started_s = self.script, time.monotonic()
        is_exact = request.sampling.leniency is None
        off = as_chosen(request.drafter, request.num_draft_tokens)
        stats = TurnStats(num_prompt_tokens, reason=script.reason, exact=is_exact, off=off)
        yield Chunk("prefill", stats)
        cancel.wait(script.prefill_s)
        stats = replace(stats, prefill_ms=1000 * (time.monotonic() - started_s))
        reply = script.reply if isinstance(script.reply, str) else script.reply(request)
        said_so_far: Any = ReplyText(Verbatim(), (), Start(()), THINK)  # type: ignore[arg-type]
        if request.continues:  # like a model, it knows what it would have said next
            stats = replace(stats, continued_from="tokens" if request.begun_tokens else "text")
            reply = reply.removeprefix(request.messages[-1].content)
        pieces, done, plain_ms = _pieces(reply), 0, list[float]()
        if request.ignores_end:
            pieces *= 1 + (request.max_tokens or 0) // len(pieces)
        pieces = pieces[: request.max_tokens]
        while done < len(pieces) and not cancel.is_set():
            if self.script.fail_at_round == self.num_rounds and script.fault is not None:
                self.num_rounds += 1
                raise script.fault
            step = self._step(request, len(pieces) - done, num_prompt_tokens + done)
            time.sleep(self._round_s(request))
            self.num_rounds += 1
            stats = stats.plus(step)
            if stats.ttft_ms is None:
                stats = replace(stats, ttft_ms=1000 * (time.monotonic() - started_s))
            stats = replace(stats, reply_ms=1000 * (time.monotonic() - started_s))
            plain_ms.append(step.num_output_tokens * (script.plain_ms or 0.0))
            if script.plain_ms is not None:
                stats = stats.compared(sum(plain_ms))
            new = pieces[done : done + step.num_output_tokens]
            done += len(new)
            provenance = (step.drafter,) * step.num_accepted_tokens + (TARGET,)
            was_thinking = said_so_far.is_thinking
            said = said_so_far.push(new)
            if was_thinking or said_so_far.is_thinking:
                stats = replace(
                    stats,
                    num_thinking_tokens=stats.num_thinking_tokens + len(new),
                    thinking_ms=stats.thinking_ms + step.round_ms,
                )
            yield Chunk(
                "decode",
                stats,
                text=said.text,
                thinking=said.thinking,
                tokens=tuple(_token_id(piece) for piece in new),
                provenance=provenance[: len(new)],
                step=step,
                lengths=said.lengths,
                drafted=self._drafted(step, pieces[done - len(new) :]),
                logprobs=_logprobs(request, new),
            )
        reason = "cancelled" if cancel.is_set() and done < len(pieces) else "eos"
        if reason == "eos" and done == request.max_tokens:
            reason = "length"
        is_compared = stats.plain_decode_ms is not None
        rest = said_so_far.flush()
        yield Chunk(
            "done",
            stats,
            rest.text,
            thinking=rest.thinking,
            finish_reason=reason,  # type: ignore[arg-type]
            plain_ms=tuple(plain_ms) if is_compared else (),
        )

    def _drafted(self, step: Step, pieces: list[str]) -> tuple[DraftedToken, ...]:
        """A chain that was right as far as it was accepted, then guessed "wrong"."""
        accepted = step.num_accepted_tokens
        drafted = []
        for place in range(step.num_draft_tokens):
            is_right = place < accepted
            text = pieces[place] if is_right else " wrong"
            outcome = "accepted" if is_right else "rejected" if place == accepted else "not_reached"
            drafted.append(
                DraftedToken(_token_id(text), text, place - 1, 0.8, outcome)  # type: ignore[arg-type]
            )
        return tuple(drafted)

    def candidates(
        self, messages: tuple[Message, ...], tokens: tuple[int, ...], count: int
    ) -> tuple[Candidate, ...]:
        best = (Candidate(1, " one", 12.5, 0.6), Candidate(2, " two", 12.49, 0.39))
        return (*best, Candidate(3, " three", 3.0, 0.01))[:count]

    def _round_s(self, request: Request) -> float:
        round_s = self.script.round_s
        return round_s if isinstance(round_s, float) else round_s(request)

    def _step(self, request: Request, num_left: int, context_length: int) -> Step:
        script = self.script
        drafter = script.drafter if request.drafter == "auto" else request.drafter
        gamma = script.num_draft_tokens
        if request.num_draft_tokens is not None:
            gamma = request.num_draft_tokens
        gamma = 0 if drafter == OFF else min(gamma, num_left - 1)
        accepted = min(script.accepted[self.num_rounds % len(script.accepted)], gamma)
        round_ms = 1000.0 * self._round_s(request)
        draft_ms = 0.4 * round_ms if gamma else 0.0
        return Step(
            drafter=drafter if gamma else OFF,
            num_draft_tokens=gamma,
            num_accepted_tokens=accepted,
            num_checked_tokens=min(accepted + 1, gamma),
            num_output_tokens=accepted + 1,
            draft_ms=draft_ms,
            verify_ms=round_ms - draft_ms,
            context_length=context_length,
            # As if exact checking would have refused one token of every draft that got anywhere.
            num_lenient_tokens=min(accepted, 1) if request.sampling.leniency else 0,
        )

    def calibrate(self, cancel: threading.Event) -> Iterator[str]:
        while self.num_measured < len(self.script.calibration):
            yield self.script.calibration[self.num_measured]
            if cancel.wait(self.script.calibration_step_s):
                return
            self.num_measured += 1

    def review(self, request: Request, cancel: threading.Event) -> Iterator[Hindsight]:
        for result in self.script.hindsight:
            if not cancel.is_set():
                yield result

    def keep_read(self, disk_bytes: int | None, cancel: threading.Event) -> Iterator[str]:
        self.kept.append(disk_bytes)
        cancel.wait(self.script.keep_s)
        yield "keeping what was read"

    def forget(self, chat: int) -> None:
        self.forgotten.append(chat)

    def snapshot(self) -> dict[str, Any]:
        return {"num_rounds": self.num_rounds}

    def close(self) -> None:
        self.is_closed = True


def _logprobs(request: Request, pieces: list[str]) -> tuple[Logprob, ...]:
    if request.num_logprobs is None:
        return ()
    top = ((" one", -0.5), (" two", -1.0))[: request.num_logprobs]
    return tuple(Logprob(piece, -0.5, top) for piece in pieces)


def _pieces(text: str) -> list[str]:
    """Token-like pieces whose join is the text."""
    return re.findall(r"\s?\w{1,6}|\s+|[^\w\s]", text)


def _token_id(piece: str) -> int:
    return sum(piece.encode()) % 8192


class WatchedStore(Store):
    """A store that asks `before_write` before each step of a turn's life; reading goes on."""

    def before_write(self) -> None:
        """Raises what the write is to raise."""

    def start_session(self, info: SessionInfo) -> int:
        self.before_write()
        return super().start_session(info)

    def create_conversation(self, *made: str) -> int:
        self.before_write()
        return super().create_conversation(*made)

    def add_message(self, *place: Any, **more: Any) -> int:
        self.before_write()
        return super().add_message(*place, **more)

    def begin_turn(self, *wanted: Any) -> Turn:
        self.before_write()
        return super().begin_turn(*wanted)

    def finish_turn(self, turn: Turn, end: TurnEnd) -> None:
        self.before_write()
        super().finish_turn(turn, end)


class BreakableStore(WatchedStore):
    """A store whose writes raise while `fault` is set."""

    fault: str | None = None

    def before_write(self) -> None:
        if self.fault is not None:
            raise StoreError(self.fault)

    def checkpoint_reply(self, message_id: int, text: str, thinking: str = "") -> None:
        self.before_write()
        super().checkpoint_reply(message_id, text, thinking)

    def save_state(self, key: str, state: Mapping[str, Any], num_others: int = 0) -> None:
        self.before_write()
        super().save_state(key, state, num_others)


def session_info() -> SessionInfo:
    return SessionInfo(app_version="0.1.0", device="cpu", python="3.11", platform="test")


def main() -> None:
    """Serve the page on the fake: `python -m tests.kit.fakes [--port 7860] [--load-s 2]`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--load-s", type=float, default=2.0)
    parser.add_argument("--round-s", type=float, default=0.03)
    parser.add_argument("--home", type=Path, default=None)
    flags = parser.parse_args()

    from localspec.chat.service import ChatService
    from localspec.web.server import serve

    def open_backend(report: Callable[[str], None]) -> FakeBackend:
        report("Loading the target: demo-12m")
        time.sleep(flags.load_s)
        steps = ("Measuring one plain step", "Measuring checks")
        return FakeBackend(Script(round_s=flags.round_s, calibration=steps))

    home = flags.home or Path(tempfile.mkdtemp(prefix="localspec-fake-"))
    store = Store.open(home / "localspec.db")
    service = ChatService(store, session_info, open_backend)
    serve(service, "127.0.0.1", flags.port, lambda url, once: print(url, flush=True))


if __name__ == "__main__":
    main()
