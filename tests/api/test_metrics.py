"""What /metrics counts is what the log says of the same turns."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from localspec.chat.service import ReplySettings
from localspec.core.backend import Chunk, Description, Request, Server
from tests.api.doors import Doors, scripted_pace, scripted_reply, serve_interfaces
from tests.kit.fakes import FakeBackend, Script
from tests.kit.waiting import until

BOARD = Path(__file__).resolve().parents[2] / "assets" / "grafana" / "localspec.json"


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Doors]:
    """A server that has answered nothing."""
    with serve_interfaces(
        FakeBackend(Script(reply=scripted_reply, round_s=scripted_pace)), tmp_path
    ) as one:
        yield one


def read(doors: Doors) -> dict[str, float]:
    """Sums over all labels, by name of the sample."""
    with doors.http() as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@pytest.mark.slow
def test_the_counters_are_the_logs_of_pages_and_programs(fresh: Doors) -> None:
    assert read(fresh)["vllm:request_success_total"] == 0
    with fresh.openai() as client:
        for text in ("Count.", "Count again."):
            client.chat.completions.create(
                model="demo-12m", messages=[{"role": "user", "content": text}]
            )
    reply = fresh.service.submit(None, "Count on the page.", ReplySettings())
    assert reply is not None and reply.done.wait(20) and fresh.service.flush()
    found = until(lambda: (now := read(fresh))["vllm:request_success_total"] == 3 and now)
    rows = fresh.service.turn_rows()

    def summed(name: str) -> float:
        return sum(row[name] for row in rows)

    assert found["vllm:generation_tokens_total"] == summed("num_output_tokens")
    assert found["vllm:prompt_tokens_total"] == summed("num_prompt_tokens")
    assert found["vllm:spec_decode_num_drafts_total"] == summed("num_drafts")
    assert found["vllm:spec_decode_num_draft_tokens_total"] == summed("num_draft_tokens")
    accepted = summed("num_accepted_tokens")
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == accepted > 0
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted
    assert found["localspec:accepted_tokens_total"] == accepted
    assert found["localspec:rejected_tokens_total"] == summed("num_draft_tokens") - accepted
    assert found["localspec:draft_length_tokens_count"] == summed("num_drafts")
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == summed("num_output_tokens") - 3
    speedup = found["localspec:plain_reply_seconds_total"]
    speedup /= found["localspec:compared_reply_seconds_total"]
    assert speedup == pytest.approx(summed("plain_reply_ms") / summed("reply_ms"))
    assert found["localspec:memory_bytes"] > 50e6
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0


def test_counters_begin_at_0_and_every_metric_names_its_model(fresh: Doors) -> None:
    with fresh.http() as client:
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    samples = [one for family in families for one in family.samples]
    for sample in samples:
        assert (sample.labels["model_name"], sample.labels["engine"]) == ("demo-12m", "0"), sample
    counts = [one for one in samples if one.name.endswith(("_total", "_count"))]
    assert {one.value for one in counts} == {0}
    names = {one.name for one in counts}
    assert {"vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"} <= names
    labels = [one.labels for one in counts]
    assert {one.get("finished_reason") for one in labels} >= {"stop", "length", "abort", "error"}
    assert {one.get("drafter") for one in labels} == {None, "draft_model", "ngram"}
    assert not [one for one in names if "energy" in one], "whether the card tells it is not known"


def test_a_reply_that_failed_or_was_stopped_counts_as_such(fresh: Doors) -> None:
    with fresh.openai() as client:
        stream = client.chat.completions.create(
            model="demo-12m", messages=[{"role": "user", "content": "endless slow"}], stream=True
        )
        next(iter(stream))
        assert read(fresh)["vllm:num_requests_running"] == 1
        stream.close()
    until(lambda: read(fresh).get("vllm:request_success_total") == 1)
    with fresh.http() as http:
        assert 'finished_reason="abort"' in http.get("/metrics").text


class Reticent(FakeBackend):
    """A server that tells how long a prompt is, and not how much of it was known before."""

    def describe(self) -> Description:
        return replace(super().describe(), server=Server("vLLM 1", "http://x.test", ("demo-12m",)))

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        for chunk in super().generate(request, cancel):
            untold = frozenset({"num_reused_tokens", "num_output_tokens", "decode_ms"})
            yield replace(chunk, stats=replace(chunk.stats, untold=untold))


@pytest.mark.slow
def test_what_a_server_does_not_tell_is_not_counted(tmp_path: Path) -> None:
    with serve_interfaces(Reticent(Script(reply=scripted_reply)), tmp_path) as doors:
        reply = doors.service.submit(None, "Count.", ReplySettings())
        assert reply is not None and reply.done.wait(20)
        found = until(lambda: (now := read(doors)).get("vllm:request_success_total") == 1 and now)
    assert found["vllm:prompt_tokens_total"] > 0
    untold = ("prefix_cache", "generation_tokens_total", "request_decode_time_seconds")
    assert not [name for name in found for each in untold if each in name]


def test_the_board_asks_for_metrics_that_there_are(fresh: Doors) -> None:
    with fresh.openai() as client:
        client.chat.completions.create(
            model="demo-12m", messages=[{"role": "user", "content": "Count."}]
        )
    until(lambda: read(fresh).get("vllm:request_success_total") == 1)
    known = {*read(fresh), "localspec:energy_joules_total"}
    asked = set(re.findall(r"(?:vllm|localspec):\w+", BOARD.read_text("utf-8")))
    assert asked - known == set() and len(asked) > 12
    titles = [panel["title"] for panel in json.loads(BOARD.read_text("utf-8"))["panels"]]
    assert {"Accepted tokens", "Rejected tokens", "Acceptance rate"} <= set(titles)
