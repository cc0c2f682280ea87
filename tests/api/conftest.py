"""One running server of the interfaces for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.api.doors import Doors, scripted_pace, scripted_reply, serve_interfaces
from tests.kit.fakes import FakeBackend, Script
from tests.kit.waiting import until

if TYPE_CHECKING:
    from openai import OpenAI


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    script = Script(reply=scripted_reply, round_s=scripted_pace, prefill_s=0.0)
    with serve_interfaces(FakeBackend(script), tmp_path_factory.mktemp("doors")) as doors:
        yield doors


@pytest.fixture
def doors(running: Doors) -> Doors:
    """The server, with nothing under way."""
    until(lambda: running.service.current is None and not running.service.worker.num_waiting)
    running.fake.requests.clear()
    running.fake.num_rounds = 0
    return running


@pytest.fixture
def client(doors: Doors) -> Iterator[OpenAI]:
    with doors.openai() as opened:
        yield opened
