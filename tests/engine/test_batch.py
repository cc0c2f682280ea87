"""Sequences that are decoded together say what each says alone, whoever joins, leaves or fails."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import OFF, Round, SamplingParams
from localspec.drafters.parts import Parts
from localspec.drafters.registry import drafter_class
from localspec.engine import batch as batches
from localspec.engine.batch import Batch, Forwarded, Steps
from localspec.engine.engine import Engine
from localspec.forward.decoder import Decoder
from localspec.forward.passes import Pass, Rows
from tests.kit.random_heads import KINDS as HEADS
from tests.kit.random_heads import head_for
from tests.kit.tiny import Plans, agreeing_draft, tiny_llama, with_cache

LENGTH = 24
# Prompt, sampling, drafter and length: of each sequence its own.
Asked = tuple[tuple[int, ...], SamplingParams, tuple[str, int]]
ASKED: tuple[Asked, ...] = (
    ((5, 9, 12, 5, 9), SamplingParams(), ("ngram", 4)),
    (tuple(range(1, 50)), SamplingParams(0.8, seed=3), ("draft_model", 3)),
    ((7,), SamplingParams(1.0, top_k=9, seed=4), (OFF, 0)),
    ((30, 31, 32, 5), SamplingParams(0.5, seed=5, repetition_penalty=1.2), ("early_exit", 5)),
    ((5, 9, 12, 5), SamplingParams(0.8, seed=3), ("draft_model", 3)),
)


@cache
def target() -> Any:
    made = tiny_llama(num_layers=4, later=1.0)
    with torch.no_grad():
        for layer in made.model.layers:  # attention that looks at some tokens more than others
            layer.self_attn.q_proj.weight.mul_(30.0)
    return made


@cache
def parts(dtype: torch.dtype) -> Parts:
    module, draft = (copy.deepcopy(each).to(dtype) for each in (target(), agreeing_draft(target())))
    heads = {kind: head_for(kind, target) for kind in HEADS}
    return Parts(with_cache(module), with_cache(draft), heads=heads)


def engines(
    dtype: torch.dtype, count: int, kinds: Sequence[str] = ("ngram", "draft_model", "early_exit")
) -> list[Engine]:
    found = list[Engine]()
    for _ in range(count):
        own = parts(dtype).beside()
        assert own is not None
        drafters = {kind: drafter_class(kind).build(own) for kind in kinds}
        found.append(Engine(own.target, drafters))
    return found


def steps_of(
    engine: Engine,
    place: int,
    cancel: threading.Event,
    chunk: int = 512,
    asked: Asked | None = None,
) -> Generator[Pass | Round | None, Forwarded, None]:
    prompt, sampling, plan = asked or ASKED[place]
    sequence = engine.start(prompt, sampling, LENGTH, frozenset())
    yield from engine.read(sequence, cancel, lambda: chunk)
    with engine.decoding(sequence):
        while sequence.finish_reason is None and not cancel.is_set():
            yield (yield from engine.round(sequence, Plans(plan)))


def written(rounds: Iterator[Round]) -> list[int]:
    return [token for each in rounds for token in each.tokens]


def alone(dtype: torch.dtype, place: int) -> list[int]:
    (engine,) = engines(dtype, 1)
    return written(Batch[Round]().run(steps_of(engine, place, threading.Event())))


def read_in_turn(open_ones: dict[int, Iterator[Round]], found: dict[int, list[int]]) -> None:
    for place, rounds in tuple(open_ones.items()):
        each = next(rounds, None)
        if each is None:
            del open_ones[place]
        else:
            found[place] += each.tokens


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_says_what_it_says_alone(dtype: torch.dtype) -> None:
    """The second joins while the first is under way, its prompt read in small pieces; the others
    join later, and each leaves when it ends."""
    together, never = Batch[Round](), threading.Event()
    found: dict[int, list[int]] = {place: [] for place in range(len(ASKED))}
    open_ones = dict[int, Iterator[Round]]()
    for place, engine in enumerate(engines(dtype, len(ASKED))):
        open_ones[place] = together.run(steps_of(engine, place, never, chunk=3))
        for _ in range(2):
            read_in_turn(open_ones, found)
    while open_ones:
        read_in_turn(open_ones, found)
    assert found == {place: alone(dtype, place) for place in found}
    assert all(len(tokens) == LENGTH for tokens in found.values())


@pytest.mark.slow
def test_a_forward_serves_all_and_says_who_else_was_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = list[list[int]]()
    forward = batches.forward_together

    def counted(asked: Sequence[Pass]) -> list[torch.Tensor]:
        sizes.append([each.num_rows for each in asked])
        return forward(asked)

    monkeypatch.setattr(batches, "forward_together", counted)
    together, never = Batch[Round](), threading.Event()
    places = (0, 2)
    open_ones = {
        place: together.run(steps_of(engine, place, never))
        for place, engine in zip(places, engines(torch.float32, 2), strict=True)
    }
    steps: dict[int, list[decoding.Step]] = {place: [] for place in places}
    while open_ones:
        for place, rounds in tuple(open_ones.items()):
            found = next(rounds, None)
            if found is None:
                del open_ones[place]
            else:
                steps[place].append(found.step)
    assert sizes and all(len(each) == 2 for each in sizes)
    shared = [step for step in steps[2] if step.others.num_sequences]
    assert [step.others.num_rows for step in shared] == [rows[0] for rows in sizes]
    assert all(0.0 <= step.others.took_ms <= step.verify_ms for step in shared)
    # The longer one ends alone.
    assert steps[2][-1].others == decoding.ALONE


@pytest.mark.slow
def test_those_who_draft_with_one_model_share_its_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two do here, beside one that leaves early and one that looks up. The forwards of others are
    no part of a sequence's draft, but of its round; of one that is shared each has its share."""
    drafted, forward = list[int](), batches.forward_together
    planned, known = list[float](), Plans.plan

    def slow(asked: Sequence[Pass]) -> list[torch.Tensor]:
        if asked[0].is_draft:
            drafted.append(len(asked))
            time.sleep(0.01)
        return forward(asked)

    def plan(self: Plans, sequence: decoding.Sequence) -> decoding.DraftPlan:
        planned.append(time.perf_counter())
        return known(self, sequence)

    def joined(steps: Steps[Round]) -> Steps[Round | str]:
        yield "in"
        yield from steps

    monkeypatch.setattr(Plans, "plan", plan)
    monkeypatch.setattr(batches, "forward_together", slow)
    monkeypatch.setattr(batches, "_result_of", lambda part: slow([part])[0])
    together, never = Batch[Round | str](), threading.Event()
    places = (4, 4, 3, 0)
    open_ones = [
        together.run(joined(steps_of(engine, place, never)))
        for place, engine in zip(places, engines(torch.float32, len(places)), strict=True)
    ]
    assert [next(each) for each in open_ones] == ["in"] * 4
    heads = [next(each) for each in open_ones]
    passed_ms = 1000.0 * (time.perf_counter() - planned[0])
    assert drafted == [2, 2, 2, 1, 1, 1, 1, 1]
    steps = [each.step for each in heads if isinstance(each, Round)]
    least_ms = [each.others.took_ms for each in steps]
    assert all(took > wanted for took, wanted in zip(least_ms, (65, 65, 30, 80), strict=True))
    assert all(each.draft_ms + each.others.took_ms < each.round_ms for each in steps)
    assert all(each.round_ms < passed_ms + 20.0 for each in steps), "nothing counts twice"
    for place, head, each in zip(places, heads, open_ones, strict=True):
        found = [head, *each]
        assert [token for one in found for token in one.tokens] == alone(torch.float32, place)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft_model", "mtp", "eagle", "block"])
def test_what_a_drafter_reads_delays_no_round_of_the_others_by_more_than_a_piece(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(batches, "SHARED_DRAFT_CHUNK", 16)
    (first, second), events = engines(torch.float32, 2, (kind,)), list[int | str]()
    run, planned, never = batches._result_of, Plans.plan, threading.Event()

    def noted(part: Pass) -> Any:
        events.extend([part.num_rows] if part.is_reading else [])
        return run(part)

    def plan(policy: Plans, sequence: decoding.Sequence) -> decoding.DraftPlan:
        events.append("long" if sequence.prompt_length > 100 else "short")
        return planned(policy, sequence)

    monkeypatch.setattr(batches, "_result_of", noted)
    monkeypatch.setattr(Plans, "plan", plan)
    prompt = tuple(1 + place % 50 for place in range(150))
    together = Batch[Round]()
    short = together.run(steps_of(first, 2, never))
    next(short)
    long = together.run(steps_of(second, 1, never, asked=(prompt, SamplingParams(), (kind, 2))))
    next(long)
    begun = events.index("long")
    between = " ".join(map(str, events[begun:])).split("short")[1:]
    assert [each.strip() for each in between[:5]] == ["16"] * 5
    long.close()  # type: ignore[attr-defined]
    assert written(short)


@pytest.mark.slow
def test_a_reader_who_waits_holds_up_nobody() -> None:
    together, never = Batch[Round](), threading.Event()
    first, second = engines(torch.float32, 2)
    idle = together.run(steps_of(first, 0, never))
    head = next(idle)
    assert written(together.run(steps_of(second, 2, never))) == alone(torch.float32, 2)
    # What was missed was kept.
    assert [*head.tokens, *written(idle)] == alone(torch.float32, 0)


def test_one_that_stops_leaves_the_others() -> None:
    together, cancel = Batch[Round](), threading.Event()
    first, second, third = engines(torch.float32, 3)
    rounds = [
        together.run(steps_of(first, 0, cancel)),
        together.run(steps_of(second, 2, threading.Event())),
        together.run(steps_of(third, 3, threading.Event())),
    ]
    heads = [next(each) for each in rounds]
    cancel.set()
    rounds[2].close()  # type: ignore[attr-defined]
    rest = [written(each) for each in rounds[:2]]
    assert [*heads[1].tokens, *rest[1]] == alone(torch.float32, 2)
    assert len(rest[0]) < LENGTH - len(heads[0].tokens)
    assert len(third.target.cache.tokens) < len(ASKED[3][0]) + LENGTH - 1


@pytest.mark.slow
def test_an_error_ends_the_sequence_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of the forward: each is then run by itself."""
    first, second = engines(torch.float32, 2)
    target = first.target
    assert isinstance(target, Decoder)

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    together, never = Batch[Round](), threading.Event()
    failing = together.run(steps_of(first, 0, never))
    going_on = together.run(steps_of(second, 2, never))
    head = next(failing), next(going_on)
    monkeypatch.setattr(target, "laid_out", broken)
    with pytest.raises(RuntimeError, match="planted"):
        written(failing)
    assert [*head[1].tokens, *written(going_on)] == alone(torch.float32, 2)
    monkeypatch.undo()
    held = target.cache.tokens
    assert held == [*ASKED[0][0], *alone(torch.float32, 0)][: len(held)]


def test_one_that_waits_goes_on_after_a_forward_of_the_others() -> None:
    has_room = threading.Event()

    def waiting() -> Steps[str]:
        while not has_room.is_set():
            yield None
        yield "in"

    def working() -> Generator[Pass | str | None, Forwarded, None]:
        (engine,) = engines(torch.float32, 1)
        yield "first"
        yield Rows(engine.target, [1, 2])
        has_room.set()
        yield "last"

    together = Batch[str]()
    first, second = together.run(working()), together.run(waiting())
    assert [next(first), next(second), next(first)] == ["first", "in", "last"]
    assert list(first) == list(second) == []


def test_alone_a_prompt_is_read_in_large_pieces_and_beside_others_in_small_ones() -> None:
    together = Batch[Round]()
    seen = list[int]()

    def steps() -> Generator[Pass | Round | None, Forwarded, None]:
        seen.append(together.num_rows_read)
        yield from ()

    one = together.run(steps())
    list(one)
    idle = together.run(steps_of(engines(torch.float32, 1)[0], 2, threading.Event()))
    next(idle)
    list(together.run(steps()))
    assert seen[0] > 4 * seen[1]
