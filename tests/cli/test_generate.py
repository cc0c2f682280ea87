"""`generate`: one message, one reply as JSON; with a home the learnt state is kept."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.local import LocalBackend
from localspec.chat.service import ChatService, ReplySettings
from localspec.cli import generate as generate_command
from localspec.cli.generate import (
    answer,
    collect,
    labelled,
    note_of,
    replayed,
    statistics_json,
)
from localspec.core.backend import Chunk, Message, Request
from localspec.core.config import settings_for
from localspec.core.decoding import AUTO, OFF, SamplingParams
from localspec.core.errors import ConfigError, LocalspecError, RequestError
from localspec.core.leniency import Leniency, Threshold, Typical
from localspec.core.options import LoadOptions
from localspec.core.turn_stats import TurnStats
from localspec.core.workloads import decide, load_workloads
from localspec.engine import calibrate
from localspec.loading.local_backend import open_local_backend
from localspec.record.store import STATE_KEY, SessionInfo, Store
from tests.kit.command_line import invoke
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tiny import tiny_llama

# They load models with all that drafts for them.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_home")]
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
    "decode_speedup",
    "reply_ms",
    "exact",
    "num_lenient_tokens",
    "reason",
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> LoadOptions:
    folder = tmp_path_factory.mktemp("models") / "target"
    save_model(folder, tiny_llama(vocab_size=VOCAB_SIZE))
    return LoadOptions(model=str(folder), context=256, dtype="float32")


@pytest.fixture(scope="module")
def backend(options: LoadOptions, tmp_path_factory: pytest.TempPathFactory) -> LocalBackend:
    """The model once, for tests that are about its replies and measure nothing."""
    home = tmp_path_factory.mktemp("home")
    return open_local_backend(replace(options, home=home), None, lambda phrase: None)


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured in one round each: what they are does not matter here."""
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "QUICKLY_S", 0.0)


def test_reply_is_plain_json_data_of_fixed_form(
    options: LoadOptions, backend: LocalBackend
) -> None:
    request = Request(HELLO, max_tokens=12, drafter="ngram", num_draft_tokens=3)
    found = json.loads(json.dumps(answer(options, request), allow_nan=False))
    assert set(found) == {
        *("text", "thinking", "tokens", "provenance", "finish_reason", "seed", "stats")
    }
    assert set(found["stats"]) >= STATS_KEYS
    assert len(found["tokens"]) == len(found["provenance"]) == found["stats"]["num_output_tokens"]
    assert found["stats"]["speedup"] is None  # nothing was measured for a fixed choice
    plain = collect(backend, Request(HELLO, max_tokens=12, drafter=OFF))
    assert found["tokens"] == plain["tokens"] and found["text"] == plain["text"]
    assert plain["stats"]["acceptance_rate"] is None


def test_a_wait_for_costs_is_told(options: LoadOptions, capsys: pytest.CaptureFixture[str]) -> None:
    answer(options, Request(HELLO, max_tokens=1, drafter=OFF))
    assert capsys.readouterr() == ("", "")
    answer(options, Request(HELLO, max_tokens=1, drafter=AUTO))
    first, *parts, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Measuring what each way of drafting costs here.")
    assert last.startswith("Measured in ") and len(parts) == len(set(parts)) > 4
    assert (
        sum("measuring word lookup, 128 tokens of context, greedy" in part for part in parts) == 1
    )


def test_costs_are_measured_first_where_something_is_chosen(options: LoadOptions) -> None:
    backend = open_local_backend(options, None, lambda _: None)
    asked = [(AUTO, None), (AUTO, 3), ("ngram", None), (OFF, None), ("ngram", 3), (AUTO, 0)]
    requests = [Request(HELLO, drafter=name, num_draft_tokens=length) for name, length in asked]
    assert [backend.lacks_costs(each) for each in requests] == [True] * 3 + [False] * 3
    for _ in backend.calibrate(threading.Event()):
        pass
    assert not any(backend.lacks_costs(each) for each in requests)


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
    answer(replace(options, home=tmp_path), warm)
    with closing(Store.open(settings_for(tmp_path).database)) as store:
        state = store.load_state(STATE_KEY)
    assert not open_local_backend(options, state, lambda _: None).lacks_costs(warm)


def test_a_reply_is_there_also_where_what_was_learnt_cannot_be_kept(
    options: LoadOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(Store.open(settings_for(tmp_path).database)):
        pass
    with closing(sqlite3.connect(settings_for(tmp_path).database)) as log, log:
        log.execute("DROP TABLE calibration")
    request = Request(HELLO, max_tokens=4, drafter=OFF)
    assert answer(replace(options, home=tmp_path), request)["text"]
    assert "could not be used" in capsys.readouterr().err


@pytest.mark.parametrize("is_named", [True, False])
def test_auto_measures_first_and_a_home_keeps_it(
    options: LoadOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    request = Request(HELLO, max_tokens=4, drafter=AUTO)
    options = replace(options, home=tmp_path) if is_named else options
    answer(options, request)
    store = Store.open(settings_for(options.home).database)
    state = store.load_state(STATE_KEY)
    store.close()
    assert state

    def measured_again(*_: Any) -> Any:
        pytest.fail("what was measured before was not taken up")

    monkeypatch.setattr(LocalBackend, "calibrate", measured_again)
    answer(options, request)


@pytest.mark.parametrize(
    ("checking", "workload", "is_exact", "note"),
    [
        ("as set", "code", True, ""),
        ("threshold", "chat", True, "\n[exact: chat has no threshold]"),
        ("threshold:0", "chat", False, "\n[lenient: N of 12 tokens would have been refused; kind"),
    ],
)
def test_a_reply_says_how_it_was_checked(
    backend: LocalBackend, checking: str, workload: str, is_exact: bool, note: str
) -> None:
    decision = decide(load_workloads(), workload, checking, "hello")
    sampling = SamplingParams(leniency=decision.leniency)
    request = Request(HELLO, sampling, max_tokens=12, drafter="ngram", num_draft_tokens=3)
    found = labelled(collect(backend, request), decision)
    found = json.loads(json.dumps(found, allow_nan=False))
    assert (found["stats"]["exact"], found["workload"]) == (is_exact, workload)
    assert found["label"].startswith("exact" if is_exact else "lenient: ")
    assert (found["leniency"] is None) == is_exact
    count = str(found["stats"]["num_lenient_tokens"])
    said = note_of(found, checking != "as set")
    assert said.startswith(note.replace("N", count)) and bool(said) == bool(note)


def test_a_reply_says_how_fast_it_came(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Apart from the reply, which may be piped to another program."""
    rates = iter([23.44, None])

    def answer(options: object, request: Request) -> dict[str, Any]:
        stats = statistics_json(TurnStats(4, num_output_tokens=46))
        return {"text": "a", "thinking": "", "stats": stats | {"tokens_per_second": next(rates)}}

    monkeypatch.setattr(generate_command, "answer", answer)
    words = ["generate", "hi", "--home", str(tmp_path)]
    ended = [invoke(*words) for _ in range(2)]
    assert [each.stderr for each in ended] == ["[46 tokens, 23.4 tokens/s]\n", ""]
    assert [each.stdout for each in ended] == ["a\n", "a\n"]


@pytest.mark.parametrize("text", ["", "Four."])
def test_a_reply_that_is_all_thought_says_so(text: str) -> None:
    """A budget of tokens that ends within the thought left an empty line."""
    result = {"text": text, "thinking": "Two and two", "leniency": None, "workload": "chat"}
    for is_leniency_asked in (False, True):
        assert ("gave no answer" in note_of(result, is_leniency_asked)) == (not text)


def test_a_turn_that_ends_in_an_error_is_an_error() -> None:
    class Failing:
        def generate(self, request: Request, cancel: Any) -> Any:
            yield Chunk("done", TurnStats(3), finish_reason="error", error="The engine stopped.")

    backend: Any = Failing()
    with pytest.raises(LocalspecError, match="The engine stopped"):
        collect(backend, Request(HELLO))


# -- flags, on a stand-in for the engine ------------------------------------------------------

PROMPT = "Write a function that adds."
Asked = list[Request]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The requests that reach the engine, which answers each with three tokens."""
    requests: Asked = []

    def answer(options: object, request: Request) -> dict[str, Any]:
        requests.append(request)
        is_exact = request.sampling.leniency is None
        stats = TurnStats(4, num_output_tokens=3, exact=is_exact, num_lenient_tokens=1 - is_exact)
        return {"text": "a b c", "thinking": "", "stats": statistics_json(stats)}

    monkeypatch.setattr(generate_command, "answer", answer)
    return requests


def run(home: Path, *flags: str) -> list[str]:
    ended = invoke("generate", PROMPT, "--home", str(home), "--json", *flags)
    assert ended.exit_code == 0, ended
    return ended.lines


@pytest.mark.parametrize(
    ("flags", "workload", "rule"),
    [
        ((), "code", None),
        (("--workload", "story"), "story", None),
        (("--lenient", "threshold"), "code", Threshold(0.75)),
        (("--lenient", "threshold", "--workload", "story"), "story", Threshold(0.5)),
        (("--lenient", "typical"), "code", Typical()),
        (("--lenient", "threshold", "--workload", "chat"), "chat", None),
    ],
)
def test_flags_settle_the_kind_and_the_rule(
    asked: Asked, tmp_path: Path, flags: tuple[str, ...], workload: str, rule: Leniency | None
) -> None:
    *shown, last = run(tmp_path, *flags)
    assert asked[0].sampling.leniency == rule
    found = json.loads(last)
    assert (found["workload"], found["stats"]["exact"]) == (workload, rule is None)
    assert found["is_workload_recognised"] is ("--workload" not in flags)
    assert ("1 of 3 tokens would have been refused" in shown[-1]) is (rule is not None)


def test_stop_strings_are_asked_for_by_a_flag(asked: Asked, tmp_path: Path) -> None:
    run(tmp_path, "--stop", "END", "--stop", "###")
    assert asked[0].stop == ("END", "###")


def test_a_text_is_continued_by_a_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = list[LoadOptions]()
    stats = statistics_json(TurnStats(4))
    monkeypatch.setattr(
        generate_command,
        "answer",
        lambda options, request: (
            found.append(options) or {"text": "", "thinking": "", "stats": stats}
        ),
    )
    run(tmp_path, "--raw")
    run(tmp_path)
    assert [options.raw for options in found] == [True, False]


def test_a_text_that_is_continued_is_all_that_the_model_reads(
    options: LoadOptions, backend: LocalBackend
) -> None:
    raw = open_local_backend(replace(options, raw=True), None, lambda phrase: None)
    said, chatted = (one.count_tokens((Message("user", "abc"),)) for one in (raw, backend))
    assert said < chatted


def test_a_profile_in_ones_home_is_lenient_and_a_flag_overrides_it(
    asked: Asked, tmp_path: Path
) -> None:
    own = tmp_path / "profiles" / "workloads" / "code.toml"
    own.parent.mkdir(parents=True)
    own.write_text("threshold = 0.9\nlenient = true\nfirst_num_draft_tokens = 5\n")
    run(tmp_path)
    run(tmp_path, "--lenient", "exact")
    assert [one.sampling.leniency for one in asked] == [Threshold(0.9), None]
    assert [one.first_num_draft_tokens for one in asked] == [5, 5]


# -- a logged reply, made again -------------------------------------------------------------------


@pytest.fixture(scope="module")
def logged(options: LoadOptions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose log has a greedy reply and two that were not."""
    home = tmp_path_factory.mktemp("home")
    store = Store.open(settings_for(home).database)
    service = ChatService(
        store, SessionInfo, lambda report: open_local_backend(options, None, report)
    )
    service.start()
    for sampling in (SamplingParams(), SamplingParams(1.0), SamplingParams(1.0, seed=5)):
        reply = service.submit(None, "hello hello", ReplySettings(sampling, 24, drafter="ngram"))
        assert reply is not None and reply.done.wait(60), reply
    service.close()
    store.close()
    return home


@pytest.mark.parametrize(
    ("turn", "drafter"), [(1, "off"), (2, None), (3, "auto"), (3, "lookahead")]
)
def test_a_logged_reply_is_made_again(
    options: LoadOptions, logged: Path, turn: int, drafter: str | None
) -> None:
    flags = [] if drafter is None else ["--drafter", drafter]
    assert options.model is not None
    place = ["--home", str(logged), "--model", options.model, "--json"]
    ended = invoke("generate", "--replay", str(turn), *place, *flags)
    assert ended.exit_code == 0, ended
    *shown, last = ended.lines
    found = json.loads(last)
    assert (found["turn_id"], found["drafter"]) == (turn, drafter or "ngram")
    assert found["outcome"] == "identical" and found["changes"] == []
    assert "Identical: made again" in shown[-1] and found["num_compared"] > 0
    with closing(Store.open(settings_for(logged).database)) as store:
        assert store.branch(2 * turn)[-1].text.startswith(found["text"])
        assert len(store.turn_rows()) == 3, "a replay is not logged"


@pytest.mark.parametrize(
    ("kernels", "changes"),
    [(None, []), ("same-bits", ["the kernels (fastest then, same-bits now)"])],
)
def test_a_reply_is_made_again_with_the_kernels_that_it_was_made_with(
    options: LoadOptions, logged: Path, tmp_path: Path, kernels: str | None, changes: list[str]
) -> None:
    home = shutil.copytree(logged, tmp_path / "home")
    with sqlite3.connect(settings_for(home).database) as database:
        database.execute("UPDATE turn SET kernels = 'fastest' WHERE id = 1")
    database.close()
    asked = replace(options, kernels=kernels)
    assert replayed(replace(asked, drafter=OFF, home=home), 1)["changes"] == tuple(changes)


def test_a_turn_that_is_not_there_or_cannot_be_made_again_is_said(
    options: LoadOptions, logged: Path, tmp_path: Path
) -> None:
    with pytest.raises(LocalspecError, match="no turn 9"):
        replayed(replace(options, home=logged), 9)
    older = shutil.copytree(logged, tmp_path / "older")
    with sqlite3.connect(settings_for(older).database) as database:
        database.execute("UPDATE turn SET seed = NULL WHERE id = 2")
    database.close()
    with pytest.raises(LocalspecError, match="its seed was not logged"):
        replayed(replace(options, home=older), 2)


def test_what_cannot_be_asked_for_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    words = ["generate", "hi", "--stop", "", "--model", str(tmp_path / "absent")]
    ended = invoke(*words)
    assert isinstance(ended.error, RequestError) and "stop string" in str(ended.error)


def test_a_message_or_a_turn_is_asked_for_and_not_both() -> None:
    for words in ([], ["hi", "--replay", "1"]):
        ended = invoke("generate", *words)
        assert isinstance(ended.error, ConfigError) and "--replay" in str(ended.error)


@pytest.mark.parametrize(
    "words", [["--temperature", "1"], ["--seed", "0"], ["--stop", "x"], ["--raw"]]
)
def test_a_setting_beside_a_logged_reply_is_refused(words: list[str]) -> None:
    ended = invoke("generate", "--replay", "1", *words)
    assert isinstance(ended.error, ConfigError) and "from the log" in str(ended.error)
