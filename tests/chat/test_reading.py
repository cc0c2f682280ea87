"""While a long prompt is read, a person sees how far."""

from __future__ import annotations

import threading

from localspec.core.backend import Message, Request
from localspec.core.decoding import OFF
from localspec.forward.model import PREFILL_CHUNK
from tests.kit.local_backend import PIECES, SAY, backend_of
from tests.kit.tiny import scripted

NUM_TOKENS = 2 * PREFILL_CHUNK + 100


def test_between_the_forwards_of_a_long_prompt_it_is_said_how_many_tokens_are_read() -> None:
    target = scripted([SAY["a"], 0], NUM_TOKENS, len(PIECES), capacity=NUM_TOKENS + 8)
    request = Request((Message("user", "b" * NUM_TOKENS),), max_tokens=4, drafter=OFF)
    backend = backend_of(target, {}, context_length=NUM_TOKENS + 8)
    read = list(backend.generate(request, threading.Event()))
    told = [chunk.num_read_tokens for chunk in read if chunk.phase == "prefill"]
    assert told == [0, PREFILL_CHUNK, 2 * PREFILL_CHUNK]
    assert "".join(chunk.text for chunk in read) == "a"
    again = [chunk.phase for chunk in backend.generate(request, threading.Event())]
    assert again.count("prefill") == 1, "what is in the cache is not read again"
