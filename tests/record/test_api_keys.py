"""A key opens until it is revoked, and the log does not hold it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from localspec.core.errors import RequestError
from localspec.record.store import Store


def test_a_key_opens_until_it_is_revoked_also_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "localspec.db"
    with closing(Store.open(path)) as served, closing(Store.open(path)) as command:
        key = command.api_keys.make("laptop")
        assert key.startswith("sk-") and served.api_keys.opens(key)
        assert not served.api_keys.opens(key[:-1]) and not served.api_keys.opens("")
        assert [one.name for one in served.api_keys.all()] == ["laptop"]
        command.api_keys.revoke("laptop")
        assert not served.api_keys.opens(key) and served.api_keys.all() == []


def test_the_log_holds_no_key(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "localspec.db")) as store:
        key = store.api_keys.make("laptop")
    held = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert key.encode() not in held and b"laptop" in held


def test_the_last_use_is_known_and_a_log_that_is_read_only_refuses_nobody(tmp_path: Path) -> None:
    path = tmp_path / "localspec.db"
    with closing(Store.open(path)) as store:
        key = store.api_keys.make("laptop")
        assert store.api_keys.all()[0].last_used_at_utc is None
        assert not store.api_keys.opens("sk-another")
        assert store.api_keys.all()[0].last_used_at_utc is None
        assert store.api_keys.opens(key)
        assert store.api_keys.all()[0].last_used_at_utc is not None
    with (
        closing(Store.open(path, busy_timeout_ms=1)) as served,
        closing(sqlite3.connect(path)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        assert served.api_keys.opens(key)


def test_names_are_single_and_must_be_known(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "localspec.db")) as store:
        store.api_keys.make("laptop")
        with pytest.raises(RequestError, match="already"):
            store.api_keys.make("laptop")
        for name in (" ", "x" * 81, "lap\ntop", "lap\udcfftop"):
            with pytest.raises(RequestError, match="one line of 1 to 80 characters"):
                store.api_keys.make(name)
        with pytest.raises(RequestError, match="no key called 'phone'"):
            store.api_keys.revoke("phone")
