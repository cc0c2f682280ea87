"""Servers in a thread of the test's process, each on a port that the system chose.

`serve_app` runs an ASGI application on the product's own server, `serve_handler` a plain HTTP
handler. The port is bound before anybody learns of it and stays bound until the server has ended,
so no other process can take it in between.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from tests.kit.waiting import WAIT_S, until

if TYPE_CHECKING:
    from uvicorn import Server

HOST = "127.0.0.1"
# Seconds between two looks of a plain server for its end; the default of 0.5 would be waited for.
LOOK_S = 0.01


@dataclass
class RunningApp:
    """A server that has started. server: uvicorn's, whose settings and state a test may read."""

    port: int
    server: Server
    thread: threading.Thread

    def stop(self) -> None:
        """End the server, and wait until it has ended."""
        self.server.should_exit = True
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the server does not end"


@contextmanager
def serve_app(app_of: Callable[[int], Any], **settings: Any) -> Iterator[RunningApp]:
    """Serve the application that `app_of` makes for a port. settings: of the server."""
    from localspec.web.guard.connections import server_of

    with socket.socket() as bound:
        bound.bind((HOST, 0))
        port = bound.getsockname()[1]
        server = server_of(app_of(port), **{"timeout_graceful_shutdown": 1, **settings})
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        running = RunningApp(port, server, thread)
        thread.start()
        try:
            until(lambda: server.started)
            yield running
        finally:
            running.stop()


@contextmanager
def serve_handler(handler: type[BaseHTTPRequestHandler], **attributes: Any) -> Iterator[int]:
    """Serve requests with a handler class, and yield the port. attributes: of the class, for what
    its requests read and write."""
    server = ThreadingHTTPServer((HOST, 0), type("Handler", (handler,), attributes))
    thread = threading.Thread(target=server.serve_forever, args=(LOOK_S,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
