"""The conversion of a log of a version before 19 keeps every row and the former file."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from localspec.cli.main import main
from localspec.core.errors import AlreadyRunning, StoreError
from localspec.record.export import Scope, export
from localspec.record.log_file import read_replies, read_states
from localspec.record.older_log import upgrade_log
from localspec.record.opening import sole_use
from localspec.record.store import Store
from tests.kit.older_logs import FURTHER_COLUMN, PRESET, ROWS, write_log
from tests.kit.samples import begin, finish


@contextmanager
def converted(tmp_path: Path, version: int, rows: str = ROWS) -> Iterator[Store]:
    path = write_log(tmp_path / "localspec.db", version, rows)
    upgrade_log(path)
    with closing(Store.open(path)) as store:
        assert store.path is not None and store.notices == ()
        yield store


@pytest.mark.parametrize(("version", "more"), [(1, ""), (10, ""), (10, FURTHER_COLUMN)])
def test_a_converted_log_has_all_that_the_former_held(
    tmp_path: Path, version: int, more: str
) -> None:
    with converted(tmp_path, version, more + ROWS) as store:
        store.tidy()
        assert [m.text for m in store.branch(4)] == ["asked", "an\0other", "and then?"]
        assert store.branch(5)[-1].state == "interrupted"
        assert store.message_tree.sibling_groups(1) == {None: (1,), 1: (2, 3, 5), 3: (4,)}
        assert [one.id for one in store.conversation_list.rows("answer")] == [1]
        assert store.reply_tokens(2) == ([1, 2], ["ngram", "target"])
        assert len(store.step_rows(1)) == 1 and store.session_rows()[0]["app_version"] == "0.1"
        for form in ("csv", "jsonl", "markdown", "sqlite"):
            export(store, Scope(), form, tmp_path / form)
        finish(store, begin(store, "new"))
    assert read_states(tmp_path / "localspec.db") == {"a | b": {"version": 1}}
    replies = read_replies(tmp_path / "localspec.db")
    assert [reply.text for reply in replies][:2] == ["answered", "an\0other"]


def test_a_speedup_of_rounds_stays_theirs_and_a_reply_without_drafts_has_none(
    tmp_path: Path,
) -> None:
    with converted(tmp_path, 1) as store:
        drafted, plain, _ = store.turn_rows()
    assert (drafted["decode_speedup"], drafted["speedup"], drafted["plain_decode_ms"]) == (
        2.0, None, 18.0,
    )  # fmt: skip
    unknown = ("decode_speedup", "speedup", "plain_decode_ms")
    assert [plain[name] for name in unknown] == [None] * 3


def test_a_short_reply_loses_its_speedup_and_keeps_its_times(tmp_path: Path) -> None:
    short = ROWS + "UPDATE turn SET num_output_tokens = 7, decode_speedup = 2.0 WHERE id = 1;"
    with converted(tmp_path, 10, short) as store:
        row = store.turn_rows()[0]
    assert (row["plain_decode_ms"], row["speedup"], row["decode_speedup"], row["no_speedup"]) == (
        18.0, None, None, "too_short",
    )  # fmt: skip


def test_messages_of_the_first_version_take_the_models_of_their_turns(tmp_path: Path) -> None:
    with converted(tmp_path, 1) as store:
        assert [message.model for message in store.messages(1)] == [None, "m", None, None, None]


def test_a_preset_becomes_a_prompt_that_sets_the_other_fields_too(tmp_path: Path) -> None:
    with converted(tmp_path, 10, PRESET) as store:
        assert store.prompts.all() == {
            "Mine": {
                "system_prompt": 'Be "brief".', "temperature": "0.7", "top_p": "1", "top_k": "40",
                "min_p": "0.05", "repetition_penalty": "1.1", "max_tokens": "256",
            }
        }  # fmt: skip


@pytest.mark.parametrize("version", [1, 10])
def test_a_start_leaves_an_older_log_alone_and_names_the_command(
    tmp_path: Path, version: int
) -> None:
    path = write_log(tmp_path / "localspec.db", version)
    before = path.read_bytes()
    with closing(Store.open(path)) as store:
        assert store.path is None
        assert "python -m localspec upgrade" in store.notices[0]
        finish(store, begin(store))
    with pytest.raises(StoreError, match="python -m localspec upgrade"):
        read_replies(path)
    assert path.read_bytes() == before


def test_the_command_converts_the_log_of_a_home_and_names_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_log(tmp_path / "localspec.db", 10)
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["localspec", "upgrade", "--home", str(tmp_path), "--json"])
    main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["num_conversations"], result["num_turns"]) == (1, 3)
    assert Path(result["former"]).read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("version", "reason"), [(None, "There is no log at"), (19, "needs no conversion")]
)
def test_what_needs_no_conversion_is_said(tmp_path: Path, version: int | None, reason: str) -> None:
    path = tmp_path / "localspec.db"
    if version is not None:
        write_log(path, version)
    with pytest.raises(StoreError, match=reason):
        upgrade_log(path)


def test_a_log_in_use_is_not_converted(tmp_path: Path) -> None:
    path = write_log(tmp_path / "localspec.db", 1)
    with sole_use(path), pytest.raises(AlreadyRunning):
        upgrade_log(path)


def test_a_conversion_that_fails_leaves_the_former_log_in_place(tmp_path: Path) -> None:
    stray = "INSERT INTO step (turn_id, n, drafter, num_draft_tokens, num_accepted_tokens,"
    stray += " num_output_tokens, is_probe) VALUES (99, 0, 'ngram', 1, 1, 1, 0);"
    path = write_log(tmp_path / "localspec.db", 1, ROWS + stray)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"was not converted: .*step refers to a row"):
        upgrade_log(path)
    assert path.read_bytes() == before
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("DELETE FROM step WHERE turn_id = 99")
        conn.commit()
    assert upgrade_log(path).num_turns == 3
