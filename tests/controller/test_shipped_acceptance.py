"""The file of what another machine accepted: it returns as it was, and a bad one costs nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from localspec.controller.acceptance import Acceptance, Situation
from localspec.controller.shipped_acceptance import Origin, read_accepted, write_accepted
from localspec.core.errors import StoreError

MARKS = {"target": "1a", "draft": "2b", "eagle": "3c"}
ORIGIN = Origin("a/target", "a/draft", "float32", 3, (0.0, 0.7), 48, MARKS)


def learnt() -> Acceptance:
    found = Acceptance()
    for accepted in (3, 0, 4, 4, 1):
        found.tick("code")
        found.observe("ngram", "2", Situation(3, "code"), 4, accepted, 10.0 / 3.0)
    found.observe_confidences("ngram", 3, [0.5], [True])
    found.begin_turn()
    return found


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "accepted.json"
    write_accepted(path, ORIGIN, learnt().snapshot())
    state, notice = read_accepted(path, MARKS)
    assert state is not None and notice is None
    place = ("ngram", "2", Situation(3, "code"))
    found = Acceptance.restored(state).rates(*place)
    assert found == pytest.approx(learnt().rates(*place), abs=0.01)
    assert json.loads(path.read_text())["target"] == "a/target"
    assert [file.name for file in path.parent.iterdir()] == ["accepted.json"]


def test_no_file_is_no_fault() -> None:
    assert read_accepted(None, MARKS) == (None, None)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"version": 1, "acceptance": {"records": [], "confidence": []}}',
        '{"version": 2, "acceptance": {"records": [], "confidence": []}}',
        '{"version": 2, "marks": [], "acceptance": {"records": [], "confidence": []}}',
        '{"version": 2, "marks": {}, "acceptance": {"records": [{}], "confidence": []}}',
        '{"version": 2, "marks": {}, "acceptance": {"records": [{"drafter": "d", "signal": "s",'
        ' "bucket": 0, "kind": "", "tried": [1], "accepted": [2]}], "confidence": []}}',
        '{"version": 2, "marks": {}, "acceptance": {"records": [], "confidence": ['
        f'{{"drafter": "d", "bucket": 0, "cells": [[{10**400}, 1]]}}]}}}}',
        b"\xff\xfe",
    ],
    ids=lambda content: repr(content[:40]),
)
def test_a_file_that_cannot_be_used_is_a_sentence_and_no_error(
    tmp_path: Path, content: Any
) -> None:
    path = tmp_path / "accepted.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    state, notice = read_accepted(path, MARKS)
    assert state is None
    assert notice is not None and str(path) in notice and "learn it anew" in notice
    assert "learn it anew" in str(read_accepted(tmp_path / "absent.json", MARKS)[1])


@pytest.mark.parametrize("part", ["target", "draft", "eagle"])
def test_what_other_weights_were_accepted_is_not_believed(tmp_path: Path, part: str) -> None:
    path = tmp_path / "accepted.json"
    write_accepted(path, ORIGIN, learnt().snapshot())
    state, notice = read_accepted(path, {**MARKS, part: "9f"})
    assert state is None
    assert notice is not None and f"another {part} than is loaded" in notice
    without = {name: mark for name, mark in MARKS.items() if name != part}
    assert read_accepted(path, without)[0] is not None, "what is not loaded drafts nothing"


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "accepted.json"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match="Free disk space"):
        write_accepted(path, ORIGIN, learnt().snapshot())
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
        ("accepted.json", "before")
    ]


def test_a_place_below_a_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(StoreError, match="cannot be written"):
        write_accepted(tmp_path / "file" / "accepted.json", ORIGIN, learnt().snapshot())
    assert (tmp_path / "file").read_text() == "kept"
