"""One reply of a server, event by event."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from localspec.core.backend import Message, Request
from localspec.remote.remote_turn import RemoteTurn
from localspec.remote.servers import OTHER


def event(num_tokens: int) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": "word"}}], "usage": {"completion_tokens": num_tokens}}


def test_text_that_arrives_all_at_once_tells_no_rate_of_writing() -> None:
    """A reply that broke off on a busy machine said 20,035 tokens/s."""
    turn = RemoteTurn(Request((Message("user", "Rain?"),)), threading.Event())
    for num_tokens in (1, 2, 3):
        found = turn.add(event(num_tokens), OTHER)
    assert found is not None and turn.first_s is not None
    assert found.stats.ttft_ms is not None and found.stats.tokens_per_second is None
    assert found.stats.told("decode_ms") is None
    turn.first_s -= 2.0
    found = turn.add(event(4), OTHER)
    assert found is not None
    assert found.stats.told("decode_ms") == pytest.approx(2000.0, rel=0.1)
    assert found.stats.tokens_per_second == pytest.approx(2.0, rel=0.1)
