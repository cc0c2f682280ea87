"""The peers themselves on the demo pair: in fp32 their greedy text is ours, however they draft.

They are large and installed by `tools.peers --setup-peers`; without them these tests skip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localspec.bench.cases import OWN_PROMPTS, Prompt, load_prompts
from localspec.bench.compare import compare
from localspec.bench.runs import BenchEngine, open_bench_engine
from localspec.bench.settings import BenchSettings
from localspec.config import default_home
from localspec.errors import ModelError
from localspec.options import LoadOptions
from tools.peers.engines import other_engines
from tools.peers.environments import RECIPES, environment_of
from tools.peers.llama_cpp import converted

pytestmark = [pytest.mark.slow, pytest.mark.model]


def require(name: str) -> Path:
    """The Python of an installed peer; skips where it is absent."""
    environment = environment_of(name, default_home())
    if not environment.is_complete():
        pytest.skip(f"{name} is not installed (python -m tools.peers --setup-peers)")
    return environment.python


@pytest.fixture(scope="module")
def bench() -> BenchEngine:
    if not any(environment_of(name, default_home()).is_complete() for name in RECIPES):
        pytest.skip("no engine is installed (python -m tools.peers --setup-peers)")
    return open_bench_engine(LoadOptions(context=512, dtype="float32"), None, lambda _: None)


def prompts(count: int) -> list[Prompt]:
    return load_prompts(OWN_PROMPTS, count)


def draft_rate(rows: dict[str, Any], arm: str = "draft_model@3") -> float:
    """How much of the draft was accepted: with the same two models the same for every engine,
    but for how a reply ends."""
    rate = rows[arm]["acceptance_rate"]
    assert rate > 0.2, "the draft is this target's"
    return float(rate)


def test_llama_cpp_writes_what_we_write(bench: BenchEngine) -> None:
    require("llama_cpp")
    arms = ("draft_model@3", "llama_cpp", "llama_cpp_lookup@5", "llama_cpp_draft@3")
    wanted = BenchSettings(max_tokens=48, temperatures=(0.0,), arms=arms, warm_prompts=0)
    result = compare(bench, prompts(16), wanted, print, other_engines())
    assert result["differences"] == []
    rows = {row["arm"]: row for row in result["rows"] if row["task"] == "all"}
    assert all(rows[arm]["num_prompts"] == 16 for arm in arms)
    assert draft_rate(rows, "llama_cpp_draft@3") == pytest.approx(draft_rate(rows), abs=0.015)
    assert rows["llama_cpp_lookup@5"]["acceptance_rate"] > 0.0


def test_vllm_writes_what_we_write(bench: BenchEngine) -> None:
    require("vllm")
    arms = ("draft_model@3", "vllm", "vllm_draft@3")
    wanted = BenchSettings(max_tokens=32, temperatures=(0.0,), arms=arms, warm_prompts=0)
    result = compare(bench, prompts(4), wanted, print, other_engines())
    assert result["differences"] == []
    rows = {row["arm"]: row for row in result["rows"] if row["task"] == "all"}
    assert all(rows[arm]["num_prompts"] == 4 for arm in arms)
    assert draft_rate(rows, "vllm_draft@3") == pytest.approx(draft_rate(rows), abs=0.05)


def test_sampled_peers_write_something_and_draft(bench: BenchEngine) -> None:
    require("llama_cpp")
    arms = ("llama_cpp", "llama_cpp_draft")
    wanted = BenchSettings(max_tokens=32, temperatures=(0.7,), arms=arms, warm_prompts=0)
    result = compare(bench, prompts(4), wanted, print, other_engines())
    rows = {row["arm"]: row for row in result["rows"] if row["task"] == "all"}
    assert all(rows[arm]["num_tokens"] > 0 for arm in arms)
    assert rows["llama_cpp_draft"]["acceptance_rate"] > 0.1


def test_weights_are_written_once_and_a_strange_family_is_said(
    bench: BenchEngine, tmp_path: Path
) -> None:
    assert bench.draft_folder is not None
    first = converted(bench.draft_folder, "bf16", tmp_path)
    written = first.stat().st_mtime_ns
    assert converted(bench.draft_folder, "bf16", tmp_path) == first
    assert first.stat().st_mtime_ns == written
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match="this is mamba"):
        converted(strange, "bf16", tmp_path)
    assert list((tmp_path / "peers" / "gguf").iterdir()) == [first]
