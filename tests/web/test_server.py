"""The server says why it cannot start, and ends in order. (That it starts: test_checks_faults.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localspec.chat.service import ChatService
from localspec.core.errors import SetupError
from localspec.core.interrupts import ENDINGS
from localspec.web.server import serve


def never(url: str, once: str) -> None:
    raise AssertionError("the page must not come up")


def test_a_taken_port_is_said_with_the_remedy(idle_service: ChatService, taken_port: int) -> None:
    with pytest.raises(SetupError, match=rf"127.0.0.1:{taken_port}.*--port {taken_port + 1}"):
        serve(idle_service, "127.0.0.1", taken_port, never)


SERVING = """
import signal
import sys
from pathlib import Path

from localspec.chat.service import ChatService
from localspec.core.interrupts import ENDINGS
from localspec.record.store import Store
from localspec.web.server import serve_interfaces
from tests.kit.fakes import FakeBackend, session_info

class Telling(ChatService):
    def start(self):
        super().start()
        print("up", flush=True)

    def close(self):
        super().close()
        print("written", flush=True)

service = Telling(Store.open(Path(sys.argv[1])), session_info, lambda report: FakeBackend())
for number in ENDINGS:  # pytest may run in the background
    signal.signal(number, signal.SIG_DFL)
serve_interfaces(service, "127.0.0.1", 0, lambda url: None)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("number", ENDINGS)
def test_a_request_to_end_ends_it_in_order(root: Path, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", SERVING, str(tmp_path / "localspec.db")]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdout is not None and ran.stdout.readline() == "up\n"
        ran.send_signal(number)
        assert ran.communicate(timeout=30) == ("written\n", "") and ran.returncode == 0
