"""Kinds of text: what a file may say, what a message looks like, and that no kind is ever lenient
unless a person asked for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localspec.core.config import settings_for
from localspec.core.decoding import AUTO
from localspec.core.errors import ConfigError, RequestError
from localspec.core.leniency import Factor, Threshold, Typical
from localspec.core.workloads import (
    AS_SET,
    EXACT,
    Workload,
    decide,
    load_workload,
    load_workloads,
    recognise,
    workload_folders,
)

SHIPPED = load_workloads()


def written(folder: Path, text: str, name: str = "code") -> Path:
    path = folder / "profiles" / "workloads" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_kinds_have_their_thresholds_and_none_is_lenient() -> None:
    thresholds = {name: kind.threshold for name, kind in SHIPPED.items()}
    assert thresholds == {"chat": None, "code": 0.75, "json": 0.65, "rework": None, "story": 0.5}
    assert not any(kind.lenient for kind in SHIPPED.values())
    assert all(kind.first_num_draft_tokens for kind in SHIPPED.values())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("What is speculative decoding?", "chat"),
        ("hi", "chat"),
        ("", "chat"),
        ("Write a function that sorts a list", "code"),
        ("fix the off-by-one bug in this", "code"),
        ("```\nx = 1\n```\nwhat does it print?", "code"),
        ("def add(a, b):\n    return a + b", "code"),
        ("class Stack(list):\n    pass", "code"),
        ("import os, sys as s\nos.getcwd()", "code"),
        ("import { useState } from 'react'", "code"),
        ("from os import path", "code"),
        ("#include <stdio.h>", "code"),
        ("func (s *Stack) Push(x int) {", "code"),
        ("fn main() {", "code"),
        ("public static void main(String[] args)", "code"),
        ("let mut total: u32 = 0;", "code"),
        ("How do I read a file in Python?", "code"),
        ("Give me three users as JSON with name and age", "json"),
        ('{"name": "Ann"}', "json"),
        ("write a Python function that reads json", "json"),  # the first sign wins
        ("Tell me a short story about a fox", "story"),
        ("Once upon a time there was", "story"),
        ("Write a poem on rain", "story"),
        ("Summarise this text in two sentences:\n\nThe village lies in a valley.", "rework"),
        ("Repeat this text word for word:\nThe lamp is lit by hand.", "rework"),
        ("Translate German to English: Guten Morgen", "rework"),
        ("Rewrite the note in capital letters\n\nFile `a.txt`:\n\n```\nBuy milk.\n```", "rework"),
        ("What is this?\n\nFile `a.py`:\n\n```\ndef f(x):\n    pass\n```", "code"),
        ("What is this about?\n\n" + "The bees live in a hive. " * 20, "rework"),
        ("Write a summary of this story in three sentences:\nNora found a key.", "rework"),
        ("What does this do?\n```\n" + "x = x + 1\n" * 40 + "```", "code"),
        ("The class was a success, and so was the story of it.", "chat"),
        ("I read a novel yesterday. Was that wise?", "chat"),
        ("Who pays\nimport duties on steel?", "chat"),
        ("Import duties", "chat"),
        ("The first\nclass begins at nine:\nlet me know who comes", "chat"),
        ("from Monday on\npublic transport (buses) is free", "chat"),
        ("fn keys and\nvar is a region of France", "chat"),
    ],
)
def test_a_message_is_recognised_by_its_signs(text: str, kind: str) -> None:
    assert recognise(text) == kind


@pytest.mark.slow
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("unit", "kind"),
    [("w", "rework"), ("\n", "chat"), ("a(", "rework"), ("\n\nFile `a`:\n\n```\n", "rework")],
)
def test_the_time_to_recognise_does_not_grow_with_the_square_of_a_text(
    unit: str, kind: str
) -> None:
    assert recognise("Is this long?\n" + unit * 500_000) == kind


@pytest.mark.parametrize("text", ["My Java mug broke.", "json", "Write a poem", "{}[]", "x" * 9000])
def test_a_wrong_guess_does_no_harm(text: str) -> None:
    """Whatever is recognised, the reply stays exact and the draft length within bounds."""
    decision = decide(SHIPPED, AUTO, AS_SET, text)
    assert decision.is_recognised and decision.leniency is None
    assert 1 <= (decision.workload.first_num_draft_tokens or 1) <= 15


@pytest.mark.parametrize("name", [AUTO, *SHIPPED])
@pytest.mark.parametrize("checking", [AS_SET, EXACT])
def test_naming_a_kind_never_turns_leniency_on(name: str, checking: str) -> None:
    assert decide(SHIPPED, name, checking, "write a function").leniency is None


def test_leniency_is_what_was_asked_for() -> None:
    text = "write a function"
    found = {
        asked: decide(SHIPPED, "code", asked, text).leniency
        for asked in ("threshold", "threshold:0.9", "typical", "factor:3")
    }
    assert found == {
        "threshold": Threshold(0.75),
        "threshold:0.9": Threshold(0.9),
        "typical": Typical(),
        "factor:3": Factor(3.0),
    }
    assert decide(SHIPPED, "story", "threshold", text).leniency == Threshold(0.5)
    assert decide(SHIPPED, "chat", "threshold", text).leniency is None  # exact only
    assert decide(SHIPPED, "chat", "typical", text).leniency == Typical()


def test_only_a_profile_of_ones_own_is_lenient_unasked_and_a_request_overrides_it() -> None:
    own = {**SHIPPED, "code": replace(SHIPPED["code"], lenient=True)}
    text = "write a function"
    assert decide(own, AUTO, AS_SET, text).leniency == Threshold(0.75)
    assert decide(own, AUTO, EXACT, text).leniency is None
    assert decide(own, "story", AS_SET, text).leniency is None


def test_an_unknown_kind_or_rule_is_refused_with_the_choices() -> None:
    with pytest.raises(RequestError, match="Did you mean 'code'"):
        decide(SHIPPED, "cod", AS_SET, "")
    with pytest.raises(RequestError, match="typical, factor"):
        decide(SHIPPED, "code", "loose", "")


def test_ones_own_files_come_first_and_may_add_kinds(tmp_path: Path) -> None:
    written(tmp_path, 'title = "My code"\nthreshold = 0.9\nlenient = true\n')
    written(tmp_path, "first_num_draft_tokens = 2\n", "letters")
    found = load_workloads(workload_folders(settings_for(tmp_path)))
    assert set(found) == {*SHIPPED, "letters"}
    assert found["code"] == Workload("code", "My code", None, 0.9, True)
    assert found["letters"] == Workload("letters", "Letters", 2)
    assert found["story"] == SHIPPED["story"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("treshold = 0.5", "unknown key 'treshold'. Did you mean 'threshold'"),
        ("threshold = 1.5", "'threshold' is 1.5, but must be a number from 0 to 1"),
        ("threshold = true", "'threshold' is True"),
        ('threshold = "high"', "'threshold' is 'high'"),
        ("threshold = nan", "'threshold' is nan"),
        ("first_num_draft_tokens = 0", "a number from 1 to 15"),
        ("first_num_draft_tokens = 2.5", "a whole number"),
        ("lenient = 1", "true or false"),
        ("lenient = true", "has no threshold"),
        ("title = 3", "'title' is 3, but must be text"),
        ("title =", "cannot be read as TOML"),
        ("min_match = 2", "unknown key 'min_match'"),
    ],
)
def test_a_mistake_names_the_file_and_the_remedy(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_workload(written(tmp_path, text))
    assert said in str(raised.value) and "code.toml" in str(raised.value)


def test_a_file_of_an_earlier_version_still_opens(tmp_path: Path) -> None:
    found = load_workload(written(tmp_path, "threshold = 0.75\nfloor = 0.2"))
    assert found == Workload("code", "Code", threshold=0.75)


def test_a_kind_cannot_take_the_name_of_recognition(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Rename"):
        load_workload(written(tmp_path, 'title = "x"', AUTO))
