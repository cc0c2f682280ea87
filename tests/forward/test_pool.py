"""Recording work: what the stand-in refuses, what the CUDA pool asks of torch, and the shelf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import pytest
import torch

from localspec.forward.pool import WARM_UPS, CudaGraphPool, Shelf, UncapturedPool
from tests.forward.tracing import TracingPool


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


def test_a_shelf_announces_before_it_makes() -> None:
    made = list[int]()
    shelf = Shelf[int, str](UncapturedPool())

    def make(key: int) -> str:
        made.append(key)
        return str(key)

    steps = shelf.fill([1, 2], lambda key: f"graph {key}", make)
    assert next(steps) == "graph 1" and made == []
    assert next(steps) == "graph 2" and made == [1]
    steps.close()
    assert shelf.ready == {1: "1"}


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
    pool = CudaGraphPool(torch.device("cuda", 0))
    fake.fails = True
    with pytest.raises(RuntimeError, match="capture failed"):
        pool.capture(lambda: None)
    assert fake.stream_now == "default"


def test_torchs_own_capture_takes_what_the_pool_gives_it() -> None:
    settings = {"pool": (0, 1), "stream": None, "capture_error_mode": "thread_local"}
    signature(torch.cuda.graph.__init__).bind(None, None, **settings)
    for name in ("graph_pool_handle", "CUDAGraph", "Stream", "mem_get_info", "empty_cache"):
        assert callable(getattr(torch.cuda, name))
