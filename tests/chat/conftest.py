"""A running service on the fake backend, for the tests of conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.chat.service import ChatService
from tests.kit.fakes import FakeBackend
from tests.kit.services import close, open_service


@pytest.fixture
def service_and_fake(tmp_path: Path) -> Iterator[tuple[ChatService, FakeBackend]]:
    service, backend = open_service(tmp_path)
    yield service, backend
    close(service)


@pytest.fixture
def service(service_and_fake: tuple[ChatService, FakeBackend]) -> ChatService:
    """A service that is ready, with an empty log."""
    return service_and_fake[0]
