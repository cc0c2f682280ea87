"""The strip says what is going on in words, with a dash for everything unknown."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from localspec.backend import DrafterStatus, TurnStats
from localspec.chat.service import Status, TurnView
from localspec.web.live import DASH, TILES, badge, footer, live_state, size
from tests.fakes import FakeBackend
from tests.web.test_stats import LENIENT, OFF, ROW

LOADED = FakeBackend().describe()
IDLE = Status("ready", "Ready", 3.0, LOADED, (), 1, 0, None)
STATS = TurnStats(
    num_prompt_tokens=10,
    num_output_tokens=50,
    num_steps=12,
    num_drafts=12,
    num_draft_tokens=60,
    num_accepted_tokens=38,
    decode_ms=500.0,
    plain_decode_ms=1250.0,
    ttft_ms=31.0,
    reason="it was the fastest",
    drafted_by={"draft_model": 60},
)


def view(**changes: Any) -> TurnView:
    return replace(TurnView("decode", time.monotonic() - 2.0, "chat", stats=STATS), **changes)


def test_every_tile_has_a_figure_before_anything_is_known() -> None:
    state = live_state(Status("loading", "Loading the draft", 2.5, None, (), None, 0, None))
    assert (state["phase"], state["label"], state["clock"]) == (
        "loading",
        "Loading the draft",
        "2.5 s",
    )
    assert {state[name] for name, _, _ in TILES} == {DASH}


def test_the_figures_of_a_reply() -> None:
    state = live_state(replace(IDLE, reply=view(last_num_draft_tokens=4)))
    shown = {name: state[name] for name in ("speed", "speedup", "acceptance", "gamma", "drafter")}
    assert shown == {
        "speed": "100.0",
        "speedup": "2.50 ×",
        "acceptance": "63 %",
        "gamma": "4",
        "drafter": "draft_model",
    }
    said = "Speculation: on, by draft_model: it was the fastest. Kind of text: chat."
    assert state["reason"] == said


def test_an_unmeasured_speedup_is_a_dash() -> None:
    state = live_state(replace(IDLE, reply=view(stats=replace(STATS, plain_decode_ms=None))))
    assert (state["speedup"], state["speedup_sub"]) == (DASH, "not measured yet")


def test_a_reply_of_no_tokens_divides_by_nothing() -> None:
    state = live_state(replace(IDLE, reply=view(stats=TurnStats(num_prompt_tokens=3))))
    assert {state[n] for n in ("speed", "speedup", "acceptance", "gamma", "drafter")} == {DASH}


@pytest.mark.parametrize(
    ("phase", "label"),
    [("prefill", "Reading the prompt"), ("decode", "Writing"), ("queued", "Waiting its turn")],
)
def test_each_phase_has_its_words_and_a_clock(phase: Any, label: str) -> None:
    state = live_state(replace(IDLE, reply=view(phase=phase)))
    assert state["label"] == label
    assert float(state["clock"].split()[0]) >= 2.0


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("eos", "Done"),
        ("length", "Done (max tokens)"),
        ("cancelled", "Stopped"),
        ("error", "Failed"),
    ],
)
def test_the_ending_is_named(reason: Any, word: str) -> None:
    ended = view(phase="done", finish_reason=reason, ended_s=time.monotonic())
    assert live_state(replace(IDLE, reply=ended))["label"] == word


def test_speculation_that_is_off_says_why() -> None:
    off = replace(STATS, drafted_by={}, num_draft_tokens=0, reason="it lost here by 12 %")
    state = live_state(replace(IDLE, reply=view(stats=off)))
    assert state["reason"] == "Speculation: off, because it lost here by 12 %. Kind of text: chat."
    off = replace(off, reason="Off this round: No drafter has anything to propose.")
    state = live_state(replace(IDLE, reply=view(stats=off)))
    assert state["reason"].startswith(
        "Speculation: off, because no drafter has anything to propose."
    )
    refused = replace(LOADED, drafters=(DrafterStatus("ngram", False, "you forbade it"),))
    state = live_state(replace(IDLE, description=refused))
    assert (
        state["reason"].startswith("Speculation: off, because") and "you forbade" in state["reason"]
    )


def test_a_lossy_reply_is_labelled() -> None:
    lenient = replace(STATS, exact=False, num_lenient_tokens=3)
    state = live_state(replace(IDLE, reply=view(stats=lenient, workload="code")))
    said = "Not exact, as you chose: lenient: 3 of 50 tokens would have been refused."
    assert f"{said} Kind of text: code." in state["reason"]
    assert (state["workload"], state["is_exact"], state["num_lenient_tokens"]) == ("code", False, 3)
    assert badge(LENIENT) == "lenient: 7 of 100 tokens would have been refused"
    assert badge(ROW) == ""


def test_memory_is_the_sum_of_its_parts() -> None:
    state = live_state(IDLE)
    total = 49_800_000 + 9_400_000 + 3_400_000 + 40_000
    assert state["memory"] == size(total) == "59.7 MiB"


def test_a_failed_load_shows_its_sentence() -> None:
    failed = Status("failed", "The folder is missing.", 1.0, None, (), None, 0, None)
    state = live_state(failed)
    assert state["phase"] == "failed"
    assert "The folder is missing." in state["notices"]


def test_the_line_under_a_reply() -> None:
    assert footer(ROW).startswith(
        "100.0 tok/s · 2.00 × plain · 75 % accepted · γ 4.0 · draft_model"
    )
    assert "no drafting" in footer(OFF) and "×" not in footer(OFF)
