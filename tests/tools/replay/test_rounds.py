"""The rounds of a log file are read as they were written, and reading changes nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from localspec.core.decoding import Step
from localspec.record.store import TurnSettings
from tests.tools.replay.logs import log_of
from tools.replay.logged import read_turns

STEPS = (
    Step("draft_model", 4, 2, 3, 1.5, 20.0, 100, signal="model"),
    Step("off", 0, 0, 1, 0.0, 18.0, 103),
    Step("ngram", 2, 2, 3, 0.1, 19.0, 104, is_probe=True, signal=["5-8", 3]),
)


def test_rounds_come_back_in_order_with_what_tells_them_apart(tmp_path: Path) -> None:
    log_of(tmp_path / "log.db", STEPS, (), STEPS[:1]).close()
    first, last = read_turns(tmp_path / "log.db")  # the turn without rounds is none
    assert first.combination == ("big", "small", "cpu", "fp32") and first.temperature == 0.7
    assert [step.drafter for step in first.steps] == ["draft_model", "off", "ngram"]
    found = first.steps[0]
    assert (found.num_draft_tokens, found.num_accepted_tokens, found.num_output_tokens) == (4, 2, 3)
    assert (found.draft_ms, found.verify_ms, found.context_length) == (1.5, 20.0, 100)
    assert len(last.steps) == 1


def test_signals_are_hashable_again(tmp_path: Path) -> None:
    log_of(tmp_path / "log.db", STEPS).close()
    (turn,) = read_turns(tmp_path / "log.db")
    assert [step.signal for step in turn.steps] == ["model", None, '["5-8", 3]']
    assert len({step.signal for step in turn.steps}) == 3


def test_a_log_of_a_version_that_knew_no_kinds_of_text_is_read_too(tmp_path: Path) -> None:
    log_of(tmp_path / "log.db", STEPS).close()
    assert [turn.workload for turn in read_turns(tmp_path / "log.db")] == ["code"]
    with sqlite3.connect(tmp_path / "log.db") as db:
        dependent = db.execute("SELECT name, type FROM sqlite_master WHERE sql LIKE '%workload%'")
        for name, kind in dependent.fetchall():
            if kind != "table":
                db.execute(f"DROP {kind} {name}")
        db.execute("ALTER TABLE turn DROP COLUMN workload")
    db.close()
    assert [turn.workload for turn in read_turns(tmp_path / "log.db")] == [""]


def test_a_log_in_use_is_read_and_not_written(tmp_path: Path) -> None:
    store = log_of(tmp_path / "log.db", STEPS)
    conversation = store.create_conversation("under way")
    asked = store.add_message(conversation, None, "user", "hello")
    turn = store.begin_turn(1, conversation, asked, TurnSettings())
    assert len(read_turns(tmp_path / "log.db")) == 1
    states = {message.id: message.state for message in store.messages(conversation)}
    assert states[turn.message_id] == "draft"  # `Store.open` would have called it interrupted
    store.close()


def test_a_lenient_turn_is_left_out(tmp_path: Path) -> None:
    log_of(tmp_path / "log.db", STEPS, STEPS).close()
    with sqlite3.connect(tmp_path / "log.db") as db:
        db.execute("UPDATE turn SET exact = 0 WHERE id = 2")
    db.close()
    assert [turn.turn_id for turn in read_turns(tmp_path / "log.db")] == [1]
