"""The local engine in its own process: the page's process stays light, the same tokens come, and
the next engine takes up what was learnt."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import app
from localspec.backend import Chunk, Message, Request
from localspec.load import open_local_backend
from localspec.options import LoadOptions
from localspec.remote.child import ChildBackend
from localspec.remote.wire import Opening
from tests.machine.folders import VOCAB_SIZE, save_model
from tests.tiny import agreeing_draft, tiny_llama

pytestmark = pytest.mark.slow  # each test starts torch in another process
HELLO = (Message("user", "hello hello"),)

PAGE = """
import json, sys, threading
from localspec.backend import Message, Request
from localspec.options import LoadOptions
from localspec.remote.child import ChildBackend
from localspec.remote.wire import Opening
import app, localspec.web.server, localspec.chat.service
options = LoadOptions(model=sys.argv[1], context=128, dtype="float32")
opening = Opening(app.ENGINE, {"options": options, "state": None, "past": ()})
backend = ChildBackend.open(opening, lambda phrase: None)
turn = backend.generate(Request((Message("user", "hello"),), max_tokens=8), threading.Event())
print(list(turn)[-1].finish_reason)
backend.close()
print([m for m in ("torch", "transformers", "tokenizers", "bitsandbytes") if m in sys.modules])
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> LoadOptions:
    root = tmp_path_factory.mktemp("pair")
    module = tiny_llama(vocab_size=VOCAB_SIZE)
    target = save_model(root / "target", module)
    draft = save_model(root / "draft", agreeing_draft(module))
    return LoadOptions(model=str(target), draft=str(draft), context=128, dtype="float32")


@pytest.fixture(scope="module")
def child(options: LoadOptions) -> Iterator[ChildBackend]:
    backend = opened(options)
    yield backend
    backend.close()


def opened(options: LoadOptions, state: dict[str, Any] | None = None) -> ChildBackend:
    keywords = {"options": options, "state": state, "past": ()}
    return ChildBackend.open(Opening(app.ENGINE, keywords), lambda phrase: None)


def play(backend: Any) -> list[Chunk]:
    request = Request(HELLO, max_tokens=24, drafter="draft_model", num_draft_tokens=3)
    return list(backend.generate(request, threading.Event()))


def test_the_page_loads_nothing_heavy_while_its_engine_answers(
    options: LoadOptions, root: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PAGE, str(options.model)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.split("\n")[:2] == ["length", "[]"], ran.stderr


def test_the_same_tokens_and_figures_come_from_either_process(
    options: LoadOptions, child: ChildBackend
) -> None:
    here = play(open_local_backend(options, None, lambda phrase: None))
    there = play(child)
    assert child.count_tokens(HELLO) == there[-1].stats.num_prompt_tokens
    assert [(c.tokens, c.provenance, c.text) for c in there] == [
        (c.tokens, c.provenance, c.text) for c in here
    ]
    assert there[-1].stats.num_accepted_tokens == here[-1].stats.num_accepted_tokens > 0


def test_the_next_engine_takes_up_what_was_learnt_and_measured(
    options: LoadOptions, child: ChildBackend
) -> None:
    assert child.describe().calibration is None
    for _ in zip(range(8), child.calibrate(threading.Event()), strict=False):
        pass  # a few widths are enough
    play(child)
    state = json.loads(json.dumps(child.snapshot()))
    measured = child.describe().calibration
    assert measured is not None
    again = opened(options, state)
    found = again.describe().calibration
    again.close()
    assert found is not None and found["verify_ms"].keys() == measured["verify_ms"].keys()
