"""The password for other machines, asked for only when localspec listens beyond loopback.

Contract: the password is kept as a salted scrypt hash and compared in constant time. A wrong try
makes its address wait, longer each time, and all unknown addresses together get TRIES_A_MINUTE. A
login that is being sent has one of few places, and one address has fewer still. An address from
which the password was right before shares neither the tries nor the last places with the others.
Who knows the password gets the guard's cookie. The page that asks for it needs no script.

Not here: where the password comes from (app.py), who is asked for it (security).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs

from localspec.core.errors import SetupError
from localspec.web.guard.bodies import BodyRefused

MIN_LENGTH = 10
MAX_LENGTH = 1024
FREE_TRIES = 3
MAX_WAIT_S = 300.0
TRIES_A_MINUTE = 30
MAX_ADDRESSES = 1024
# Seconds in which a login has to arrive, which is a line of text.
LOGIN_S = 5.0
# Logins that are being sent at the same time, of all addresses and of one.
MAX_LOGINS = 8
MAX_LOGINS_OF_ADDRESS = 2
# Of these places, those that only addresses get from which the password was right before.
KEPT_LOGINS = 2
FORM = """<form method="post" action="/login">
<label>Password <input type="password" name="password" autocomplete="current-password" autofocus
 required style="font:inherit;padding:.3rem"></label>
<button style="font:inherit;padding:.3rem .8rem">Open localspec</button></form>"""


class Password:
    """A password, hashed. Raises SetupError for one that is too easily guessed."""

    def __init__(self, password: str, salt: bytes | None = None) -> None:
        """salt: None for a random one."""
        if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
            raise SetupError(
                f"The password has {len(password)} characters, but {MIN_LENGTH} to {MAX_LENGTH} "
                "are needed: everyone on the network can try. Choose a longer one, several words "
                "for example."
            )
        self._salt = salt or secrets.token_bytes(16)
        self._hash = self._hashed(password)

    @property
    def fingerprint(self) -> str:
        """What another password does not have; it tells nothing of this one."""
        return hashlib.sha256(self._hash).hexdigest()

    def is_right(self, candidate: str) -> bool:
        """Takes some 50 ms on purpose; call it in a thread."""
        return hmac.compare_digest(self._hashed(candidate[: MAX_LENGTH + 1]), self._hash)

    def _hashed(self, password: str) -> bytes:
        words = password.encode("utf-8", "surrogatepass")
        return hashlib.scrypt(words, salt=self._salt, n=2**14, r=8, p=1)


class Tries:
    """Counts wrong tries, and knows the addresses of right ones. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._recent: deque[float] = deque()
        self._known: OrderedDict[str, None] = OrderedDict()

    def is_known(self, address: str) -> bool:
        """True if the password was right from there before."""
        return address in self._known

    def wait_s(self, address: str) -> float:
        """Seconds until this address may try; 0 for now."""
        now = self._clock()
        while self._recent and now - self._recent[0] >= 60.0:
            self._recent.popleft()
        for_all = 60.0 - (now - self._recent[0]) if len(self._recent) >= TRIES_A_MINUTE else 0.0
        _, until_s = self._failures.get(address, (0, 0.0))
        return max(0.0, until_s - now, 0.0 if self.is_known(address) else for_all)

    def begin(self, address: str) -> None:
        """A try is made; it counts as wrong until `forget` says otherwise, so that many at once
        gain nothing."""
        now = self._clock()
        self._recent.append(now)
        num_failures = self._failures.pop(address, (0, 0.0))[0] + 1
        over = num_failures - FREE_TRIES
        pause_s = min(MAX_WAIT_S, 2.0**over) if over >= 0 else 0.0
        self._failures[address] = (num_failures, now + pause_s)
        while len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def forget(self, address: str) -> None:
        """The try was right."""
        self._failures.pop(address, None)
        self._known[address] = None
        self._known.move_to_end(address)
        while len(self._known) > MAX_ADDRESSES:
            self._known.popitem(last=False)


class Places:
    """The places of logins that are being sent."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    @contextmanager
    def place(self, address: str, is_known: bool) -> Iterator[None]:
        """Hold a place. Raise BodyRefused if there is none for this address."""
        most = MAX_LOGINS if is_known else MAX_LOGINS - KEPT_LOGINS
        if self._taken.total() >= most or self._taken[address] >= MAX_LOGINS_OF_ADDRESS:
            raise BodyRefused(503, "Too many log in at the same time. Try again in some seconds.")
        self._taken[address] += 1
        try:
            yield
        finally:
            self._taken[address] -= 1
            self._taken += Counter()  # drops the addresses that hold none


def password_in(form: bytes) -> str:
    """The password of the posted form; empty where there is none."""
    try:
        fields = parse_qs(form.decode("latin-1"), encoding="utf-8", max_num_fields=4)
    except ValueError:  # more fields than ours has
        return ""
    return fields.get("password", [""])[0]
