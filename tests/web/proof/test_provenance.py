"""Runs joined are the reply, counts are the log's, and every token says where it came from."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.core.backend import DraftedToken
from localspec.core.decoding import TARGET
from localspec.record.drafted import TokenRecord
from localspec.web.proof.tokens import kind_of, provenance_of

A, R, N = "accepted", "rejected", "not_reached"


def step(drafted: int, accepted: int, tokens: int, drafter: str = "draft_model") -> dict[str, Any]:
    return {
        "drafter": drafter,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_output_tokens": tokens,
        "draft_ms": 1.0,
        "verify_ms": 2.0,
        "context_length": 9,
        "is_probe": 0,
        "filler": None,
    }


def guess(text: str, parent: int, outcome: Any) -> DraftedToken:
    return DraftedToken(1, text, parent, 0.9, outcome)


STEPS = [step(3, 1, 2), step(2, 2, 3, "ngram"), step(0, 0, 1, "off")]
SOURCES = ["draft_model", TARGET, "ngram", "ngram", TARGET, TARGET]
ROUNDS = (
    (guess("The", -1, A), guess(" dog", 0, R), guess(" ran", 1, N)),
    (guess(" sat", -1, A), guess(" on", 0, A)),
    (),
)
TEXT = "The cat sat on it."
LENGTHS = (3, 4, 4, 3, 3, 1)


def found(**changes: Any) -> dict[str, Any]:
    record = TokenRecord(LENGTHS, ROUNDS)
    given: dict[str, Any] = {"text": TEXT, "record": record} | changes
    return provenance_of(given["text"], SOURCES, STEPS, given["record"])


def kinds_of(shown: dict[str, Any]) -> list[str]:
    return [token.kind for run in shown["runs"] for token in run.tokens]


def joined(shown: dict[str, Any]) -> str:
    return "".join(run.text for run in shown["runs"])


def test_every_token_has_its_kind_and_the_counts_are_the_logs() -> None:
    shown = found()
    assert kinds_of(shown) == ["draft", "corrected", "ngram", "ngram", "bonus", "plain"]
    counts = {one["kind"]: one["count"] for one in shown["legend"]}
    assert counts == {"draft": 1, "ngram": 2, "corrected": 1, "bonus": 1, "plain": 1}
    accepted = sum(one["num_accepted_tokens"] for one in STEPS)
    assert sum(counts.get(kind, 0) for kind in ("draft", "self", "ngram")) == accepted
    assert joined(shown) == TEXT


def test_a_refused_guess_says_what_stands_instead() -> None:
    rounds = found()["rounds"]
    assert rounds[0]["missed"] == [{"text": " dog", "instead": " cat", "confidence": 0.9}]
    assert [one["not_reached"] for one in rounds] == [1, 0, 0]


def test_round_names_the_lookup_that_went_on_behind_a_draft() -> None:
    steps = [step(3, 1, 2, "mtp") | {"filler": "ngram"}, *STEPS[1:]]
    rounds = provenance_of(TEXT, SOURCES, steps, TokenRecord(LENGTHS, ROUNDS))["rounds"]
    names = ["multi-token prediction and word lookup", "word lookup"]
    assert [one["drafter"] for one in rounds[:2]] == names


def test_a_refused_sibling_gave_way_to_the_one_taken() -> None:
    rounds = (
        (guess(" a", -1, R), guess(" b", -1, A), guess(" c", 1, A)),
        *ROUNDS[1:],
    )
    steps = [step(3, 2, 3), *STEPS[1:]]
    sources = ["draft_tree", "draft_tree", TARGET, *SOURCES[2:]]
    record = TokenRecord((1, 1, 1, 1, 1, 1, 1), rounds)
    shown = provenance_of("abcdefg", sources, steps, record)
    assert [(one["text"], one["instead"]) for one in shown["rounds"][0]["missed"]] == [(" a", " b")]
    assert kinds_of(shown)[2] == "bonus"  # the path itself came to its end


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("ab\U0001f408cd", (1, 1, 0, 0, 2, 1)),  # an emoji of three tokens over two rounds
        ("\u05d0\u200d\u05d1e\u0301xy", (2, 1, 2, 0, 1, 1)),
        ("a\0b\ufffdc\n", (1, 1, 1, 1, 1, 1)),
        ("abcdef and what a flush left", (1, 1, 1, 1, 1, 1)),
    ],
)
def test_runs_joined_are_the_text_and_no_character_is_cut(
    text: str, lengths: tuple[int, ...]
) -> None:
    shown = found(text=text, record=TokenRecord(lengths, ROUNDS))
    assert joined(shown) == text
    assert sum(len(run.tokens) for run in shown["runs"]) == 6
    assert all(run.text for run in shown["runs"])


def test_a_reply_that_went_on_shows_what_was_there_before() -> None:
    shown = found(text="Before. " + TEXT, record=TokenRecord(LENGTHS, ROUNDS, start=8))
    assert joined(shown) == "Before. " + TEXT
    assert shown["runs"][0].tokens == ()


NAMES = ("draft_tree", "lookahead", "chained", "early_exit", "eagle")


def test_drafters_belong_to_kinds() -> None:
    kinds = {name: kind_of(name) for name in NAMES}
    assert kinds == {
        "draft_tree": "draft",
        "lookahead": "self",
        "chained": "draft",
        "early_exit": "self",
        "eagle": "self",
    }
