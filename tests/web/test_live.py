"""The line over the chat and its popover say in words what goes on, and no more than is known."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from localspec.chat.off_reasons import off_now
from localspec.chat.service import Status
from localspec.chat.turn import ReplyRound, TurnView
from localspec.core.backend import DrafterStatus
from localspec.core.decoding import Step
from localspec.core.off_code import OffReason
from localspec.core.turn_stats import NO_GAIN, TurnStats
from localspec.core.units import DASH, compared, gain_words
from localspec.drafters.registry import REGISTRY, label_of
from localspec.machine.sources import DEMO
from localspec.web.live import HardwareLine, badge, footer, live_state
from localspec.web.words import number, rate, time_of_day
from tests.kit.fakes import FakeBackend
from tests.kit.waiting import until
from tests.web.stats.rows import LENIENT, OFF, ROW

LOADED = FakeBackend().describe()
IDLE = Status("ready", "Ready", 3.0, LOADED, (), 0, None)
STATS = TurnStats(
    num_prompt_tokens=10,
    num_output_tokens=50,
    num_steps=12,
    num_drafts=12,
    num_draft_tokens=60,
    num_checked_tokens=48,
    num_accepted_tokens=38,
    decode_ms=500.0,
    plain_decode_ms=1250.0,
    reply_ms=600.0,
    ttft_ms=31.0,
    reason="the small model drafts as you chose.",
    drafted_by={"draft_model": 60},
)
GUESSES = {"draft_model": (38, 48)}


def view(**changes: Any) -> TurnView:
    begun = TurnView("decode", time.monotonic() - 2.0, "chat", stats=STATS, guesses=GUESSES)
    return replace(begun, **changes)


def facts(**changes: Any) -> dict[str, str]:
    """The rows of the popover over such a reply."""
    return dict(live_state(replace(IDLE, reply=view(**changes)))["facts"])


def test_a_pass_without_text_is_a_check_too() -> None:
    """As the last one is, where it only finds the end of the text."""
    shown = (ReplyRound("Hello", 2, 1, ("draft_model",)), ReplyRound(".", 1, 0))
    state = live_state(replace(IDLE, reply=view(rounds=shown)), rounds_from=1)
    assert (len(state["rounds"]), state["num_rounds"]) == (1, 2)
    assert state["num_checks"] == STATS.num_steps > 2


def test_nothing_is_made_up_before_anything_is_known() -> None:
    loading = Status("loading", "loading the draft", 2.5, None, (), 0, None)
    state = live_state(loading)
    assert (state["phase"], state["label"]) == ("loading", "Loading 2 s")
    assert state["facts"] == [("Now", "Loading the draft")]
    assert (state["speed"], state["gain"], state["guesses"]) == (DASH, "", "")
    assert state["model"] == [DASH, ""] and not state["is_demo"]
    assert live_state(loading, wanted="Qwen/Qwen3-8B")["model"] == ["Qwen3-8B", ""]
    unloaded = replace(loading, phase="unloaded")
    assert live_state(unloaded, wanted="Qwen/Qwen3-8B")["model"] == ["No model", ""]


def test_the_line_has_the_model_and_the_figures_of_a_reply() -> None:
    state = live_state(replace(IDLE, reply=view()))
    assert state["model"] == ["demo-12m", "fp32 · draft demo-draft-1m"]
    line = [state[name] for name in ("label", "speed", "gain", "guesses")]
    assert line == ["Writing 2 s", "100", "2.2x faster", "79 % of checked guesses right"]
    assert state["reason"] == "The small model drafts as you chose."
    shipped = replace(LOADED, target=DEMO)
    told = [live_state(replace(IDLE, description=one))["is_demo"] for one in (LOADED, shipped)]
    assert told == [False, True]


def test_the_popover_has_everything_else() -> None:
    assert facts() == {
        "Without drafting": "40 tok/s, measured here",
        "With drafting": "100 tok/s",
        "Writing": "2.5x faster",
        "Whole reply": "2.2x faster",
        "First token": "after 31.0 ms",
        "The small model": "38 of 48 checked guesses right",
        "Text that was guessed": "76 %",
        "Guesses a round": "5.0",
        "Kind of text": "chat",
        "Memory in use": "60 MiB, cpu",
    }


def test_a_reopened_chat_says_what_was_not_read_again() -> None:
    read = replace(STATS, num_prompt_tokens=31_260, prefill_ms=100.0)
    known = replace(read, num_reused_tokens=31_204, num_disk_tokens=31_204)
    told = "31,204 of 31,260 tokens from disk, 55 tokens read at 550 tok/s"
    assert facts(stats=known)["Prompt"] == told
    assert "from memory" in facts(stats=replace(known, num_disk_tokens=0))["Prompt"]
    reading = view(stats=known, phase="prefill", num_read_tokens=31_240)
    label = live_state(replace(IDLE, reply=reading))["label"]
    assert "31,204 of 31,260 tokens from disk" in label
    reading = {"draft_model": 312.0, "eagle": 20.0}
    told = facts(stats=replace(STATS, reading_by=reading))["Reading for guesses"]
    assert told == "The small model 312 ms, the EAGLE head 20.0 ms"
    assert facts(stats=replace(STATS, prefill_ms=90.0))["Prompt"] == "9 tokens read at 100 tok/s"


def test_a_reply_without_a_draft_has_no_gain() -> None:
    none = dict.fromkeys(("num_draft_tokens", "num_drafts", "num_checked_tokens"), 0)
    plain = replace(STATS, drafted_by={}, plain_decode_ms=None, **none)
    state = live_state(replace(IDLE, reply=view(stats=plain, guesses={})))
    assert (state["gain"], state["guesses"]) == ("without drafting", "")
    found = dict(state["facts"])
    assert found["Without drafting"] == "100 tok/s"
    assert not {"With drafting", "Whole reply", "Guesses a round"} & set(found)


def test_guesses_are_credited_to_each_drafter_the_most_busy_first() -> None:
    mixed = {"ngram": (18, 20), "draft_model": (20, 40)}
    named = [name for name in facts(guesses=mixed) if name in ("The small model", "Word lookup")]
    assert named == ["The small model", "Word lookup"]
    assert facts(guesses=mixed)["Word lookup"] == "18 of 20 checked guesses right"


def test_a_reply_under_another_load_says_that_it_cannot_be_compared() -> None:
    busy = replace(STATS, plain_decode_ms=None, no_speedup="load_changed")
    assert live_state(replace(IDLE, reply=view(stats=busy)))["gain"] == "gain not measurable"
    assert facts(stats=busy)["Without drafting"] == "not measurable: the computer was busy"


def test_a_reply_written_beside_others_blames_no_busy_computer() -> None:
    shared = STATS.compared(None, was_shared=True)
    said = "gain not measurable: other replies were written at the same time"
    assert facts(stats=shared)["Whole reply"] == said


def test_where_rounds_are_uneven_what_the_gain_is_at_least_is_said() -> None:
    plain_ms = STATS.decode_ms * 1.79
    uneven = replace(STATS, reply_ms=STATS.decode_ms).compared(None, plain_ms)
    assert uneven.speedup is None and uneven.least_speedup == pytest.approx(1.79)
    assert live_state(replace(IDLE, reply=view(stats=uneven)))["gain"] == "at least 1.7x faster"
    most = 1000 * STATS.num_output_tokens / plain_ms
    assert facts(stats=uneven)["Without drafting"] == f"at most {rate(most)} tok/s"
    for least_ms in (STATS.decode_ms * 1.09, STATS.decode_ms * 0.9):
        even = replace(STATS, reply_ms=STATS.decode_ms).compared(None, least_ms)
        assert live_state(replace(IDLE, reply=view(stats=even)))["gain"] == "gain not measurable"


def test_what_a_gain_is_at_least_is_not_said_of_a_few_tokens_or_beside_the_gain() -> None:
    assert replace(STATS, num_output_tokens=7).compared(None, 9000.0).least_speedup is None
    assert STATS.compared(200.0, 9000.0).least_speedup is None


def test_the_gain_of_a_few_tokens_is_not_said() -> None:
    few = replace(STATS, num_output_tokens=7).compared(200.0)
    assert few.plain_decode_ms == 200.0 and few.speedup is None and few.decode_speedup is None
    assert live_state(replace(IDLE, reply=view(stats=few)))["gain"] == "gain not measurable"
    assert facts(stats=few)["Whole reply"] == "gain not measurable: the reply was short"
    more = replace(STATS, num_output_tokens=8).compared(200.0)
    assert more.no_speedup is None and more.speedup is not None


def test_a_gain_is_said_in_words_and_a_loss_is_no_gain() -> None:
    said = {2.25: "2.2x faster", 1.04: "as fast", 0.98: "as fast", 0.8: "1.2x slower"}
    assert {gain: gain_words(gain) for gain in said} == said
    sentences = [compared(gain) for gain in (1.5, 1.08, 1.0, 0.9)]
    assert sentences == [
        f"{words} without drafting"
        for words in ("1.5x faster than", "1.08x faster than", "as fast as", "1.11x slower than")
    ]
    slower = live_state(replace(IDLE, reply=view(stats=replace(STATS, plain_decode_ms=400.0))))
    assert (slower["gain"], slower["gain_is"]) == ("1.2x slower", "slower")  # 500 of 600 ms
    assert live_state(replace(IDLE, reply=view()))["gain_is"] == "faster"
    even = live_state(replace(IDLE, reply=view(stats=replace(STATS, plain_decode_ms=485.0))))
    assert (even["gain"], even["gain_is"]) == ("as fast", "")  # 585 of 600 ms


def test_one_token_is_one_token() -> None:
    row = ROW | {"num_output_tokens": 1, "continues_message_id": None}
    assert footer(row)[0] == "1 token in 1.25 s"


def test_an_unmeasured_gain_is_not_known() -> None:
    state = live_state(replace(IDLE, reply=view(stats=replace(STATS, plain_decode_ms=None))))
    assert state["gain"] == "gain not known yet"
    assert dict(state["facts"])["Without drafting"] == "not measured yet"


def test_a_reply_of_no_tokens_divides_by_nothing() -> None:
    state = live_state(replace(IDLE, reply=view(stats=TurnStats(num_prompt_tokens=3))))
    assert [state[name] for name in ("speed", "gain", "guesses")] == [DASH, "", ""]


@pytest.mark.parametrize(
    ("phase", "label"), [("prefill", "Reading"), ("decode", "Writing"), ("queued", "Waiting")]
)
def test_each_phase_has_its_word_and_its_seconds_beyond_the_first(phase: Any, label: str) -> None:
    assert live_state(replace(IDLE, reply=view(phase=phase)))["label"] == f"{label} 2 s"
    just = view(phase=phase, started_s=time.monotonic())
    assert live_state(replace(IDLE, reply=just))["label"] == label
    ended = view(phase="done", finish_reason="eos", ended_s=time.monotonic())
    assert live_state(replace(IDLE, reply=ended))["label"] == "Ready"


def test_while_a_long_prompt_is_read_its_share_is_shown() -> None:
    reading = view(phase="prefill", stats=TurnStats(num_prompt_tokens=3000), num_read_tokens=1024)
    assert live_state(replace(IDLE, reply=reading))["label"] == "Reading 34 %"


def test_a_reply_without_drafting_says_why() -> None:
    off = replace(STATS, drafted_by={}, num_draft_tokens=0, reason="Off: Medusa would reach 0.88x.")
    state = live_state(replace(IDLE, reply=view(stats=off)))
    assert state["reason"] == "Off: Medusa would reach 0.88x."
    state = live_state(replace(IDLE, reply=view(stats=replace(off, reason=""))))
    assert state["reason"] == "Without drafting: no round was long enough."


def test_a_command_in_a_refusal_is_shown_as_it_is_to_be_typed() -> None:
    """The name of a drafter in it is no word to be put plainer."""
    train = "Train one: python -m localspec train eagle."
    refused = replace(LOADED, drafters=(DrafterStatus("eagle", False, train),))
    status = replace(IDLE, description=refused, off=off_now(refused, None, was_lost=False))
    said = live_state(status)["reason"]
    assert said == f"No drafter can be used: {label_of('eagle')}: {train}"


def test_the_reason_of_a_reply_is_not_that_of_its_last_rounds() -> None:
    off = OffReason("does_not_pay", "Drafting paused.", "")
    paused = replace(STATS, off=off)
    assert off_now(LOADED, paused, was_lost=False, is_over=False) == off
    assert off_now(LOADED, paused, was_lost=False) is None
    stats = TurnStats(1)
    for drafter, num_drafted in (("draft_model", 4), ("ngram", 2), ("off", 0)):
        step = Step(drafter, num_drafted, 1, 2, 1.0, 1.0, 10)
        stats = stats.plus(step).explained(step, f"Drafting with {drafter}.")
    assert (stats.drafter, stats.reason) == ("draft_model", "Drafting with draft_model.")


def test_a_lossy_reply_is_labelled() -> None:
    lenient = replace(STATS, exact=False, num_lenient_tokens=3)
    state = live_state(replace(IDLE, reply=view(stats=lenient, workload="code")))
    said = "Not exact, as you chose: lenient: 3 of 50 tokens would have been refused."
    assert state["reason"].endswith(said)
    assert badge(LENIENT) == "lenient: 7 of 100 tokens would have been refused"
    assert badge(ROW) == ""


def test_a_draft_model_is_counted_once_however_many_draft_with_it() -> None:
    loaded = IDLE.description
    assert loaded is not None
    own = [replace(one, shares=REGISTRY[one.name].shares) for one in loaded.drafters]
    more = [replace(own[0], name=name) for name in ("draft_tree", "chained")]
    sharing = replace(loaded, drafters=(*own, *more))
    assert sharing.held_bytes == loaded.held_bytes == 49_800_000 + 9_400_000 + 3_400_000 + 40_000
    nothing = replace(loaded, drafters=(), target_bytes=None, kv_bytes=None)
    assert nothing.held_bytes is None


def test_a_zero_has_no_sign() -> None:
    assert [number(value, " J") for value in (-0.04, 0.0, -0.06)] == ["0.0 J", "0.0 J", "-0.1 J"]


def test_a_failed_load_shows_its_sentence() -> None:
    failed = Status("failed", "The folder is missing.", 1.0, None, (), 0, None)
    state = live_state(failed)
    assert state["phase"] == "failed"
    assert "The folder is missing." in state["notices"]


def test_the_line_under_a_reply() -> None:
    speeds = ["writing at 100 tok/s", "1.8x faster than without drafting"]
    assert footer(ROW) == ["100 tokens in 1.25 s", *speeds]
    assert footer(OFF)[1:] == ["writing at 30 tok/s", "without drafting"]
    more = footer({**ROW, "continues_message_id": 3})
    assert more[0] == "100 tokens more in 1.25 s", "the new part's alone"
    assert footer(ROW | {"tokens_per_second": 4.04})[1] == "writing at 4.0 tok/s"
    unknown = ROW | {"speedup": None, "reply_ms": None}
    assert footer(unknown) == ["100 tokens", "writing at 100 tok/s"]
    for why, said in NO_GAIN.items():
        assert footer(unknown | {"no_speedup": why})[2] == said


def test_the_time_of_a_reply_has_its_day_where_that_is_not_today() -> None:
    at, later = (datetime(2026, 1, day, 12, 5, tzinfo=UTC) for day in (2, 4))
    clock = f"{at.astimezone():%H:%M}"
    assert time_of_day(at.isoformat(), at) == clock
    assert time_of_day(at.isoformat(), later) == f"2 Jan 2026, {clock}"
    assert time_of_day("9999-12-31T23:59:59-14:00") == "–", "an older import may have left it"


def test_what_keeps_drafting_off_is_said_with_its_remedy() -> None:
    reason = OffReason("no_memory", "The draft needs 0.9 GiB more.", "Shorten the context.")
    state = live_state(replace(IDLE, off=reason, reply=view()))
    assert state["remedy"] == "Shorten the context."
    assert state["reason"] == "The draft needs 0.9 GiB more."
    assert live_state(IDLE)["remedy"] == ""


def test_the_hardware_line_never_waits_and_is_renewed_when_it_is_old() -> None:
    found, may_answer = ["one GPU"], threading.Event()

    def find() -> str:
        may_answer.wait(5)
        return found[-1]

    line = HardwareLine(find, refresh_s=0.05)
    assert line.line() == ""  # the driver is asleep; nobody waits for it
    may_answer.set()
    until(lambda: line.line() == "one GPU")
    found.append("no GPU")
    until(lambda: line.line() == "no GPU")


def test_a_driver_that_fails_leaves_the_last_line() -> None:
    num_asked, may_answer = 0, threading.Event()

    def find() -> str:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            raise OSError("the driver is gone")
        if num_asked == 3:
            may_answer.wait(5)
        return "one GPU"

    line = HardwareLine(find, refresh_s=0.0)
    until(lambda: line.line() == "one GPU")
    while num_asked < 3:
        assert line.line() == "one GPU"
    assert line.line() == "one GPU"
    may_answer.set()


def test_one_look_is_cheap() -> None:
    """A look happens ten times a second: 200 of them in 0.2 s leave it below 1 % of a core."""
    shown = replace(IDLE, reply=view())
    started_s = time.thread_time()
    for _ in range(200):
        json.dumps(live_state(shown))
    assert time.thread_time() - started_s < 0.2  # 0.01 s
