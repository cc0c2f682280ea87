"""A service behind the page, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.chat.service import ChatService
from localspec.record.store import Store
from tests.kit.fakes import FakeBackend, Script, session_info


@pytest.fixture
def idle_service(tmp_path: Path) -> Iterator[ChatService]:
    """A service on the fake that nobody has started."""
    store = Store.open(tmp_path / "localspec.db")
    quick = Script(prefill_s=0.0, round_s=0.002)
    made = ChatService(store, session_info, lambda *_: FakeBackend(quick))
    yield made
    made.close()
    store.close()
