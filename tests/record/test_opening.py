"""Whatever lies at the path, the app gets a log that works, and no byte is lost."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from localspec.core.errors import SetupError
from localspec.record.opening import sole_use
from localspec.record.store import Store
from tests.kit.samples import begin, finish, open_store

ROOT = Path(__file__).resolve().parents[2]
posix_only = pytest.mark.skipif(os.name == "nt", reason="file modes and signals are POSIX")


@pytest.fixture
def old_log(tmp_path: Path) -> Path:
    """A closed log with one finished turn."""
    with closing(open_store(tmp_path)) as store:
        finish(store, begin(store, "old words"))
        assert store.path is not None
        return store.path


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that an account without rights can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def texts(store: Store) -> list[str]:
    return [
        message.text for row in store.turn_rows() for message in store.branch(row["message_id"])
    ]


def assert_works(store: Store, word: str = "new words") -> None:
    turn = begin(store, word)
    store.checkpoint_reply(turn.message_id, "so far")
    finish(store, turn, f"{word}!")
    assert texts(store)[-2:] == [word, f"{word}!"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_missing_folders_are_made(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "a b" / "é" / "localspec.db")) as store:
        assert store.path is not None and store.notices == ()
        assert_works(store)


@posix_only
def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(open_store(tmp_path / "home")) as store:
            assert_works(store)
            modes = {
                path.name: stat.S_IMODE(path.stat().st_mode) for path in store.path.parent.iterdir()
            }
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("localspec.db", "localspec.db-wal", "localspec.db-shm"), 0o600)
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_log_is_wal_and_checks_foreign_keys(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store, store._db.writing() as tables:
        for pragma, value in (
            ("journal_mode", "wal"),
            ("busy_timeout", 5000),
            ("foreign_keys", 1),
            ("synchronous", 1),
        ):
            assert tables.conn.execute(f"PRAGMA {pragma}").fetchone()[0] == value


def test_closing_leaves_one_file(old_log: Path) -> None:
    assert list(files(old_log.parent)) == ["localspec.db"]


DAMAGE = {
    "not_a_database": lambda data: b"This was never a database." * 100,
    "zeroed_pages": lambda data: data[:4096] + bytes(3 * 4096) + data[4 * 4096 :],
    "cut_short": lambda data: data[: len(data) // 2],
    "garbage_after_header": lambda data: data[:100] + random.Random(0).randbytes(len(data) - 100),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_log_is_set_aside_and_a_fresh_one_works(old_log: Path, name: str) -> None:
    damaged = DAMAGE[name](old_log.read_bytes())
    old_log.write_bytes(damaged)
    Path(f"{old_log}-wal").write_bytes(b"left over")
    with closing(Store.open(old_log)) as store:
        assert store.path is not None and store.path == old_log
        (kept,) = old_log.parent.glob("localspec.db.corrupt-*Z")
        assert kept.read_bytes() == damaged
        assert Path(f"{kept}-wal").read_bytes() == b"left over"
        assert kept.name in store.notices[0] and "new, empty log" in store.notices[0]
        assert store.turn_rows() == []
        assert_works(store)
    with closing(Store.open(old_log)) as again:
        assert again.notices == () and len(again.turn_rows()) == 1


def test_zero_bytes_are_a_new_log(tmp_path: Path) -> None:
    (tmp_path / "localspec.db").touch()
    with closing(open_store(tmp_path)) as store:
        assert store.path is not None and store.notices == ()
        assert_works(store)


def test_newer_log_is_not_touched(old_log: Path) -> None:
    with closing(sqlite3.connect(old_log)) as conn, conn:
        conn.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name) VALUES ('localspec', 'm900_new')"
        )
    before = files(old_log.parent)["localspec.db"]
    with closing(Store.open(old_log)) as store:
        assert store.path is None and store.path is None
        assert "newer localspec" in store.notices[0] and "m900_new" in store.notices[0]
        assert store.turn_rows() == []
        assert_works(store)
    assert files(old_log.parent)["localspec.db"] == before


def test_another_programs_database_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "localspec.db"
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("CREATE TABLE message (theirs TEXT)")
    with closing(Store.open(path)) as store:
        assert store.path is None and "another program's" in store.notices[0]
        assert_works(store)
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("SELECT name FROM sqlite_master").fetchall() == [("message",)]


@pytest.mark.parametrize(
    "kind", ["a_folder", "below_a_file", pytest.param("a_pipe", marks=posix_only)]
)
def test_impossible_path_gives_a_log_in_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "localspec.db"
    if kind == "a_folder":
        path.mkdir()
    elif kind == "a_pipe":
        os.mkfifo(path)
    else:
        path.touch()
        path = path / "localspec.db"
    with closing(Store.open(path)) as store:
        assert store.path is None
        assert "in memory only" in store.notices[0] and "--home" in store.notices[0]
        assert_works(store)


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from tests.kit.samples import begin, finish
from localspec.record.store import Store
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
store = Store.open(Path(sys.argv[1]))
print(store.path is not None)
print(store.notices[0])
print([m.text for row in store.turn_rows() for m in store.branch(row["message_id"])])
finish(store, begin(store, "new words"))
print(len(store.turn_rows()))
"""


@pytest.mark.slow  # starts child processes
@posix_only
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_read_only_log_is_shown_and_goes_on_in_memory(open_folder: Path, kind: str) -> None:
    with closing(open_store(open_folder)) as store:
        finish(store, begin(store, "old words"))
    path = open_folder / "localspec.db"
    path.chmod(0o666 if kind == "folder" else 0o444)
    open_folder.chmod(0o777 if kind == "file" else 0o555)
    before = path.read_bytes()
    out, _ = run(UNPRIVILEGED, path).communicate(timeout=60)
    is_persistent, notice, earlier, num_turns = out.splitlines()
    assert is_persistent == "False"
    assert "read-only" in notice and "in memory only" in notice and "Earlier chats" in notice
    assert (earlier, num_turns) == ("['old words', 'hello']", "2")
    assert path.read_bytes() == before


def test_log_locked_while_starting_is_shown_and_goes_on_in_memory(old_log: Path) -> None:
    with closing(sqlite3.connect(old_log, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with closing(Store.open(old_log, busy_timeout_ms=50)) as store:
            assert store.path is None
            assert "another program keeps it locked" in store.notices[0]
            assert texts(store) == ["old words", "hello"]
            assert_works(store)
        other.execute("ROLLBACK")
    with closing(Store.open(old_log)) as store:
        assert store.path is not None and texts(store) == ["old words", "hello"]


@pytest.mark.slow  # starts child processes
def test_lock_that_ends_in_time_is_waited_for(old_log: Path) -> None:
    holder = run(
        "import sqlite3, sys, time\n"
        "conn = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "conn.execute('BEGIN IMMEDIATE'); print('held', flush=True)\n"
        "time.sleep(0.5); conn.execute('ROLLBACK')",
        old_log,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with closing(Store.open(old_log)) as store:
        assert store.path is not None and store.notices == ()
    holder.communicate(timeout=10)


@pytest.mark.slow  # starts child processes
def test_several_processes_may_start_on_a_blank_folder(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from localspec.record.store import Store\n"
        "store = Store.open(Path(sys.argv[1])); store.create_conversation('one')\n"
        "print(store.path is not None, store.notices); store.close()"
    )
    starts = [run(script, tmp_path / "localspec.db") for _ in range(2)]
    assert [one.communicate(timeout=60)[0] for one in starts] == ["True ()\n"] * 2
    with closing(open_store(tmp_path)) as store:
        assert len(store.conversations()) == 2


def test_a_log_held_exclusively_does_not_hold_up_the_start(old_log: Path) -> None:
    with closing(sqlite3.connect(old_log, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with closing(Store.open(old_log, busy_timeout_ms=50)) as store:
            assert store.path is None and "keeps it locked" in store.notices[0]
            assert texts(store) == ["old words", "hello"]
            assert_works(store)


def test_only_a_tidy_start_marks_the_draft_of_a_crash(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as living:
        turn = begin(living)
        living.checkpoint_reply(turn.message_id, "half")
        with closing(open_store(tmp_path)) as command:
            assert command.branch(turn.message_id)[-1].state == "draft"
        finish(living, turn, "whole")
        crashed = begin(living)
        living.checkpoint_reply(crashed.message_id, "half")
    with closing(open_store(tmp_path)) as next_start:
        next_start.tidy()
        assert next_start.branch(turn.message_id)[-1].state == "complete"
        left = next_start.branch(crashed.message_id)[-1]
        assert (left.text, left.state) == ("half", "interrupted")


def test_a_log_is_used_by_one_program_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "localspec.db"
    for _ in range(2):
        with sole_use(path), pytest.raises(SetupError, match=r"already running on .*--home"):
            sole_use(path).__enter__()


@posix_only
def test_a_link_to_a_log_is_that_log(tmp_path: Path) -> None:
    path, link, circle = tmp_path / "localspec.db", tmp_path / "other.db", tmp_path / "circle"
    link.symlink_to(path)
    circle.symlink_to(circle)
    with sole_use(link), pytest.raises(SetupError, match="already running on"):
        sole_use(path).__enter__()
    with sole_use(circle):
        pass


def test_a_folder_that_cannot_be_written_needs_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        with sole_use(tmp_path / "file" / "localspec.db"):
            pass


WRITER = """
import sys
from pathlib import Path
from tests.kit.samples import begin, finish
from localspec.record.store import Store
store = Store.open(Path(sys.argv[1]))
finish(store, begin(store, "finished before"))
print("ready", flush=True)
while True:
    turn = begin(store, "asked")
    for length in range(1, 40):
        store.checkpoint_reply(turn.message_id, "x" * length)
    finish(store, turn, "x" * 40)
"""


@pytest.mark.slow  # starts child processes
@posix_only
@pytest.mark.parametrize("seed", range(2))
def test_kill_9_while_writing_loses_nothing_that_was_committed(tmp_path: Path, seed: int) -> None:
    writer = run(WRITER, tmp_path / "localspec.db")
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    time.sleep(random.Random(seed).uniform(0.02, 0.3))
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    with closing(open_store(tmp_path)) as store:
        assert store.path is not None and store.notices == ()
        store.tidy()
        with store._db.writing() as tables:
            assert tables.rows("PRAGMA integrity_check") == [{"integrity_check": "ok"}]
            assert tables.rows("PRAGMA foreign_key_check") == []
        assert texts(store)[:2] == ["finished before", "hello"]
        for row in store.turn_rows():
            asked, reply = store.branch(row["message_id"])
            is_whole = row["finish_reason"] is not None
            assert asked.state == "complete"
            assert reply.state == ("complete" if is_whole else "interrupted")
            assert len(store.step_rows(row["turn_id"])) == (3 if is_whole else 0)
            assert is_whole or reply.text == "x" * len(reply.text)
        assert_works(store)


MID_REPLY = """
import sys, time
from pathlib import Path
from tests.kit.samples import begin
from localspec.record.store import Store
store = Store.open(Path(sys.argv[1]))
turn = begin(store, "asked")
store.checkpoint_reply(turn.message_id, "half a rep")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow  # starts child processes
@posix_only
def test_kill_9_in_the_middle_of_a_reply_keeps_question_and_beginning(tmp_path: Path) -> None:
    writer = run(MID_REPLY, tmp_path / "localspec.db")
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    with closing(open_store(tmp_path)) as store:
        store.tidy()
        asked, reply = store.branch(store.turn_rows()[0]["message_id"])
        assert (asked.text, asked.state) == ("asked", "complete")
        assert (reply.text, reply.state) == ("half a rep", "interrupted")
        finish(store, begin(store))
