"""The captured decoder is the decoder: same logits, same text, whatever is captured so far.

On a CPU the graphs are those of tests.kit.tracing; with a GPU there are tests over real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from itertools import islice
from typing import Any

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import OFF, DraftPlan, Proposal, SamplingParams, chain
from localspec.core.errors import CacheError
from localspec.engine.engine import Engine
from localspec.forward import graphs
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import (
    WARM_UPS,
    CapturedDecoder,
    CudaGraphPool,
    GraphPool,
    GraphStore,
    Recording,
    Work,
    buckets,
    shapes,
)
from localspec.forward.static import Window
from tests.kit.families import assert_close
from tests.kit.tiny import Plans, play, tiny_llama, with_plain_cache
from tests.kit.tracing import (
    NO_GPU,
    FailingPool,
    StalePool,
    TracingPool,
    UncapturedPool,
    on_gpu,
)

PROMPT = (5, 9, 12, 5, 9, 30, 7, 5, 9)
TREE = (-1, 0, 0, 1, 2, 2, -1)
CAPACITY = 600  # three stretches: 256, 512, 600


def captured(
    pool: GraphPool | None = None, num_graphs: int | None = None, capacity: int = CAPACITY
) -> CapturedDecoder:
    decoder = CapturedDecoder(with_plain_cache(tiny_llama(), capacity), pool or TracingPool())
    for _ in islice(decoder.capture(), num_graphs):
        pass
    return decoder


def text(length: int) -> list[int]:
    return [1 + (7 * i * i) % 61 for i in range(length)]


def check_equal(decoder: Decoder, reference: Decoder, length: int, width: int) -> None:
    """A chain of `width` after `length` tokens, which both caches are brought to."""
    for model in (decoder, reference):
        have = model.cache.reuse(text(length))
        if have < length:
            model.forward(text(length)[have:], num_logits=1)
    tokens = [2 + i % 50 for i in range(width)]
    assert_close(decoder.forward(tokens), reference.forward(tokens))
    assert decoder.cache.tokens == reference.cache.tokens


# -- which graphs -----------------------------------------------------------------------------


def test_stretches_double_and_end_at_the_capacity() -> None:
    assert buckets(200) == (200,)
    assert buckets(256) == (256,)
    assert buckets(4096) == (256, 512, 1024, 2048, 4096)
    assert buckets(3000) == (256, 512, 1024, 2048, 3000)


def test_widths_of_the_cost_table_come_first_and_none_twice() -> None:
    order = shapes(1024)
    assert len(set(order)) == len(order) == 30
    assert {width for width, _ in order[:15]} == {1, 2, 4, 8, 16}
    assert all(width <= 8 for width, _ in shapes(8))


# -- logits -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graphs_pair() -> tuple[CapturedDecoder, Decoder]:
    return captured(), with_plain_cache(tiny_llama(), CAPACITY)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])
def test_every_width_gives_the_decoders_logits(
    graphs_pair: tuple[CapturedDecoder, Decoder], width: int
) -> None:
    decoder, reference = graphs_pair
    pool = decoder._store.pool
    assert isinstance(pool, TracingPool) and len(decoder.captured) == 30
    for length in (0, 1, 200):
        before = pool.num_replays
        check_equal(decoder, reference, length, width)
        assert pool.num_replays > before, "the graph was not used"


@pytest.mark.slow
@pytest.mark.parametrize("edge", [256, 512, CAPACITY])
@pytest.mark.parametrize("width", [1, 5, 16])
def test_at_the_edge_of_a_stretch(
    graphs_pair: tuple[CapturedDecoder, Decoder], edge: int, width: int
) -> None:
    for short in (0, 1, 2):
        check_equal(*graphs_pair, length=edge - width - short, width=width)
        if edge < CAPACITY:
            check_equal(*graphs_pair, length=edge - width + 1 + short, width=width)


def test_a_padded_width_never_reaches_beyond_the_capacity(
    graphs_pair: tuple[CapturedDecoder, Decoder],
) -> None:
    """13 tokens fit the context's end, the 16 of their graph do not: they run as before."""
    decoder, reference = graphs_pair
    check_equal(decoder, reference, CAPACITY - 13, 13)
    assert decoder.cache.length == CAPACITY
    with pytest.raises(CacheError):
        decoder.forward([1])
    assert decoder.cache.length == CAPACITY


def test_trees_and_the_path_that_is_kept(graphs_pair: tuple[CapturedDecoder, Decoder]) -> None:
    for model in graphs_pair:
        model.cache.rollback(0)
        model.forward(text(40), num_logits=1)
    tokens = [5, 6, 7, 8, 9, 10, 11]
    assert_close(*(model.forward(tokens, TREE) for model in graphs_pair))
    for model in graphs_pair:
        model.cache.keep(40, [0, 2, 4])
    assert_close(*(model.forward([12, 13]) for model in graphs_pair))
    assert graphs_pair[0].cache.tokens == graphs_pair[1].cache.tokens


def test_only_the_wanted_logits_and_never_those_of_a_later_step(
    graphs_pair: tuple[CapturedDecoder, Decoder],
) -> None:
    decoder, _ = graphs_pair
    decoder.cache.rollback(0)
    everything = decoder.forward([4, 5, 6, 7])
    kept = everything.clone()
    decoder.cache.rollback(0)
    last = decoder.forward([4, 5, 6, 7], num_logits=1)
    decoder.forward([9, 9, 9, 9])
    assert torch.equal(last, kept[-1:])
    assert torch.equal(everything, kept), "a later step wrote over logits handed out"


def test_a_rejected_draft_leaves_no_trace(graphs_pair: tuple[CapturedDecoder, Decoder]) -> None:
    for round_width in (9, 1, 5, 2):
        for model in graphs_pair:
            model.cache.rollback(0)
            model.forward(text(30), num_logits=1)
            model.forward([60] * round_width)
            model.cache.rollback(31)
        assert_close(*(model.forward([3, 4]) for model in graphs_pair))


def test_hidden_states_are_those_of_the_decoder() -> None:
    decoder, reference = captured(num_graphs=3), with_plain_cache(tiny_llama(), CAPACITY)
    for model in (decoder, reference):
        model.forward(text(12))
    outputs = [model.look_back(2, keep=(0,)) for model in (decoder, reference)]
    assert_close(outputs[0].logits, outputs[1].logits)
    assert_close(outputs[0].hidden[0], outputs[1].hidden[0])


# -- capturing --------------------------------------------------------------------------------


def test_the_first_answer_does_not_wait_and_graphs_are_used_as_they_come() -> None:
    pool = TracingPool()
    decoder = CapturedDecoder(with_plain_cache(tiny_llama(), CAPACITY), pool)
    reference = with_plain_cache(tiny_llama(), CAPACITY)
    check_equal(decoder, reference, 20, 3)
    assert pool.num_captures == pool.num_replays == decoder.buffer_bytes == 0
    steps = decoder.capture()
    used = 0
    for _ in islice(steps, 8):
        before = pool.num_replays
        check_equal(decoder, reference, 20, 1)
        used += pool.num_replays > before
    assert used == 7, "all but the first, when nothing was captured yet"


@pytest.mark.slow
def test_left_in_the_middle_it_goes_on_where_it_stopped() -> None:
    pool = TracingPool()
    decoder = captured(pool, num_graphs=4)
    assert pool.num_captures == 3  # the fourth was announced, then left
    phrases = list(decoder.capture())
    assert len(phrases) == 27 and pool.num_captures == 30
    assert decoder.buffer_bytes == 16 * decoder.vocab_size * 4
    assert list(decoder.capture()) == []


def test_capturing_leaves_a_conversation_as_it_is() -> None:
    decoder = CapturedDecoder(with_plain_cache(tiny_llama(), CAPACITY), TracingPool())
    decoder.forward(text(50), num_logits=1)
    before = [tensor.clone() for both in decoder.cache.slots for tensor in both]
    assert len(list(islice(decoder.capture(), 12))) == 12
    after = [tensor for both in decoder.cache.slots for tensor in both]
    assert decoder.cache.tokens == text(50)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, :, :50], new[:, :, :50])


def test_without_room_there_are_fewer_graphs_and_a_sentence() -> None:
    decoder = captured(TracingPool(room=2))
    assert len(decoder.captured) == 2
    assert decoder.notice is not None and "no more memory" in decoder.notice
    check_equal(decoder, with_plain_cache(tiny_llama(), CAPACITY), 20, 8)


def test_room_that_comes_later_is_used() -> None:
    pool = TracingPool(room=2)
    decoder = captured(pool)
    pool.room = 4
    list(decoder.capture())
    assert len(decoder.captured) == 4


def test_a_failed_capture_is_said_and_ends_capturing_but_not_decoding() -> None:
    decoder = captured(FailingPool())
    assert len(decoder.captured) == 2
    assert decoder.notice is not None and "not permitted when stream is" in decoder.notice
    assert "\n" not in decoder.notice
    assert list(decoder.capture()) == []
    reference = with_plain_cache(tiny_llama(), CAPACITY)
    for width in (1, 2, 8):
        check_equal(decoder, reference, 20, width)


def test_a_replay_that_does_nothing_is_not_believed() -> None:
    decoder = captured(StalePool())
    assert decoder.captured == frozenset()
    assert decoder.notice is not None and "other logits" in decoder.notice
    check_equal(decoder, with_plain_cache(tiny_llama(), CAPACITY), 20, 4)


class UntimedPool(UncapturedPool):
    """The clock of the device fails."""

    def seconds(self, recorded: Work) -> float:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_choice_of_graphs_that_fails_ends_capturing_but_not_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs, "windows", lambda *it: (Window(*it), Window(*it)))
    decoder = captured(UntimedPool())
    assert decoder.captured == frozenset()
    assert decoder.notice is not None and "illegal memory access" in decoder.notice
    check_equal(decoder, with_plain_cache(tiny_llama(), CAPACITY), 20, 1)


# -- text -------------------------------------------------------------------------------------


class Copier:
    """Proposes the right text with a wrong token now and then, as a chain or a tree."""

    name = "copier"
    shapes_itself = False
    block_length = None
    memory_bytes = 0

    def __init__(self, answer: list[int], is_tree: bool) -> None:
        self._answer = answer
        self._is_tree = is_tree

    def signal(self, sequence: decoding.Sequence) -> str:
        return self.name

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        done = len(sequence.tokens)
        right = self._answer[done : done + plan.num_draft_tokens]
        if done % 2 == 0 and len(right) > 2:
            right[2] = (right[2] + 1) % 60
        if not self._is_tree or len(right) < 2:
            return chain(tuple(right))
        # A wrong first branch beside the right one.
        tokens = (((right[0] + 1) % 60), *right)
        return Proposal(tokens, (-1, -1, *range(1, len(right))))

    def observe(self, sequence: decoding.Sequence, outcome: decoding.Outcome) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_the_engine_writes_the_same_text_over_graphs(is_tree: bool) -> None:
    """Across the first edge, 256, with plain rounds and drafts of several widths in turn."""
    prompt = tuple(text(236))
    plain = play(Engine(with_plain_cache(tiny_llama(), CAPACITY), {}), prompt, Plans((OFF, 0)), 60)
    decoder = captured()
    engine = Engine(decoder, {"copier": Copier(plain.tokens, is_tree)})
    policy = Plans(("copier", 4), ("copier", 7), (OFF, 0), ("copier", 2), ("copier", 12))
    assert play(engine, prompt, policy, 60).tokens == plain.tokens
    assert sum(step.num_accepted_tokens for step in policy.steps) > 20
    assert any(step.num_accepted_tokens < step.num_draft_tokens for step in policy.steps)
    pool = decoder._store.pool
    assert isinstance(pool, TracingPool) and pool.num_replays >= len(policy.steps)


@pytest.mark.slow
def test_sampled_text_with_a_seed_is_the_same_over_graphs() -> None:
    sampling = SamplingParams(0.9, top_p=0.95, seed=11)
    texts = [
        play(Engine(model, {}), PROMPT, Plans((OFF, 0)), 40, sampling).tokens
        for model in (captured(num_graphs=4), with_plain_cache(tiny_llama(), CAPACITY))
    ]
    assert texts[0] == texts[1]


# -- with a GPU -------------------------------------------------------------------------------


def cuda_pair(dtype: torch.dtype) -> tuple[CapturedDecoder, Decoder]:
    decoder = on_gpu(dtype)
    made = CapturedDecoder(decoder, CudaGraphPool(decoder.device, 2**30))
    for _ in made.capture():
        pass
    assert made.notice is None, made.notice
    return made, on_gpu(dtype)


@NO_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_graphs_give_the_decoders_logits(dtype: torch.dtype) -> None:
    decoder, reference = cuda_pair(dtype)
    bound = 1e-3 if dtype == torch.float32 else 0.05
    for length in (0, 31, 250, 500, CAPACITY - 16):
        for width in range(1, 17):
            for model in (decoder, reference):
                have = model.cache.reuse(text(length))
                if have < length:
                    model.forward(text(length)[have:], num_logits=1)
            tokens = [2 + i % 50 for i in range(width)]
            found, wanted = decoder.forward(tokens), reference.forward(tokens)
            assert float((found - wanted).norm() / wanted.norm()) < bound, (length, width)


@NO_GPU
@pytest.mark.gpu
def test_real_graphs_after_rollbacks_and_trees() -> None:
    decoder, reference = cuda_pair(torch.float32)
    for model in (decoder, reference):
        model.forward(text(40), num_logits=1)
    for _ in range(3):
        found, wanted = (m.forward([5, 6, 7, 8, 9, 10, 11], TREE) for m in (decoder, reference))
        assert float((found - wanted).norm() / wanted.norm()) < 1e-3
        for model in (decoder, reference):
            model.cache.keep(40, [0, 2, 4])
        found, wanted = (m.forward([12, 13]) for m in (decoder, reference))
        assert float((found - wanted).norm() / wanted.norm()) < 1e-3
        for model in (decoder, reference):
            model.cache.rollback(40)


@NO_GPU
@pytest.mark.gpu
def test_forwards_without_a_wait_between_them_keep_their_own_inputs() -> None:
    """The host may be far ahead of the device: no input may be overwritten under way."""
    decoder, reference = cuda_pair(torch.float32)
    tokens = text(200)
    found = [decoder.forward([token]) for token in tokens]
    wanted = [reference.forward([token]) for token in tokens]
    error = (torch.cat(found) - torch.cat(wanted)).norm() / torch.cat(wanted).norm()
    assert float(error) < 1e-3


@NO_GPU
@pytest.mark.gpu
def test_the_pools_size_is_measured_and_bounded() -> None:
    decoder = on_gpu(torch.bfloat16)
    pool = CudaGraphPool(decoder.device, limit_bytes=1)
    made = CapturedDecoder(decoder, pool)
    assert pool.pool_bytes == 0
    list(made.capture())
    assert pool.pool_bytes > 0
    assert len(made.captured) < 30 and made.notice is not None


@NO_GPU
@pytest.mark.gpu
def test_the_first_answer_comes_before_any_capture_on_a_gpu() -> None:
    decoder = on_gpu(torch.float32)
    made = CapturedDecoder(decoder, CudaGraphPool(decoder.device, 2**30))
    engine = Engine(made, {})
    first = play(engine, PROMPT, Plans((OFF, 0)), 20).tokens
    assert made.captured == frozenset()
    list(made.capture())
    made.cache.rollback(0)
    assert play(engine, PROMPT, Plans((OFF, 0)), 20).tokens == first


def test_work_that_asks_the_host_cannot_be_recorded() -> None:
    counter = torch.zeros(1)

    def reads_back() -> None:
        counter.add_(float(counter.sum()))

    with pytest.raises(RuntimeError, match="asks the host"):
        TracingPool().capture(reads_back)


def test_a_replay_freezes_what_stood_on_the_host() -> None:
    """The stand-in is as strict as CUDA: the same work with a number from the host goes wrong."""
    source, target, step = torch.ones(3), torch.zeros(3), [1.0]

    def work() -> None:
        target.copy_(source * step[0])

    replay = TracingPool().capture(work)
    step[0] = 5.0
    source.fill_(2.0)
    replay()
    assert target.tolist() == [2.0, 2.0, 2.0]


def test_a_store_announces_before_it_makes() -> None:
    made = list[int]()
    store = GraphStore[int, Work](UncapturedPool())
    recording = Recording[Work](made.clear, made.clear)

    def make(key: int) -> list[Recording[Work]]:
        made.append(key)
        return [recording]

    steps = store.fill([1, 2], lambda key: f"graph {key}", make)
    assert next(steps) == "graph 1" and made == []
    assert next(steps) == "graph 2" and made == [1]
    steps.close()
    assert store.ready == {1: recording}


def test_what_has_no_graph_runs_as_it_is_and_is_made_once() -> None:
    store, made = GraphStore[int, Work](UncapturedPool()), [0]

    def work() -> Work:
        made[0] += 1
        return made.reverse

    plain = store.captured_or(1, work)
    assert store.captured_or(1, work) is plain and plain.replay is plain.work and made == [1]
    graph = Recording[Work](made.clear, made.copy)
    assert [*store.fill([1], str, lambda key: [graph])] and store.captured_or(1, work) is graph


class FakeCuda:
    """Just enough of torch.cuda, on the host, to see what a pool asks of it and in which order."""

    def __init__(self) -> None:
        self.calls = list[str]()
        self.free = 1000
        self.stream_now = "default"
        self.fails = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class FakeStream:
            def __init__(self, device: Any = None) -> None:
                self.name = "side"

            def wait_stream(self, other: Any) -> None:
                fake.calls.append(f"{self.name} waits for {other.name}")

        current = FakeStream()
        current.name = "default"

        @contextmanager
        def stream(chosen: Any) -> Iterator[None]:
            before, fake.stream_now = fake.stream_now, chosen.name
            try:
                yield
            finally:
                fake.stream_now = before

        class FakeGraph:
            def replay(self) -> None:
                fake.calls.append("replay")

        @contextmanager
        def graph(_: Any, **settings: Any) -> Iterator[None]:
            fake.calls.append("capture on " + settings["stream"].name)
            fake.stream_now = "side"
            yield
            if fake.fails:  # torch then leaves the stream as it is
                raise RuntimeError("capture failed")
            fake.stream_now = "default"
            fake.free -= 300

        for name, value in {
            "Stream": FakeStream,
            "stream": stream,
            "graph": graph,
            "CUDAGraph": FakeGraph,
            "device": lambda device: nullcontext(),
            "current_stream": lambda device: current,
            "graph_pool_handle": lambda: (0, 1),
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device: (self.free, 2000),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_the_cuda_pool_warms_up_records_and_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, ran = FakeCuda(), list[str]()
    fake.install(monkeypatch)
    pool = CudaGraphPool(torch.device("cuda", 0), reserve_bytes=500, limit_bytes=10_000)
    assert pool.has_room()
    replay = pool.capture(lambda: ran.append(fake.stream_now))
    assert ran == ["side"] * (WARM_UPS + 1), "warmed up on the stream it is recorded on"
    replay()
    waits = ["side waits for default", "default waits for side"]
    assert fake.calls == [*waits, "capture on side", "replay"]
    assert pool.pool_bytes == 300 and fake.stream_now == "default"
    assert pool.has_room()  # 700 free
    pool.capture(lambda: None)
    assert pool.pool_bytes == 600 and not pool.has_room()  # 400 free, 500 to be left


def test_a_failed_capture_restores_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    fake.install(monkeypatch)
    pool = CudaGraphPool(torch.device("cuda", 0), 10_000)
    fake.fails = True
    with pytest.raises(RuntimeError, match="capture failed"):
        pool.capture(lambda: None)
    assert fake.stream_now == "default"


def test_torchs_own_capture_takes_what_the_pool_gives_it() -> None:
    settings = {"pool": (0, 1), "stream": None, "capture_error_mode": "thread_local"}
    signature(torch.cuda.graph.__init__).bind(None, None, **settings)
    for name in ("graph_pool_handle", "CUDAGraph", "Stream", "mem_get_info", "empty_cache"):
        assert callable(getattr(torch.cuda, name))
