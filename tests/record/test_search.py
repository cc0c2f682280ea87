"""Search finds what was written, takes whatever is typed for text, and does without FTS5."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from localspec.record import search
from localspec.record.store import Store
from tests.kit.samples import INFO, SETTINGS, begin, finish, open_store


@pytest.fixture
def without_fts5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "has_fts5", lambda conn: False)


def talk(store: Store, title: str, asked: str, reply: str) -> int:
    session_id = store.start_session(INFO)
    made = store.create_conversation(title)
    message = store.add_message(made, None, "user", asked)
    finish(store, store.begin_turn(session_id, made, message, SETTINGS), reply)
    return made


def fill(store: Store) -> None:
    talk(store, "Bread", "How do I bake a sourdough loaf?", "Mix flour and water, then wait.")
    talk(store, "Café", "Où est le café?", "Das Café ist in der Straße nebenan, schöne Grüße.")
    talk(store, "Code", "What does a[i] += 1 do in C++?", "It adds one: 100% sure. See foo_bar.")
    talk(store, "日本", "東京はどこですか。", "東京は日本の首都です。👩‍👩‍👧")


def titles(store: Store, typed: str) -> list[str]:
    return [row.title for row in store.conversation_list.rows(typed)]


FOUND = {
    "sourdough": ["Bread"],
    "SourDough": ["Bread"],
    "sour": ["Bread"],
    "flour wat": ["Bread"],
    "  flour\t\n water ": ["Bread"],
    "flour tokyo": [],
    "loaf flour": [],  # both words, but in different messages
    "bread": ["Bread"],  # only in the title
    "a[i]": ["Code"],
    "c++": ["Code"],
    "100%": ["Code"],
    "%": ["Code"],
    "foo_bar": ["Code"],
    "fooXbar": [],
    "東京": ["日本"],
    "首都": ["日本"],
    "👩‍👩‍👧": ["日本"],
    "café": ["Café"],
    '"sourdough loaf"': ["Bread"],
    '"sourdough lo': ["Bread"],  # while it is being typed
    '"loaf sourdough"': [],
    'wait "flour and water"': ["Bread"],
    '"does a[i] +="': ["Code"],
    "sourd* loaf": ["Bread"],
    "sourdough OR tokyo": [],
}


def test_words_are_found_with_the_index(store: Store) -> None:
    fill(store)
    assert {typed: titles(store, typed) for typed in FOUND} == FOUND


def test_words_are_found_without_the_index(tmp_path: Path, without_fts5: None) -> None:
    with closing(open_store(tmp_path)) as store:
        assert any("has no FTS5" in notice for notice in store.notices)
        fill(store)
        assert {typed: titles(store, typed) for typed in FOUND} == FOUND


MIXED = {  # texts with words that touch a script without spaces, and searches with their texts
    "chinese": "请教我使用GPU训练模型",
    "korean": "서울에서GPU를샀다",
    "thai": "ผมใช้Pythonเขียนโปรแกรม",
    "japanese": "第3章のQwen3でLLMを使う",
    "end": "我用gpu",
    "phrase": "使用GPU cluster很快",
    "latin": "A smart party bought GPUs.",
}
FOUND_IN_MIXED = {
    "GPU": {"chinese", "korean", "end", "phrase", "latin"},
    "gpu x": set(),
    "GPU 模型": {"chinese"},
    '"GPU"': {"chinese", "korean", "end", "phrase"},
    "pyth": {"thai"},
    '"pyth"': set(),
    "LLM": {"japanese"},
    '"qwen3"': {"japanese"},
    "3": {"japanese"},
    '"gpu cluster"': {"phrase"},
    "샀다": {"korean"},
    '"art"': set(),
    '"arty"': set(),
}


def test_a_word_between_characters_without_spaces_is_found(store: Store) -> None:
    for title, text in MIXED.items():
        talk(store, title, text, "-")
    assert {typed: set(titles(store, typed)) for typed in FOUND_IN_MIXED} == FOUND_IN_MIXED
    for typed in ("GPU", '"gpu cluster"', "샀다", "LLM"):
        for row in store.conversation_list.rows(typed):
            assert typed.strip('"').casefold() in row.snippet.casefold()


@pytest.mark.parametrize(
    ("typed", "text", "shown"),
    [
        ("cafe", "Das Café", "Café"),
        ("CAFÉ", "the cafe", "cafe"),
        ("needle", "İ" * 300 + " needle", "needle"),
        ('"flour water"', "flour, mixed; flour,\n\n water", "flour, water"),
        ("art ", "party " * 50 + "of art", "of art"),
        ("schon", "x " * 100 + "scho\u0308n", "scho\u0308n"),
        ("foo(", "x " * 100 + "foo(", "foo("),
        ("샀다", "\U0001f600 " * 100 + "GPU를샀다", "GPU를샀다"),
    ],
)
def test_the_snippet_holds_the_word_that_was_found(
    store: Store, typed: str, text: str, shown: str
) -> None:
    talk(store, "title", "y " * 100 + text, "-")
    (row,) = store.conversation_list.rows(typed)
    assert shown in row.snippet


def test_a_search_of_any_length_is_taken(store: Store) -> None:
    talk(store, "long", "é" * 2000, "-")
    assert titles(store, "é" * 60_000) == ["long"]
    assert titles(store, "%" * 60_000) == []


def test_the_index_ignores_accents_and_case_of_any_letter(store: Store) -> None:
    fill(store)
    assert titles(store, "cafe") == titles(store, "SCHÖNE") == ["Café"]


HOSTILE = (
    '"',
    '""',
    "'",
    "' OR 1=1 --",
    "foo AND",
    "NOT",
    "NEAR(a b, 2)",
    "a:b",
    "text:secret",
    "(",
    ")",
    "*",
    "^a",
    "-a",
    "a*b",
    "{a b}:c",
    "\\",
    "\\%",
    "_",
    "a\0b",
    "\0",
    "\ud83d",
    "x" * 5000,
    "quux " * 500,
    "\u202e",
    "; DROP TABLE message",
    "rank",
)


@pytest.mark.parametrize("is_indexed", [True, False])
def test_whatever_is_typed_is_text(
    tmp_path: Path, is_indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_indexed:
        monkeypatch.setattr(search, "has_fts5", lambda conn: False)
    with closing(open_store(tmp_path)) as store:
        fill(store)
        for number, typed in enumerate(HOSTILE, 1):
            assert "Bread" not in titles(store, typed)
            talk(store, f"exact {number}", f"before {typed} after", "x")
            assert f"exact {number}" in titles(store, typed)
            assert len(store.conversation_list.rows()) == 4 + number


def test_nothing_typed_lists_everything(store: Store) -> None:
    fill(store)
    assert titles(store, "  \n") == ["日本", "Code", "Café", "Bread"]


def test_the_snippet_shows_the_words_as_plain_text(store: Store) -> None:
    talk(store, "long", "x " * 200 + "<b>needle</b> " + "y " * 200, "ok")
    (row,) = store.conversation_list.rows("needle")
    assert "<b>needle</b>" in row.snippet and row.snippet[0] == row.snippet[-1] == "…"
    assert len(row.snippet) <= search.SNIPPET_LENGTH + 2
    assert row.message_id is not None and store.branch(row.message_id)[-1].role == "user"
    (titled,) = store.conversation_list.rows("long")
    assert (titled.snippet, titled.message_id) == ("", None)


def test_a_log_that_cannot_be_written_is_still_searched(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        fill(store)
    with closing(sqlite3.connect(tmp_path / "localspec.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with closing(open_store(tmp_path, busy_timeout_ms=10)) as copy:
            assert copy.path is None and "locked" in copy.notices[0]
        other.execute("ROLLBACK")
    (tmp_path / "localspec.db").rename(tmp_path / "kept.db")
    with closing(sqlite3.connect(tmp_path / "kept.db")) as newer, newer:
        newer.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name) VALUES ('localspec', 'm999')"
        )
    with closing(Store.open(tmp_path / "kept.db")) as blank:
        assert "newer localspec" in blank.notices[0] and titles(blank, "flour") == []
        fill(blank)
        assert titles(blank, "flour") == ["Bread"]


def test_a_very_long_message_is_found_and_snipped(store: Store) -> None:
    lines = "\n".join(f"line {n} of many" for n in range(10_000))
    talk(store, "lines", lines, "x" * 1_000_000 + " needle " + "y" * 1_000_000)
    for typed in ("needle", "9999", "NEEDLE"):
        (row,) = store.conversation_list.rows(typed)
        assert typed.lower() in row.snippet and len(row.snippet) < 200


def test_a_reply_is_found_when_it_has_ended(store: Store) -> None:
    turn = begin(store)
    store.checkpoint_reply(turn.message_id, "halfway")
    assert titles(store, "halfway") == []
    store.checkpoint_reply(turn.message_id, "halfway there")
    finish(store, turn, "finished")
    finish(store, turn, "replaced")
    assert titles(store, "finished") == titles(store, "halfway") == []
    assert titles(store, "replaced") == ["hi"]
    with store._db.writing() as tables:  # raises where index and texts differ
        tables.execute(
            "INSERT INTO message_search (message_search, rank) VALUES ('integrity-check', 1)"
        )


def test_a_reply_cut_by_a_crash_is_found_after_the_next_start(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        store.checkpoint_reply(begin(store).message_id, "halfway")
    with closing(open_store(tmp_path)) as again:
        again.tidy()
        assert titles(again, "halfway") == ["hi"]


def test_fts5_may_go_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_store(tmp_path)) as store:
        talk(store, "first", "apple", "x")
    with monkeypatch.context() as patched:
        patched.setattr(search, "has_fts5", lambda conn: False)
        with closing(open_store(tmp_path)) as poorer:
            assert poorer.path is not None
            talk(poorer, "second", "banana", "x")
            assert titles(poorer, "banana") == ["second"]
    with closing(open_store(tmp_path)) as richer:
        assert titles(richer, "appl") == ["first"] and titles(richer, "banan") == ["second"]
        assert richer.notices == ()


def test_a_log_with_an_index_opens_where_its_module_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_store(tmp_path)) as store:
        talk(store, "first", "apple", "x")
    with closing(sqlite3.connect(tmp_path / "localspec.db")) as conn, conn:
        conn.execute("PRAGMA writable_schema = ON")
        conn.execute("UPDATE sqlite_master SET sql = replace(sql, 'fts5(', 'fts_of_elsewhere(')")
    monkeypatch.setattr(search, "has_fts5", lambda conn: False)
    with closing(open_store(tmp_path)) as poorer:
        assert poorer.path is not None, poorer.notices
        talk(poorer, "second", "banana", "x")
        assert titles(poorer, "apple") == ["first"] and titles(poorer, "banana") == ["second"]


def test_a_broken_index_is_built_anew_at_the_next_start(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        talk(store, "first", "apple", "x")
        with store._db.writing() as tables:
            tables.execute("DROP TRIGGER message_search_insert")
        talk(store, "second", "banana", "x")
        assert titles(store, "banana") == []
    with closing(open_store(tmp_path)) as again:
        assert titles(again, "banana") == ["second"] and titles(again, "apple") == ["first"]


def test_words_like_special_expressions_are_quoted() -> None:
    assert search.match_of(['say "hi"', "AND"], {"AND"}) == '"say ""hi""" "AND"*'
    assert search.like_of("50%_\\") == "%50\\%\\_\\\\%"
    assert search.parsed("a\0b  c").texts == ("a\ufffdb", "c")
