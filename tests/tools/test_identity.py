"""The count of replies that differ: right where all are alike, and where one is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localspec.bench.cases import Case
from localspec.core.decoding import AUTO, OFF
from localspec.core.errors import ConfigError
from tests.kit.tiny_bench import captured_engine, tiny_bench
from tests.kit.tracing import TracingPool
from tools.identity import RANDOM, Count, Written, digests_of, replies, table

CASE = Case("a", "chat", (5, 9, 5, 9, 5), seed=7)


def counted(case: Case, order: int, earlier: dict[str, str] | None = None) -> Count:
    count, bench = Count(earlier or {}), tiny_bench()
    for written in replies(bench, case, 0.7, max_tokens=12, order=order):
        count.take(written)
    return count


@pytest.mark.slow
def test_every_arm_writes_the_same_reply_in_any_order_and_after_a_restart() -> None:
    first = counted(CASE, order=0)
    again = counted(CASE, order=1, earlier=first.digests)
    found = again.as_json()
    assert found["num_replies"] == len((OFF, AUTO, RANDOM, "ngram", "draft_model"))
    assert found["accepted_by_arm"]["draft_model"] > 0
    assert (found["num_differing"], found["num_other_than_earlier"]) == (0, 0)


@pytest.mark.slow
def test_every_arm_replays_graphs() -> None:
    pool = TracingPool()
    bench = tiny_bench(captured_engine(pool))
    for written in replies(bench, CASE, 0.7, max_tokens=12, order=0):
        replayed, pool.num_replays = pool.num_replays, 0
        assert replayed >= 5, written.arm
    assert pool.num_captures


@pytest.mark.slow
def test_a_reply_with_another_seed_is_counted_as_other_than_the_earlier_one() -> None:
    first = counted(CASE, order=0)
    again = counted(replace(CASE, seed=8), order=0, earlier=first.digests)
    assert again.num_other_than_earlier == again.num_replies


@pytest.mark.parametrize("place_of_plain", [0, 1, 2])
def test_a_differing_reply_is_counted_whenever_plain_decoding_came(place_of_plain: int) -> None:
    arms = ["ngram", "medusa"]
    arms.insert(place_of_plain, OFF)
    count = Count({})
    for key in ("a T 0", "b T 0"):
        for arm in arms:
            is_wrong = arm == "medusa" and key == "b T 0"
            count.take(Written(key, arm, (1, 2, 4 if is_wrong else 3), 2))
    found = count.as_json()
    assert (found["num_differing"], found["num_replies"]) == (1, 6)
    assert found["differing_by_arm"] == {"medusa": 1, "ngram": 0, OFF: 0}
    assert "1 differ from plain decoding." in table({**found, "num_prompts": 2})


def test_a_file_that_holds_no_digests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no digests"):
        digests_of(tmp_path / "other.json")
