"""The key of a home folder: what lets a browser in again after localspec was started anew.

Cookies and tickets are a time, some random characters and a signature by the key, so neither has to
be remembered here and both grow too old. The key itself never leaves its file and this process. The
file can be read by its owner alone; without the file the next start makes another key, and every
browser has to be let in anew.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
import time
from pathlib import Path

from localspec.core.files import place_of, write_private

KEY_FILE = "page.key"
KEY_BYTES = 32
# Bits of a file's mode that let other accounts read or write it.
OTHERS = 0o077


class PageKey:
    """A key that signs. secret: None for a random one."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(KEY_BYTES)

    @property
    def salt(self) -> bytes:
        """A salt for passwords that stays with the key."""
        return self._digest("salt")

    def signed(self, purpose: str) -> str:
        """Return a new value for this purpose, good from now on."""
        stamp = f"{int(time.time())}.{secrets.token_urlsafe(9)}"
        return f"{stamp}.{self._digest(purpose, stamp).hex()}"

    def is_signed(self, value: str, purpose: str, lifetime_s: float) -> bool:
        """True if `signed` gave the value for this purpose no longer ago than its lifetime."""
        stamp, _, signature = value.rpartition(".")
        expected = self._digest(purpose, stamp).hex()
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode()):
            return False
        return time.time() - int(stamp.partition(".")[0]) <= lifetime_s

    def _digest(self, *words: str) -> bytes:
        message = "\n".join(words).encode("utf-8", "replace")
        return hmac.digest(self._secret, message, hashlib.sha256)


def page_key(folder: Path | None) -> PageKey:
    """Return the key of a home folder, which is made where there is none. Where none can be kept,
    return one for this launch."""
    if folder is None:
        return PageKey()
    file = folder / KEY_FILE
    try:
        if (secret := _read(file)) is None:
            secret = secrets.token_bytes(KEY_BYTES)
            write_private(file, secret.hex())
    except OSError:
        return PageKey()
    return PageKey(secret)


def _read(file: Path) -> bytes | None:
    """Return the secret of the file; None where there is none, and where another account could have
    read or written it."""
    place = place_of(file)
    if not place.exists():
        return None
    if sys.platform != "win32" and place.stat().st_mode & OTHERS:
        return None
    try:
        secret = bytes.fromhex(place.read_text("ascii"))
    except ValueError:
        return None
    return secret if len(secret) == KEY_BYTES else None
