"""The keys by which other programs may ask for replies.

Contract: a key is random, shown once when it is made, and kept as its SHA-256 only, which is enough
for a secret that nobody can guess. Any thread, and any process that has the log open: a key that
is revoked opens nothing from then on. Raises StoreError; each call is one transaction.

Not here: where a request carries its key (web.guard).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass

from localspec.core.errors import RequestError, StoreError
from localspec.record.connection import SharedConnection
from localspec.record.rows import now

PREFIX = "sk-localspec-"  # clients of OpenAI expect sk-
NUM_BYTES = 24
MOST_CHARACTERS = 80  # of a name
USED_EVERY_S = 60.0


@dataclass(frozen=True)
class ApiKey:
    """What is known of a key. last_used_at_utc: None where it never was, or that is not known."""

    name: str
    created_at_utc: str
    last_used_at_utc: str | None


class ApiKeys:
    """Those of one log."""

    def __init__(self, db: SharedConnection) -> None:
        self._db = db
        self._noted_s: dict[str, float] = {}  # by the hash of a key

    def all(self) -> list[ApiKey]:
        """Oldest first."""
        rows = self._db.rows(
            "SELECT name, created_at_utc, last_used_at_utc FROM api_key ORDER BY id"
        )
        return [ApiKey(**row) for row in rows]

    def make(self, name: str) -> str:
        """A new key; it can never be read again. Raises RequestError for a name in use, or none."""
        if not 0 < len(name.strip()) <= MOST_CHARACTERS or not name.isprintable():
            raise RequestError(
                f"A key needs a name to tell it by: one line of 1 to {MOST_CHARACTERS} characters."
            )
        key = f"{PREFIX}{secrets.token_urlsafe(NUM_BYTES)}"
        with self._db.writing() as tables:
            if tables.rows("SELECT 1 FROM api_key WHERE name = ?", name):
                raise RequestError(
                    f"There is a key called {name!r} already. Revoke it, or choose another name."
                )
            row = {"name": name, "hash": _hashed(key), "created_at_utc": now()}
            tables.insert("api_key", row)
        return key

    def revoke(self, name: str) -> None:
        """Raises RequestError where there is no such key."""
        if not self._db.execute("DELETE FROM api_key WHERE name = ?", name):
            raise RequestError(f"There is no key called {name!r}. See the list of keys.")

    def opens(self, key: str) -> bool:
        hashed = _hashed(key)
        is_known = bool(self._db.rows("SELECT 1 FROM api_key WHERE hash = ?", hashed))
        if is_known:
            self._note_use(hashed)
        return is_known

    def _note_use(self, hashed: str) -> None:
        """Once a minute. A log that cannot be written refuses nobody who has a key."""
        now_s = time.monotonic()
        if now_s - self._noted_s.get(hashed, -USED_EVERY_S) < USED_EVERY_S:
            return
        self._noted_s[hashed] = now_s
        with suppress(StoreError), self._db.writing() as tables:
            tables.execute("UPDATE api_key SET last_used_at_utc = ? WHERE hash = ?", now(), hashed)


def _hashed(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
