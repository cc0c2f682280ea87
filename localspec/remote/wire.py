"""The messages between the page's process and the engine's, over a pipe.

Contract: plain picklable values. To open the backend is the call OPEN_CALL, whose items are phrases
of progress. After it has returned, an empty message of items every BEAT_S says that the process
runs. Errors of ours keep their type, message and fields, Python's own their type and message; any
other error becomes a RuntimeError that names it. When the other end is gone, `receive` and `send`
raise Hangup.

Not here: the order of messages (child, engine).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from localspec.core.errors import LocalspecError

BEAT_S = 0.25
OPEN_CALL = 0


class Hangup(Exception):
    """The process at the other end is gone."""


@dataclass(frozen=True)
class Opening:
    """How the engine's process opens its backend. function: "package.module:name", imported only
    there; called with the keywords and `report`."""

    function: str
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A method of the backend, by name. is_stream: it takes a cancel event last and yields."""

    call_id: int
    method: str
    arguments: tuple[Any, ...]
    is_stream: bool = False


@dataclass(frozen=True)
class Cancel:
    """Set the cancel event of a call."""

    call_id: int


@dataclass(frozen=True)
class Failed:
    """An error that ended a call."""

    call_id: int
    kind: type[Exception]
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Returned:
    """The result of a call, None at the end of a stream."""

    call_id: int
    value: Any


@dataclass(frozen=True)
class Items:
    """The items of a stream since the last message, in order."""

    call_id: int
    values: list[Any]


def packed(message: object) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def send(pipe: Connection, data: bytes) -> None:
    """Send a packed message. Raises Hangup. Waits while the pipe is full."""
    try:
        pipe.send_bytes(data)
    except OSError as error:
        raise Hangup from error


def receive(pipe: Connection, wait_s: float | None = None) -> Any:
    """The next message; None where none comes within `wait_s`. Raises Hangup."""
    try:
        return pickle.loads(pipe.recv_bytes()) if pipe.poll(wait_s) else None
    except (EOFError, OSError) as error:
        raise Hangup from error


def fault_of(call_id: int, error: BaseException) -> Failed:
    if isinstance(error, LocalspecError):
        return Failed(call_id, type(error), str(error), dict(vars(error)))
    if isinstance(error, Exception) and type(error).__module__ == "builtins":
        return Failed(call_id, type(error), str(error))  # its fields may hold what cannot be packed
    return Failed(call_id, RuntimeError, f"{type(error).__name__}: {error}")


def error_of(fault: Failed) -> Exception:
    """The error as the caller would have got it in one process."""
    error = fault.kind.__new__(fault.kind, fault.message)  # ours may take other arguments
    error.args = (fault.message,)
    vars(error).update(fault.fields)
    return error
