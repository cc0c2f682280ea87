"""A server that answers without end, too slowly or in no format: each answer ends in a sentence."""

from __future__ import annotations

import gc
import json
import threading
import time
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from types import AsyncGeneratorType
from typing import Any

import pytest

from localspec.core import http_limits
from localspec.core.backend import Chunk, Message, Request
from localspec.core.errors import ConfigError, LocalspecError, NotCounted
from localspec.core.options import RemoteServer
from localspec.remote import counters, remote_turn, server, servers
from localspec.remote.server import ServerBackend
from tests.kit.stub_server import Stub, reset
from tests.kit.waiting import WAIT_S, until

Send = Callable[[bytes], None]
Write = Callable[[Send], None]

CHAT = "/v1/chat/completions"
ASKED = (Message("user", "Rain?"),)
SMALL = 2**16
SOON_S = 0.2
PAUSE_S = 0.01
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
EVENTS = HEAD + b"Content-Type: text/event-stream\r\n\r\n"
DEEP = b"[" * 500 + b"]" * 500


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of size that are reached soon."""
    monkeypatch.setattr(http_limits, "ANSWER_BYTES", SMALL)
    monkeypatch.setattr(http_limits, "EVENT_BYTES", SMALL)
    monkeypatch.setattr(counters, "UPDATE_S", 0.0)


@pytest.fixture(scope="module")
def backend_of_file(stub_of_module: Stub) -> Iterator[ServerBackend]:
    reset(stub_of_module)
    with closing(ServerBackend(RemoteServer(stub_of_module.url))) as backend:
        yield backend


@pytest.fixture
def remote_backend(stub: Stub, backend_of_file: ServerBackend) -> ServerBackend:
    return backend_of_file


def suspended_generators() -> list[object]:
    """The asynchronous generators of this process that wait for somebody to end them."""
    return [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, AsyncGeneratorType) and thing.ag_frame is not None
    ]


def is_reply_left(before: list[object]) -> bool:
    """True if a generator is suspended that was not before. A server of other tests in this process
    holds its own as long as it runs."""
    known = {id(thing) for thing in before}
    return any(id(thing) not in known for thing in suspended_generators())


def body(content: bytes, headers: bytes = b"") -> Write:
    return lambda send: send(HEAD + headers + b"\r\n" + content)


def endless(start: bytes, part: bytes, pause_s: float = 0.0) -> Write:
    def write(send: Send) -> None:
        send(start)
        for _ in count():
            send(part)
            time.sleep(pause_s)

    return write


def packed(content: bytes) -> bytes:
    return zlib.compress(content)


def event(data: object) -> bytes:
    return b"data: %s\n\n" % (data if isinstance(data, bytes) else json.dumps(data).encode())


def word(text: str = "word ", **more: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}], **more})


LIST = b'{"object": "list", "data": [{"id": "a", "owned_by": "vllm"}]}'
LATE = "takes too long"
SLOW = "no whole answer within 0.2 s"


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (endless(HEAD + b"\r\n", b" " * SMALL), "an answer of more than"),
        (endless(HEAD + b"\r\n", b" ", PAUSE_S), SLOW),
        (endless(b"HTTP/1.1 200 OK\r\nA: ", b"a", PAUSE_S), SLOW),
        (endless(b"HTTP/1.1 200 OK\r\n", b"a: " + b"b" * SMALL + b"\r\n"), "does not answer"),
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", PAUSE_S), SLOW),
        (body(DEEP), "more than 64 lists inside each other"),
        (body(b'{"a":' * 500 + b"1" + b"}" * 500), "more than 64 lists inside each other"),
        (body(packed(LIST), b"Content-Encoding: deflate\r\n"), "a packed answer"),
        (body(packed(LIST), b"Content-Type: text/plain; charset=zlib\r\n"), "no list of models"),
        (body(LIST, b"Content-Length: 999\r\n"), "does not answer"),
        (body(b'{"data": [{"id": "\\u001b[31mred\\u202e"}]}'), "no list of models"),
        (body(b'{"data": [{"id": "%s"}]}' % (b"a" * 9999)), "no list of models"),
        (body(b'{"data": %s}' % (b"9" * 9999)), "no list of models"),
        (body(b"\xff\xfe\x00"), "no list of models"),
        (
            lambda send: send(
                b"HTTP/1.1 302 On\r\nLocation: http://10.9.9.9/\x1b\r\nContent-Length: 0\r\n\r\n"
            ),
            r"sends everybody on to 'http://10\.9\.9\.9/\\x1b'",
        ),
    ],
)
def test_a_list_of_models_that_cannot_be_read_is_a_sentence(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, write: Write, words: str
) -> None:
    stub.writes = {"/v1/models": write}
    if words == SLOW:
        monkeypatch.setattr(servers, "LOOK_S", SOON_S)
    with pytest.raises(ConfigError, match=words) as refused:
        ServerBackend(RemoteServer(stub.url))
    assert str(refused.value).isprintable() and len(str(refused.value)) < 500


def test_what_a_list_of_models_says_beside_its_names_is_taken_where_it_can_be(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = b'"owned_by": "vllm", "max_model_len": NaN, "id": "b", "id": "a"'
    stub.writes = {
        "/v1/models": body(b'{"data": [{%s}, {"id": 3}]}' % values),
        "/version": body(b'{"version": "\\u001b[31m"}'),
        "/metrics": endless(HEAD + b"\r\n", b"x" * SMALL),
        "/tokenize": endless(HEAD + b"\r\n", b" ", PAUSE_S),
    }
    with closing(ServerBackend(RemoteServer(stub.url))) as backend:
        found = backend.describe()
        assert (found.target, found.context_length) == ("a", None)
        assert found.server is not None
        assert (found.server.name, found.server.models) == ("vLLM", ("a",))
        assert backend.counters() is None
        monkeypatch.setattr(servers, "COUNT_S", SOON_S)
        with pytest.raises(NotCounted, match=SLOW):
            backend.count_tokens(ASKED)
        assert "".join(chunk.text for chunk in reply(backend)) == "Rain falls."


def reply(backend: ServerBackend, **more: Any) -> list[Chunk]:
    return list(backend.generate(Request(ASKED, **more), threading.Event()))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (endless(EVENTS, b"data: " + b"x" * SMALL), "without a whole event"),
        (endless(EVENTS, b"data: x\n" * 9999), "without a whole event"),
        (endless(EVENTS, b": I am here\n\n" * 999), "without a whole event"),
        (endless(EVENTS, b": I am here\n\n", PAUSE_S), LATE),
        (endless(EVENTS, b"x", PAUSE_S), LATE),
        (endless(EVENTS, event({"choices": []}) * 99), "more events than a reply can have"),
        (body(event(DEEP), b"Content-Type: text/event-stream\r\n"), "more than 64 lists"),
        (body(event(b'"\xff"'), b"Content-Type: text/event-stream\r\n"), "cannot be read"),
        (body(event({"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [
            {"token": "a", "logprob": float("nan")}]}}]})), "logarithm is nan"),
        (body(event({"error": {"message": "\ud800" + "x" * 9999}})), "failed: �xxx"),
        (body(word(), b"Content-Encoding: gzip\r\n"), "a packed answer"),
        (body(b'{"choices": []}'), "ended the reply without a reason"),
    ],
)  # fmt: skip
def test_a_stream_that_cannot_be_read_ends_the_reply_in_words(
    stub: Stub,
    remote_backend: ServerBackend,
    monkeypatch: pytest.MonkeyPatch,
    write: Write,
    words: str,
) -> None:
    monkeypatch.setattr(remote_turn, "EVENTS_BESIDE", 100)
    monkeypatch.setattr(server, "SILENT_S", SOON_S if words == LATE else WAIT_S)
    stub.writes = {CHAT: write}
    try:
        fault = str(reply(remote_backend, max_tokens=9)[-1].error)
    except LocalspecError as error:
        fault = str(error)
    assert words in fault
    fault.encode()
    stub.writes = {}
    monkeypatch.setattr(server, "SILENT_S", WAIT_S)
    assert "".join(chunk.text for chunk in reply(remote_backend)) == "Rain falls."


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (endless(b"HTTP/1.1 500 No\r\n\r\n", b"x" * SMALL), "an answer of more than"),
        (endless(b"HTTP/1.1 500 No\r\n\r\n", b"x", PAUSE_S), LATE),
        (endless(b"HTTP/1.1 200 OK\r\nA: ", b"x", PAUSE_S), LATE),
        (lambda send: send(b"HTTP/1.1 400 No\r\nConnection: close\r\n\r\n" + DEEP), "64 lists"),
        (lambda send: send(b"HTTP/1.1 400 No\r\nContent-Type: a/b; charset=zlib\r\nConnection: "
                           b"close\r\n\r\n" + packed(b"x" * 9999)), "refused the request"),
        (lambda send: send(b"HTTP/1.1 307 On\r\nLocation: http://10.9.9.9/v1\r\n"
                           b"Content-Length: 0\r\n\r\n"), "sends everybody on to"),
    ],
)  # fmt: skip
def test_a_refusal_that_cannot_be_read_is_a_sentence(
    stub: Stub,
    remote_backend: ServerBackend,
    monkeypatch: pytest.MonkeyPatch,
    write: Write,
    words: str,
) -> None:
    stub.writes = {CHAT: write}
    if words == LATE:
        monkeypatch.setattr(server, "SILENT_S", SOON_S)
    with pytest.raises(LocalspecError, match=words) as refused:
        reply(remote_backend)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("owned_by", "part", "least", "most"),
    [
        ("vllm", word(), 9, 12),
        ("llamacpp", word(), 9, 12),
        ("somebody", word(), 9, 16),
        ("somebody", word("x" * 1000), 1, 4),
        ("vllm", word("x" * 1000, usage={"completion_tokens": 0}), 1, 4),
    ],
)
def test_a_server_that_ignores_the_most_tokens_is_stopped_here(
    stub: Stub, owned_by: str, part: bytes, least: int, most: int
) -> None:
    stub.owned_by = owned_by
    stub.writes = {CHAT: endless(EVENTS, part)}
    with closing(ServerBackend(RemoteServer(stub.url))) as backend:
        found = reply(backend, max_tokens=9)
        assert found[-1].finish_reason == "length" and found[-1].error is None
        assert least <= sum(bool(chunk.text) for chunk in found) <= most
        assert stub.closed.wait(WAIT_S), "the server was told"


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_reader_ends_its_generators_without_the_garbage_collector(
    stub: Stub, no_collector: None
) -> None:
    before = suspended_generators()
    stub.writes = {CHAT: endless(EVENTS, word())}
    with closing(ServerBackend(RemoteServer(stub.url))) as backend:
        reply(backend, max_tokens=9)
        until(lambda: not is_reply_left(before), 10)


def test_a_server_that_counts_its_tokens_is_stopped_at_the_last_one(
    stub: Stub, remote_backend: ServerBackend
) -> None:
    def write(send: Send) -> None:
        send(EVENTS)
        for number in count(1):
            send(word(usage={"completion_tokens": number}))

    stub.writes = {CHAT: write}
    found = reply(remote_backend, max_tokens=9)
    assert sum(bool(chunk.text) for chunk in found) == 9


@pytest.mark.parametrize("words", ["word ", "a"])
def test_a_server_that_cuts_its_text_into_letters_is_not_stopped(stub: Stub, words: str) -> None:
    """9 tokens of 5 letters each, of which an unknown server makes 45 events."""
    sent = (word(words) * 9) if words == "word " else word("a") * 45
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]}) + event(b"[DONE]")
    stub.owned_by = "somebody"
    stub.writes = {CHAT: body(sent + end, b"Content-Type: text/event-stream\r\n")}
    with closing(ServerBackend(RemoteServer(stub.url))) as backend:
        found = reply(backend, max_tokens=9)
    assert len("".join(chunk.text for chunk in found)) == 45
    assert found[-1].finish_reason == "eos"


def test_half_a_character_of_a_reply_is_shown_as_one_sign(
    stub: Stub, remote_backend: ServerBackend
) -> None:
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    stub.writes = {CHAT: body(word("\ud83d") + end, b"Content-Type: text/event-stream\r\n")}
    assert [chunk.text for chunk in reply(remote_backend) if chunk.text] == ["�"]


def test_a_mark_of_the_byte_order_hides_no_word(stub: Stub, remote_backend: ServerBackend) -> None:
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    for sent in ([BOM_UTF8 + word() + end], [BOM_UTF8[:1], BOM_UTF8[1:] + word() + end]):
        stub.writes = {CHAT: lambda send, sent=sent: [send(part) for part in (EVENTS, *sent)]}  # type: ignore[misc]
        assert [chunk.text for chunk in reply(remote_backend) if chunk.text] == ["word "]


def test_closing_ends_a_reply_that_nobody_reads(stub: Stub) -> None:
    stub.writes = {CHAT: endless(EVENTS, word("x" * 1000, more="y" * 9000))}
    backend = ServerBackend(RemoteServer(stub.url))
    found = backend.generate(Request(ASKED, max_tokens=10**6), threading.Event())
    next(found)
    assert stub.blocked.wait(WAIT_S)
    closing_it = threading.Thread(target=backend.close, daemon=True)
    closing_it.start()
    closing_it.join(WAIT_S)
    assert not closing_it.is_alive()
    assert "was closed" in str(list(found)[-1].error)


def test_no_more_is_read_than_the_reader_takes(stub: Stub, remote_backend: ServerBackend) -> None:
    stub.writes = {CHAT: endless(EVENTS, word("x" * 1000, more="y" * 9000))}
    found = remote_backend.generate(Request(ASKED, max_tokens=10**6), threading.Event())
    next(found)
    assert stub.blocked.wait(WAIT_S), "the server cannot send on"
    found.close()
