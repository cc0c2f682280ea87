"""A server that speaks what vLLM, SGLang and plain OpenAI servers speak, with a script.

Contract: no model; what it says is made from its fields alone. `bodies` holds every request for a
reply, `closed` is set when a client leaves one that is being written.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.kit.servers import serve_handler

COUNTERS = (
    "num_requests_running", "num_requests_waiting", "request_success_total",
    "generation_tokens_total", "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
)  # fmt: skip

COUNTING = threading.Lock()
# Seconds after which a client that takes nothing has stopped reading.
BLOCKED_S = 0.3


@dataclass
class Stub:
    """words: of the reply, one an event. drafted: of each reply (rounds, tokens, accepted). extra:
    fields of the last event. breaks_after: events until the connection breaks. sends_after:
    events, and the data of one more behind them. stands_after: events until nothing comes any more.
    others: requests of somebody else that end during a reply. key: without which there is no
    answer. tokenized: status and body of an answer on a prompt's length. runs_on_s: that an ended
    reply still counts as running. writes: of an address, what writes its raw answer; `blocked` is
    set once nobody reads it any more."""

    port: int = 0
    owned_by: str = "vllm"
    model: str = "stub-1b"
    context_length: int | None = 512
    words: tuple[str, ...] = ("Rain", " falls", ".")
    thinking: tuple[str, ...] = ()
    drafted: tuple[int, int, int] = (4, 12, 6)
    extra: Mapping[str, Any] = field(default_factory=dict)
    fault: tuple[int, str] | None = None
    breaks_after: int | None = None
    sends_after: tuple[int, str] | None = None
    stands_after: int | None = None
    others: int = 0
    key: str | None = None
    tokenized: tuple[int, str] = (200, '{"count": 9, "max_model_len": 512}')
    runs_on_s: float = 0.0
    ended_s: float = 0.0
    writes: Mapping[str, Callable[[Callable[[bytes], None]], None]] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    blocked: threading.Event = field(default_factory=threading.Event)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def finish(self) -> None:
        """Count a reply as vLLM does."""
        grown = (0, 0, 1 + self.others, len(self.words) * (1 + self.others), *self.drafted)
        with COUNTING:
            for name, by in zip(COUNTERS, grown, strict=True):
                self.counters[name] += by
        self.ended_s = time.monotonic()

    def models(self) -> dict[str, Any]:
        entry = {"id": self.model, "object": "model", "owned_by": self.owned_by}
        if self.context_length is not None:
            entry["max_model_len"] = self.context_length  # type: ignore[assignment]
        return {"object": "list", "data": [entry]}

    def metrics(self) -> str:
        is_running = time.monotonic() - self.ended_s < self.runs_on_s
        return "".join(
            f'# TYPE vllm:{name} untyped\nvllm:{name}{{engine="0"}} {value}.0\n'
            for name, value in {**self.counters, COUNTERS[1]: int(is_running)}.items()
        )

    def events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield _event({"role": "assistant", "content": ""}, 0)
        said = [{"reasoning_content": word} for word in self.thinking]
        for count, word in enumerate(self.words, 1):
            said.append({"content": word, **({"count": count} if count else {})})
        for one in said:
            count = one.pop("count", 0)  # type: ignore[call-overload]
            logprobs = None
            if body.get("logprobs") and "content" in one:
                top = [{"token": one["content"], "logprob": -0.1}, {"token": "x", "logprob": -3.0}]
                logprobs = {"content": [{**top[0], "top_logprobs": top}]}
            yield _event(one, count, logprobs=logprobs)
        yield _event({}, len(self.words), finish="stop")
        yield {**_event(None, len(self.words)), **self.extra}


def _event(
    delta: Mapping[str, Any] | None, count: int, finish: str | None = None, logprobs: Any = None
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    usage = {"prompt_tokens": 9, "completion_tokens": count, "total_tokens": 9 + count}
    head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "stub"}
    return {**head, "choices": [] if delta is None else [choice], "usage": usage}


def _native(text: str) -> dict[str, Any]:
    """A reply of SGLang's own interface."""
    told = {"spec_verify_ct": 2, "spec_num_proposed_drafts": 8, "spec_num_correct_drafts": 4}
    return {"text": f"To {text}", "meta_info": {"completion_tokens": 6, **told}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _answer(self, status: int, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _is_refused(self) -> bool:
        if (write := self.stub.writes.get(self.path)) is not None:
            self.close_connection = True
            self.connection.settimeout(BLOCKED_S)
            try:
                write(self.connection.sendall)
            except TimeoutError:
                self.stub.blocked.set()
            except OSError:
                self.stub.closed.set()
            return True
        if self.stub.key in (None, (self.headers["authorization"] or "").removeprefix("Bearer ")):
            return False
        said = f"Incorrect API key: {self.headers['authorization']}"
        self._answer(401, json.dumps({"error": {"message": said}}))
        return True

    def do_GET(self) -> None:
        if self._is_refused():
            return
        if self.path == "/v1/models":
            self._answer(200, json.dumps(self.stub.models()))
        elif self.path == "/version":
            self._answer(200, '{"version": "9.9"}')
        elif self.path == "/metrics" and self.stub.owned_by == "vllm":
            self._answer(200, self.stub.metrics(), "text/plain")
        else:
            self._answer(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self._is_refused():
            return
        if self.path == "/generate":
            self.stub.bodies.append({"path": self.path, **body})
            self._answer(200, json.dumps([_native(text) for text in body["text"]]))
            return
        if self.path == "/tokenize":
            self._answer(*self.stub.tokenized)
            return
        self.stub.bodies.append({"path": self.path, **body})
        if self.stub.fault is not None:
            status, said = self.stub.fault
            self._answer(status, json.dumps({"error": {"message": said}}))
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("connection", "close")  # or a client asks once more while it closes
        self.end_headers()
        self._stream(body)

    def _send(self, text: str) -> None:
        data = text.encode(errors="surrogateescape")
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _stream(self, body: Mapping[str, Any]) -> None:
        stub = self.stub
        for number, event in enumerate(stub.events(body)):
            if number == stub.breaks_after:
                self._send('data: {"choi')
                return
            if number == stub.stands_after:
                self._stand()
                return
            if stub.sends_after is not None and number == stub.sends_after[0]:
                self._send(f"data: {stub.sends_after[1]}\n\n")
            self._send(f"data: {json.dumps(event)}\n\n")
        stub.finish()
        self._send("data: [DONE]\n\n")
        self._send("")

    def _stand(self) -> None:
        """Say nothing until the client leaves."""
        self.connection.settimeout(20.0)
        try:
            if not self.connection.recv(1):
                self.stub.closed.set()
        except OSError:
            time.sleep(0)


@contextmanager
def serve_stub() -> Iterator[Stub]:
    """Yield a running server, to be asked at its `url`."""
    stub = Stub()
    with serve_handler(_Handler, stub=stub) as stub.port:
        yield stub


def reset(stub: Stub) -> None:
    """As it was when it began, but for its port."""
    port = stub.port
    stub.__dict__.update(Stub().__dict__)
    stub.port = port
