"""Drafters are judged by each finished reply: exactly, only while nothing waits, without a trace in
any reply; and what they would have gained stays in the log."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localspec.chat.hindsight import Reviews
from localspec.chat.local import LocalBackend
from localspec.controller.hindsight import MOST_TAUGHT
from localspec.core.backend import Request
from localspec.core.decoding import OFF, SamplingParams
from localspec.core.hindsight import Hindsight
from localspec.core.leniency import Typical
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.parts import Parts
from localspec.web.proof.report import report_zip
from localspec.web.stats.selection import Selection
from localspec.web.stats.tab import fill
from tests.kit.fakes import FIVE_WORDS
from tests.kit.local_backend import HELLO, PIECES, backend_of
from tests.kit.services import ask, close, open_service
from tests.kit.tiny import agreeing_draft, tiny_llama, with_cache
from tests.kit.waiting import until

LENGTH = 32
NEVER = threading.Event()
SAMPLED = SamplingParams(temperature=1.0, seed=5)


@pytest.fixture(autouse=True)
def without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's reply takes too little time for a share of it to be the same everywhere."""
    monkeypatch.setattr("localspec.chat.hindsight.SHARE", 1e9)


def backend() -> LocalBackend:
    module = tiny_llama(3, vocab_size=len(PIECES))
    parts = Parts(with_cache(module), with_cache(agreeing_draft(module)))
    makers = (NgramDrafter, DraftModelDrafter)
    return backend_of(parts.target, {make.name: make.build(parts) for make in makers}, 256)


def request(drafter: str = OFF, **facts: Any) -> Request:
    facts = {"sampling": SAMPLED, "ignores_end": True, "max_tokens": LENGTH, **facts}
    return Request(HELLO, drafter=drafter, **facts)


def reply(of: LocalBackend, asked: Request) -> list[Any]:
    return list(of.generate(asked, threading.Event()))


def judged(of: LocalBackend, asked: Request) -> dict[str, Hindsight]:
    return {each.drafter: each for each in of.review(asked, NEVER)}


def with_costs(of: LocalBackend) -> None:
    costs = of.loaded.controller.sampled_costs
    for width in (1, 16):
        costs.set_verify(width, 16, 10.0)
    costs.set_draft_step("draft_model", 16, 1.0)


@pytest.mark.parametrize("name", ["draft_model", "ngram"])
def test_what_is_told_of_a_drafter_is_what_it_does_when_it_is_chosen(name: str) -> None:
    plain, chosen = backend(), backend()
    reply(plain, request())
    result = judged(plain, request())[name]
    stats = reply(chosen, request(name))[-1].stats
    assert stats.num_output_tokens == result.num_output_tokens == LENGTH
    assert (result.num_drafts, result.num_accepted_tokens) == (
        stats.num_drafts,
        stats.num_accepted_tokens,
    )
    assert result.num_accepted_tokens > 0
    assert (result.decode_ms, result.plain_decode_ms) == (None, None), "nothing was measured"


def test_times_are_those_of_the_rounds_by_the_measured_costs() -> None:
    of = backend()
    reply(of, request())
    with_costs(of)  # not before: rounds of a tiny model would correct them
    results = judged(of, request())
    result = results["draft_model"]
    assert result.plain_decode_ms == pytest.approx(10.0 * LENGTH)
    num_rounds = LENGTH - result.num_accepted_tokens
    assert result.decode_ms is not None and result.decode_ms > 10.0 * num_rounds
    read_ms = result.decode_ms - 10.0 * num_rounds - 1.0 * result.num_draft_tokens
    assert 0.0 <= read_ms < 5.0, "what it read of the prompt"
    assert results["ngram"].decode_ms is None, "its step was not measured"


def test_the_next_reply_is_the_same_and_finds_the_draft_warm() -> None:
    one, other = backend(), backend()
    for of in (one, other):
        reply(of, request())
    assert judged(one, request())
    draft: Any = one.loaded.engine.drafters["draft_model"]
    assert draft.model.cache.tokens == one.loaded.engine.target.cache.tokens
    texts = [[chunk.tokens for chunk in reply(of, request("draft_model"))] for of in (one, other)]
    assert texts[0] == texts[1]


def test_a_message_drops_the_review_and_the_reply() -> None:
    of = backend()
    reply(of, request())
    assert not judged(of, request(max_tokens=9)), "it answered another request"
    results = of.review(request(), NEVER)
    next(results)
    reply(of, request(max_tokens=9))
    assert not list(results)
    reply(of, request())
    assert judged(of, request())
    assert not judged(of, request()), "once"


def test_a_cancel_ends_a_review_after_the_forward_under_way() -> None:
    of, cancel, num_forwards = backend(), threading.Event(), 0
    draft: Any = of.loaded.engine.drafters["draft_model"]
    run = draft.model.forward
    reply(of, request(max_tokens=200))

    def forward(*arguments: Any, **more: Any) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        cancel.set()
        logits: torch.Tensor = run(*arguments, **more)
        return logits

    draft.model.forward = forward
    results = list(of.review(request(max_tokens=200), cancel))
    assert num_forwards == 1
    assert all(each.drafter != "draft_model" for each in results)


def test_a_costly_drafter_leaves_time_to_the_others_and_goes_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that moves on by a second each time it is looked at."""
    ticks = count()
    monkeypatch.setattr("localspec.chat.local.Reviews", lambda: Reviews(clock=ticks.__next__))
    of, asked = backend(), request(max_tokens=64)
    names = list[list[str]]()
    for _ in range(2):
        reply_ms = reply(of, asked)[-1].stats.reply_ms
        monkeypatch.setattr("localspec.chat.hindsight.SHARE", 50_000.0 / reply_ms)
        results = list(of.review(asked, NEVER))
        names.append([result.drafter for result in results])
    assert names == [["ngram", "draft_model"], ["draft_model", "ngram"]]


@pytest.mark.parametrize("what", ["SHARE", "SPARED"])
def test_a_review_keeps_to_its_share_and_to_less_on_battery(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    of = backend()
    monkeypatch.setattr(f"localspec.chat.hindsight.{what}", 0.0)
    reply(of, request())
    assert bool(judged(of, request())) == (what == "SPARED")
    unplugged = SimpleNamespace(power_plugged=False)
    monkeypatch.setattr("psutil.sensors_battery", lambda: unplugged, raising=False)
    reply(of, request())
    assert not judged(of, request())


@pytest.mark.parametrize(
    "facts",
    [
        {"sampling": SamplingParams(1.0, seed=5, leniency=Typical())},
        {"max_tokens": 4},
    ],
    ids=["lenient", "short"],
)
def test_a_reply_that_tells_nothing_exactly_is_not_judged_by(facts: dict[str, Any]) -> None:
    of = backend()
    reply(of, request(**facts))
    assert not judged(of, request(**facts))


def test_a_reply_teaches_what_drafters_would_have_got_right_and_no_costs() -> None:
    of = backend()
    controller = of.loaded.controller
    reply(of, request())
    before = controller.snapshot()
    told = judged(of, request())["draft_model"]
    after = controller.snapshot()
    assert {**after, "acceptance": before["acceptance"]} == before, "acceptance alone was learnt"
    records = [row for row in after["acceptance"]["records"] if row["drafter"] == "draft_model"]
    (record,) = records
    rate = told.num_accepted_tokens / told.num_drafts
    assert record["num_rounds"] == pytest.approx(min(told.num_drafts, MOST_TAUGHT), rel=0.1)
    assert record["tokens"] / record["num_rounds"] == pytest.approx(1 + rate, rel=0.1)


def test_rounds_that_a_drafter_really_drafted_are_not_taught_again() -> None:
    of = backend()
    controller = of.loaded.controller
    reply(of, request("draft_model"))
    before = {row["drafter"]: row for row in controller.snapshot()["acceptance"]["records"]}
    assert judged(of, request("draft_model"))["draft_model"].num_output_tokens == LENGTH
    after = {row["drafter"]: row for row in controller.snapshot()["acceptance"]["records"]}
    assert after["draft_model"] == before["draft_model"] and "ngram" in after


# -- the log and the page ---------------------------------------------------------------------

GOOD = Hindsight("draft_model", 40, 10, 40, 30, 100.0, 200.0)
UNTIMED = Hindsight("mtp", 40, 4, 8, 2, None, None)


@pytest.fixture
def judged_folder(tmp_path: Path) -> Iterator[Path]:
    """A log in which two replies judged the drafters."""
    script = replace(FIVE_WORDS, round_s=0.0, hindsight=(GOOD, UNTIMED))
    service, _ = open_service(tmp_path, script)
    for number in (1, 2):
        ask(service, "hi")
        until(lambda: len(service.hindsight(service.turn_rows())) == 2 * number)  # noqa: B023
    close(service)
    yield tmp_path


def test_the_gains_stand_on_stats_and_in_the_report_after_a_restart(judged_folder: Path) -> None:
    service, _ = open_service(judged_folder)
    shown = " ".join(fill(service, Selection("all")))
    assert "What each drafter would have gained" in shown
    packed = report_zip(service, {"scope": "all"})
    report = zipfile.ZipFile(io.BytesIO(packed)).read("report.md").decode()
    assert "| the small model | 2.0x faster | 4.00 | 75 % | 2 | 80 |" in report
    assert "| multi-token prediction | – | 1.50 | 5 % | 2 | 80 |" in report
    assert "| word lookup | – | – | – | 0 | 0 |" in report, "it is loaded and was not judged"
    close(service)


def test_what_judged_a_deleted_turn_goes_with_it(judged_folder: Path) -> None:
    service, _ = open_service(judged_folder)
    service.delete(service.conversations()[0].id)
    service.tidy()
    until(lambda: len(service.store.hindsight.rows([1, 2])) == 2)
    close(service)
