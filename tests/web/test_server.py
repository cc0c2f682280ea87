"""The server starts from one command, says what stands in its way, and ends when told to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from localspec.chat.service import ChatService
from localspec.errors import SetupError
from localspec.web.server import serve


def never(url: str) -> None:
    raise AssertionError("the page must not come up")


def test_a_taken_port_is_said_with_the_remedy(service: ChatService) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=rf"127.0.0.1:{port}.*--port {port + 1}"):
            serve(service, "127.0.0.1", port, never)


@pytest.mark.slow
def test_it_serves_guarded_and_ends_when_interrupted(tmp_path: Path, root: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes", "--port", "0", "--home", str(tmp_path)],
        cwd=root,
        env=os.environ | {"http_proxy": "http://127.0.0.1:9"},  # a proxy must not matter
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        origin = url.split("/?")[0]
        assert get(f"{origin}/healthz")[0] == 200
        assert get(f"{origin}/live")[0] == 401
        status, body = get(url)
        assert status == 200 and "token" not in body
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) is not None
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    assert (tmp_path / "localspec.db").exists()


def get(url: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
