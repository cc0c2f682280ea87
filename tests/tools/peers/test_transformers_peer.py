"""transformers' own `generate` on the compared weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.bench.cases import Case, Prompt
from localspec.bench.compare import compare_arms
from localspec.bench.runs import BenchEngine
from localspec.bench.settings import BenchSettings
from localspec.core.decoding import SamplingParams
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.engine.engine import Engine
from tests.kit.tiny import VOCAB_SIZE, agreeing_draft, on_transformers, tiny_llama
from tests.kit.tiny_bench import tiny_bench
from tools.peers.engines import other_engines
from tools.peers.transformers_peer import Modules, transformers_peer

PROMPTS = [Prompt("a", "chat", "hello there"), Prompt("b", "code", "write a loop")]


@pytest.fixture
def tiny_engine_bench() -> BenchEngine:
    return tiny_bench()


@pytest.fixture
def module_bench() -> BenchEngine:
    """The same models, run by transformers' own modules."""
    target = tiny_llama()
    draft = DraftModelDrafter(on_transformers(agreeing_draft(target)), VOCAB_SIZE)
    return tiny_bench(Engine(on_transformers(target), {"draft_model": draft}))


@pytest.fixture
def folder_bench(tiny_engine_bench: BenchEngine, tmp_path: Path) -> BenchEngine:
    """The same models on our own forward, with the folders they came from."""
    target = tiny_llama()
    target.save_pretrained(tmp_path / "target")
    agreeing_draft(target).save_pretrained(tmp_path / "draft")
    return replace(
        tiny_engine_bench, target_folder=tmp_path / "target", draft_folder=tmp_path / "draft"
    )


def compared(bench: BenchEngine, *arms: str) -> dict[str, Any]:
    settings = BenchSettings(max_tokens=10, temperatures=(0.0,), arms=arms)
    return compare_arms(bench, PROMPTS, settings, lambda _: None, other_engines())


def rows_of(result: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if (row["arm"], row["task"]) == (arm, "all")]


TRANSFORMERS_ARMS = (
    "transformers", "transformers_draft", "transformers_draft@3", "transformers_lookup",
    "transformers_lookup@2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["module_bench", "folder_bench"])
def test_transformers_runs_the_same_weights_to_the_same_tokens(
    request: pytest.FixtureRequest, kind: str
) -> None:
    bench: BenchEngine = request.getfixturevalue(kind)
    result = compared(bench, *TRANSFORMERS_ARMS)
    assert result["differences"] == []
    for arm in TRANSFORMERS_ARMS:
        (row,) = rows_of(result, arm)
        assert row["identical_to_off"] == 0
        assert row["num_tokens"] == rows_of(result, "off")[0]["num_tokens"] > 0
        assert row["tokens_per_second"] > 0 and row["acceptance_rate"] is None
        assert row["peak_memory_bytes"] > 0


@pytest.mark.slow
def test_transformers_samples_too_and_is_then_not_compared(module_bench: BenchEngine) -> None:
    arms = TRANSFORMERS_ARMS[:2]
    wanted = BenchSettings(max_tokens=8, temperatures=(0.7,), arms=arms)
    result = compare_arms(module_bench, PROMPTS, wanted, lambda _: None, other_engines())
    for arm in arms:
        (row,) = rows_of(result, arm)
        assert row["num_tokens"] > 0 and row["identical_to_off"] is None


def test_assisted_transformers_really_takes_draft_tokens(module_bench: BenchEngine) -> None:
    modules, calls = Modules(module_bench, 1), list[object]()
    peer = transformers_peer(modules, "draft", 4)
    hook = modules.target.register_forward_pre_hook(lambda *call: calls.append(call))
    run = peer.run(Case("a", "chat", (3, 9, 14, 27, 5), 0), SamplingParams(), 16)
    hook.remove()
    assert 0 < len(calls) < len(run.decided)


def test_the_drafts_own_settings_are_put_back(module_bench: BenchEngine) -> None:
    modules = Modules(module_bench, 1)
    before = modules.draft.generation_config
    peer = transformers_peer(modules, "draft", 4)
    peer.run(Case("a", "chat", (3, 9, 14), 0), SamplingParams(), 4)
    assert modules.draft.generation_config is before


def test_transformers_has_its_own_number_of_threads_while_it_runs(
    module_bench: BenchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = torch.get_num_threads(), list[int]()
    modules = Modules(module_bench, own + 1)
    generate = modules.target.generate

    def noting(**arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return generate(**arguments)

    monkeypatch.setattr(modules.target, "generate", noting)
    peer = transformers_peer(modules, "plain", None)
    peer.run(Case("a", "chat", (3, 9, 14), 0), SamplingParams(), 4)
    assert (seen, torch.get_num_threads()) == ([own + 1], own)


def test_transformers_without_a_module_or_a_folder_is_a_reason(
    tiny_engine_bench: BenchEngine,
) -> None:
    result = compared(tiny_engine_bench, "transformers")
    assert "does not run on transformers" in rows_of(result, "transformers")[0]["reason"]


def test_a_quantised_target_is_not_loaded_a_second_time(folder_bench: BenchEngine) -> None:
    quantised = replace(folder_bench, precision="4-bit")
    result = compared(quantised, "transformers")
    assert "4-bit" in rows_of(result, "transformers")[0]["reason"]
