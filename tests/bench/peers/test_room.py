"""Peers opened by name: what is shared is started once, what is missing says what to do. The
workers are fake_peer.py, a real process that counts upwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.backend import DrafterStatus
from localspec.bench.arms import PEERS, parse_arms
from localspec.bench.peers import llama_cpp, vllm
from localspec.bench.peers.room import PeerRoom
from localspec.bench.peers.worker import Worker
from localspec.bench.prompts import Prompt
from localspec.bench.stage import Case, Stage
from localspec.bench.suite import BenchSettings, compare
from localspec.core import SamplingParams
from localspec.drafters.ngram import NgramDrafter
from localspec.engine.acceptance import Acceptance
from localspec.engine.controller import Controller
from localspec.engine.costs import Costs
from localspec.engine.engine import Engine
from localspec.errors import LocalspecError, ModelError, SetupError
from tests.tiny import END_ID, VOCAB_SIZE, on_transformers, tiny_llama

FAKE = Path(__file__).parent / "fake_peer.py"
CASE = Case("a", "chat", (3, 9, 14), 77)
GREEDY = SamplingParams()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    engine = Engine(on_transformers(tiny_llama()), {"ngram": NgramDrafter()})
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return Stage(
        engine=engine,
        controller=Controller(engine.drafters, Costs(), Acceptance()),
        render=lambda text: [1 + ord(character) % (VOCAB_SIZE - 2) for character in text],
        end_ids=frozenset({END_ID}),
        statuses=(DrafterStatus("ngram", True, "ready"),),
        context_length=256,
        precision="float32",
        machine={"target": "tiny"},
        target_folder=tmp_path / "target",
        draft_folder=tmp_path / "draft",
    )


class Fakes:
    """Stands in for installed peers. started: the opening and command of every worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[list[str], dict[str, Any]]] = []
        self.workers: list[Worker] = []
        self.behaviour = "well"
        for module in (llama_cpp, vllm):
            monkeypatch.setattr(module, "Worker", self.start)
            monkeypatch.setattr(module, "python_of", lambda *_: Path(sys.executable))
        monkeypatch.setattr(llama_cpp, "converted", lambda folder, *_: folder / "x.gguf")
        monkeypatch.setattr(vllm, "is_linux", lambda: True)

    def start(self, name: str, command: list[str], opening: Any, log: Path, limit: float) -> Worker:
        self.started.append((command, dict(opening)))
        self.workers.append(
            Worker(name, [sys.executable, str(FAKE), self.behaviour], opening, log, limit)
        )
        return self.workers[-1]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    made = Fakes(monkeypatch)
    yield made
    for worker in made.workers:
        worker.close()


@pytest.fixture
def room(stage: Stage, tmp_path: Path) -> Iterator[PeerRoom]:
    made = PeerRoom(stage, tmp_path / "home", 3)
    yield made
    made.close()


def opened(room: PeerRoom, *names: str) -> None:
    for arm in parse_arms(names)[1:]:
        room.open(arm)


def test_a_peer_that_is_not_installed_names_the_remedy(room: PeerRoom) -> None:
    for name in ("llama_cpp", "llama_cpp_draft", "vllm"):
        with pytest.raises(LocalspecError, match=r"bench --setup-peers|on Linux only"):
            opened(room, name)


def test_the_arms_of_llama_cpp_share_one_process(room: PeerRoom, fakes: Fakes) -> None:
    opened(room, "llama_cpp", "llama_cpp_lookup", "llama_cpp_draft", "llama_cpp_draft@7")
    assert len(fakes.started) == 1
    assert fakes.started[0][1]["draft"].endswith("x.gguf")
    assert fakes.started[0][1]["num_threads"] == 3
    assert "7 greedy tokens" in room.notes["llama_cpp_draft@7"]
    assert "prompt lookup of 2" in room.notes["llama_cpp_lookup"]


def test_every_way_of_vllm_has_its_own_process(room: PeerRoom, fakes: Fakes) -> None:
    opened(room, "vllm", "vllm_draft@5", "vllm_lookup")
    plain, draft, lookup = (opening["speculative"] for _, opening in fakes.started)
    assert plain is None
    assert (draft["method"], draft["num_speculative_tokens"]) == ("draft_model", 5)
    assert lookup["method"] == "ngram"
    assert "always 5 tokens" in room.notes["vllm_draft@5"]


def test_vllm_is_told_what_libraries_read_at_their_start(room: PeerRoom, fakes: Fakes) -> None:
    opened(room, "vllm")
    command = fakes.started[0][0]
    assert command[0] == "env" and "VLLM_HOST_IP=127.0.0.1" in command
    assert "OMP_NUM_THREADS=3" in command


def test_a_run_is_under_our_own_definitions(room: PeerRoom, stage: Stage, fakes: Fakes) -> None:
    (arm,) = parse_arms(("llama_cpp",))[1:]
    room.open(arm)
    run = room.run(arm, CASE, GREEDY, 4)
    assert run.tokens == (15, 16, 17, 18) and run.decode_ms == 8.0
    assert (run.num_drafts, run.num_draft_tokens, run.num_accepted_tokens) == (3, 6, 4)


def test_vllm_with_speculation_is_not_timed_when_it_samples(room: PeerRoom, fakes: Fakes) -> None:
    plain, draft = parse_arms(("vllm", "vllm_draft"))[1:]
    for arm in (plain, draft):
        room.open(arm)
    warm = SamplingParams(temperature=0.7)
    assert room.run(plain, CASE, warm, 4).tokens_per_second == 500.0
    assert room.run(draft, CASE, GREEDY, 4).tokens_per_second == 500.0
    unknown = room.run(draft, CASE, warm, 4)
    assert (unknown.tokens, unknown.tokens_per_second) == ((), None)
    assert "only greedy" in room.notes["vllm_draft"] and "only" not in room.notes["vllm"]


def test_without_a_draft_model_the_drafting_arms_say_so(
    stage: Stage, tmp_path: Path, fakes: Fakes
) -> None:
    alone = PeerRoom(replace(stage, draft_folder=None), tmp_path / "home", 3)
    opened(alone, "llama_cpp")
    assert fakes.started[0][1]["draft"] is None
    for name in ("llama_cpp_draft", "vllm_draft", "transformers_draft"):
        with pytest.raises(ModelError, match="no draft model"):
            opened(alone, name)
    alone.close()


@pytest.mark.parametrize("name", ["llama_cpp", "vllm"])
def test_a_precision_that_a_peer_cannot_take_is_said(
    stage: Stage, tmp_path: Path, fakes: Fakes, name: str
) -> None:
    with pytest.raises(ModelError, match="4-bit"):
        opened(PeerRoom(replace(stage, precision="4-bit"), tmp_path, 3), name)
    assert fakes.started == []


def test_what_kept_the_shared_process_from_starting_is_asked_only_once(
    room: PeerRoom, fakes: Fakes
) -> None:
    fakes.behaviour = "dies-at-start"
    for name in ("llama_cpp", "llama_cpp_draft"):
        with pytest.raises(ModelError, match="ended by itself"):
            opened(room, name)
    assert len(fakes.started) == 1


def test_closing_the_room_ends_every_process(room: PeerRoom, fakes: Fakes) -> None:
    opened(room, "llama_cpp", "vllm")
    assert [worker.is_running for worker in fakes.workers] == [True, True]
    room.close()
    assert [worker.is_running for worker in fakes.workers] == [False, False]


def test_every_peer_can_be_opened_by_its_name(room: PeerRoom, fakes: Fakes) -> None:
    names = [name for name in PEERS if name != "transformers_draft"]  # this stage has no module
    opened(room, *names)
    assert list(room.notes) == names and all(room.notes.values())


# -- in a whole comparison --------------------------------------------------------------------

PROMPTS = [Prompt("a", "chat", "hello there"), Prompt("b", "code", "write a loop")]


def bench(stage: Stage, home: Path, *arms: str) -> dict[str, Any]:
    settings = BenchSettings(max_tokens=8, temperatures=(0.0,), arms=arms, home=home)
    return compare(stage, PROMPTS, settings, lambda _: None)


def row_of(result: dict[str, Any], arm: str) -> dict[str, Any]:
    (row,) = [row for row in result["rows"] if (row["arm"], row["task"]) == (arm, "all")]
    return row


def test_a_peer_is_compared_like_any_other_arm(stage: Stage, tmp_path: Path, fakes: Fakes) -> None:
    result = bench(stage, tmp_path, "llama_cpp", "ngram@2")
    row = row_of(result, "llama_cpp")
    assert (row["num_prompts"], row["identical_to_off"]) == (2, 2)  # it counts, it cannot write
    assert row["tokens_per_second"] == pytest.approx(500.0)
    assert row_of(result, "ngram@2")["identical_to_off"] == 0
    assert "llama-cpp-python 1" in result["machine"]["peers"]["llama_cpp"]
    assert [worker.is_running for worker in fakes.workers] == [False]


def test_a_peer_that_is_missing_or_dies_is_a_row_with_the_reason(
    stage: Stage, tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> Path:
        raise SetupError("vllm is not installed. Install it.")

    monkeypatch.setattr(vllm, "python_of", missing)
    fakes.behaviour = "dies"
    result = bench(stage, tmp_path, "llama_cpp", "vllm")
    assert "vllm is not installed" in row_of(result, "vllm")["reason"]
    assert "ended by itself" in row_of(result, "llama_cpp")["reason"]
    assert row_of(result, "off")["num_prompts"] == 2


def test_ctrl_c_leaves_no_process_behind(stage: Stage, tmp_path: Path, fakes: Fakes) -> None:
    def stop(phrase: str) -> None:
        if phrase.startswith("[1/"):
            raise KeyboardInterrupt

    settings = BenchSettings(max_tokens=8, temperatures=(0.0,), arms=("llama_cpp",), home=tmp_path)
    result = compare(stage, PROMPTS, settings, stop)
    assert "stopped by hand" in result["ending"]
    assert [worker.is_running for worker in fakes.workers] == [False]


def test_an_arm_that_is_not_timed_has_a_row_of_unknowns(
    stage: Stage, tmp_path: Path, fakes: Fakes
) -> None:
    settings = BenchSettings(
        max_tokens=8, temperatures=(0.0, 0.7), arms=("vllm_draft",), home=tmp_path
    )
    result = compare(stage, PROMPTS, settings, lambda _: None)
    greedy, sampled = (
        row for row in result["rows"] if (row["arm"], row["task"]) == ("vllm_draft", "all")
    )
    assert greedy["tokens_per_second"] == pytest.approx(500.0)
    assert sampled["tokens_per_second"] is None and sampled["ratio_to_off"] is None
    json.dumps(result, allow_nan=False)
