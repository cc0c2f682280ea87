"""The server says why it cannot start. (That it starts and ends: test_checks_faults.)"""

from __future__ import annotations

import socket

import pytest

from localspec.chat.service import ChatService
from localspec.errors import SetupError
from localspec.web.server import serve


def never(url: str, once: str) -> None:
    raise AssertionError("the page must not come up")


def test_a_taken_port_is_said_with_the_remedy(service: ChatService) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=rf"127.0.0.1:{port}.*--port {port + 1}"):
            serve(service, "127.0.0.1", port, never)
