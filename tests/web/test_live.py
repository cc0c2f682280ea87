"""The strip says what is going on in words, with a dash for everything unknown."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from localspec.backend import DrafterStatus, OffReason, TurnStats
from localspec.chat.service import Status, TurnView
from localspec.drafters.registry import REGISTRY
from localspec.web.layout import TILES
from localspec.web.live import DASH, HardwareLine, badge, footer, live_state, number, size
from localspec.workloads import REWORK
from tests.fakes import FakeBackend
from tests.web.conftest import until
from tests.web.stats.test_figures import LENIENT, OFF, ROW

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
    reply_ms=600.0,
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
        "speedup": "2.25 ×",
        "acceptance": "63 %",
        "gamma": "4",
        "drafter": "the draft model",
    }
    assert state["speedup_sub"] == "decode 2.50 ×"
    said = "Speculation: on, by the draft model: it was the fastest. Kind of text: chat."
    assert state["reason"] == said


def test_a_reply_without_a_draft_shows_no_speedup() -> None:
    plain = replace(STATS, drafted_by={}, num_draft_tokens=0, num_drafts=0, plain_decode_ms=None)
    state = live_state(replace(IDLE, reply=view(stats=plain)))
    assert (state["speedup"], state["speedup_sub"]) == (DASH, "no draft")
    assert "×" not in footer(OFF) and "without drafting" in footer(OFF)


def test_a_reply_of_several_drafters_names_the_first_and_counts_the_others() -> None:
    mixed = {"ngram": 20, "draft_model": 40}
    state = live_state(replace(IDLE, reply=view(stats=replace(STATS, drafted_by=mixed))))
    assert (state["drafter"], state["drafter_sub"]) == ("the draft model", "+ 1 more: 38 of 60")
    assert "the draft model + 1 more" in footer(ROW | {"drafted_by": mixed})


def test_a_reply_under_another_load_says_that_it_cannot_be_compared() -> None:
    busy = replace(STATS, plain_decode_ms=None, no_speedup="load_changed")
    state = live_state(replace(IDLE, reply=view(stats=busy)))
    assert (state["speedup"], state["speedup_sub"]) == (DASH, "load changed")


def test_a_speedup_below_one_is_no_gain() -> None:
    slower = live_state(replace(IDLE, reply=view(stats=replace(STATS, plain_decode_ms=400.0))))
    assert (slower["speedup"], slower["is_slower"]) == ("0.83 ×", True)  # 500 of 600 ms
    assert live_state(replace(IDLE, reply=view()))["is_slower"] is False


def test_a_look_at_another_drafter_is_not_said_to_be_the_first_ones_reason() -> None:
    look = replace(STATS, reason="A look at ngram: it lost before, things may have changed.")
    said = live_state(replace(IDLE, reply=view(stats=look)))["reason"]
    assert said.startswith(
        "Speculation: on, mostly by the draft model; last a look at n-gram lookup: it lost"
    )


def test_one_token_is_one_token() -> None:
    row = ROW | {"num_output_tokens": 1, "continues_message_id": None}
    assert " 1 token · " in footer(row)


def test_an_unmeasured_speedup_is_a_dash() -> None:
    state = live_state(replace(IDLE, reply=view(stats=replace(STATS, plain_decode_ms=None))))
    assert (state["speedup"], state["speedup_sub"]) == (DASH, "not measured")


def test_a_reply_of_no_tokens_divides_by_nothing() -> None:
    state = live_state(replace(IDLE, reply=view(stats=TurnStats(num_prompt_tokens=3))))
    assert {state[n] for n in ("speed", "speedup", "acceptance", "gamma", "drafter")} == {DASH}


@pytest.mark.parametrize(
    ("phase", "label"),
    [
        ("prefill", "Reading the prompt"),
        ("decode", "Writing"),
        ("queued", "Waiting for other replies"),
    ],
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
        ("interrupted", "Cut short"),
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
    assert badge(LENIENT) == "lenient: 7 of 100 tokens would have been refused"
    assert badge(ROW) == ""


def test_memory_is_the_sum_of_its_parts() -> None:
    state = live_state(IDLE)
    total = 49_800_000 + 9_400_000 + 3_400_000 + 40_000
    assert state["memory"] == size(total) == "59.7 MiB"


def test_a_draft_model_is_counted_once_however_many_draft_with_it() -> None:
    loaded = IDLE.description
    assert loaded is not None
    own = [replace(one, shares=REGISTRY[one.name].shares) for one in loaded.drafters]
    more = [replace(own[0], name=name) for name in ("draft_tree", "chained")]
    sharing = replace(loaded, drafters=(*own, *more))
    assert sharing.held_bytes == loaded.held_bytes == 49_800_000 + 9_400_000 + 3_400_000 + 40_000
    nothing = replace(loaded, drafters=(), target_bytes=None, kv_bytes=None)
    assert nothing.held_bytes is None


def test_nothing_saved_has_no_sign() -> None:
    assert [number(value, " s") for value in (-0.04, 0.0, -0.06)] == ["0.0 s", "0.0 s", "-0.1 s"]


def test_the_last_rounds_of_another_drafter_are_said_to_be_its_own() -> None:
    mixed = replace(STATS, reason="ngram: 1.50x of plain decoding expected.")
    said = live_state(replace(IDLE, reply=view(stats=mixed)))["reason"]
    assert said.startswith("Speculation: on, mostly by the draft model; last n-gram lookup: 1.50x")


def test_a_failed_load_shows_its_sentence() -> None:
    failed = Status("failed", "The folder is missing.", 1.0, None, (), None, 0, None)
    state = live_state(failed)
    assert state["phase"] == "failed"
    assert "The folder is missing." in state["notices"]


def test_the_line_under_a_reply() -> None:
    assert footer(ROW).startswith("100.0 tok/s · 1.80 × · 75 % accepted · γ 4.0 · the draft model")
    assert "without drafting" in footer(OFF) and "×" not in footer(OFF)
    assert " tokens more" in footer({**ROW, "continues_message_id": 3}), "the new part's alone"
    longest = {**ROW, "workload": REWORK, "num_output_tokens": 2048, "ttft_ms": 12_345.0}
    assert len(footer({**longest, "continues_message_id": None})) <= 110, "one line of the page"


def test_off_is_a_state_with_a_code_and_a_remedy() -> None:
    reason = OffReason("no_memory", "The draft needs 0.9 GiB more.", "Shorten the context.")
    state = live_state(replace(IDLE, off=reason, reply=view()))
    assert state["off"] == {"code": "no_memory", "remedy": "Shorten the context."}
    assert state["reason"].startswith("Speculation: off, because the draft needs 0.9 GiB more.")
    assert live_state(IDLE)["off"] is None


def test_the_hardware_line_never_waits_and_is_renewed_when_it_is_old() -> None:
    found = iter(["one GPU", "no GPU"])
    may_answer = threading.Event()

    def find() -> str:
        may_answer.wait(5)
        return next(found)

    line = HardwareLine(find, refresh_s=0.05)
    assert line.line() == ""  # the driver is asleep; nobody waits for it
    may_answer.set()
    until(lambda: line.line() == "one GPU")
    until(lambda: line.line() == "no GPU")


def test_a_driver_that_fails_leaves_the_last_line() -> None:
    def find() -> str:
        raise OSError("the driver is gone")

    line = HardwareLine(find, refresh_s=0.0)
    assert line.line() == ""
    time.sleep(0.05)
    assert line.line() == ""


def test_one_look_at_the_strip_is_cheap() -> None:
    """A look happens ten times a second: 200 of them in 0.2 s leave it below 1 % of a core."""
    shown = replace(IDLE, reply=view())
    started_s = time.process_time()
    for _ in range(200):
        json.dumps(live_state(shown))
    assert time.process_time() - started_s < 0.2
