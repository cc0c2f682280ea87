"""The distribution test sees a bent distribution, lets a right one pass, and says its limits.

Random numbers come from the seeds of the requests themselves, so every run counts the same.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from localspec.backend import Chunk, Request, TurnStats
from localspec.chat import distribution
from localspec.chat.distribution import (
    ALPHA,
    ENDED,
    Comparison,
    DistributionTest,
    TrialView,
    chi_squared_survival,
    compare,
    corrected,
    pooled,
    sentence,
)
from localspec.core import OFF, SamplingParams
from localspec.web.proof.race_html import trial_html
from tests.fakes import FakeBackend

PASSED = Comparison(0, 0, 4, 0, 2.0, 0.4, 0.6)

SWEEPS = 100  # of 5 replies of each arm to each of 3 prompts


class Dice(FakeBackend):
    """Draws each token from five; `bend` moves weight to the first when drafting. Ends its
    trial after SWEEPS sweeps."""

    def __init__(self, bend: float, accepted: int = 3) -> None:
        super().__init__()
        self.bend, self.accepted = bend, accepted
        self.num_replies = 0

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        self.requests.append(request)
        self.num_replies += 1
        rng = random.Random(request.sampling.seed)
        weights = [1.0 + (0.0 if request.drafter == OFF else self.bend), 1.0, 1.0, 0.6, 0.02]
        tokens = tuple(rng.choices(range(5), weights, k=request.max_tokens))
        accepted = 0 if request.drafter == OFF else self.accepted
        stats = TurnStats(3, num_output_tokens=len(tokens), num_accepted_tokens=accepted)
        yield Chunk("decode", stats, tokens=tokens)
        yield Chunk("done", stats, finish_reason="length")


def trial(backend: Dice, monkeypatch: pytest.MonkeyPatch) -> DistributionTest:
    now = iter(range(10 * SWEEPS))
    monkeypatch.setattr(distribution.time, "monotonic", lambda: float(next(now)))
    # Each sweep asks the clock twice.
    test = DistributionTest(SamplingParams(temperature=1.0), "draft_model", 4, 2.0 * SWEEPS)
    test.run(backend, threading.Event())
    return test


def test_a_right_engine_passes_and_the_limits_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    view = trial(Dice(bend=0.0), monkeypatch).view
    assert view.phase == "done" and view.num_replies >= 15 * (SWEEPS - 2)
    assert not view.is_suspicious, view.smallest
    said = sentence(view)
    assert "no sign that drafting changes" in said and "no proof of equality" in said
    assert "could go unseen" in said


def test_a_bent_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    view = trial(Dice(bend=0.6), monkeypatch).view
    assert view.is_suspicious
    assert "evidence that drafting changes" in sentence(view)
    assert 'data-band="low"' in trial_html(view)


def test_the_drafter_is_named_and_too_few_drafts_are_no_test() -> None:
    few = TrialView("lookahead", "done", 60, share_drafted=0.02, comparisons=(PASSED,))
    assert "drafting by lookahead" in sentence(few)
    assert "only 2.0 % of its tokens were drafted" in sentence(few)
    assert 'data-band="none"' in trial_html(few)
    assert "no sign that drafting" in sentence(replace(few, share_drafted=0.3))
    found = replace(few, comparisons=(replace(PASSED, holm=1e-6),))
    assert "evidence that drafting" in sentence(found), "a fault shows however little was drafted"


def test_without_accepted_drafts_nothing_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    view = trial(Dice(bend=0.0, accepted=0), monkeypatch).view
    assert "hardly tested" in sentence(view)
    assert 'data-band="none"' in trial_html(view)


def test_every_reply_has_a_seed_of_its_own_and_both_arms_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Dice(bend=0.0)
    trial(backend, monkeypatch)
    seeds = [one.sampling.seed for one in backend.requests]
    assert len(set(seeds)) == len(seeds)
    assert [one.drafter for one in backend.requests[:4]] == [OFF, "draft_model"] * 2
    assert {one.num_draft_tokens for one in backend.requests if one.drafter != OFF} == {4}


def test_a_cancel_ends_it_and_compares_what_there_is() -> None:
    cancel = threading.Event()

    class Stops(Dice):
        def generate(self, request: Request, cancel_: threading.Event) -> Iterator[Chunk]:
            if self.num_replies == 120:
                cancel.set()
            return super().generate(request, cancel_)

    test = DistributionTest(SamplingParams(temperature=1.0), "draft_model", 4, 60.0)
    test.run(Stops(0.0), cancel)
    assert test.view.phase == "cancelled" and len(test.view.comparisons) == 18


@pytest.mark.parametrize(
    ("statistic", "degrees", "p"),
    [
        (3.841, 1, 0.05),
        (6.635, 1, 0.01),
        (18.307, 10, 0.05),
        (2.558, 10, 0.99),
        (124.342, 100, 0.05),
    ],
)
def test_the_survival_function_agrees_with_the_tables(
    statistic: float, degrees: int, p: float
) -> None:
    assert chi_squared_survival(statistic, degrees) == pytest.approx(p, rel=2e-3)
    assert chi_squared_survival(0.0, degrees) == 1.0


def test_rare_tokens_are_pooled_by_both_arms_together() -> None:
    plain = {1: 40, 2: 50, 7: 3, 8: 2, ENDED: 5}
    drafted = {1: 45, 2: 46, 7: 1, 9: 8}
    classes, num_pooled = pooled(plain, drafted)
    assert num_pooled == 4  # 7, 8, 9 and the ended ones
    assert (10, 9) in classes and len(classes) == 3
    assert sum(a for a, _ in classes) == 100 and sum(b for _, b in classes) == 100


def test_rare_tokens_that_are_too_few_together_join_the_rarest_class() -> None:
    classes, num_pooled = pooled({1: 60, 2: 39, 7: 1}, {1: 60, 2: 40})
    assert sorted(classes) == [(40, 40), (60, 60)] and num_pooled == 2


def test_a_place_with_one_class_tests_nothing() -> None:
    found = compare(0, 0, {4: 100}, {4: 100})
    assert found.p_value is None
    assert corrected([found])[0].holm is None


def test_holms_correction_never_falls_with_rank() -> None:
    found = [
        compare(0, place, {1: 50, 2: 50}, {1: 50 + place, 2: 50 - place}) for place in range(9)
    ]
    tested = sorted(corrected(found), key=lambda one: one.p_value or 0.0)
    assert tested[0].holm == pytest.approx(min(1.0, 9 * (tested[0].p_value or 0.0)))
    assert [one.holm for one in tested] == sorted(one.holm or 0.0 for one in tested)


def test_false_alarms_are_as_rare_as_said() -> None:
    """200 right comparisons of 12 places; at ALPHA = 0.01 more than 9 alarms have p < 1e-4."""
    rng = random.Random(7)
    alarms = 0
    for _ in range(200):
        found = []
        for place in range(12):
            arms: list[dict[int, int]] = [{}, {}]
            for arm in arms:
                for token in rng.choices(range(6), [5, 4, 3, 2, 1, 0.1], k=150):
                    arm[token] = arm.get(token, 0) + 1
            found.append(compare(0, place, *arms))
        alarms += any((one.holm or 1.0) < ALPHA for one in corrected(found))
    assert alarms <= 9
