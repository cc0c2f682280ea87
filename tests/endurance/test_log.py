"""A log of 20,000 turns opens, lists and is searched in under a second; clocks that jump and logs
of every earlier version lose nothing."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.service import ChatService
from localspec.record.export import Scope, export
from localspec.record.older_log import upgrade_log
from localspec.record.store import Store
from tests.kit.fakes import FakeBackend, session_info
from tests.kit.older_logs import VERSIONS, write_log
from tests.kit.samples import begin, finish, open_store
from tests.kit.services import FAST, ask, close, open_service
from tests.kit.tally import Tally

LIMIT_S = 1.0
CHAT_TURNS = 10
STEPS_OF_A_TURN = 30
NUM_TOKENS = 200
WORDS = [f"{a}{b}" for a in "able bake cold dare ever".split() for b in range(1000)]
RARE = "zymurgy"


def grow(path: Path, num_turns: int) -> None:
    """Fill an empty log with copies of one real turn, as large as a usual one."""
    with closing(Store.open(path)) as store:
        finish(store, begin(store))
    rng = random.Random(3)
    with closing(sqlite3.connect(path)) as db, db:
        db.row_factory = sqlite3.Row
        turn, step = (dict(db.execute(f"SELECT * FROM {t}").fetchone()) for t in ("turn", "step"))
        turn |= {
            "token_ids": str([rng.randrange(32000) for _ in range(NUM_TOKENS)]),
            "provenance": str(["ngram"] * NUM_TOKENS).replace("'", '"'),
            "drafted": rng.randbytes(2000),
        }
        columns: dict[str, list[Any]] = {"conversation": [], "message": [], "turn": [], "step": []}
        for number in range(num_turns):
            chat, asked = number // CHAT_TURNS + 2, 2 * number + 3
            at = f"2026-11-23T00:00:00.{number % 1000:03}+00:00"
            if number % CHAT_TURNS == 0:
                columns["conversation"].append(_row(id=chat, title=f"{chat}", created_at_utc=at))
            said = {"conversation_id": chat, "state": "complete", "created_at_utc": at}
            before = None if number % CHAT_TURNS == 0 else asked - 1
            texts = [" ".join(rng.choices(WORDS, k=size)) for size in (12, 120)]
            texts[1] += f" {RARE}" if number % 1000 == 0 else ""
            user = {**said, "id": asked, "parent_id": before, "role": "user", "text": texts[0]}
            reply = {**said, "id": asked + 1, "parent_id": asked, "role": "assistant"}
            columns["message"] += [user, {**reply, "text": texts[1]}]
            of_turn = {"id": number + 2, "conversation_id": chat, "message_id": asked + 1}
            columns["turn"].append({**turn, **of_turn})
            columns["step"] += [
                {**step, "turn_id": number + 2, "n": n} for n in range(STEPS_OF_A_TURN)
            ]
        for table, rows in columns.items():
            marks = ", ".join(f":{name}" for name in rows[0])
            names = ", ".join(rows[0])
            db.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)


def _row(**values: Any) -> dict[str, Any]:
    return values


def timed(tally: Tally, what: str, act: Callable[[], Any]) -> Any:
    started_s = time.perf_counter()
    found = act()
    tally.measured(what, time.perf_counter() - started_s, LIMIT_S, "s")
    return found


@pytest.mark.slow
def test_a_log_of_twenty_thousand_turns_opens_and_searches_in_under_a_second(
    tmp_path: Path, tally: Tally
) -> None:
    path, num_turns = tmp_path / "localspec.db", tally.size(200, 20_000)
    grow(path, num_turns)
    tally.figures.append(f"{num_turns:,} turns, {path.stat().st_size / 1e6:.0f} MB")
    store = timed(tally, "open", lambda: Store.open(path))
    timed(tally, "tidy", store.tidy)
    num_chats = num_turns // CHAT_TURNS
    assert len(timed(tally, "list", store.conversation_list.rows)) == num_chats + 1
    for words, what in (
        (RARE, "a rare word"),
        (WORDS[0], "a usual word"),
        ("ab", "a beginning"),
        (f'"{WORDS[0]} {WORDS[1]}"', "a phrase"),
        ("字", "a sign"),
    ):
        found = timed(tally, what, lambda typed=words: store.conversation_list.rows(typed))
        assert words not in (RARE, "ab") or found
    timed(tally, "earlier texts", store.conversation_list.earlier_texts)
    service = ChatService(store, session_info, lambda report: FakeBackend(FAST))
    timed(tally, "a chat", lambda: service.messages(num_chats))
    service.start()
    timed(tally, "a turn", lambda: ask(service, "hello"))
    close(service)


# clocks


@pytest.mark.slow
def test_a_clock_that_jumps_changes_neither_order_nor_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """The wall clock is only written down; what is measured is monotonic."""
    rng = random.Random(8)
    days = timedelta(days=400)

    def jumping() -> str:
        moment = datetime(2026, 11, 23, tzinfo=UTC) + days * rng.uniform(-30, 30)
        return moment.isoformat(timespec="milliseconds")

    for module in ("rows", "store", "conversations"):
        monkeypatch.setattr(f"localspec.record.{module}.now", jumping)
    service, _ = open_service(tmp_path)
    sent = list[str]()
    handles = list[int]()
    for number in range(tally.size(12, 300)):
        handle = rng.choice([None, *handles])
        sent.append(f"message {number}")
        reply = ask(service, sent[-1], handle)
        with tally.case(sent[-1]):
            shown = [m.text for m in service.messages(reply.handle) if m.role == "user"]
            assert shown[-1] == sent[-1] and shown == [text for text in sent if text in shown]
            assert service.conversations()[0].id == reply.handle, "the newest stands first"
        handles = list({*handles, reply.handle})
    rows = service.turn_rows()
    for row in rows:
        with tally.case(f"figures of turn {row['turn_id']}"):
            assert all(row[name] >= 0 for name in ("ttft_ms", "prefill_ms", "decode_ms"))
    for kind in ("csv", "jsonl", "markdown", "sqlite"):
        service.export(Scope(), kind, tmp_path / f"out.{kind}")
    close(service)
    with closing(open_store(tmp_path)) as again, tally.case("the next start"):
        again.tidy()
        stored = [m.text for one in again.conversations() for m in again.messages(one.id)]
        assert again.notices == () and {*sent} <= {*stored}


# logs of earlier versions


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_chat_goes_on_in_a_log_of_an_earlier_version(tmp_path: Path, version: int) -> None:
    path = write_log(tmp_path / "localspec.db", version)
    if version < 19:
        upgrade_log(path)
    _continue_on(tmp_path)


def _continue_on(folder: Path) -> None:
    """All is there, every format is written, and the chat goes on."""
    service, _ = open_service(folder)
    assert service.store.path is not None and service.store.notices == ()
    (chat,) = service.conversations("answered")
    assert [m.text for m in service.messages(chat.id)] == ["asked", "an\0other", "and then?"]
    states = {m.text: m.state for m in service.store.messages(chat.id)}
    assert states["half an"] == "interrupted"
    assert service.store.reply_tokens(2) == ([1, 2], ["ngram", "target"])
    assert len(service.store.step_rows(1)) == 1
    ask(service, "and now?", chat.id)
    for kind in ("csv", "jsonl", "markdown", "sqlite"):
        export(service.store, Scope(), kind, folder / f"out.{kind}")
    close(service)
    with closing(open_store(folder)) as again:
        (row, *_) = again.conversations()
        assert "and now?" in [m.text for m in again.messages(row.id)]
