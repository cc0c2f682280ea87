"""Whether a request was sent to this server by one of its own names (DNS rebinding).

Contract: a request with two of a header that must be single counts as none of ours: two readers
could see two different requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers

from localspec.web.guard.policy import Scope

SINGLE = (
    "host", "origin", "content-length", "transfer-encoding", "cookie", "sec-fetch-site",
    "authorization", "x-api-key",
)  # fmt: skip
NOT_HERE = "localspec answers only under its own address."


@dataclass(frozen=True)
class Hosts:
    """names: every `name:port` by which this server may be called, beside the address a connection
    was made to."""

    names: frozenset[str]
    port: int

    def are_called(self, scope: Scope, headers: Headers) -> bool:
        if any(len(headers.getlist(name)) > 1 for name in SINGLE):
            return False
        host = headers.get("host", "").lower()
        return host in self.names or host == self._own_address(scope)

    def _own_address(self, scope: Scope) -> str | None:
        """The address this connection was made to. It is a number, so no name that another
        person's DNS points here can equal it."""
        server = scope.get("server")
        if server is None:
            return None
        return f"[{server[0]}]:{self.port}" if ":" in server[0] else f"{server[0]}:{self.port}"
