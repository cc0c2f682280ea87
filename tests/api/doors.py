"""A real server of the interfaces on the fake backend, in a thread, and the real clients.

The clients are imported where they are used, for that takes seconds and one worker needs them. None
reads the system's certificates, which takes longer than a request: the server has none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from localspec.chat.service import ChatService
from localspec.core.backend import Backend, Request
from localspec.core.decoding import AUTO
from localspec.record.store import Store
from localspec.web.guard.programs import nothing_else
from localspec.web.server import with_interfaces
from tests.kit.fakes import FakeBackend, session_info
from tests.kit.servers import HOST, serve_app
from tests.kit.waiting import until

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

REPLY = "One two three four five six seven eight nine ten."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call>'


def scripted_reply(request: Request) -> str:
    """Answers by key word, so that one server serves all tests of a process."""
    asked = request.messages[-1].content
    if "endless" in asked:
        return 200 * REPLY
    if "weather" in asked and request.tools:
        return f"I look.\n{CALL}\n{CALL.replace('Lima', 'Cusco')}"
    if "think" in asked:
        return f"<think>\nLet me see.\n</think>\n\n{REPLY}"
    return asked if "echo" in asked else REPLY


def scripted_pace(request: Request) -> float:
    return 0.02 if "slow" in request.messages[-1].content else 0.0005


@dataclass
class Doors:
    """A running server, and what stands behind it."""

    service: ChatService
    backend: Backend
    port: int
    key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def fake(self) -> FakeBackend:
        assert isinstance(self.backend, FakeBackend)
        return self.backend

    def openai(self) -> OpenAI:
        from openai import DefaultHttpxClient, OpenAI

        plain = DefaultHttpxClient(verify=False)
        return OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=20.0,
            http_client=plain,
        )  # fmt: skip

    def anthropic(self) -> Anthropic:
        from anthropic import Anthropic, DefaultHttpxClient

        plain = DefaultHttpxClient(verify=False)
        return Anthropic(
            base_url=self.url, api_key=self.key, max_retries=0, timeout=20.0, http_client=plain
        )

    def http(self, **headers: str) -> httpx.Client:
        """Without the system's proxies, with the key."""
        bearer = {"authorization": f"Bearer {self.key}", **headers}
        return httpx.Client(
            base_url=self.url, headers=bearer, trust_env=False, timeout=20.0, verify=False
        )


@contextmanager
def serve_interfaces(
    backend: Backend,
    folder: Path,
    may_load: threading.Event | None = None,
    drafter: str = AUTO,
) -> Iterator[Doors]:
    """The interfaces over a backend, on a free port. may_load: before it is set, it loads."""

    def opened(report: object) -> Backend:
        if may_load is not None:
            may_load.wait(20.0)
        return backend

    with (
        closing(Store.open(folder / "localspec.db")) as store,
        closing(ChatService(store, session_info, opened, drafter)) as service,
    ):

        def interfaces(port: int) -> Any:
            return with_interfaces(nothing_else, service, HOST, port, ["http://allowed.test"])

        with serve_app(interfaces) as running:
            service.start()
            # A real engine is loaded before it is "ready": a request ends its measuring of costs.
            until(lambda: (may_load or service.lifecycle.backend) is not None)
            yield Doors(service, backend, running.port, store.api_keys.make("test"))
