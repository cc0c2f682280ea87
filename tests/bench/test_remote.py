"""The throughput test of a server: what it counts, compares and advises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from localspec.bench.cases import Prompt
from localspec.bench.remote import run_remote
from localspec.bench.remote_report import render_remote
from localspec.core.backend import Message, Request
from localspec.core.decoding import SamplingParams
from localspec.core.errors import ConfigError
from localspec.core.options import RemoteServer
from localspec.remote.server import ServerBackend
from tests.kit.stub_server import Stub, reset, serve_stub

PROMPTS = [Prompt(f"p{number}", "qa", f"Question {number}?") for number in range(6)]


@pytest.fixture(scope="module")
def pair_of_file() -> Iterator[tuple[Stub, Stub]]:
    with serve_stub() as one, serve_stub() as other:
        yield one, other


@pytest.fixture
def stub_pair(pair_of_file: tuple[Stub, Stub]) -> tuple[Stub, Stub]:
    for stub in pair_of_file:
        reset(stub)
    return pair_of_file


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub counts a reply before it ends it."""
    monkeypatch.setattr("localspec.bench.remote.LOOK_S", 0.0)


def measured(*stubs: Stub, **more: Any) -> dict[str, Any]:
    usual = {"prompts": PROMPTS, "concurrencies": [1, 3], "max_tokens": 8, "temperature": 0.0}
    servers = [RemoteServer(stub.url) for stub in stubs]
    return run_remote(servers, **{**usual, **more}, say=lambda phrase: None)


@pytest.mark.slow
def test_every_prompt_is_asked_of_both_at_every_load(stub_pair: tuple[Stub, Stub]) -> None:
    drafting, plain = stub_pair
    plain.drafted = (0, 0, 0)
    result = measured(drafting, plain)
    rows = result["rows"]
    assert [(row["server"], row["concurrency"]) for row in rows] == [
        ("speculative", 1), ("plain", 1), ("speculative", 3), ("plain", 3),
    ]  # fmt: skip
    for row in rows:
        assert (row["num_requests"], row["num_failed"]) == (6, 0), row["faults"]
        assert row["tokens_per_second"] == pytest.approx(18 / row["seconds"])
        assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"]
    assert [row["num_draft_tokens"] for row in rows] == [72, 0, 72, 0], "warm requests are apart"
    assert rows[0]["acceptance_rate"] == 0.5
    assert rows[0]["mean_accepted_length"] == 2.5
    gains = [row["speedup"] for row in rows]
    assert gains[1] is gains[3] is None
    assert gains[0] == pytest.approx(rows[0]["tokens_per_second"] / rows[1]["tokens_per_second"])
    assert len(drafting.bodies) == len(plain.bodies) == (2 + 6) + (3 + 6)
    asked = [body["messages"][0]["content"] for body in drafting.bodies]
    assert not set(asked[:2]) & set(asked[2:8]), "no prompt stands in a cache"
    assert [row["num_differing"] for row in rows] == [0, 0, 0, 0]
    assert [row["of_one_at_a_time_low"] for row in rows] == [None] * 4, "one run has no interval"
    assert "times plain" in render_remote(result)


@pytest.mark.slow
def test_arms_take_turns_as_often_as_is_asked_for_with_other_seeds(
    stub_pair: tuple[Stub, Stub],
) -> None:
    drafting, plain = stub_pair
    plain.words = ("Rain", " fell", ".")
    result = measured(drafting, plain, concurrencies=[1], repeats=2, prompts=PROMPTS[:2])
    row, _ = result["rows"]
    assert (row["num_requests"], row["num_draft_tokens"], row["num_differing"]) == (4, 48, 4)
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    assert row["speedup"] == row["of_one_at_a_time"], "without speculation one at a time"
    seeds = [body["seed"] for body in drafting.bodies]
    assert seeds[2:4] == [seed - 1 for seed in seeds[6:8]]
    assert f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}" in render_remote(result)


@pytest.mark.slow
def test_a_localspec_server_is_asked_for_both_ways(stub_pair: tuple[Stub, Stub]) -> None:
    stub_pair[0].owned_by = "localspec"
    result = measured(stub_pair[0], concurrencies=[2])
    assert [row["server"] for row in result["rows"]] == ["speculative", "plain"]
    assert [body.get("drafter") for body in stub_pair[0].bodies] == [None] * 8 + ["off"] * 8


@pytest.mark.slow
def test_counters_that_somebody_else_moved_are_not_used(stub_pair: tuple[Stub, Stub]) -> None:
    stub_pair[0].others = 1
    row = measured(stub_pair[0], concurrencies=[1])["rows"][0]
    assert row["num_draft_tokens"] is row["acceptance_rate"] is None


@pytest.mark.slow
def test_counters_that_never_stand_still_hold_up_no_test(
    stub_pair: tuple[Stub, Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others use the server all the time: it was waited for without end."""
    told = stub_pair[0].metrics

    def moved() -> str:
        stub_pair[0].finish()
        return told()

    monkeypatch.setattr(stub_pair[0], "metrics", moved)
    monkeypatch.setattr("localspec.bench.remote.MOST_LOOKS", 3)
    row = measured(stub_pair[0], concurrencies=[1])["rows"][0]
    assert row["num_failed"] == 0 and row["num_draft_tokens"] is None


@pytest.mark.slow
def test_failures_are_counted_and_told(stub_pair: tuple[Stub, Stub]) -> None:
    stub_pair[0].fault = (500, "no memory")
    result = measured(stub_pair[0], concurrencies=[2])
    assert result["rows"][0]["num_failed"] == 6
    assert result["rows"][0]["ttft_ms"] is None
    assert "no memory" in render_remote(result)


@pytest.mark.slow
@pytest.mark.parametrize(("accepted", "words"), [(10, "more spec"), (6, "usual"), (1, "thrown")])
def test_the_advice_goes_by_acceptance(
    stub_pair: tuple[Stub, Stub], accepted: int, words: str
) -> None:
    stub_pair[0].drafted = (4, 12, accepted)
    assert words in measured(stub_pair[0], concurrencies=[1])["advice"][0]


@pytest.mark.slow
def test_sglang_gets_all_prompts_as_one_batch_too(stub_pair: tuple[Stub, Stub]) -> None:
    stub_pair[0].owned_by = "sglang"
    row = measured(stub_pair[0], concurrencies=[2])["rows"][0]
    assert row["batch"]["acceptance_rate"] == 0.5
    body = stub_pair[0].bodies[-1]
    assert body["path"] == "/generate"
    assert body["text"] == [prompt.text for prompt in PROMPTS]
    assert body["sampling_params"][0]["max_new_tokens"] == 8


def test_the_replies_of_a_batch_come_in_order(stub_pair: tuple[Stub, Stub]) -> None:
    stub_pair[0].owned_by = "sglang"
    requests = [
        Request((Message("user", text),), SamplingParams(seed=3), 5, stop=("\n",))
        for text in ("a", "b")
    ]
    with closing(ServerBackend(RemoteServer(stub_pair[0].url))) as backend:
        found = backend.generate_batch(requests)
    assert found is not None
    assert [one.text for one in found] == ["To a", "To b"]
    assert found[0].drafts is not None
    assert (found[0].num_output_tokens, found[0].drafts.num_accepted_tokens) == (6, 4)
    wanted = {"sampling_seed": 3, "stop": ["\n"], "top_k": -1, "temperature": 0.0}
    asked = stub_pair[0].bodies[-1]["sampling_params"][1]
    assert {name: asked[name] for name in wanted} == wanted


def test_a_test_of_nothing_is_refused(stub_pair: tuple[Stub, Stub]) -> None:
    with pytest.raises(ConfigError, match="prompts"):
        measured(stub_pair[0], prompts=[])
    with pytest.raises(ConfigError, match="concurrency"):
        measured(stub_pair[0], concurrencies=[0])
