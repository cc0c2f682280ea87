"""The log keeps what it is given, as a tree, under the agreed names, and NULL for unknown."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from localspec.core.errors import StoreError
from localspec.core.turn_stats import TurnStats
from localspec.record.store import SessionInfo, Store, TurnEnd, TurnSettings
from tests.kit.samples import (
    INFO,
    PROVENANCE,
    SETTINGS,
    STATS,
    STEPS,
    TOKEN_IDS,
    begin,
    finish,
    open_store,
    siblings,
)

NASTY = {
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301",
    "right_to_left": "\u05e9\u05dc\u05d5\u05dd \u202e abc",
    "nul": "before\0after",
    "lone_surrogate": "a\ud83d b\udc00",
    "surrogate_and_nul": "\udfff\0",
    "escapes": "\x1b[31m\u2028\r\n\ufeff",
    "backslashes": "\\ud83d \\0 \ufffd",
    "special_tokens": "<|im_end|>",
    "empty": "",
    "long": "x" * 1_000_000,
}


def raw(store: Store, sql: str) -> list[tuple[object, ...]]:
    """What another program sees in the file."""
    assert store.path is not None
    with closing(sqlite3.connect(store.path)) as conn:
        return conn.execute(sql).fetchall()


def test_person_message_is_in_the_file_before_the_turn_begins(store: Store) -> None:
    conversation = store.create_conversation("chat")
    store.add_message(conversation, None, "user", "hi")
    assert raw(store, "SELECT role, text, state FROM message") == [("user", "hi", "complete")]


def test_reply_is_a_draft_that_grows_until_it_is_finished(store: Store) -> None:
    turn = begin(store)
    store.checkpoint_reply(turn.message_id, "hel")
    reply = f"SELECT text, state FROM message WHERE id = {turn.message_id}"
    assert raw(store, reply) == [("hel", "draft")]
    finish(store, turn)
    assert raw(store, reply) == [("hello", "complete")]


def test_late_checkpoint_does_not_reopen_a_finished_reply(store: Store) -> None:
    turn = begin(store)
    finish(store, turn)
    store.checkpoint_reply(turn.message_id, "hel")
    assert store.branch(turn.message_id)[-1].text == "hello"
    assert store.branch(turn.message_id)[-1].state == "complete"


@pytest.mark.parametrize(
    ("finish_reason", "state"),
    [
        ("eos", "complete"),
        ("stop", "complete"),
        ("length", "complete"),
        ("cancelled", "stopped"),
        ("error", "error"),
    ],
)
def test_ending_decides_the_state(store: Store, finish_reason: str, state: str) -> None:
    turn = begin(store)
    finish(store, turn, finish_reason=finish_reason)
    assert store.branch(turn.message_id)[-1].state == state
    assert store.turn_rows()[0]["state"] == state
    assert store.turn_rows()[0]["finish_reason"] == finish_reason


def test_turn_row_has_all_settings_and_numbers_by_name(store: Store) -> None:
    finish(store, begin(store))
    row = store.turn_rows()[0]
    assert {name: row[name] for name in asdict(SETTINGS)} == asdict(SETTINGS)
    for name in (
        "drafter",
        "reason",
        "exact",
        "num_prompt_tokens",
        "num_reused_tokens",
        "num_disk_tokens",
        "num_output_tokens",
        "num_steps",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "acceptance_rate",
        "draft_share",
        "mean_accepted_length",
        "mean_num_draft_tokens",
        "tokens_per_second",
        "speedup",
        "decode_speedup",
        "no_speedup",
        "least_speedup",
        "ttft_ms",
        "prefill_ms",
        "decode_ms",
        "plain_decode_ms",
        "reply_ms",
        "plain_reply_ms",
        "prompt_fingerprint",
    ):
        assert row[name] == getattr(STATS, name), name
    assert row["exact"] is True
    assert json.loads(row["reading_by"]) == STATS.reading_by


def test_tokens_provenance_and_steps_are_kept(store: Store) -> None:
    turn = begin(store)
    first, *others = STEPS
    filled = replace(first, num_filled_tokens=3, filler="lookahead")
    finish(store, turn, steps=(filled, *others))
    assert store.reply_tokens(turn.message_id) == (list(TOKEN_IDS), list(PROVENANCE))
    steps = store.step_rows(turn.turn_id)
    assert [step["filler"] for step in steps] == ["lookahead", None, None]
    assert [step["num_filled_tokens"] for step in steps] == [3, 0, 0]
    assert [step["n"] for step in steps] == [0, 1, 2]
    assert [step["drafter"] for step in steps] == [step.drafter for step in STEPS]
    assert [step["verify_ms"] for step in steps] == [10.0, 9.5, 8.0]
    assert [step["is_probe"] for step in steps] == [0, 1, 0]
    assert [step["signal"] for step in steps] == ["3", '["len", 2]', None]


def test_unknown_numbers_are_null_in_the_file(store: Store) -> None:
    turn = begin(store, settings=TurnSettings(model="m"))
    unknown = {"stats": None, "steps": (), "token_ids": (), "provenance": ()}
    store.finish_turn(turn, TurnEnd(text="", finish_reason="error", error="No memory.", **unknown))
    row = store.turn_rows()[0]
    known = {"turn_id", "session_id", "conversation_id", "message_id", "started_at_utc"}
    known |= {"finished_at_utc", "state", "finish_reason", "error", "model", "source"}
    assert {name for name, value in row.items() if value is not None} == known
    assert raw(store, "SELECT acceptance_rate, speedup, exact FROM turn") == [(None,) * 3]


def test_ratios_without_drafts_are_null_not_zero(store: Store) -> None:
    turn = begin(store)
    plain = TurnStats(num_prompt_tokens=3, num_output_tokens=2, num_steps=2, decode_ms=5.0)
    store.finish_turn(
        turn,
        TurnEnd(
            text="ok",
            token_ids=(1, 2),
            provenance=("target", "target"),
            stats=plain,
            steps=(),
            finish_reason="eos",
            error=None,
        ),
    )
    columns = "num_drafts, acceptance_rate, mean_accepted_length, draft_share, speedup, drafter"
    assert raw(store, f"SELECT {columns} FROM turn") == [(0, None, None, 0.0, None, "off")]


def test_finishing_twice_replaces_and_does_not_double(store: Store) -> None:
    turn = begin(store)
    finish(store, turn, "first")
    finish(store, turn, "second")
    assert len(store.turn_rows()) == 1
    assert len(store.step_rows(turn.turn_id)) == len(STEPS)
    assert store.branch(turn.message_id)[-1].text == "second"


@pytest.mark.slow
@pytest.mark.parametrize("name", NASTY)
def test_text_round_trips_after_reopening(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path)
    turn = begin(store, NASTY[name])
    store.checkpoint_reply(turn.message_id, NASTY[name])
    assert store.branch(turn.message_id)[-1].text == NASTY[name]
    finish(store, turn, NASTY[name])
    store.close()
    with closing(open_store(tmp_path)) as again:
        assert [message.text for message in again.branch(turn.message_id)] == [NASTY[name]] * 2


def test_any_text_leaves_a_file_other_programs_can_read(store: Store) -> None:
    everything = "".join(NASTY[name] for name in NASTY if name != "long")
    strange = replace(SETTINGS, system_prompt=everything, model=everything)
    finish(store, begin(store, everything, strange), everything)
    store.save_state(everything, {"key": everything})
    assert store.load_state(everything) == {"key": everything}
    for (text,) in raw(store, "SELECT text FROM message"):
        assert isinstance(text, str) and "\0" not in text
    assert raw(store, "SELECT length(title) FROM conversation") == [(len(everything),)]


def test_only_strange_texts_have_an_exact_twin(store: Store) -> None:
    conversation = store.create_conversation("chat")
    store.add_message(conversation, None, "user", "plain \u05e9 \U0001f600")
    store.add_message(conversation, None, "user", "\0")
    assert raw(store, "SELECT text_exact FROM message") == [(None,), ('"\\u0000"',)]


def test_branches_are_a_tree(store: Store) -> None:
    session = store.start_session(INFO)
    conversation = store.create_conversation("chat")
    asked = store.add_message(conversation, None, "user", "q")
    first = store.begin_turn(session, conversation, asked, SETTINGS).message_id
    second = store.begin_turn(session, conversation, asked, SETTINGS).message_id
    edited = store.add_message(conversation, None, "user", "q, better")
    follow_up = store.add_message(conversation, first, "user", "and then?")
    assert [message.id for message in store.branch(follow_up)] == [asked, first, follow_up]
    assert [message.parent_id for message in store.branch(follow_up)] == [None, asked, first]
    assert siblings(store, first) == siblings(store, second) == [first, second]
    assert siblings(store, asked) == [asked, edited]
    assert store.message_tree.newest_leaf(asked) == follow_up
    assert store.message_tree.newest_leaf(second) == second
    assert [message.id for message in store.messages(conversation)] == [1, 2, 3, 4, 5]


def test_siblings_do_not_leak_between_conversations(store: Store) -> None:
    first = store.add_message(store.create_conversation("a"), None, "user", "q")
    store.add_message(store.create_conversation("b"), None, "user", "q")
    assert siblings(store, first) == [first]


def test_tip_follows_the_chat_and_can_be_set(store: Store) -> None:
    turn = begin(store)
    conversation = store.conversations()[0]
    assert conversation.tip_message_id == turn.message_id
    asked = store.branch(turn.message_id)[0].id
    store.message_tree.set_tip(conversation.id, asked)
    store.conversation_list.rename(conversation.id, "renamed")
    renamed = replace(conversation, tip_message_id=asked, title="renamed", title_by="person")
    assert store.conversations() == [renamed]


def test_turn_rows_are_filtered_by_session_and_conversation(store: Store) -> None:
    first, second = begin(store, "a"), begin(store, "b")
    assert [row["turn_id"] for row in store.turn_rows()] == [first.turn_id, second.turn_id]
    assert [row["turn_id"] for row in store.turn_rows(session_id=2)] == [second.turn_id]
    assert [row["turn_id"] for row in store.turn_rows(conversation_id=1)] == [first.turn_id]
    assert store.turn_rows(session_id=2, conversation_id=1) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.add_message(99, None, "user", "x"),
        lambda store: store.add_message(1, 99, "user", "x"),
        lambda store: store.add_message(2, 1, "user", "message 1 is of conversation 1"),
        lambda store: store.begin_turn(99, 1, 1, SETTINGS),
        lambda store: store.message_tree.set_tip(2, 1),
        lambda store: store.message_tree.set_tip(1, 99),
        lambda store: store.conversation_list.rename(99, "x"),
    ],
)
def test_unknown_ids_are_refused_and_leave_nothing(store: Store, use: object) -> None:
    begin(store)
    store.create_conversation("empty")
    before = store.messages(1), store.turn_rows(), store.conversations()
    with pytest.raises(StoreError, match="Reload the page"):
        use(store)  # type: ignore[operator]
    assert (store.messages(1), store.turn_rows(), store.conversations()) == before


def test_state_is_replaced_and_survives_reopening(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        store.save_state("controller", {"ngram": [0.5, 1]})
        store.save_state("controller", {"ngram": [0.75, 2]})
        assert store.load_state("nothing") is None
    with closing(open_store(tmp_path)) as again:
        assert again.load_state("controller") == {"ngram": [0.75, 2]}
        assert again.notices == ()


DAMAGED = {
    "cut": "{",
    "no object": "[1]",
    "null": "null",
    "infinite": '{"logs_text": true, "a": 1e999}',
    "deep": '{"logs_text": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "no text": "CAST(x'7b80ff7d' AS TEXT)",
}


def damage(store: Store, kind: str) -> None:
    """What every row of learnt state then holds."""
    value = DAMAGED[kind] if kind == "no text" else f"'{DAMAGED[kind]}'"
    with closing(sqlite3.connect(store.path or "")) as conn, conn:
        conn.execute(f"UPDATE calibration SET state = {value}")


def test_what_two_programs_learn_stands_side_by_side(tmp_path: Path) -> None:
    """Each of them saves again and again, and reads once; the newest stay."""
    one, two = (Store.open(tmp_path / "x.db") for _ in range(2))
    with closing(one), closing(two):
        one.save_state("controller", {"a": 1}, num_others=2)
        two.save_state("controller", {"b": 1}, num_others=2)
        one.save_state("controller", {"a": 2}, num_others=2)
        assert two.load_state("controller") == {"b": 1, "a": 2}
        for name in "cd":
            two.save_state("controller", {name: 1}, num_others=2)
        assert one.load_state("controller") == {"a": 2, "c": 1, "d": 1}


@pytest.mark.parametrize("kind", DAMAGED)
def test_unreadable_state_is_left_out_and_said_once(store: Store, kind: str) -> None:
    store.save_state("costs", {"a": 1})
    damage(store, kind)
    for _ in range(2):
        assert store.load_state("costs") is None
    assert len(store.notices) == 1 and "measured again" in store.notices[0]
    store.save_state("costs", {"a": 2})
    assert store.load_state("costs") == {"a": 2}


def test_a_log_without_its_table_of_states_opens_all_the_same(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        store.save_state("costs", {"a": 1})
    with closing(sqlite3.connect(tmp_path / "localspec.db")) as conn, conn:
        conn.execute("DROP TABLE calibration")
    with closing(open_store(tmp_path)) as again:
        assert again.load_state("costs") is None
        assert not again.logs_text and len(again.notices) == 2


@pytest.mark.parametrize("kind", [*DAMAGED, "another value", "no value"])
def test_no_text_is_written_where_the_choice_cannot_be_read(tmp_path: Path, kind: str) -> None:
    with closing(open_store(tmp_path)) as store:
        store.keep_text(True)
        if kind in ("another value", "no value"):
            store.save_state("privacy", {"logs_text": None} if kind == "another value" else {})
        else:
            damage(store, kind)
    with closing(open_store(tmp_path)) as again:
        assert not again.logs_text
        assert "none are written" in again.notices[0]
        again.keep_text(True)
    with closing(open_store(tmp_path)) as mended:
        assert mended.logs_text and mended.notices == ()


def test_state_that_is_not_json_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="JSON"):
        store.save_state("costs", {"a": float("inf")})


def test_sessions_keep_machine_and_versions(store: Store) -> None:
    store.start_session(SessionInfo(gpu="RTX", vram_total_bytes=12 * 2**30))
    row = store.session_rows()[0]
    assert (row["gpu"], row["vram_total_bytes"], row["torch"]) == ("RTX", 12 * 2**30, None)
    assert row["started_at_utc"].endswith("+00:00")


def test_many_threads_write_and_read_at_once(store: Store) -> None:
    failures: list[BaseException] = []

    def chat(name: str) -> None:
        try:
            for number in range(10):
                turn = begin(store, f"{name}{number}")
                store.checkpoint_reply(turn.message_id, "so far")
                finish(store, turn, f"{name}{number}!")
                assert store.branch(turn.message_id)[0].text == f"{name}{number}"
                store.turn_rows()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=chat, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    rows = store.turn_rows()
    assert len(rows) == 40 and all(row["state"] == "complete" for row in rows)
    for row in rows:
        asked, reply = store.branch(row["message_id"])
        assert reply.text == f"{asked.text}!"


def test_view_sums_before_it_divides(store: Store) -> None:
    finish(store, begin(store))
    turn = begin(store)
    worse = replace(STATS, num_draft_tokens=21, num_accepted_tokens=2, plain_decode_ms=None)
    store.finish_turn(
        turn,
        TurnEnd(
            text="",
            token_ids=(),
            provenance=(),
            stats=worse,
            steps=(),
            finish_reason="eos",
            error=None,
        ),
    )
    finish(store, begin(store, settings=replace(SETTINGS, temperature=0.0)))
    columns = (
        "temperature, num_turns, acceptance_rate, mean_accepted_length, decode_speedup, speedup"
    )
    seen = raw(store, f"SELECT {columns} FROM turn_by_temperature ORDER BY temperature")
    whole = pytest.approx(STATS.speedup)
    assert seen == [(0.0, 1, 5 / 7, 3.5, 2.0, whole), (0.7, 2, 7 / 28, 1 + 7 / 4, 2.0, whole)]


def test_backup_is_one_private_file_with_everything(store: Store, tmp_path: Path) -> None:
    finish(store, begin(store))
    copy = tmp_path / "copy.db"
    store.backup(copy)
    assert [path.name for path in tmp_path.glob("copy*")] == ["copy.db"]
    assert os.name == "nt" or copy.stat().st_mode & 0o777 == 0o600
    with closing(Store.open(copy)) as again:
        assert again.turn_rows() == store.turn_rows()
        assert again.messages(1) == store.messages(1)


def test_closed_log_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.create_conversation("late")
