"""Thousands of turns in one run: what they leave behind stays flat, and every reply is the one of
plain decoding, whatever was cancelled, edited, made again or switched before it."""

from __future__ import annotations

import gc
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from localspec.chat.journal import PendingTurn
from localspec.chat.local import LocalBackend
from localspec.chat.service import ChatService, Reply, ReplySettings
from localspec.core.backend import Chunk, Request
from localspec.core.decoding import AUTO, OFF, SamplingParams, Sequence
from localspec.core.errors import LocalspecError
from localspec.core.options import LoadOptions
from localspec.loading.local_backend import open_local_backend
from localspec.record.store import Store
from tests.kit.fakes import session_info
from tests.kit.tally import Tally
from tests.kit.waiting import until

Report = Callable[[str], None]
WAIT_S = 60.0
CHAT_TURNS = 5
NUM_BLOCKS = 20
OF_A_TURN = (Reply, PendingTurn, Sequence)


def ready(service: ChatService) -> None:
    until(lambda: service.status().phase == "ready", WAIT_S)


# flat


@pytest.mark.slow
def test_ten_thousand_turns_leave_nothing_behind(
    tmp_path: Path, pair_options: LoadOptions, tally: Tally
) -> None:
    num_turns = tally.size(40, 10_000)
    before = _of_a_turn()
    store = Store.open(tmp_path / "localspec.db")
    service = ChatService(
        store, session_info, lambda report: open_local_backend(pair_options, None, report)
    )
    service.start()
    ready(service)
    process, rng = psutil.Process(), random.Random(1)
    memory_mb, descriptors, turn_ms = list[float](), list[int](), list[float]()
    for block in range(NUM_BLOCKS):
        times = list[float]()
        for turn in range(block * num_turns // NUM_BLOCKS, (block + 1) * num_turns // NUM_BLOCKS):
            if turn % CHAT_TURNS == 0:
                handle: int | None = None
            started_s = time.process_time()
            settings = ReplySettings(SamplingParams(0.7, seed=rng.randrange(99)), max_tokens=6)
            reply = service.submit(handle, f"{rng.randrange(100)} words", settings)
            assert reply is not None and reply.done.wait(WAIT_S)
            with tally.case(f"turn {turn}"):
                assert reply.view.finish_reason in ("eos", "length"), reply.view.error
            handle = reply.handle
            times.append(1000.0 * (time.process_time() - started_s))
        memory_mb.append(process.memory_info().rss / 2**20)
        descriptors.append(process.num_fds() if hasattr(process, "num_fds") else 0)
        turn_ms.append(statistics.median(times))
    assert service.flush()
    with tally.case("everything is in the log"):
        assert len(store.turn_rows()) == num_turns
    kept = _of_a_turn() - before
    with tally.case("objects of turns that are over"):
        assert all(kept[kind] <= 2 for kind in OF_A_TURN), kept
    with tally.case("descriptors"):
        assert max(descriptors) <= descriptors[1] + 2, descriptors
    _judge(tally, memory_mb, turn_ms, num_turns)
    tally.figures.append(f"{descriptors[-1]} descriptors, {max(descriptors)} at most")
    service.close()
    store.close()


def _of_a_turn() -> Counter[type]:
    """Objects of turns that are alive in this process, also those of other tests."""
    gc.collect()
    return Counter(kind for one in gc.get_objects() if (kind := type(one)) in OF_A_TURN)


def _judge(tally: Tally, memory_mb: list[float], turn_ms: list[float], num_turns: int) -> None:
    """By the later blocks: the first ones fill buffers and caches."""
    per_thousand = 1000.0 * NUM_BLOCKS / num_turns
    growth_mb, growth_ms = (
        per_thousand * _slope(values[NUM_BLOCKS // 4 :]) for values in (memory_mb, turn_ms)
    )
    median_ms = statistics.median(turn_ms)
    tally.figures.append(f"{memory_mb[-1]:.0f} MB, {growth_mb:+.2f} MB per 1,000 turns")
    took = f"{median_ms:.1f} ms of processor time a turn"
    tally.figures.append(f"{took}, {growth_ms:+.3f} ms per 1,000 turns")
    if tally.is_whole:
        with tally.case("memory grows"):
            assert growth_mb < 1.0, memory_mb
        with tally.case("turns become slower"):
            assert growth_ms < 0.03 * median_ms, turn_ms


def _slope(values: list[float]) -> float:
    return statistics.linear_regression(range(len(values)), values).slope


# as plain decoding


@dataclass
class Played:
    """A turn as the backend was asked for it, and the ids that it gave."""

    model: str
    request: Request
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Recording:
    """A local backend that keeps every turn."""

    def __init__(self, backend: LocalBackend, model: str, turns: list[Played]) -> None:
        self._backend, self._model, self._turns = backend, model, turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        return self._kept(request, self._backend.generate(request, cancel))

    def _kept(self, request: Request, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        turn = Played(self._model, request)
        self._turns.append(turn)
        for chunk in chunks:
            turn.tokens.extend(chunk.tokens)
            turn.finish_reason = chunk.finish_reason
            yield chunk


class Person:
    """Does what a person may do, at random."""

    def __init__(
        self, service: ChatService, models: tuple[LoadOptions, ...], rng: random.Random
    ) -> None:
        self._service, self._models, self._rng = service, models, rng
        self._handle: int | None = None

    def act(self) -> None:
        acts = {self.say: 4, self.stop: 3, self.edit: 2, self.again: 2, self.go_on: 2}
        acts |= {self.new_chat: 1, self.switch: 1}
        act = self._rng.choices(list(acts), list(acts.values()))[0]
        try:
            act()
        except LocalspecError:  # the context is full, or there is nothing to edit
            self.new_chat()

    def say(self) -> None:
        self._follow(self._submit())

    def stop(self) -> None:
        reply = self._submit()
        wanted = self._rng.randrange(5)
        if reply is not None:
            until(lambda: len(reply.view.rounds) >= wanted or reply.done.is_set(), WAIT_S)
            self._service.stop(reply)
        self._follow(reply)

    def edit(self) -> None:
        shown = self._service.messages(self._handle)
        ids = [one.message_id for one in shown if one.message_id is not None]
        if self._handle is not None and ids:
            chosen = self._rng.choice(ids)
            self._follow(self._service.edit(self._handle, chosen, self._text(), self._settings()))

    def again(self) -> None:
        if self._handle is not None:
            self._follow(self._service.regenerate(self._handle, self._settings()))

    def go_on(self) -> None:
        if self._handle is not None:
            self._follow(self._service.proceed(self._handle, self._settings()))

    def new_chat(self) -> None:
        self._handle = None

    def switch(self) -> None:
        self._service.switch(self._rng.choice(self._models))

    def _submit(self) -> Reply | None:
        return self._service.submit(self._handle, self._text(), self._settings())

    def _follow(self, reply: Reply | None) -> None:
        if reply is not None:
            assert reply.done.wait(WAIT_S)
            self._handle = reply.handle

    def _text(self) -> str:
        return "".join(self._rng.choices("abc 12\n", k=self._rng.randrange(1, 12))) + "?"

    def _settings(self) -> ReplySettings:
        rng, loaded = self._rng, self._service.status().description
        usable = [one.name for one in loaded.drafters if one.is_available] if loaded else []
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.2)),
            top_k=rng.choice((0, 20)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            seed=rng.randrange(2**40),
        )
        return ReplySettings(
            sampling,
            max_tokens=rng.randrange(1, 14),
            drafter=rng.choice((AUTO, OFF, *usable)),
            num_draft_tokens=rng.choice((None, None, 1, 3, 6)),
        )


@pytest.mark.slow
def test_whatever_a_person_does_each_reply_is_that_of_plain_decoding(
    tmp_path: Path, pairs: tuple[LoadOptions, LoadOptions], tally: Tally
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    turns = list[Played]()

    def opener_for(options: LoadOptions) -> Callable[[Report], Any]:
        name = str(options.model)
        return lambda report: Recording(open_local_backend(options, None, report), name, turns)

    store = Store.open(tmp_path / "localspec.db")
    service = ChatService(
        store, session_info, opener_for(pairs[0]), options=pairs[0], opener_for=opener_for
    )
    service.start()
    ready(service)
    person = Person(service, pairs, random.Random(seed))
    for _ in range(tally.size(15, 1200)):
        person.act()
    service.close()
    store.close()
    plain = {str(one.model): open_local_backend(one, None, lambda phrase: None) for one in pairs}
    for number, turn in enumerate(turns):
        with tally.case(f"turn {number} of seed {seed}, {turn.request.drafter}"):
            backend = plain[turn.model]
            backend.close()  # an empty cache
            asked = replace(turn.request, drafter=OFF, num_draft_tokens=None)
            chunks = backend.generate(asked, threading.Event())
            wanted = [token for chunk in chunks for token in chunk.tokens]
            is_whole = turn.finish_reason in ("eos", "length", "stop")
            assert turn.tokens == (wanted if is_whole else wanted[: len(turn.tokens)])
    tally.figures.append(f"{sum(len(turn.tokens) for turn in turns)} tokens")
