"""A peer's process is asked and answered, and whatever goes wrong with it is one sentence and
leaves no process behind. The worker is a real process: fake_peer.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec.core.errors import ModelError
from tests.kit.waiting import until
from tools.peers.worker import WORKERS, PeerWorker

pytestmark = pytest.mark.slow  # starts child processes

FAKE = Path(__file__).parent / "fake_peer.py"
REQUEST = {"prompt": [5], "max_tokens": 3, "end_ids": []}

Start = Callable[..., PeerWorker]


@pytest.fixture
def start_peer(tmp_path: Path) -> Iterator[Start]:
    started: list[PeerWorker] = []

    def begin(behaviour: str, limit_s: float = 20.0) -> PeerWorker:
        command = [sys.executable, str(FAKE), behaviour]
        started.append(
            PeerWorker("fake", command, {"n": 1}, tmp_path / "logs" / "fake.log", limit_s)
        )
        return started[-1]

    yield begin
    for worker in started:
        worker.close()


def is_alive(process_id: int) -> bool:
    """A child that ended but was not waited for is a zombie: it runs no more."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status


def wait_until_gone(process_id: int) -> bool:
    return until(lambda: not is_alive(process_id))


def test_the_opening_is_handed_over_and_requests_are_answered(start_peer: Start) -> None:
    worker = start_peer("well")
    assert worker.facts["opening"] == {"n": 1}
    assert worker.ask(REQUEST, 20.0)["tokens"] == [6, 7, 8]
    assert worker.ask({**REQUEST, "prompt": [20]}, 20.0)["tokens"] == [21, 22, 23]


def test_closing_ends_the_process_and_may_be_done_twice(start_peer: Start) -> None:
    worker = start_peer("well")
    worker.close()
    worker.close()
    assert not is_alive(worker.process_id)
    with pytest.raises(ModelError, match="ended"):
        worker.ask(REQUEST, 20.0)


def test_a_refused_request_is_said_and_the_next_one_is_served(start_peer: Start) -> None:
    worker = start_peer("refuses")
    with pytest.raises(ModelError, match="fake failed: ValueError: no such thing"):
        worker.ask(REQUEST, 20.0)
    assert worker.ask(REQUEST, 20.0)["tokens"] == [6, 7, 8]


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("dies", r"ended by itself \(exit code 3\)"),
        ("babbles", "wrote something that is no answer"),
        ("hangs", "did not answer within 1 s"),
    ],
)
def test_a_worker_that_goes_wrong_is_one_sentence_and_is_ended(
    start_peer: Start, tmp_path: Path, behaviour: str, told: str
) -> None:
    worker = start_peer(behaviour)
    with pytest.raises(ModelError, match=told):
        worker.ask(REQUEST, 1.0 if behaviour == "hangs" else 20.0)
    assert not is_alive(worker.process_id)
    with pytest.raises(ModelError, match="ended"):
        worker.ask(REQUEST, 1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_worker_started_itself_is_ended_with_it(start_peer: Start, tmp_path: Path) -> None:
    worker = start_peer("hangs")
    with pytest.raises(ModelError):
        worker.ask(REQUEST, 1.0)
    child = int((tmp_path / "logs" / "fake.log").read_text().split()[1])
    assert wait_until_gone(child)


@pytest.mark.parametrize("behaviour", ["dies-at-start", "babbles-at-start", "hangs-at-start"])
def test_a_worker_that_does_not_open_is_an_error(start_peer: Start, behaviour: str) -> None:
    with pytest.raises(ModelError, match=r"fake.*fake\.log"):
        start_peer(behaviour, 1.0 if behaviour.startswith("hangs") else 20.0)


def test_a_command_that_is_not_there_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--setup-peers"):
        PeerWorker("gone", [str(tmp_path / "python")], {}, tmp_path / "log", 5.0)


def test_ctrl_c_while_waiting_ends_the_worker(
    start_peer: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_peer("hangs")

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("queue.Queue.get", interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.ask(REQUEST, 20.0)
    assert not is_alive(worker.process_id)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_ends_when_the_process_that_asked_is_killed(tmp_path: Path, root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tools.peers.worker import PeerWorker\n"
        f"w = PeerWorker('fake', [sys.executable, {str(FAKE)!r}, 'well'], {{}}, "
        f"Path({str(tmp_path / 'log')!r}), 20.0)\n"
        "print(w.process_id, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as asking:
        assert asking.stdout is not None
        process_id = int(asking.stdout.readline())
        asking.send_signal(signal.SIGKILL)
        asking.wait(10)
    assert wait_until_gone(process_id)


ENGINE = """
class PeerEngine:
    def __init__(self, opening):
        print("chatter")
        self.facts = {"version": opening["version"]}
    def run(self, request):
        print("more chatter")
        if request["prompt"] == [0]:
            raise ValueError("no zero")
        return {"tokens": request["prompt"]}
"""


def serving(tmp_path: Path, opening: dict[str, Any]) -> PeerWorker:
    """The real serve.py with an engine of the test's own beside it."""
    (tmp_path / "serve.py").write_text((WORKERS / "serve.py").read_text())
    (tmp_path / "engine_test.py").write_text(ENGINE)
    command = [sys.executable, str(tmp_path / "serve.py"), "engine_test"]
    return PeerWorker("served", command, opening, tmp_path / "log", 20.0)


def test_serve_keeps_chatter_out_of_the_answers_and_survives_a_bad_request(tmp_path: Path) -> None:
    worker = serving(tmp_path, {"version": 7})
    try:
        assert worker.facts == {"version": 7}
        with pytest.raises(ModelError, match="ValueError: no zero"):
            worker.ask({"prompt": [0]}, 20.0)
        answer = worker.ask({"prompt": [3]}, 20.0)
        assert answer["tokens"] == [3]
        assert sys.platform == "win32" or answer["peak_memory_bytes"] > 1_000_000
    finally:
        worker.close()
    assert "chatter" in (tmp_path / "log").read_text()


def test_serve_says_why_an_engine_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="KeyError: 'version'"):
        serving(tmp_path, {})


@pytest.mark.parametrize("path", sorted(WORKERS.glob("*.py")), ids=lambda path: str(path.stem))
def test_scripts_of_the_workers_import_nothing_of_ours(path: Path) -> None:
    assert "localspec." not in path.read_text() and "from localspec" not in path.read_text()
