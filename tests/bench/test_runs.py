"""What one run of our engine notes beside its tokens."""

from __future__ import annotations

import sys
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import psutil
import pytest

from localspec.bench.cases import Case
from localspec.bench.runs import (
    BenchEngine,
    EngineRunner,
    MeasuredReply,
    MemoryGauge,
    empty_caches,
    own_controller,
)
from localspec.controller.acceptance import Situation
from localspec.core.decoding import Proposal, SamplingParams
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.ngram import NgramDrafter
from tests.kit.tiny_bench import captured_engine, tiny_bench
from tests.kit.tracing import TracingPool

CASE = Case("a", "chat", (3, 9, 14, 27, 5), 0)


@pytest.fixture
def fresh_bench() -> BenchEngine:
    return tiny_bench()


def run(bench: BenchEngine, drafter: str, length: int | None = None) -> MeasuredReply:
    runner = EngineRunner(bench, bench.controller, drafter, length)
    return runner.run(CASE, SamplingParams(), 16)


def test_every_round_replays_graphs_also_those_asked_for_meanwhile() -> None:
    """As in the app, which captures in idle time."""
    pool = TracingPool()
    bench = tiny_bench(captured_engine(pool))
    assert [*bench.engine.capture()] and pool.num_captures
    for sampling in (SamplingParams(), SamplingParams(0.8, top_p=0.9, seed=3)):
        runner = EngineRunner(bench, bench.controller, "draft_model", 2)
        runner.run(CASE, sampling, 4)  # asks for what this kind of sampling needs
        pool.num_replays = 0
        reply = runner.run(CASE, sampling, 16)
        assert reply.num_drafts > 3 and pool.num_replays >= 2 * reply.num_drafts
        assert not any(each.has_missing for each in bench.engine.captures)


def test_the_time_of_rounds_lies_within_the_decode_time(fresh_bench: BenchEngine) -> None:
    found = run(fresh_bench, "draft_model", 3)
    assert found.draft_ms is not None and found.drafted_verify_ms is not None
    assert found.decode_ms is not None and found.num_accepted_tokens > 0
    assert 0.0 < found.draft_ms + found.drafted_verify_ms < found.decode_ms


def test_a_reply_that_ends_at_once_has_no_rate(fresh_bench: BenchEngine) -> None:
    first = run(fresh_bench, "off").decided[0]
    found = run(replace(fresh_bench, end_ids=frozenset({first})), "off")
    assert (found.tokens, found.tokens_per_second) == ((), None)


def test_energy_is_what_the_counter_gained_while_decoding(fresh_bench: BenchEngine) -> None:
    readings = iter([100.0, 103.5])
    assert run(replace(fresh_bench, joules=lambda: next(readings)), "off").energy_joules == 3.5


def test_without_a_counter_energy_is_unknown(fresh_bench: BenchEngine) -> None:
    found = run(fresh_bench, "off")
    assert found.energy_joules is None
    assert found.peak_memory_bytes is not None and found.peak_memory_bytes > 10 * 2**20


def test_an_arm_learns_apart_from_the_others(fresh_bench: BenchEngine) -> None:
    one, other = own_controller(fresh_bench), own_controller(fresh_bench)
    EngineRunner(fresh_bench, one, "draft_model", 3).run(CASE, SamplingParams(), 16)
    assert one.acceptance.estimate("draft_model", "model", Situation(0)).evidence > 0
    assert other.acceptance.estimate("draft_model", "model", Situation(0)).evidence == 0
    assert (
        fresh_bench.controller.acceptance.estimate("draft_model", "model", Situation(0)).evidence
        == 0
    )


def test_forgetting_empties_every_cache(fresh_bench: BenchEngine) -> None:
    run(fresh_bench, "draft_model", 3)
    empty_caches(fresh_bench.engine, CASE.prompt)
    draft = fresh_bench.engine.drafters["draft_model"]
    assert isinstance(draft, DraftModelDrafter)
    assert fresh_bench.engine.target.cache.length == 0
    draft.model.cache.reuse(list(CASE.prompt))
    assert draft.model.cache.length == 0


def test_a_drafter_that_shares_the_targets_cache_meets_it_at_the_root(
    fresh_bench: BenchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = fresh_bench.engine.target, list[int]()

    def sharing(self: NgramDrafter, sequence: Any, plan: Any) -> Proposal:
        assert target.cache.tokens == sequence.tokens[:-1]
        target.forward(sequence.tokens[-1:])  # scribbles, as a self-draft does
        seen.append(len(sequence.tokens))
        return Proposal()

    monkeypatch.setattr(NgramDrafter, "propose", sharing)
    empty_caches(fresh_bench.engine, (3, 9, 14, 27, 5))
    assert seen and target.cache.length == 0


def test_a_sampled_run_can_be_made_again(fresh_bench: BenchEngine) -> None:
    case = Case("a", "chat", (3, 9, 14, 27, 5), 11)
    runner = EngineRunner(fresh_bench, fresh_bench.controller, "draft_model", 3)
    one, two = (runner.run(case, case.sampling(0.7), 16) for _ in range(2))
    assert one.decided == two.decided


# -- memory ------------------------------------------------------------------------------------


def test_the_peak_is_the_kernels_mark_since_it_was_restarted(tmp_path: Path) -> None:
    (tmp_path / "clear_refs").touch()
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    gauge = MemoryGauge(tmp_path)
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert gauge.peak_bytes() == 2 * 2**20


def test_where_the_mark_cannot_be_restarted_the_present_size_is_given(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t       1 kB\n")
    found = MemoryGauge(tmp_path / "absent").peak_bytes()
    assert found == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can restart the mark")
def test_a_peak_that_has_passed_is_seen() -> None:
    gauge = MemoryGauge()
    before = gauge.peak_bytes()
    # From the kernel: torch's allocator may take freed memory that the process still holds.
    with mmap(-1, 200_000_000) as memory:
        for _ in range(200):
            memory.write(bytes(1_000_000))
    assert gauge.peak_bytes() - before > 100_000_000
