"""The key, the token of the launch and the cookie that the guards of the tests let in."""

from __future__ import annotations

from localspec.web.guard.page_key import PageKey
from localspec.web.guard.security import owner_purpose

TOKEN = "a-token-of-this-launch"
KEY = PageKey(b"the key of the tests")


def own_cookie(port: int) -> str:
    """Return the cookie for the server at this port, as a header has it."""
    return f"localspec_{port}={KEY.signed(owner_purpose(port))}"
