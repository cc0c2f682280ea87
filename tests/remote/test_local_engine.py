"""The local engine in its own process: the page's process stays light, the same tokens come, the
next engine takes up what was learnt, and Ctrl-C is for the page."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localspec.core.backend import Message, Request
from localspec.core.interrupts import ENDINGS
from localspec.core.options import LoadOptions
from localspec.loading.local_backend import open_local_backend
from localspec.remote.child import ChildBackend
from tests.kit.engines import opening
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tiny import agreeing_draft, tiny_llama

pytestmark = pytest.mark.slow  # starts a page, and torch in the process of its engine
REQUEST = Request(
    (Message("user", "hello hello"),), max_tokens=24, drafter="draft_model", num_draft_tokens=3
)

PAGE = """
import json, sys, threading
from localspec.core.options import LoadOptions
from localspec.remote.child import ChildBackend
from localspec.remote.wire import Opening
import app, localspec.loading.service, localspec.web.server, localspec.chat.service
from localspec.core.backend import Message, Request
options = LoadOptions(model=sys.argv[1], draft=sys.argv[2], context=128, dtype="float32")
opening = Opening(localspec.loading.service.ENGINE, {"options": options, "state": None, "past": ()})
backend = ChildBackend.open(opening, lambda phrase: None)
request = Request(
    (Message("user", "hello hello"),), max_tokens=24, drafter="draft_model", num_draft_tokens=3
)
chunks = list(backend.generate(request, threading.Event()))
before = backend.describe().calibration
for phrase in backend.calibrate(threading.Event()):
    if "forwards" not in phrase:
        break  # the first widths are enough
print(json.dumps({
    "chunks": [[chunk.tokens, chunk.provenance, chunk.text] for chunk in chunks],
    "num_accepted_tokens": chunks[-1].stats.num_accepted_tokens,
    "num_prompt_tokens": backend.count_tokens(request.messages),
    "before": before,
    "measured": backend.describe().calibration,
    "state": backend.snapshot(),
    "heavy": [
        name for name in ("torch", "transformers", "tokenizers", "bitsandbytes")
        if name in sys.modules
    ],
}))
backend.close()
"""


@pytest.fixture(scope="module")
def engine_options(tmp_path_factory: pytest.TempPathFactory) -> LoadOptions:
    root = tmp_path_factory.mktemp("pair")
    module = tiny_llama(vocab_size=VOCAB_SIZE)
    target = save_model(root / "target", module)
    draft = save_model(root / "draft", agreeing_draft(module))
    return LoadOptions(model=str(target), draft=str(draft), context=128, dtype="float32")


@pytest.fixture(scope="module")
def seen_by_page(engine_options: LoadOptions, root: Path) -> dict[str, Any]:
    """What the process of a page saw of its engine."""
    ran = subprocess.run(
        [sys.executable, "-c", PAGE, str(engine_options.model), str(engine_options.draft)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_the_page_loads_nothing_heavy_while_its_engine_answers(
    seen_by_page: dict[str, Any],
) -> None:
    assert seen_by_page["heavy"] == []


def test_the_same_tokens_and_figures_come_from_either_process(
    engine_options: LoadOptions, seen_by_page: dict[str, Any]
) -> None:
    backend = open_local_backend(engine_options, None, lambda phrase: None)
    here = list(backend.generate(REQUEST, threading.Event()))
    assert seen_by_page["num_prompt_tokens"] == here[-1].stats.num_prompt_tokens
    assert seen_by_page["chunks"] == [[list(c.tokens), list(c.provenance), c.text] for c in here]
    assert seen_by_page["num_accepted_tokens"] == here[-1].stats.num_accepted_tokens > 0


def test_the_next_engine_takes_up_what_was_learnt_and_measured(
    engine_options: LoadOptions, seen_by_page: dict[str, Any]
) -> None:
    assert seen_by_page["before"] is None
    again = (
        open_local_backend(engine_options, seen_by_page["state"], lambda phrase: None)
        .describe()
        .calibration
    )
    assert (
        again is not None
        and again["verify_ms"].keys() == seen_by_page["measured"]["verify_ms"].keys()
    )


@pytest.mark.parametrize("number", ENDINGS)
def test_an_engine_ends_with_its_page_and_not_by_what_all_processes_are_sent(
    number: int,
) -> None:
    """From its start on."""

    def send(phrase: str) -> None:
        for process in multiprocessing.active_children():
            os.kill(process.pid or 0, number)

    with closing(ChildBackend.open(opening("playing"), send)) as backend:
        send("open")
        assert backend.describe().target and backend.is_alive()
    assert not multiprocessing.active_children()
