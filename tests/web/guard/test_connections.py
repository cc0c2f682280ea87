"""Over real sockets: a sender that is slow, long or speaks another protocol holds nothing up."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from uvicorn import Server

from localspec.web.guard import bodies, connections
from localspec.web.guard.connections import server_of
from localspec.web.guard.security import Guard, Hosts
from tests.kit.own_cookie import KEY, TOKEN, own_cookie
from tests.kit.servers import HOST, serve_app
from tests.kit.waiting import WAIT_S, until

Connect = Callable[[], socket.socket]


async def inner(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of what came in."""
    if scope["type"] != "http":
        return
    message = await receive()
    answer = str(len(message["body"])).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": answer})


@pytest.fixture
def connect(listening: tuple[Connect, Server]) -> Connect:
    return listening[0]


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connect, Server]]:
    """Connections to a guarded server whose patience is short, and the server."""
    monkeypatch.setattr(connections, "HEAD_S", 0.4)
    with guarded(bodies.Bodies(body_s=0.4)) as found:
        yield found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Connections to a server that waits for a sender however slow the machine is."""
    monkeypatch.setattr(bodies, "PAUSE_S", WAIT_S)
    with guarded(bodies.Bodies(body_s=WAIT_S)) as (make, _):
        yield make


@contextmanager
def guarded(read: bodies.Bodies) -> Iterator[tuple[Connect, Server]]:
    def guard(port: int) -> Guard:
        return Guard(inner, TOKEN, Hosts(frozenset({"ours"}), port), bodies=read, key=KEY)

    with serve_app(guard, lifespan="off", limit_concurrency=20) as running, ExitStack() as opened:

        def make() -> socket.socket:
            address = (HOST, running.port)
            return opened.enter_context(socket.create_connection(address, timeout=WAIT_S))

        yield make, running.server


def head(to: socket.socket, first_line: str, **headers: str) -> bytes:
    port = to.getpeername()[1]
    given = {
        "host": "ours",
        "origin": "http://ours",
        "cookie": own_cookie(port),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [first_line, *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def read_all(connection: socket.socket) -> bytes:
    """Until the other side closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.slow
def test_a_whole_request_is_answered_and_the_server_says_nothing_of_itself(
    connect: Connect,
) -> None:
    one = connect()
    one.sendall(
        head(one, "POST /gradio_api/cancel HTTP/1.1", content_length="5", connection="close")
        + b"12345"
    )
    answer = read_all(one)
    assert answer.startswith(b"HTTP/1.1 200") and b"\r\n\r\n1\r\n5\r\n" in answer
    assert b"server:" not in answer.lower().split(b"\r\n\r\n")[0]


def test_malformed_requests_are_told_once_a_minute_with_their_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_malformed(make: Connect, count: int) -> str:
        for _ in range(count):
            one = make()
            one.sendall(b"\x16\x03\x01 no request\r\n\r\n")
            assert read_all(one).startswith(b"HTTP/1.1 400")
        return capsys.readouterr().err

    with guarded(bodies.Bodies()) as (make, _):
        assert send_malformed(make, 10).count("Invalid HTTP request") == 1
        monkeypatch.setattr(connections, "WARNING_S", 0.0)
        told = send_malformed(make, 1)
    assert told.count("Invalid HTTP request") == 1 and "9 more" in told


def test_an_answer_in_pieces_waits_for_no_acknowledgement(
    listening: tuple[Connect, Server],
) -> None:
    connect, server = listening
    connect()
    until(lambda: len(server.server_state.connections) == 1)
    (one,) = server.server_state.connections
    accepted = one.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", b"GET /live HTTP/1.1\r\nhost: ours\r\nx-slow: "]
)
def test_a_head_that_does_not_come_is_given_up(connect: Connect, sent: bytes) -> None:
    one = connect()
    one.sendall(sent)
    assert read_all(one) == b""


@pytest.mark.slow
def test_a_second_head_that_drips_is_given_up_too(connect: Connect) -> None:
    one = connect()
    one.sendall(head(one, "GET /live HTTP/1.1"))
    one.sendall(b"GET /live HT")
    assert read_all(one).count(b"HTTP/1.1 200") == 1


@pytest.mark.slow
def test_a_body_that_drips_gets_408_and_the_connection_ends(connect: Connect) -> None:
    one = connect()
    one.sendall(head(one, "POST /gradio_api/queue/join HTTP/1.1", content_length="100000"))
    has_answered = False
    while not has_answered:  # far more bytes are missing than fit into any wait
        one.sendall(b"x")
        has_answered = bool(select.select([one], [], [], 0.02)[0])
    assert read_all(one).startswith(b"HTTP/1.1 408")


@pytest.mark.slow
def test_a_body_longer_than_it_said_or_may_be_is_refused(connect: Connect) -> None:
    for length in (str(2**31), "99999999999999999999"):
        one = connect()
        one.sendall(head(one, "POST /gradio_api/queue/join HTTP/1.1", content_length=length))
        assert read_all(one).startswith(b"HTTP/1.1 413")
    one = connect()
    one.sendall(head(one, "POST /gradio_api/cancel HTTP/1.1", transfer_encoding="chunked"))
    piece = b"8000\r\n" + bytes(0x8000) + b"\r\n"
    one.sendall(piece * 3)
    assert read_all(one).startswith(b"HTTP/1.1 413")


@pytest.mark.slow
def test_a_body_that_is_too_long_and_too_slow_is_said_to_be_too_long(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    monkeypatch.setattr(bodies, "PAUSE_S", WAIT_S)
    one = connect()
    one.sendall(head(one, "POST /gradio_api/queue/join HTTP/1.1", content_length=str(2**31)))
    assert read_all(one).startswith(b"HTTP/1.1 413")


@pytest.mark.slow
def test_a_sender_of_too_much_gets_the_answer_and_no_reset(patient: Connect) -> None:
    """It sends all of it before it reads."""
    one = patient()
    piece, length = bytes(2**20), 70_000_000
    one.sendall(head(one, "POST /import HTTP/1.1", content_length=str(length)))
    for _ in range(length // len(piece)):
        one.sendall(piece)
    one.sendall(bytes(length % len(piece)))
    assert read_all(one).startswith(b"HTTP/1.1 413")


def test_a_web_socket_is_refused(connect: Connect) -> None:
    one = connect()
    handshake = {"upgrade": "websocket", "connection": "upgrade", "sec_websocket_version": "13"}
    one.sendall(
        head(one, "GET /gradio_api/queue/data HTTP/1.1", sec_websocket_key="eA==", **handshake)
    )
    assert one.recv(65536).startswith(b"HTTP/1.1 403")


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        b"host: evil.test\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
    ],
)
def test_a_request_that_could_be_read_in_two_ways_is_refused(
    connect: Connect, extra: bytes
) -> None:
    one = connect()
    whole = head(one, "POST /gradio_api/cancel HTTP/1.1")
    one.sendall(whole[:-2] + extra + b"\r\n")
    assert read_all(one)[9:12] in (b"400", b"403", b"413", b"408")


def test_slow_senders_do_not_keep_others_out(connect: Connect) -> None:
    for _ in range(12):
        one = connect()
        one.sendall(head(one, "POST /gradio_api/queue/join HTTP/1.1", content_length="1000"))
    other = connect()
    other.sendall(head(other, "GET /live HTTP/1.1", connection="close"))
    assert read_all(other).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_connection_is_kept_while_a_person_reads(connect: Connect) -> None:
    """Nor does the time that a head may take end it between two requests."""
    assert server_of(inner).config.timeout_keep_alive >= 60
    connection = connect()
    request = b"POST / HTTP/1.1\r\nhost: ours\r\ncontent-length: 2\r\n\r\nab"
    connection.sendall(request)
    assert connection.recv(1000).startswith(b"HTTP/1.1")
    connection.settimeout(1.0)  # longer than a head may take here
    with pytest.raises(TimeoutError):
        connection.recv(1000)
        connection.recv(1000)  # where the body came apart from the head


def test_a_stream_that_nobody_ends_hears_of_the_servers_end() -> None:
    """As a page's events do; uvicorn would cancel it, with a traceback."""
    heard: list[str] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        heard.append((await receive())["type"])

    with (
        serve_app(lambda port: stream, lifespan="off") as running,
        socket.create_connection((HOST, running.port), timeout=10) as page,
    ):
        page.sendall(b"GET / HTTP/1.1\r\nhost: ours\r\n\r\n")
        assert page.recv(1000).startswith(b"HTTP/1.1 200")
        running.stop()
    assert heard == ["http.disconnect"]
