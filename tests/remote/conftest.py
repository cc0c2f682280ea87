"""A server of another program, as a script plays it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.stub_server import Stub, reset, serve_stub


@pytest.fixture(scope="module")
def stub_of_module() -> Iterator[Stub]:
    with serve_stub() as stub:
        yield stub


@pytest.fixture
def stub(stub_of_module: Stub) -> Stub:
    """The server as it was when it began."""
    reset(stub_of_module)
    return stub_of_module
