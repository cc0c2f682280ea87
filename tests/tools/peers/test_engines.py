"""Other engines opened by name: what is shared is started once, what is missing says what to do.
The workers are fake_peer.py, a real process that counts upwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.bench.arms import parse_arms
from localspec.bench.cases import Case, Prompt
from localspec.bench.compare import compare_arms
from localspec.bench.runs import BenchEngine, Runner
from localspec.bench.settings import BenchSettings
from localspec.core.decoding import SamplingParams
from localspec.core.errors import LocalspecError, ModelError
from localspec.drafters.ngram import NgramDrafter
from localspec.engine.engine import Engine
from tests.kit.tiny import on_transformers, tiny_llama
from tests.kit.tiny_bench import tiny_bench
from tools.peers import llama_cpp, vllm
from tools.peers.engines import FURTHER_LENGTHS, other_engines
from tools.peers.worker import PeerWorker

pytestmark = pytest.mark.slow  # starts child processes

FAKE = Path(__file__).parent / "fake_peer.py"
CASE = Case("a", "chat", (3, 9, 14), 77)
GREEDY = SamplingParams()


@pytest.fixture
def saved_bench(tmp_path: Path) -> BenchEngine:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    engine = Engine(on_transformers(tiny_llama()), {"ngram": NgramDrafter()})
    folders = {"target_folder": tmp_path / "target", "draft_folder": tmp_path / "draft"}
    return replace(tiny_bench(engine), **folders)


class Fakes:
    """Stands in for installed peers. started: the opening and command of every worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[list[str], dict[str, Any]]] = []
        self.workers: list[PeerWorker] = []
        self.behaviour = "well"
        for module in (llama_cpp, vllm):
            monkeypatch.setattr(module, "PeerWorker", self.start)
            monkeypatch.setattr(module, "python_of", lambda *_: Path(sys.executable))
        monkeypatch.setattr(llama_cpp, "converted", lambda folder, *_: folder / "x.gguf")
        monkeypatch.setattr(vllm, "is_linux", lambda: True)

    def start(
        self, name: str, command: list[str], opening: Any, log: Path, limit: float
    ) -> PeerWorker:
        self.started.append((command, dict(opening)))
        self.workers.append(
            PeerWorker(name, [sys.executable, str(FAKE), self.behaviour], opening, log, limit)
        )
        return self.workers[-1]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    made = Fakes(monkeypatch)
    yield made
    for worker in made.workers:
        worker.close()


class Opened:
    """The other engines of one comparison, opened by the names of their arms."""

    def __init__(self, bench: BenchEngine, home: Path) -> None:
        self._bench, self._home = bench, home
        self._engines = other_engines()
        self.runners: dict[str, Runner] = {}

    def open(self, *names: str) -> None:
        for arm in parse_arms(names, self._engines.arms)[1:]:
            opener = self._engines.arms[arm.drafter]
            self.runners[arm.name] = opener.open(self._bench, self._home, 3, arm.num_draft_tokens)

    def note(self, name: str) -> str:
        return self.runners[name].note


@pytest.fixture
def opened_peers(saved_bench: BenchEngine, tmp_path: Path) -> Opened:
    return Opened(saved_bench, tmp_path / "home")


def test_an_engine_that_is_not_installed_names_the_remedy(opened_peers: Opened) -> None:
    for name in ("llama_cpp", "llama_cpp_draft", "vllm"):
        with pytest.raises(LocalspecError, match=r"tools\.peers --setup-peers|on Linux only"):
            opened_peers.open(name)


def test_the_arms_of_llama_cpp_share_one_process(opened_peers: Opened, fakes: Fakes) -> None:
    opened_peers.open("llama_cpp", "llama_cpp_lookup", "llama_cpp_draft", "llama_cpp_draft@7")
    assert len(fakes.started) == 1
    assert fakes.started[0][1]["draft"].endswith("x.gguf")
    assert fakes.started[0][1]["num_threads"] == 3
    assert "7 greedy tokens" in opened_peers.note("llama_cpp_draft@7")
    assert "prompt lookup of 2" in opened_peers.note("llama_cpp_lookup")


def test_every_way_of_vllm_has_its_own_process(opened_peers: Opened, fakes: Fakes) -> None:
    opened_peers.open("vllm", "vllm_draft@5", "vllm_lookup")
    plain, draft, lookup = (opening["speculative"] for _, opening in fakes.started)
    assert plain is None
    assert (draft["method"], draft["num_speculative_tokens"]) == ("draft_model", 5)
    assert lookup["method"] == "ngram"
    assert "always 5 tokens" in opened_peers.note("vllm_draft@5")


def test_vllm_is_told_what_libraries_read_at_their_start(
    opened_peers: Opened, fakes: Fakes
) -> None:
    opened_peers.open("vllm")
    command = fakes.started[0][0]
    assert command[0] == "env" and "VLLM_HOST_IP=127.0.0.1" in command
    assert "OMP_NUM_THREADS=3" in command


def test_a_reply_is_under_our_own_definitions(opened_peers: Opened, fakes: Fakes) -> None:
    opened_peers.open("llama_cpp")
    reply = opened_peers.runners["llama_cpp"].run(CASE, GREEDY, 4)
    assert reply.tokens == (15, 16, 17, 18) and reply.decode_ms == 8.0
    assert (reply.num_drafts, reply.num_draft_tokens, reply.num_accepted_tokens) == (3, 6, 4)


def test_vllm_with_speculation_is_not_timed_when_it_samples(
    opened_peers: Opened, fakes: Fakes
) -> None:
    opened_peers.open("vllm", "vllm_draft")
    plain, draft = opened_peers.runners["vllm"], opened_peers.runners["vllm_draft"]
    sampled = SamplingParams(temperature=0.7)
    assert plain.run(CASE, sampled, 4).tokens_per_second == 500.0
    assert draft.run(CASE, GREEDY, 4).tokens_per_second == 500.0
    unknown = draft.run(CASE, sampled, 4)
    assert (unknown.tokens, unknown.tokens_per_second) == ((), None)
    assert "only greedy" in draft.note and "only" not in plain.note


def test_without_a_draft_model_the_drafting_arms_say_so(
    saved_bench: BenchEngine, tmp_path: Path, fakes: Fakes
) -> None:
    alone = Opened(replace(saved_bench, draft_folder=None), tmp_path / "home")
    alone.open("llama_cpp")
    assert fakes.started[0][1]["draft"] is None
    for name in ("llama_cpp_draft", "vllm_draft", "transformers_draft"):
        with pytest.raises(ModelError, match="no draft model"):
            alone.open(name)


@pytest.mark.parametrize(("name", "precision"), [("llama_cpp", "float16"), ("vllm", "4-bit")])
def test_a_precision_that_an_engine_cannot_take_is_said(
    saved_bench: BenchEngine, tmp_path: Path, fakes: Fakes, name: str, precision: str
) -> None:
    with pytest.raises(ModelError, match=precision):
        Opened(replace(saved_bench, precision=precision), tmp_path).open(name)
    assert fakes.started == []


def test_what_kept_the_shared_process_from_starting_is_asked_only_once(
    opened_peers: Opened, fakes: Fakes
) -> None:
    fakes.behaviour = "dies-at-start"
    for name in ("llama_cpp", "llama_cpp_draft"):
        with pytest.raises(ModelError, match="ended by itself"):
            opened_peers.open(name)
    assert len(fakes.started) == 1


def test_every_arm_can_be_opened_by_its_name(opened_peers: Opened, fakes: Fakes) -> None:
    engines = other_engines()
    names = [name for name in engines.arms if name != "transformers_draft"]  # no module here
    opened_peers.open(*names)
    assert list(opened_peers.runners) == names and all(
        r.note for r in opened_peers.runners.values()
    )
    assert set(engines.full_suite) == {*engines.arms, *FURTHER_LENGTHS}


def test_a_comparison_runs_them_and_leaves_no_process_behind(
    saved_bench: BenchEngine, tmp_path: Path, fakes: Fakes
) -> None:
    prompts = [Prompt("a", "chat", "hello there"), Prompt("b", "code", "write a loop")]
    arms = ("llama_cpp", "vllm_draft")
    settings = BenchSettings(max_tokens=8, temperatures=(0.0, 0.7), arms=arms, home=tmp_path)
    result = compare_arms(saved_bench, prompts, settings, lambda _: None, other_engines())
    rates = {
        (row["arm"], row["temperature"]): row["tokens_per_second"]
        for row in result["rows"]
        if row["task"] == "all"
    }
    assert rates["llama_cpp", 0.7] == rates["vllm_draft", 0.0] == pytest.approx(500.0)
    assert rates["vllm_draft", 0.7] is None
    assert "llama-cpp-python 1" in result["machine"]["peers"]["llama_cpp"]
    assert [worker.is_running for worker in fakes.workers] == [False, False]
    json.dumps(result, allow_nan=False)
