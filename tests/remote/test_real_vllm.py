"""vLLM itself behind the seam, on the demo pair: what it streams, counts and refuses.

It is large and installed by `python -m tools.peers --setup-peers --home DIR`; this test runs with
`--peers DIR` and skips without it.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.cli.cluster import end
from localspec.core.backend import Message, Request, chunks_of
from localspec.core.config import PROJECT_FOLDER
from localspec.core.errors import ConfigError
from localspec.core.options import RemoteServer
from localspec.machine.cluster import Wanted, command_for
from localspec.machine.model import Model
from localspec.machine.sources import find_model
from localspec.remote.server import ServerBackend
from tools.peers.environments import environment_of

pytestmark = [pytest.mark.slow, pytest.mark.model]

PAIR = PROJECT_FOLDER / "assets" / "demo"
START_S = 240.0
ASKED = (Message("user", "Tell me about rain."),)


@pytest.fixture
def python(peers_home: Path) -> Path:
    environment = environment_of("vllm", peers_home)
    if not environment.is_complete():
        pytest.skip(f"vLLM is not installed in {peers_home} (python -m tools.peers --setup-peers)")
    return environment.python


def part(name: str) -> Model:
    return find_model(str(PAIR / name), {})


@contextmanager
def running(python: Path, port: int, method: Any, drafter: Model | None) -> Iterator[str]:
    """The server as `localspec cluster` starts it."""
    wanted = Wanted(
        "vllm", part("target"), method, 3, 512, "fp32", drafter, port=port, python=str(python)
    )
    made = command_for(wanted, [])
    settings = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    environment = {**os.environ, **settings, **made.environment}
    server = subprocess.Popen(
        made.arguments,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_s = time.monotonic() + START_S
        while True:
            try:
                ServerBackend(RemoteServer(made.url)).close()
                break
            except ConfigError:
                assert server.poll() is None, "it ended"
                assert time.monotonic() < until_s, "it did not answer"
                time.sleep(1.0)
        yield made.url
    finally:
        end(server)


def written(backend: ServerBackend, request: Request) -> tuple[str, Any]:
    found = list(chunks_of(backend, request, threading.Event()))
    return "".join(chunk.text for chunk in found), found[-1]


def test_plain_ngram_and_draft_speculation_write_the_same_and_tell_what_was_accepted(
    python: Path, reserved_port: int
) -> None:
    texts = dict[str, str]()
    request = Request(ASKED, max_tokens=40)
    for method, drafter in (("ngram", None), ("draft_model", part("draft"))):
        with (
            running(python, reserved_port, method, drafter) as url,
            closing(ServerBackend(RemoteServer(url))) as backend,
        ):
            said = backend.describe()
            assert said.server is not None
            assert said.server.name.startswith("vLLM 0.")
            assert said.context_length == 512
            assert backend.count_tokens(ASKED) > 5
            texts[method], last = written(backend, request)
            assert last.finish_reason in ("eos", "length")
            drafted = last.stats.told("num_draft_tokens")
            assert drafted is not None, "alone on the server, its counters tell"
            if method == "draft_model":
                assert drafted == 3 * last.stats.num_drafts
                assert last.stats.acceptance_rate > 0.2
                # stop, continuation and probabilities
                stopped, end_ = written(backend, replace(request, stop=(",",)))
                assert end_.finish_reason == "stop"
                assert texts[method].startswith(stopped)
                begun = (*ASKED, Message("assistant", stopped))
                more, _ = written(backend, replace(request, messages=begun, continues=True))
                assert more
                first = next(
                    chunk
                    for chunk in backend.generate(
                        replace(request, num_logprobs=2), threading.Event()
                    )
                    if chunk.logprobs
                )
                assert len(first.logprobs[0].top) == 2
                # a cancel frees its place
                cancel = threading.Event()
                chunks = backend.generate(replace(request, max_tokens=400), cancel)
                next(chunk for chunk in chunks if chunk.text)
                cancel.set()
                assert list(chunks)[-1].finish_reason in ("cancelled", "eos")
    assert texts["ngram"] == texts["draft_model"]
