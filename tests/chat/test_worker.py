"""What is loaded changes on request and by itself, and neither a lost engine nor a shortage of
memory costs more than the turn it fell on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.jobs import Task
from localspec.chat.programs import ProgramService
from localspec.chat.service import ChatService, Reply, ReplySettings
from localspec.core.backend import Backend, Chunk, Description, Message, Request
from localspec.core.decoding import SamplingParams
from localspec.core.errors import EngineLost, MemoryShortage, RequestError
from localspec.core.options import LoadOptions, Offer
from localspec.core.turn_stats import TurnStats
from localspec.record.store import Store
from tests.kit.fakes import REPLY, FakeBackend, Script, session_info
from tests.kit.services import ask
from tests.kit.waiting import WAIT_S, until

PLAN = LoadOptions(model="first", context=4096)


@dataclass
class Mortal(FakeBackend):
    """A fake that can be lost: at `dies_at` rounds of a reply, when it counts tokens, or when
    `is_dead` is set."""

    dies_at: int | None = None
    dies_counting: bool = False
    is_dead: bool = False

    def is_alive(self) -> bool:
        return not self.is_dead

    def describe(self) -> Description:
        if self.is_dead:
            raise EngineLost("The engine ended unexpectedly.")
        return super().describe()

    def count_tokens(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> int:
        if self.dies_counting:
            self.is_dead = True
            raise EngineLost("The engine ended unexpectedly.")
        return super().count_tokens(messages, tools)

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        for number, chunk in enumerate(super().generate(request, cancel), -1):
            if number == self.dies_at:
                self.is_dead = True
                raise EngineLost("The engine ended unexpectedly.")
            yield chunk


@dataclass
class Stuck(Mortal):
    """Takes a request, and answers nothing until it is closed."""

    def count_tokens(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> int:
        raise EngineLost("The engine does not answer.")

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        yield Chunk("prefill", TurnStats(1))
        until(lambda: self.is_closed)
        raise EngineLost("The engine was closed.")


@dataclass
class World:
    """A service, everything it opened, and what it may open next."""

    folder: Path
    opened: list[Mortal] = field(default_factory=list)
    asked: list[LoadOptions] = field(default_factory=list)
    next_ones: list[Callable[[LoadOptions], Mortal]] = field(default_factory=list)
    alive_at_open: list[int] = field(default_factory=list)
    make: Callable[[LoadOptions], Mortal] = lambda options: Mortal(quick(options))
    before_load: Callable[[Callable[[str], None]], None] = lambda report: None
    service: ChatService = field(init=False)

    def begin(self, **more: Any) -> ChatService:
        store = Store.open(self.folder / "localspec.db")
        self.service = ChatService(
            store,
            session_info,
            self.opener_for(PLAN),
            options=PLAN,
            opener_for=self.opener_for,
            **more,
        )
        self.service.start()
        return self.service

    def opener_for(self, options: LoadOptions) -> Callable[[Callable[[str], None]], Backend]:
        def open_backend(report: Callable[[str], None]) -> Mortal:
            report("Loading the target")
            self.asked.append(options)
            self.alive_at_open.append(sum(not each.is_closed for each in self.opened))
            self.before_load(report)
            make = self.next_ones.pop(0) if self.next_ones else self.make
            self.opened.append(make(options))
            return self.opened[-1]

        return open_backend


def quick(options: LoadOptions, **more: Any) -> Script:
    return Script(**{"round_s": 0.002, "context_length": options.context or 4096, **more})


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("localspec.chat.worker.WATCH_S", 0.02)
    made = World(tmp_path)
    yield made
    made.service.close()
    made.service.store.close()


def ready(service: ChatService) -> ChatService:
    until(lambda: service.status().phase == "ready" and not service.lifecycle.needs_calibration)
    return service


def finished(task: Task) -> Task:
    assert task.done.wait(WAIT_S)
    return task


# tasks


@pytest.mark.slow
def test_a_task_has_the_backend_between_replies_in_the_order_asked(world: World) -> None:
    service = ready(world.begin())
    order: list[str] = []

    def job(backend: Backend, cancel: threading.Event) -> None:
        assert service.current is None and service.status().phase == "busy"
        assert service.status().phrase == "Race"
        order.append(backend.describe().target)

    first = service.submit(None, "one", ReplySettings())
    task = service.enqueue("Race", job)
    second = service.submit(None, "two", ReplySettings())
    assert first is not None and second is not None
    finished(task)
    assert first.done.is_set() and not second.view.text
    assert second.done.wait(WAIT_S)
    assert order == ["demo-12m"] and task.error is None
    assert service.status().phase == "ready"


@pytest.mark.slow
def test_a_task_ends_by_its_own_cancel_alone(world: World) -> None:
    service = ready(world.begin())
    ends: list[str] = []
    has_begun = threading.Event()

    def job(backend: Backend, cancel: threading.Event) -> None:
        has_begun.set()
        assert cancel.wait(WAIT_S)
        ends.append("task")

    task = service.enqueue("Audit", job)
    assert has_begun.wait(WAIT_S)
    reply = service.submit(None, "hi", ReplySettings())
    assert reply is not None
    assert not task.cancel.is_set() and reply.view.phase == "queued"
    ends.append("cancel")
    task.cancel.set()
    finished(task)
    assert reply.done.wait(WAIT_S) and reply.view.finish_reason == "eos"
    assert ends == ["cancel", "task"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (RequestError("There is no turn to replay."), "There is no turn to replay."),
        (ZeroDivisionError("division by zero"), "unexpected fault (ZeroDivisionError"),
    ],
)
def test_a_task_that_fails_says_so_and_the_next_job_runs(
    world: World, fault: Exception, said: str
) -> None:
    service = ready(world.begin())

    def job(backend: Backend, cancel: threading.Event) -> None:
        raise fault

    task = finished(service.enqueue("Audit", job))
    assert task.error is not None and said in task.error
    assert ask(service).view.finish_reason == "eos"


def test_a_task_without_a_backend_says_why(world: World) -> None:
    def refuse(options: LoadOptions) -> Mortal:
        raise MemoryShortage("first needs 9 GiB, and 2 GiB is free.")

    world.next_ones = [refuse]
    service = world.begin()
    task = finished(service.enqueue("Race", lambda backend, cancel: None))
    assert task.error == "first needs 9 GiB, and 2 GiB is free."


# switching, unloading, loading again


@pytest.mark.slow
def test_switching_frees_before_it_loads(world: World) -> None:
    service = ready(world.begin())
    ask(service)
    wanted = LoadOptions(model="second", context=2048)
    service.switch(wanted)
    until(lambda: len(world.opened) == 2)
    ready(service)
    assert world.opened[0].is_closed and world.alive_at_open == [0, 0]
    assert service.options == wanted
    loaded = service.status().description
    assert loaded is not None and loaded.context_length == 2048
    assert ask(service).view.finish_reason == "eos"
    assert service.store.load_state("controller") is not None


@pytest.mark.slow
def test_a_switch_goes_before_waiting_replies_and_after_the_running_one(world: World) -> None:
    world.make = lambda options: Mortal(quick(options, round_s=0.005))
    service = ready(world.begin())
    running = service.submit(None, "one", ReplySettings())
    waiting = service.submit(None, "two", ReplySettings())
    assert running is not None and waiting is not None
    until(lambda: running.view.text != "")
    service.switch(LoadOptions(model="second", context=2048))
    assert waiting.done.wait(WAIT_S)
    assert running.view.finish_reason == waiting.view.finish_reason == "eos"
    assert [len(each.requests) for each in world.opened] == [1, 1]


def test_a_switch_gives_up_what_is_being_loaded(world: World) -> None:
    begun = threading.Event()

    def before_load(report: Callable[[str], None]) -> None:
        begun.set()
        while world.asked[-1] is PLAN:
            report("Loading slowly")
            time.sleep(0.01)

    world.before_load = before_load
    service = world.begin()
    assert begun.wait(WAIT_S)
    service.switch(LoadOptions(model="second"))
    ready(service)
    assert [each.model for each in world.asked] == ["first", "second"]
    assert len(world.opened) == 1


def test_closing_gives_up_what_is_being_loaded(world: World) -> None:
    begun = threading.Event()

    def before_load(report: Callable[[str], None]) -> None:
        begun.set()
        while True:
            report("Loading slowly")
            time.sleep(0.01)

    world.before_load = before_load
    service = world.begin()
    assert begun.wait(WAIT_S)
    started_s = time.monotonic()
    service.close()
    assert time.monotonic() - started_s < 5.0 and world.opened == []


@pytest.mark.slow
def test_unloading_frees_and_the_next_message_loads_again(world: World) -> None:
    service = ready(world.begin())
    first = ask(service)
    service.unload()
    until(lambda: service.status().phase == "unloaded")
    assert world.opened[0].is_closed and service.options is None
    assert service.status().description is None and service.lifecycle.backend is None
    again = ask(service, "again", first.handle)
    assert again.view.text == REPLY
    assert len(world.opened) == 2 and service.options == PLAN


class Clock:
    """Stands in for the module `time`: the moment that the test sets, and how often it was read."""

    def __init__(self) -> None:
        self.now_s, self.num_reads = 0.0, 0

    def monotonic(self) -> float:
        self.num_reads += 1
        return self.now_s

    def wait_for_a_look(self) -> None:
        """Wait until an idle worker has read the moment that was set last."""
        num_before = self.num_reads
        until(lambda: self.num_reads > num_before + 1)  # the first may be from before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the worker."""
    made = Clock()
    monkeypatch.setattr("localspec.chat.worker.time", made)
    return made


def test_an_idle_model_is_let_go_and_comes_back(world: World, clock: Clock) -> None:
    service = ready(world.begin(unload_after_s=10.0))
    clock.now_s = 10.0
    until(lambda: service.status().phase == "unloaded")
    assert world.opened[0].is_closed
    assert "the next message" in service.status().phrase
    reply = service.submit(None, "hi", ReplySettings())
    assert reply is not None
    assert reply.done.wait(WAIT_S) and reply.view.finish_reason == "eos"


def test_work_keeps_the_model_loaded(world: World, clock: Clock) -> None:
    world.make = lambda options: Mortal(quick(options, reply="Hm."))
    service = ready(world.begin(unload_after_s=10.0))
    for clock.now_s in (9.0, 18.0, 27.0):  # less than 10 s after the work before it
        clock.wait_for_a_look()
        ask(service)
    assert len(world.opened) == 1


def test_a_failed_load_can_be_tried_again(world: World) -> None:
    def refuse(options: LoadOptions) -> Mortal:
        raise MemoryShortage("first needs 9 GiB, and 2 GiB is free.")

    world.next_ones = [refuse]
    service = world.begin()
    until(lambda: service.status().phase == "failed")
    service.retry()
    ready(service)
    assert ask(service).view.finish_reason == "eos"


# lost engines


def test_a_lost_engine_interrupts_the_turn_and_the_next_one_works(world: World) -> None:
    world.next_ones = [lambda options: Mortal(quick(options), dies_at=4)]
    service = ready(world.begin())
    lost = ask(service)
    assert lost.view.finish_reason == "interrupted"
    assert lost.view.text and REPLY.startswith(lost.view.text)
    assert lost.view.error is not None and "What was written is kept" in lost.view.error
    shown = service.messages(lost.handle)
    assert [(m.role, m.state) for m in shown] == [
        ("user", "complete"),
        ("assistant", "interrupted"),
    ]
    assert shown[1].text == lost.view.text
    assert ask(service, "again", lost.handle).view.finish_reason == "eos"
    assert len(world.opened) == 2 and world.opened[0].is_closed


def test_replies_that_waited_are_answered_by_the_next_engine(world: World) -> None:
    world.next_ones = [lambda options: Mortal(quick(options), dies_at=4)]
    service = ready(world.begin())
    replies = [service.submit(None, text, ReplySettings()) for text in ("one", "two")]
    for reply in replies:
        assert reply is not None and reply.done.wait(WAIT_S)
    assert [r.view.finish_reason for r in replies if r] == ["interrupted", "eos"]


def test_an_engine_that_ends_while_idle_is_started_again(world: World) -> None:
    service = ready(world.begin())
    world.opened[0].is_dead = True
    until(lambda: len(world.opened) == 2)
    assert ask(service).view.finish_reason == "eos"


def test_a_message_to_an_engine_found_dead_is_answered_by_the_next_one(world: World) -> None:
    world.next_ones = [lambda options: Mortal(quick(options), dies_counting=True)]
    service = ready(world.begin())
    reply = ask(service)
    assert (reply.view.finish_reason, reply.view.text) == ("eos", REPLY)
    assert len(world.opened) == 2 and world.opened[0].is_closed


def test_a_message_that_ends_every_engine_is_tried_twice(world: World) -> None:
    world.make = lambda options: Mortal(quick(options), dies_counting=True)
    service = ready(world.begin())
    reply = ask(service)
    assert reply.view.finish_reason == "interrupted"
    # One that was there, one to try again, one for what comes next.
    until(lambda: len(world.opened) == 3 and service.status().phase == "ready")


def test_a_message_is_committed_while_the_engine_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whatever it does not answer, closing ends it."""
    monkeypatch.setattr("localspec.chat.worker.CLOSE_S", 0.2)
    engine = Stuck(Script())
    world.next_ones = [lambda options: engine]
    service = ready(world.begin())
    reply = service.submit(None, "keep this", ReplySettings())
    assert reply is not None
    until(lambda: bool(reply.handle > 0 and service.store.messages(reply.handle)))
    until(lambda: reply.view.phase == "prefill")
    service.close()
    assert engine.is_closed and reply.view.finish_reason == "interrupted"


def test_an_engine_lost_in_a_task_is_started_again(world: World) -> None:
    service = ready(world.begin())

    def job(backend: Backend, cancel: threading.Event) -> None:
        world.opened[0].is_dead = True
        backend.describe()

    task = finished(service.enqueue("Race", job))
    assert task.error is not None and "ended unexpectedly" in task.error
    assert ask(service).view.finish_reason == "eos"


@pytest.mark.slow
def test_after_three_losses_in_a_row_it_waits_to_be_told(world: World) -> None:
    world.make = lambda options: Mortal(quick(options), dies_at=2)
    service = ready(world.begin())
    for number in (1, 2):
        assert ask(service).view.finish_reason == "interrupted"
        until(partial(lambda wanted: len(world.opened) == wanted, number + 1))
        ready(service)
    assert ask(service).view.finish_reason == "interrupted"
    until(lambda: service.status().phase == "failed")
    assert len(world.opened) == 3
    assert "3 times in a row" in service.status().phrase
    refused = ask(service)
    assert refused.view.error is not None and "Start the engine again" in refused.view.error
    assert service.status().phrase.count("The engine ended") == 1, "said once"
    world.make = lambda options: Mortal(quick(options))
    service.retry()
    ready(service)
    assert ask(service).view.finish_reason == "eos"


@pytest.mark.slow
def test_losses_with_good_turns_between_them_never_add_up(world: World) -> None:
    world.next_ones = [lambda options: Mortal(quick(options), dies_at=2)]
    service = ready(world.begin())
    for _ in range(5):
        ask(service)
        until(lambda: service.status().phase == "ready")
        assert ask(service).view.finish_reason == "eos"
        world.opened[-1].dies_at = 2
    until(lambda: service.status().phase == "ready")  # after it has measured, perhaps
    assert len(world.opened) == 6


def test_an_engine_that_ends_in_every_load_is_not_started_for_ever(world: World) -> None:
    def end(options: LoadOptions) -> Mortal:
        raise EngineLost("The engine ended unexpectedly: it was killed.")

    world.make = end
    service = world.begin()
    until(lambda: service.status().phase == "failed")
    assert len(world.asked) == 3 and "it was killed" in service.status().phrase


def test_an_engine_lost_while_measuring_is_not_measured_for_ever(world: World) -> None:
    @dataclass
    class Unmeasurable(Mortal):
        def calibrate(self, cancel: threading.Event) -> Iterator[str]:
            yield "Measuring"
            self.is_dead = True
            raise EngineLost("The engine ended unexpectedly.")

    world.make = lambda options: Unmeasurable(quick(options))
    service = world.begin()
    until(lambda: service.status().phase == "failed" or len(world.opened) > 1)
    until(lambda: service.status().phase in ("failed", "ready"))
    assert len(world.opened) <= 3
    assert any("while this machine was measured" in n for n in service.status().notices)


# memory


@dataclass
class Hungry(Mortal):
    """Memory runs out at a round of every reply while the context is longer than `enough`."""

    at_round: int = 1
    enough: int = 2048
    drafts: int = 1

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        is_short = self.script.context_length > self.enough
        for number, chunk in enumerate(super().generate(request, cancel)):
            if is_short and number == self.at_round:
                self.drafts -= 1
                yield Chunk(
                    "done",
                    chunk.stats,
                    finish_reason="error",
                    error="Memory ran out. What was written is kept.",
                    is_relieved=self.drafts >= 0,
                )
                return
            yield chunk


@pytest.mark.slow
@pytest.mark.parametrize("at_round", [1, 2, 20])
def test_memory_is_given_up_in_order_and_said(world: World, at_round: int) -> None:
    world.make = lambda options: Hungry(quick(options, round_s=0.001), at_round=at_round)
    service = ready(world.begin())
    first = ask(service)
    assert first.view.error is not None and "context" not in first.view.error
    assert len(world.opened) == 1, "the backend had something to give up"
    second = ask(service, "again", first.handle)
    assert second.view.error is not None
    assert "context of 2048 instead of 4096" in second.view.error
    assert REPLY.startswith(second.view.text)
    third = ask(service, "and again", first.handle)
    assert third.view.finish_reason == "eos" and third.view.text == REPLY
    assert service.options == LoadOptions(model="first", context=2048)
    assert any("context of 2048" in notice for notice in service.status().notices)


def test_a_context_that_the_conversation_needs_is_not_cut(world: World) -> None:
    world.make = lambda options: Hungry(quick(options), drafts=0)
    service = ready(world.begin())
    reply = ask(service, "word " * 1500)
    assert reply.view.error is not None and "context of 3584" not in reply.view.error
    assert len(world.opened) <= 2
    loaded = service.status().description
    assert loaded is not None and loaded.context_length >= 1500


def test_when_nothing_is_left_a_smaller_plan_is_offered(world: World) -> None:
    world.make = lambda options: Hungry(quick(options), drafts=0, enough=0)
    wanted = Offer("first in 4-bit weights.", LoadOptions(model="first", dtype="4-bit"))
    service = ready(world.begin(smaller=lambda options, loaded: wanted))
    said = [ask(service).view.error or "" for _ in range(5)]
    contexts = [each.context for each in world.asked]
    assert contexts == [4096, 2048, 1024, 768], said
    assert "A smaller plan: first in 4-bit weights." in said[-1]
    offer = service.status().offer
    assert offer == wanted
    service.switch(offer.options)
    until(lambda: service.status().offer is None)
    assert ready(service).options == wanted.options


# -- several at the same time ---------------------------------------------------------------


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Replies stop before their first round until it is set."""
    found = threading.Event()
    yield found
    found.set()


def beside(world: World, num_slots: int, gate: threading.Event) -> ChatService:
    def round_s(request: Request) -> float:
        gate.wait(WAIT_S)
        return 0.002

    def make(options: LoadOptions) -> Mortal:
        return Mortal(quick(options, num_slots=num_slots, round_s=round_s))

    world.make = make
    return ready(world.begin())


def sent(service: ChatService, text: str = "hi", handle: int | None = None) -> Reply:
    reply = service.submit(handle, text, ReplySettings())
    assert reply is not None
    return reply


def begun(*replies: Reply) -> None:
    until(lambda: all(reply.pending.settings is not None for reply in replies))


def test_replies_of_two_conversations_are_written_at_the_same_time(
    world: World, gate: threading.Event
) -> None:
    service = beside(world, 2, gate)
    first, second, third = sent(service), sent(service), sent(service)
    begun(first, second)
    assert (service.status().num_waiting, third.view.phase) == (1, "queued")
    assert third.view.position == 1, "it begins when one of the two has ended"
    told = [service.status(each) for each in (None, first.handle, second.handle, third.handle)]
    oldest, *own = [one.reply for one in told]
    assert oldest is first.view and own == [first.view, second.view, third.view]
    service.stop(first)
    gate.set()
    for reply in (first, second, third):
        assert reply.done.wait(WAIT_S)
    assert first.view.finish_reason == "cancelled"
    assert second.view.text == third.view.text == REPLY
    last = service.latest
    told = [service.status(each).reply for each in (None, first.handle, 0)]
    assert last in (second, third) and told == [last.view, None, None], "a new chat is 0"


@pytest.mark.slow
def test_of_one_conversation_one_reply_follows_the_other(
    world: World, gate: threading.Event
) -> None:
    service = beside(world, 3, gate)
    first = sent(service)
    second = sent(service, "and then?", first.handle)
    begun(first)
    assert second.view.phase == "queued"
    gate.set()
    assert first.done.wait(WAIT_S) and second.done.wait(WAIT_S)
    roles = [each.role for each in world.opened[0].requests[-1].messages]
    assert roles == ["user", "assistant", "user"]


@pytest.mark.slow
def test_answers_asked_for_together_are_written_together_and_what_is_sent_then_follows_all(
    world: World, gate: threading.Event
) -> None:
    service = beside(world, 2, gate)
    gate.set()
    asked = sent(service)
    assert asked.done.wait(WAIT_S)
    gate.clear()
    warm = ReplySettings(sampling=SamplingParams(temperature=0.7, seed=8))
    first = service.regenerate(asked.handle, warm, num_replies=3)
    assert first is not None and len(first.together) == 3
    begun(*first.together[:2])
    last = sent(service, "and then?", asked.handle)
    assert first.together[2].view.phase == last.view.phase == "queued"
    assert service.waiting(asked.handle) == [last]
    gate.set()
    assert first.together[1].done.wait(WAIT_S) and last.done.wait(WAIT_S)
    assert first.are_all_done and service.flush()
    requests = world.opened[0].requests
    assert sorted(one.sampling.seed or 0 for one in requests[1:4]) == [8, 9, 10]
    assert [each.role for each in requests[4].messages] == ["user", "assistant", "user"]
    assert len(service.messages(asked.handle)[1].siblings) == 4


def test_several_answers_that_would_be_the_same_are_refused(
    world: World, gate: threading.Event
) -> None:
    gate.set()
    service = beside(world, 2, gate)
    asked = sent(service)
    assert asked.done.wait(WAIT_S)
    with pytest.raises(RequestError, match="At temperature 0 every answer is the same"):
        service.regenerate(asked.handle, ReplySettings(), num_replies=4)
    assert service.running(asked.handle) is None


def test_equal_requests_of_a_program_are_answered_at_once_and_end_in_any_order(
    world: World, gate: threading.Event
) -> None:
    """Each request has all that its reply needs, and each turn is logged as its own."""
    service = beside(world, 4, gate)
    programs, said = ProgramService(service), (Message("user", "hi"), Message("assistant", REPLY))
    gate.set()
    first = programs.answer(Request(said[:1], workload="auto"))
    assert first.done.wait(WAIT_S)
    gate.clear()
    asked = Request((*said, Message("user", "and then?")), workload="auto")
    replies = [programs.answer(asked) for _ in range(4)]
    begun(*replies)
    assert {one.handle for one in replies} == {first.handle}
    for reply in replies[:0:-1]:
        service.stop(reply)
    gate.set()
    for reply in reversed(replies):
        assert reply.done.wait(WAIT_S) and service.flush()
    assert service.journal.notice is None
    reasons = [row["finish_reason"] for row in service.turn_rows()]
    assert sorted(reasons) == ["cancelled"] * 3 + [first.view.finish_reason] * 2


@pytest.mark.slow
def test_a_task_and_an_order_wait_for_all_that_runs_and_have_the_engine_alone(
    world: World, gate: threading.Event
) -> None:
    service = beside(world, 2, gate)
    first, second = sent(service), sent(service)
    begun(first, second)
    were_running = list[int]()
    task = service.enqueue("look", lambda *_: were_running.append(len(service.worker.running)))
    late = sent(service)
    service.switch(LoadOptions(model="second"))
    gate.set()
    assert task.done.wait(WAIT_S) and were_running == [0]
    assert first.view.finish_reason == second.view.finish_reason == "eos"
    assert late.done.wait(WAIT_S) and late.view.finish_reason == "eos"
    assert [each.is_closed for each in world.opened] == [True, False]


def test_a_lost_engine_is_counted_once_however_many_replies_it_was_writing(
    world: World, gate: threading.Event
) -> None:
    service = beside(world, 3, gate)
    world.opened[0].dies_at = 3
    first, second = sent(service), sent(service)
    begun(first, second)
    gate.set()
    for reply in (first, second):
        assert reply.done.wait(WAIT_S) and reply.view.finish_reason == "interrupted"
    until(lambda: len(world.opened) == 2 and service.status().phase == "ready")
    assert service.lifecycle.losses_in_a_row == 1
    assert sent(service).done.wait(WAIT_S)


def test_closing_ends_all_that_runs(world: World, gate: threading.Event) -> None:
    service = beside(world, 2, gate)
    replies = [sent(service) for _ in range(3)]
    begun(*replies[:2])
    threading.Timer(0.05, gate.set).start()
    service.close()
    assert [reply.view.finish_reason for reply in replies] == ["cancelled"] * 3
