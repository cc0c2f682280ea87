"""The process of one peer, seen from the comparison: one JSON line asked, one answered.

Contract: `PeerWorker` starts a script with a peer's own Python and waits until it is ready; `ask`
returns its answer or raises ModelError for a worker that refuses, dies, says nothing within the
limit or writes something else. A worker that failed is ended and stays so. `close` ends it in
every case, with the processes it started itself. Ctrl-C does not reach it: it is ended by
`close`, or by the end of its input when this process is gone.

Not here: what is asked (llama_cpp, vllm), the other end (workers/serve).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from localspec.core.errors import ModelError

WORKERS = Path(__file__).resolve().parent / "workers"
CLOSING_S = 5.0


class PeerWorker:
    """A running peer. name: for sentences. log: where whatever it prints goes."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        opening: Mapping[str, Any],
        log: Path,
        opening_limit_s: float,
    ) -> None:
        self._name, self._log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as stream:
            self._process = _started(command, stream)
        self._is_busy = False  # with a request that was not answered
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._pump, daemon=True)
        self._reader.start()
        try:
            self.facts: Mapping[str, Any] = self._exchange(opening, opening_limit_s)["ready"]
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The worker's answer. Raises ModelError."""
        try:
            return self._exchange(request, limit_s)
        except _RefusedRequest:
            raise  # the worker lives and may serve the next one
        except BaseException:  # Ctrl-C too: its late answer would meet the next request
            self.close()
            raise

    def close(self) -> None:
        """End the process, gently at first. May be called twice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # a dead one has nobody to read what is left to flush
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self._is_busy else CLOSING_S)
        _end_with_children(self._process)
        self._reader.join(CLOSING_S)
        if not self._reader.is_alive():  # else closing would wait for whoever holds the other end
            self._process.stdout.close()

    def _exchange(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._is_busy = True
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise ModelError(self._ended()) from None
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            raise ModelError(
                f"{self._name} did not answer within {limit_s:.0f} s and was ended. Its own "
                f"words are in {self._log}."
            ) from None
        if line is None:
            raise ModelError(self._ended())
        self._is_busy = False
        return self._read(line)

    def _read(self, line: str) -> dict[str, Any]:
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ModelError(
                f"{self._name} wrote something that is no answer and was ended. Its own words "
                f"are in {self._log}."
            )
        if "error" in answer:
            raise _RefusedRequest(f"{self._name} failed: {answer['error']} (more in {self._log}).")
        return answer

    def _ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSING_S)
        code = self._process.returncode
        return f"{self._name} ended by itself (exit code {code}). Its own words are in {self._log}."

    def _pump(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError):  # closed while reading
            for line in self._process.stdout:
                self._answers.put(line)
        self._answers.put(None)


class _RefusedRequest(ModelError):
    """The worker is well and says that it cannot do this."""


def _started(command: Sequence[str], log: Any) -> subprocess.Popen[str]:
    """The process, in a group of its own that can be ended as a whole."""
    group: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            errors="replace",
            **group,
        )
    except OSError as error:
        raise ModelError(
            f"{command[0]} cannot be started ({error.strerror}). Install the peers again with: "
            "python -m tools.peers --setup-peers"
        ) from error


def _end_with_children(process: subprocess.Popen[str]) -> None:
    if sys.platform != "win32":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
