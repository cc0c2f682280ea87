"""A log that fails while in use: waits, says why, keeps nothing half-done, and can be retried."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from localspec.core.errors import StoreError
from localspec.record.store import Store
from tests.kit.samples import STEPS, begin, finish, open_store
from tests.kit.waiting import WAIT_S


@pytest.fixture
def impatient_store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path, busy_timeout_ms=300)
    yield opened
    opened.close()


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """Another program in the middle of a long write."""
    assert store.path is not None
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("INSERT INTO session (started_at_utc) VALUES ('by another program')")
        yield
        other.execute("COMMIT")


@contextmanager
def full_disk(store: Store) -> Iterator[None]:
    """No page can be added to the file."""
    with store._db.writing() as tables:
        pages = tables.conn.execute("PRAGMA page_count").fetchone()[0]
        limit = tables.conn.execute("PRAGMA max_page_count").fetchone()[0]
    store._db._writer.conn.execute(f"PRAGMA max_page_count = {pages}")
    yield
    store._db._writer.conn.execute(f"PRAGMA max_page_count = {limit}")


@pytest.mark.slow
def test_finish_turn_waits_for_a_lock_then_says_so_then_can_be_retried(
    impatient_store: Store,
) -> None:
    turn = begin(impatient_store)
    impatient_store.checkpoint_reply(turn.message_id, "half")
    with locked(impatient_store):
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"another program keeps it locked\. Close that"):
            finish(impatient_store, turn)
        assert time.monotonic() - started >= 0.29
        assert impatient_store.branch(turn.message_id)[-1].text == "half"
    finish(impatient_store, turn)
    assert impatient_store.branch(turn.message_id)[-1].state == "complete"
    assert len(impatient_store.step_rows(turn.turn_id)) == len(STEPS)


def test_lock_released_in_time_goes_unnoticed(tmp_path: Path) -> None:
    with closing(open_store(tmp_path, busy_timeout_ms=5000)) as store:
        asked = store.add_message(store.create_conversation("chat"), None, "user", "hi")
        done = threading.Event()

        def hold() -> None:
            with locked(store):
                done.set()
                time.sleep(0.2)

        holder = threading.Thread(target=hold)
        holder.start()
        done.wait()
        # Reads the parent before it writes: the other program's commit lies in between.
        store.add_message(1, asked, "user", "and then?")
        holder.join()
        assert len(store.messages(1)) == 2 and len(store.session_rows()) == 1


def test_checkpoint_of_a_locked_log_does_not_hold_up_the_reply(tmp_path: Path) -> None:
    with closing(open_store(tmp_path, busy_timeout_ms=20_000)) as store:
        turn = begin(store)
        with locked(store):
            started = time.monotonic()
            with pytest.raises(StoreError, match="locked"):
                store.checkpoint_reply(turn.message_id, "half")
            assert time.monotonic() - started < 20, "it does not wait as other writes do"
        with store._db.writing() as tables:
            assert tables.conn.execute("PRAGMA busy_timeout").fetchone()[0] == 20_000


def test_reading_does_not_wait_for_a_writer_that_waits(tmp_path: Path) -> None:
    with closing(open_store(tmp_path, busy_timeout_ms=20_000)) as store:
        finish(store, begin(store))
        failures: list[StoreError] = []

        def write() -> None:
            try:
                store.create_conversation("waits")
            except StoreError as error:
                failures.append(error)

        with locked(store):
            writer = threading.Thread(target=write)
            writer.start()
            time.sleep(0.1)
            assert len(store.turn_rows()) == 1
            assert writer.is_alive()
        writer.join()
        assert failures == []


@pytest.mark.parametrize(
    "write",
    [
        lambda store, turn: store.add_message(1, None, "user", "x" * 100_000),
        lambda store, turn: store.checkpoint_reply(turn.message_id, "x" * 100_000),
        lambda store, turn: finish(store, turn, "x" * 100_000),
        lambda store, turn: store.save_state("costs", {"a": "x" * 100_000}),
    ],
)
def test_full_disk_is_said_and_leaves_nothing_half_done(
    impatient_store: Store, write: object
) -> None:
    turn = begin(impatient_store)
    before = (
        impatient_store.messages(1),
        impatient_store.turn_rows(),
        impatient_store.conversations(),
    )
    with full_disk(impatient_store):
        with pytest.raises(StoreError, match=r"disk is full\. Free disk space"):
            write(impatient_store, turn)  # type: ignore[operator]
        assert (
            impatient_store.messages(1),
            impatient_store.turn_rows(),
            impatient_store.conversations(),
        ) == before
    write(impatient_store, turn)  # type: ignore[operator]
    assert (
        impatient_store.step_rows(turn.turn_id) == []
        or impatient_store.turn_rows()[0]["state"] == "complete"
    )
    finish(impatient_store, turn)
    assert impatient_store.branch(turn.message_id)[-1].state == "complete"


def test_error_inside_a_transaction_rolls_all_of_it_back(impatient_store: Store) -> None:
    turn = begin(impatient_store)
    with impatient_store._db.writing() as tables:
        tables.execute(
            "CREATE TRIGGER no_steps BEFORE INSERT ON step WHEN new.n = 2 "
            "BEGIN SELECT raise(ABORT, 'third step'); END"
        )
    with pytest.raises(StoreError, match="third step"):
        finish(impatient_store, turn)
    assert impatient_store.step_rows(turn.turn_id) == []
    assert impatient_store.turn_rows()[0]["finish_reason"] is None
    assert impatient_store.branch(turn.message_id)[-1].state == "draft"


class NoRollback(sqlite3.Connection):
    """A disk that fails also while what was begun is taken back."""

    is_broken = False

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if self.is_broken and sql in ("COMMIT", "ROLLBACK"):
            raise sqlite3.OperationalError("disk I/O error")
        return super().execute(sql, *values)


def test_a_rollback_that_fails_costs_that_write_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=NoRollback))
    with closing(open_store(tmp_path)) as store:
        monkeypatch.setattr(NoRollback, "is_broken", True)
        with pytest.raises(StoreError, match="disk I/O error"):
            store.create_conversation("lost")
        monkeypatch.setattr(NoRollback, "is_broken", False)
        store.create_conversation("kept")
        assert [one.title for one in store.conversations()] == ["kept"]


def test_snapshot_sees_one_moment(impatient_store: Store) -> None:
    begin(impatient_store)
    with impatient_store.snapshot():
        assert len(impatient_store.turn_rows()) == 1
        seen = list[int]()
        other = threading.Thread(
            target=lambda: (begin(impatient_store), seen.append(len(impatient_store.turn_rows())))
        )
        other.start()
        other.join(WAIT_S)
        assert seen == [2], "another thread writes and reads meanwhile"
        assert len(impatient_store.turn_rows()) == 1
    assert len(impatient_store.turn_rows()) == 2


def test_damage_found_in_use_says_what_the_next_start_will_do(impatient_store: Store) -> None:
    with (
        pytest.raises(StoreError, match="sets the damaged file aside"),
        impatient_store._db.explained(),
    ):
        raise sqlite3.DatabaseError("database disk image is malformed")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows moves no open file")
def test_nothing_is_written_to_a_file_that_is_not_in_its_place(impatient_store: Store) -> None:
    assert impatient_store.path is not None
    turn = begin(impatient_store)
    for other in (None, b"another"):
        moved = impatient_store.path.rename(impatient_store.path.with_name("moved"))
        if other is not None:
            impatient_store.path.write_bytes(other)
        with pytest.raises(StoreError, match=r"was moved, deleted or replaced .* Put it back"):
            finish(impatient_store, turn)
        moved.replace(impatient_store.path)
    finish(impatient_store, turn)
    assert impatient_store.branch(turn.message_id)[-1].state == "complete"
