"""The peers themselves on the demo pair: in fp32 their greedy text is ours, however they draft.

They are large and installed by `python -m tools.peers --setup-peers --home DIR`; these tests run
with `--peers DIR` and skip without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localspec.bench.cases import OWN_PROMPTS, Prompt, load_prompts
from localspec.bench.compare import compare_arms
from localspec.bench.runs import BenchEngine, open_bench_engine
from localspec.bench.settings import BenchSettings
from localspec.core.options import LoadOptions
from tools.peers.engines import other_engines
from tools.peers.environments import environment_of

pytestmark = [pytest.mark.slow, pytest.mark.model]
DRAFT_LENGTH = 3  # of the arms that end in @3


def require(name: str, home: Path) -> None:
    """Skip the test where the peer is not installed in this home."""
    if not environment_of(name, home).is_complete():
        pytest.skip(f"{name} is not installed in {home} (python -m tools.peers --setup-peers)")


@pytest.fixture(scope="module")
def demo_bench(peers_home: Path) -> BenchEngine:
    options = LoadOptions(context=512, dtype="float32", home=peers_home)
    return open_bench_engine(options, None, lambda _: None)


def settings(arms: tuple[str, ...], max_tokens: int, temperature: float, home: Path) -> Any:
    return BenchSettings(
        max_tokens=max_tokens, temperatures=(temperature,), arms=arms, warm_prompts=0, home=home
    )


def prompts(count: int) -> list[Prompt]:
    return load_prompts(OWN_PROMPTS, count)


def require_the_same_rate(rows: dict[str, Any], ours: str, theirs: str) -> None:
    """Both engines have the same two models, so they accept the same share of the drafts, but for
    the last draft of each reply: one engine may ask for more tokens than the reply still takes."""
    rates = [rows[arm]["acceptance_rate"] for arm in (ours, theirs)]
    assert min(rates) > 0.2, "the draft is this target's"
    num_last = DRAFT_LENGTH * rows[ours]["num_prompts"]
    assert rates[1] == pytest.approx(rates[0], abs=num_last / rows[ours]["num_draft_tokens"])


def test_llama_cpp_writes_what_we_write(demo_bench: BenchEngine, peers_home: Path) -> None:
    require("llama_cpp", peers_home)
    arms = ("draft_model@3", "llama_cpp", "llama_cpp_lookup@5", "llama_cpp_draft@3")
    wanted = BenchSettings(
        max_tokens=48, temperatures=(0.0,), arms=arms, warm_prompts=0, home=peers_home
    )
    result = compare_arms(demo_bench, prompts(16), wanted, print, other_engines())
    assert result["differences"] == []
    rows = {row["arm"]: row for row in result["rows"] if row["task"] == "all"}
    assert all(rows[arm]["num_prompts"] == 16 for arm in arms)
    require_the_same_rate(rows, "draft_model@3", "llama_cpp_draft@3")
    assert rows["llama_cpp_lookup@5"]["acceptance_rate"] > 0.0


def test_vllm_writes_what_we_write(demo_bench: BenchEngine, peers_home: Path) -> None:
    require("vllm", peers_home)
    arms = ("draft_model@3", "vllm", "vllm_draft@3")
    wanted = BenchSettings(
        max_tokens=32, temperatures=(0.0,), arms=arms, warm_prompts=0, home=peers_home
    )
    result = compare_arms(demo_bench, prompts(4), wanted, print, other_engines())
    assert result["differences"] == []
    rows = {row["arm"]: row for row in result["rows"] if row["task"] == "all"}
    assert all(rows[arm]["num_prompts"] == 4 for arm in arms)
    require_the_same_rate(rows, "draft_model@3", "vllm_draft@3")


def test_sampled_peers_write_something_and_draft(demo_bench: BenchEngine, peers_home: Path) -> None:
    require("llama_cpp", peers_home)
    arms = ("llama_cpp", "llama_cpp_draft")
    wanted = BenchSettings(
        max_tokens=32, temperatures=(0.7,), arms=arms, warm_prompts=0, home=peers_home
    )
    result = compare_arms(demo_bench, prompts(4), wanted, print, other_engines())
    rows = {row["arm"]: row for row in result["rows"] if row["task"] == "all"}
    assert all(rows[arm]["num_tokens"] > 0 for arm in arms)
    assert rows["llama_cpp_draft"]["acceptance_rate"] > 0.1
