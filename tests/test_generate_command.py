"""One message, one reply, as JSON; with a home the learnt state is kept."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localspec.backend import Chunk, Message, Request, TurnStats
from localspec.config import settings_for
from localspec.core import AUTO, OFF, SamplingParams
from localspec.errors import LocalspecError
from localspec.generate_command import STATE_KEY, answer, collect, labelled, note_of
from localspec.load import open_local_backend
from localspec.options import LoadOptions
from localspec.record.store import Store
from localspec.workloads import decide, load_workloads
from tests.machine.folders import VOCAB_SIZE, save_model
from tests.tiny import tiny_llama

HELLO = (Message("user", "hello hello"),)
STATS_KEYS = {
    "drafter",
    "num_output_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "acceptance_rate",
    "draft_share",
    "mean_accepted_length",
    "tokens_per_second",
    "ttft_ms",
    "prefill_ms",
    "decode_ms",
    "speedup",
    "exact",
    "num_lenient_tokens",
    "reason",
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> LoadOptions:
    folder = tmp_path_factory.mktemp("models") / "target"
    save_model(folder, tiny_llama(vocab_size=VOCAB_SIZE))
    return LoadOptions(model=str(folder), context=256, dtype="float32")


@pytest.fixture(autouse=True)
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("localspec.config.default_home", lambda: tmp_path / "home")


def test_reply_is_plain_json_data_of_fixed_form(options: LoadOptions) -> None:
    request = Request(HELLO, max_tokens=12, drafter="ngram", num_draft_tokens=3)
    found = json.loads(json.dumps(answer(options, request, None), allow_nan=False))
    assert set(found) == {"text", "tokens", "provenance", "finish_reason", "stats"}
    assert set(found["stats"]) >= STATS_KEYS
    assert len(found["tokens"]) == len(found["provenance"]) == found["stats"]["num_output_tokens"]
    assert found["stats"]["speedup"] is None  # nothing was measured for a fixed choice
    plain = answer(options, Request(HELLO, max_tokens=12, drafter=OFF), None)
    assert found["tokens"] == plain["tokens"] and found["text"] == plain["text"]
    assert plain["stats"]["acceptance_rate"] is None


@pytest.mark.parametrize(
    ("drafter", "length", "is_needed"),
    [(AUTO, None, True), ("ngram", None, True), (OFF, None, False), ("ngram", 3, False)],
)
def test_costs_are_measured_first_where_something_is_chosen(
    options: LoadOptions, drafter: str, length: int | None, is_needed: bool
) -> None:
    backend = open_local_backend(options, None, lambda _: None)
    request = Request(HELLO, drafter=drafter, num_draft_tokens=length)
    assert backend.lacks_costs(request) == is_needed
    for _ in backend.calibrate(threading.Event()):
        pass
    assert not backend.lacks_costs(request)


def test_what_was_left_unmeasured_is_measured_by_the_next_command(
    options: LoadOptions, tmp_path: Path
) -> None:
    """The page was closed in the middle of its measuring, and kept what it had."""
    cold, warm = Request(HELLO), Request(HELLO, SamplingParams(0.7, seed=1), max_tokens=4)
    backend = open_local_backend(options, None, lambda _: None)
    for phrase in backend.calibrate(threading.Event()):
        if "sampled" in phrase:
            break
    assert backend.lacks_costs(warm) and not backend.lacks_costs(cold)
    with closing(Store.open(settings_for(tmp_path).database)) as store:
        store.save_state(STATE_KEY, backend.snapshot())
    answer(options, warm, tmp_path)
    with closing(Store.open(settings_for(tmp_path).database)) as store:
        state = store.load_state(STATE_KEY)
    assert not open_local_backend(options, state, lambda _: None).lacks_costs(warm)


def test_auto_measures_first_and_a_home_keeps_it(
    options: LoadOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(HELLO, max_tokens=4, drafter=AUTO)
    assert answer(options, request, tmp_path)["stats"]["speedup"] is not None
    store = Store.open(settings_for(tmp_path).database)
    state = store.load_state(STATE_KEY)
    store.close()
    assert state
    from localspec.chat.local import LocalBackend

    def measured_again(*_: Any) -> Any:
        pytest.fail("what was measured before was not taken up")

    monkeypatch.setattr(LocalBackend, "calibrate", measured_again)
    assert answer(options, request, tmp_path)["stats"]["speedup"] is not None


@pytest.mark.parametrize(
    ("checking", "workload", "is_exact", "note"),
    [
        ("as set", "code", True, ""),
        ("threshold", "chat", True, "\n[exact: chat has no threshold]"),
        ("threshold:0", "chat", False, "\n[lenient: N of 12 tokens would have been refused; kind"),
    ],
)
def test_a_reply_says_how_it_was_checked(
    options: LoadOptions, checking: str, workload: str, is_exact: bool, note: str
) -> None:
    decision = decide(load_workloads(), workload, checking, "hello")
    sampling = SamplingParams(leniency=decision.leniency)
    request = Request(HELLO, sampling, max_tokens=12, drafter="ngram", num_draft_tokens=3)
    found = labelled(answer(options, request, None), decision)
    found = json.loads(json.dumps(found, allow_nan=False))
    assert (found["stats"]["exact"], found["workload"]) == (is_exact, workload)
    assert found["label"].startswith("exact" if is_exact else "lenient: ")
    assert (found["leniency"] is None) == is_exact
    count = str(found["stats"]["num_lenient_tokens"])
    said = note_of(found, checking != "as set")
    assert said.startswith(note.replace("N", count)) and bool(said) == bool(note)


def test_a_turn_that_ends_in_an_error_is_an_error() -> None:
    class Failing:
        def generate(self, request: Request, cancel: Any) -> Any:
            yield Chunk("done", TurnStats(3), finish_reason="error", error="The engine stopped.")

    backend: Any = Failing()
    with pytest.raises(LocalspecError, match="The engine stopped"):
        collect(backend, Request(HELLO))
