"""How uvicorn listens: no proxies believed, nothing said about itself, slow headers cut off.

Contract: `server_of` is the one place where uvicorn is configured. A connection that has not
sent a whole request head within HEAD_S is closed; uvicorn itself waits for ever. More than
MAX_CONNECTIONS get a 503. What is written is sent at once: without TCP_NODELAY the second small
write of an answer waits for the first one's acknowledgement, which a browser delays by 40 ms. A
connection that is idle stays for IDLE_S: uvicorn's 5 seconds are about what a reader takes between
two clicks, and a request that crosses the close on its way is lost. A warning of one kind is
printed once in WARNING_S, with how often it came: who reaches the port can cause one with a few
bytes.

Source: uvicorn's H11Protocol, which a subclass may replace (uvicorn.Config(http=...)).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import socket
import time
from typing import Any

from uvicorn import Config, Server
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.h11_impl import H11Protocol

from localspec.web.guard.policy import App

HEAD_S = 15.0
MAX_CONNECTIONS = 512  # a page holds some five
IDLE_S = 65
GRACE_S = 2
WARNING_S = 60.0


class RareWarnings(logging.Filter):
    """Passes a warning from one line of code once in WARNING_S, with the number held back."""

    def __init__(self) -> None:
        super().__init__()
        self._last = dict[tuple[str, int], tuple[float, int]]()  # when it passed, held back since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        source, now_s = (record.pathname, record.lineno), time.monotonic()
        passed_s, num_held = self._last.get(source, (-math.inf, 0))
        if now_s - passed_s < WARNING_S:
            self._last[source] = passed_s, num_held + 1
            return False
        self._last[source] = now_s, 0
        if num_held:
            told = f"{record.getMessage()} ({num_held} more since the last warning of this kind)"
            record.msg, record.args = told, None
        return True


def _log_config() -> dict[str, Any]:
    """Return uvicorn's own, whose handler is limited to rare warnings."""
    config: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    config["filters"] = {"rare_warnings": {"()": RareWarnings}}
    config["handlers"]["default"]["filters"] = ["rare_warnings"]
    return config


class PromptHeads(H11Protocol):
    """uvicorn's protocol, with a deadline for each head from its first byte on, for a connection's
    first one from its opening. Between requests its keep-alive deadline holds.

    asyncio sets TCP_NODELAY only where the listening socket names its protocol, and one made by
    `socket.socket()` does not; so it is set here."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait_for_a_head()

    def data_received(self, data: bytes) -> None:
        cycle_before = self.cycle
        super().data_received(data)
        if self.cycle is not cycle_before:
            self._stop_waiting()
        elif self._deadline is None and self._is_between_requests():
            self._wait_for_a_head()

    def on_response_complete(self) -> None:
        """The next head may have begun while this answer was made."""
        super().on_response_complete()
        begun, _ = self.conn.trailing_data
        if begun and self._deadline is None and self._is_between_requests():
            self._wait_for_a_head()

    def shutdown(self) -> None:
        """The server ends: so does the stream of events that a page waits for."""
        super().shutdown()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_a_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def server_of(app: App, **changes: Any) -> Server:
    """The uvicorn server of an application. changes: settings of tests."""
    settings: dict[str, Any] = {
        "log_level": "warning",
        "log_config": _log_config(),
        "access_log": False,  # addresses hold the token
        "http": PromptHeads,
        "ws": "none",
        "proxy_headers": False,  # nobody stands between the browser and us
        "forwarded_allow_ips": "",
        "workers": 1,
        "env_file": None,
        "server_header": False,
        "limit_concurrency": MAX_CONNECTIONS,
        "timeout_keep_alive": IDLE_S,
        "timeout_graceful_shutdown": GRACE_S,
    }
    return Server(Config(app, **{**settings, **changes}))
