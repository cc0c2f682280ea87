"""The Stats tab counts turns as ratios of sums and compares with the formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from localspec.core.arithmetic import percentile
from localspec.web.stats import figures as stats
from localspec.web.stats.tab import PANELS
from tests.web.stats.rows import LENIENT, NOTHING, OFF, ROW


def test_several_turns_are_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    summary = stats.summarise([ROW, OFF, NOTHING])
    assert summary.num_turns == 3
    assert summary.tokens_per_second == pytest.approx(190 / 4)
    assert summary.acceptance_rate == pytest.approx(0.75)
    assert summary.speedup == pytest.approx(1.8)  # the turn without a measured baseline is left out
    assert summary.decode_speedup == pytest.approx(2.0)
    assert summary.draft_share == pytest.approx(75 / 190)
    assert summary.mean_accepted_length == pytest.approx(4.0)


def test_a_rate_is_of_the_turns_that_have_both_of_its_numbers() -> None:
    """As of a server that broke off, wrote all at once, or tells no rounds."""
    names = ("num_drafts", "num_draft_tokens", "num_checked_tokens", "num_accepted_tokens")
    no_drafts = dict.fromkeys(names)
    broken_off = ROW | no_drafts | {"decode_ms": None}
    at_once = ROW | no_drafts | {"decode_ms": 0.0}  # as an earlier version logged it
    no_rounds = ROW | {"num_drafts": None, "num_checked_tokens": None, "num_accepted_tokens": 25}
    found = stats.summarise([ROW, broken_off, at_once, no_rounds])
    assert found.num_output_tokens == 400
    assert found.tokens_per_second == pytest.approx(100.0)
    assert (found.acceptance_rate, found.draft_share) == (0.5, 0.5)
    assert found.checked_acceptance_rate == 75 / 80
    assert (found.mean_accepted_length, found.mean_num_draft_tokens) == (4.0, 4.0)


def test_nothing_measured_is_unknown_not_zero() -> None:
    summary = stats.summarise([NOTHING])
    assert summary.tokens_per_second is None and summary.speedup is None
    assert summary.acceptance_rate is None and summary.expected_length is None


@pytest.mark.parametrize(
    ("alpha", "gamma", "length"),
    [(0.5, 1, 1.5), (0.5, 1.5, 1.625), (0.5, 2, 1.75), (0.0, 4, 1.0), (1.0, 4, 5.0)],
)
def test_expected_length_is_the_formula(alpha: float, gamma: float, length: float) -> None:
    found = replace(stats.summarise([]), alpha=alpha, mean_num_draft_tokens=gamma)
    assert found.expected_length == pytest.approx(length)


def test_alpha_counts_the_guesses_that_were_reached() -> None:
    rounds = [
        {"num_draft_tokens": 4, "num_accepted_tokens": 4},  # all taken: 4 reached
        {"num_draft_tokens": 4, "num_accepted_tokens": 1},  # 1 taken, 1 refused: 2 reached
        {"num_draft_tokens": 0, "num_accepted_tokens": 0},
    ]
    assert stats.reached_acceptance(rounds) == pytest.approx(5 / 6)
    assert stats.reached_acceptance([]) is None


@pytest.mark.parametrize(
    ("gain", "said", "band"),
    [
        (1.8, "Your replies came 1.8x faster than without drafting so far (measured on 1 of 2); "
         "the small model brought the most.", "good"),
        (1.05, "came 1.05x faster than without drafting so far", "good"),
        (1.04, "came as fast as without drafting so far (measured on 1 of 2).", "none"),
        (0.96, "came as fast as without drafting", "none"),
        (0.9, "1.11x slower than without drafting so far (measured on 1 of 2). Choose another "
         "drafter, or off", "low"),
    ],
)  # fmt: skip
def test_the_verdict_is_about_the_gain(gain: float, said: str, band: str) -> None:
    """Not about acceptance, which is the higher one of the drafter that brought less."""
    row = ROW | {"plain_reply_ms": 1000.0 * gain, "reply_ms": 1000.0, "acceptance_rate": 0.1}
    rounds = [
        step(1, "draft_model", 8, 2, round_ms=50.0, plain_ms=100.0),
        step(1, "ngram", 4, 4, round_ms=20.0, plain_ms=30.0),
        step(1, "off", 0, 0, round_ms=20.0, plain_ms=900.0),
    ]
    found, sentence = stats.verdict([row, OFF], rounds, "so far")
    assert said in sentence and found == band


def test_without_a_comparison_the_verdict_says_why() -> None:
    busy = ROW | {"plain_reply_ms": None, "speedup": None}
    words = ("was busy", "Nothing was drafted", "copied and imported ones have no")
    for rows, said in zip(([busy, OFF], [OFF], [NOTHING]), words, strict=True):
        band, sentence = stats.verdict(rows, [], "so far")
        assert band == "none" and said in sentence


def test_of_many_turns_the_table_has_the_newest() -> None:
    rows = [ROW] * (stats.MAX_LINES + 7)
    shown = PANELS.turns(stats.turn_table(rows), len(rows))
    assert f"Newest {stats.MAX_LINES} of {stats.MAX_LINES + 7} turns" in shown
    assert shown.count("<tr>") == stats.MAX_LINES + 1


def test_the_table_shows_newest_first_with_dashes_for_unknown() -> None:
    table = stats.turn_table([ROW, OFF, NOTHING])
    assert [line["Turn"] for line in table] == [3, 2, 1]
    by_name = table[1]
    names = ("Gain, whole reply", "Checked guesses right", "Tokens / s")
    assert [by_name[name] for name in names] == ["–", "–", "30.0"]
    assert "0" not in table[0].values()


def test_under_the_verdict_stands_what_was_saved_in_how_many_turns() -> None:
    shown = PANELS.verdict("good", "said", stats.summarise([ROW, OFF, ROW]), 1000.0)
    assert "3 turns, 1.00 s saved" in shown


def test_lenient_turns_are_counted_marked_and_compared_apart() -> None:
    summary = stats.summarise([ROW, LENIENT, NOTHING])
    counted = (summary.num_lenient_turns, summary.num_lenient_tokens)
    assert (*counted, summary.num_lenient_output_tokens) == (1, 7, 100)
    shown = PANELS.verdict("good", "said", summary, 1.0)
    assert "1 turn was lenient: 7 of 100 tokens would have been refused" in shown
    exact = stats.summarise([ROW, NOTHING])
    assert "lenient" not in PANELS.verdict("good", "said", exact, None) + PANELS.figures(exact)
    lines = stats.turn_table([NOTHING, ROW, LENIENT])
    assert [line["Checked"] for line in lines] == [
        "lenient: 7 of 100 tokens would have been refused",
        "exact",
        "–",
    ]
    assert [line["Kind"] for line in lines] == ["code", "chat", "–"]
    assert [stats.arm(row) for row in (ROW, LENIENT)] == [
        "the small model",
        "the small model (lenient)",
    ]


def test_guesses_are_the_drafters_that_made_them() -> None:
    """A turn of two drafters, most of whose guesses are the small model's."""
    rounds = [
        step(1, "draft_model", 14, 7, round_ms=50.0, plain_ms=100.0),
        step(1, "ngram", 7, 7, round_ms=20.0, plain_ms=100.0),
        step(1, "off", 0, 0, round_ms=20.0, plain_ms=20.0),
        step(2, "ngram", 7, 0, round_ms=30.0, plain_ms=None),
    ]
    found = stats.by_drafter([ROW, ROW | {"turn_id": 2}], rounds)
    seen = {
        name: (one.num_turns, one.acceptance_rate, one.decode_speedup, one.speedup)
        for name, one in found.items()
    }
    assert seen == {
        "the small model": (1, 0.5, 2.0, None),
        "word lookup": (2, 0.5, 5.0, None),
        "without drafting": (1, None, None, None),
    }


def test_appended_guesses_are_counted_for_the_lookup_that_appended_them() -> None:
    """Of eight guesses of a chain the first three are the module's; a wrong one ended the copy."""
    filled = step(1, "mtp", 8, 6, round_ms=50.0, plain_ms=100.0)
    alone = step(1, "mtp", 3, 1, round_ms=50.0, plain_ms=100.0)
    rounds = [filled | {"filler": "ngram", "num_filled_tokens": 5}, alone]
    found = stats.by_drafter([ROW], rounds)
    module, lookup = found["multi-token prediction"], found["word lookup"]
    assert (module.acceptance_rate, module.checked_acceptance_rate) == (4 / 6, 4 / 5)
    assert (lookup.acceptance_rate, lookup.checked_acceptance_rate) == (3 / 5, 3 / 4)
    assert (module.decode_speedup, lookup.decode_speedup) == (2.0, None), "rounds of the module"
    assert module.num_output_tokens == 9


def step(
    turn: int, drafter: str, drafted: int, accepted: int, round_ms: float, plain_ms: float | None
) -> dict[str, Any]:
    return {
        "turn_id": turn,
        "drafter": drafter,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_checked_tokens": min(accepted + 1, drafted),
        "num_output_tokens": accepted + 1,
        "draft_ms": round_ms / 2,
        "verify_ms": round_ms / 2,
        "plain_ms": plain_ms,
        "filler": None,
    }


def one_round(turn: int, ms: float | None, tokens: int) -> dict[str, Any]:
    return {"turn_id": turn, "draft_ms": ms, "verify_ms": 0.0, "num_output_tokens": tokens}


WAITED: list[dict[str, Any]] = [
    {"turn_id": 1, "num_draft_tokens": 9, "plain_reply_ms": 3000.0, "reply_ms": 1000.0},
    {"turn_id": 2, "num_draft_tokens": 0, "plain_reply_ms": 500.0, "reply_ms": 1000.0},
    {"turn_id": 3, "num_draft_tokens": None, "plain_reply_ms": None, "reply_ms": None},
]


def test_tokens_of_one_round_arrive_together() -> None:
    rounds = [one_round(1, 30.0, 3), one_round(1, 60.0, 1), one_round(2, 20.0, 1)]
    drafted, plain = stats.with_and_without(WAITED, [*rounds, one_round(3, 99.0, 1)])
    assert drafted.num_tokens == 4 and plain.num_tokens == 1
    assert drafted.between_tokens[0] == pytest.approx(15.0)  # of 0, 0, 30, 60
    assert drafted.between_updates[0] == pytest.approx(45.0)
    assert plain.between_tokens == (20.0, 20.0, 20.0)


def test_an_untimed_or_empty_round_is_left_out() -> None:
    drafted, plain = stats.with_and_without(WAITED, [one_round(1, None, 2), one_round(1, 5.0, 0)])
    assert drafted.num_tokens == 0 and drafted.between_updates == (5.0, 5.0, 5.0)
    assert plain.between_tokens == (None, None, None)
    assert percentile([], 0.5) is None


def test_time_saved_may_be_lost_and_is_unknown_before_measuring() -> None:
    assert stats.saved_ms(WAITED) == pytest.approx(1500)
    assert stats.saved_ms(WAITED[1:2]) == pytest.approx(-500)
    assert stats.saved_ms(WAITED[2:]) is None


def test_nothing_waited_for_is_no_table() -> None:
    none, one = (
        stats.wait_lines(*stats.with_and_without(WAITED, rounds))
        for rounds in ([], [one_round(1, 3.0, 1)])
    )
    assert PANELS.waits(stats.WAIT_COLUMNS, none) == ""
    assert "P95" in PANELS.waits(stats.WAIT_COLUMNS, one)
