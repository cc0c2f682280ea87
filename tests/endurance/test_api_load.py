"""Sixteen clients for ten minutes at `python -m localspec serve`, with a drafter that fails,
clients that go away and a full queue: every answer is in the log as it was given, once."""

from __future__ import annotations

import json
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from localspec.record.store import Store
from tests.endurance.failing_serve import FAULT
from tests.kit.tally import Tally

SECONDS, WARM_S, LOOK_S = 600.0, 90.0, 2.0
NUM_CLIENTS, NUM_BURSTING, BURST_EVERY_S, BURST = 16, 4, 15.0, 16
CHAT_TURNS, MAX_TOKENS = 6, 24
DRAFTERS = ("auto", "auto", "off", "ngram", "draft_model")
ASKED = (
    "What is the capital of Peru?", "Tell me a story about a fox.", "What is 3 + 4?",
    "Write a function that adds two numbers.", "Why is the sky blue?",
)  # fmt: skip


@pytest.fixture
def only_whole(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--endurance"):
        pytest.skip("takes ten minutes: python -m tests --endurance")


@dataclass
class Server:
    """The process, as programs see it."""

    process: subprocess.Popen[str]
    url: str
    key: str

    def figures(self) -> tuple[float, int, int]:
        """Memory in MB, descriptors and threads, of the process and of the engine's."""
        parent = psutil.Process(self.process.pid)
        every = [parent, *parent.children(recursive=True)]
        memory_mb = sum(one.memory_info().rss for one in every) / 2**20
        return (
            memory_mb,
            sum(one.num_fds() for one in every),
            sum(one.num_threads() for one in every),
        )


@contextmanager
def serving(home: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.endurance.failing_serve", "serve", "--port", "0"]
    command += ["--parallel", "4", "--home", str(home)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        key = url = ""
        while not (key and url):
            line = process.stdout.readline()
            assert line, "the server ended"
            key = line.split()[-1] if "shown this once" in line else key
            url = line.split()[-1] if "→" in line else url
        threading.Thread(target=process.stdout.read, daemon=True).start()  # or it would block
        try:
            yield Server(process, url, key)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


@dataclass
class Client:
    """One of the clients. told: what it was answered, by the text that it asked. outcomes: how its
    requests ended."""

    number: int
    server: Server
    until_s: float
    told: dict[str, list[str]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_asked: int = 0

    def run(self) -> None:
        self._rng = random.Random(self.number)
        headers = {"authorization": f"Bearer {self.server.key}"}
        with httpx.Client(headers=headers, timeout=300.0, trust_env=False) as self._http:
            next_burst_s = time.monotonic() + WARM_S / 3
            while time.monotonic() < self.until_s:
                if self.number < NUM_BURSTING and time.monotonic() > next_burst_s:
                    next_burst_s += BURST_EVERY_S
                    self._guarded(self._burst)
                else:
                    self._guarded(self._chat)

    def _guarded(self, act: Any) -> None:
        try:
            act()
        except Exception as error:
            self.wrong.append(f"client {self.number}: {type(error).__name__}: {error}")

    def _body(self, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        rng = self._rng
        chosen = {"drafter": rng.choice(DRAFTERS), "temperature": rng.choice((0.0, 0.7))}
        return {"messages": messages, "max_tokens": MAX_TOKENS, **chosen, **more}

    def _asked(self) -> str:
        self.num_asked += 1
        return f"[{self.number}.{self.num_asked}] {self._rng.choice(ASKED)}"

    def _chat(self) -> None:
        messages = list[dict[str, str]]()
        for _ in range(CHAT_TURNS):
            asked = self._asked()
            messages.append({"role": "user", "content": asked})
            chance = self._rng.random()
            if chance < 0.1:
                self._leave(messages)
                return
            stream = chance < 0.5
            text = self._streamed(messages) if stream else self._whole(messages)
            if text is None:
                return
            self.told[asked] = [text]
            messages.append({"role": "assistant", "content": text})
            if time.monotonic() > self.until_s:
                return

    def _post(self, body: dict[str, Any]) -> dict[str, Any] | None:
        answer = self._http.post(f"{self.server.url}/chat/completions", json=body)
        found: dict[str, Any] = answer.json()
        if answer.status_code == 200:
            self.outcomes["finished"] += 1
            return found
        self._refused(answer.status_code, found["error"], answer.headers.get("retry-after"))
        return None

    def _refused(self, status: int, error: dict[str, Any], retry_after: str | None) -> None:
        """Only a full queue and the fault of the drafter may be."""
        if status == 429 and error["code"] == "queue_full" and int(retry_after or 0) >= 1:
            self.outcomes["queue full"] += 1
        elif status == 503 and FAULT in error["message"]:
            self.outcomes["drafter failed"] += 1
        else:
            self.wrong.append(f"client {self.number}: {status} {error}")

    def _whole(self, messages: list[dict[str, str]]) -> str | None:
        found = self._post(self._body(messages))
        return None if found is None else found["choices"][0]["message"]["content"]

    def _burst(self) -> None:
        asked = self._asked()
        messages = [{"role": "user", "content": asked}]
        found = self._post(self._body(messages, n=BURST, max_tokens=4))
        if found is not None:
            self.told[asked] = [one["message"]["content"] for one in found["choices"]]

    def _streaming(self, messages: list[dict[str, str]]) -> Any:
        body = self._body(messages, stream=True)
        return self._http.stream("POST", f"{self.server.url}/chat/completions", json=body)

    def _streamed(self, messages: list[dict[str, str]]) -> str | None:
        text = ""
        with self._streaming(messages) as answer:
            if answer.status_code != 200:
                error = json.loads(answer.read())["error"]
                self._refused(answer.status_code, error, answer.headers.get("retry-after"))
                return None
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.outcomes["finished"] += 1
                    return text
                if line.startswith("data: "):
                    data = json.loads(line[6:])
                    if "error" in data:
                        self._refused(503, data["error"], None)
                        return None
                    text += data["choices"][0]["delta"].get("content") or ""
        raise AssertionError("the stream ended without its end")

    def _leave(self, messages: list[dict[str, str]]) -> None:
        """Go away in the middle of the reply, or before it."""
        wanted = self._rng.randrange(4)
        with self._streaming(messages) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number >= wanted:
                    break
        self.outcomes["went away"] += 1


def test_sixteen_clients_for_ten_minutes(only_whole: None, tmp_path: Path, tally: Tally) -> None:
    memory_mb, descriptors, threads = list[float](), list[int](), list[int]()
    with serving(tmp_path) as server:
        began_s = time.monotonic()
        clients = [Client(number, server, began_s + SECONDS) for number in range(NUM_CLIENTS)]
        running = [threading.Thread(target=one.run) for one in clients]
        for thread in running:
            thread.start()
        while any(thread.is_alive() for thread in running):
            time.sleep(LOOK_S)
            if time.monotonic() - began_s > WARM_S:
                for values, value in zip(
                    (memory_mb, descriptors, threads), server.figures(), strict=True
                ):
                    values.append(value)  # type: ignore[attr-defined]
    for one in clients:
        for wrong in one.wrong:
            with tally.case(wrong):
                raise AssertionError("an answer that may not be")
    outcomes = sum((one.outcomes for one in clients), Counter[str]())
    for outcome in ("finished", "went away", "queue full", "drafter failed"):
        with tally.case(f"{outcome} never happened"):
            assert outcomes[outcome] > 0
    _check_log(tmp_path, clients, tally)
    growth_mb = statistics.linear_regression(range(len(memory_mb)), memory_mb).slope * 60 / LOOK_S
    with tally.case("memory grows"):
        assert growth_mb < 5.0, memory_mb
    for what, values in (("descriptors", descriptors), ("threads", threads)):
        with tally.case(f"{what} grow"):
            half = len(values) // 2
            assert max(values[half:]) <= max(values[:half]) + 2, values
    tally.figures += [f"{count:,} requests {outcome}" for outcome, count in outcomes.items()]
    tally.figures += [
        f"{memory_mb[-1]:.0f} MB, {growth_mb:+.2f} MB a minute",
        f"{min(descriptors)} to {max(descriptors)} descriptors",
        f"{min(threads)} to {max(threads)} threads",
    ]


def _check_log(home: Path, clients: list[Client], tally: Tally) -> None:
    """Each answer that a client has is a reply in the log, once; none is there that was not asked
    for."""
    logged = dict[str, list[str]]()
    with closing(Store.open(home / "localspec.db")) as store:
        rows = store.turn_rows()
        for row in rows:
            *_, asked, reply = store.branch(row["message_id"])
            replies = logged.setdefault(asked.text, [])
            if row["finish_reason"] in ("eos", "length", "stop"):
                replies.append(reply.text)
        num_messages = sum(len(store.messages(one.id)) for one in store.conversations())
    for one in clients:
        for asked, told in one.told.items():
            with tally.case(asked):
                assert sorted(logged[asked]) == sorted(told)
    with tally.case("a turn of nobody"):
        assert all(re.match(r"\[\d+\.\d+\] ", asked) for asked in logged)
    tally.figures.append(f"{len(rows):,} turns in the log, {num_messages:,} messages")
