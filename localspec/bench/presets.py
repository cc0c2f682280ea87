"""What each `--suite` compares.

Contract: `preset` returns complete settings; flags given beside it replace single values. `quick`
takes the peers that are installed and stays under three minutes on a laptop; `drafters` compares
every way of drafting at three temperatures; `full` names every peer, and one that is missing is a
row that says how to install it.
"""

from __future__ import annotations

from pathlib import Path

from localspec.bench.arms import PEERS
from localspec.bench.peers.environments import RECIPES, environment_of
from localspec.bench.suite import BenchSettings
from localspec.config import settings_for
from localspec.core import AUTO, OFF
from localspec.drafters.registry import REGISTRY
from localspec.errors import ConfigError

SUITES = ("quick", "drafters", "full")
# Of each engine the ways that show it at its best, without starting a process for every one.
QUICK_PEERS = ("transformers", "llama_cpp", "llama_cpp_draft", "vllm")
# Beside each peer's own choice: other draft lengths, so that it is met at its best one.
FURTHER_PEERS = (
    "transformers_draft@3", "transformers_draft@5", "transformers_draft@8",
    "transformers_lookup@5", "llama_cpp_lookup@5", "llama_cpp_lookup@10",
    "llama_cpp_draft@2", "llama_cpp_draft@5", "vllm_draft@2", "vllm_draft@5",
)  # fmt: skip


def preset(suite: str | None, home: Path | None) -> BenchSettings:
    """The settings of a suite; None: greedy decoding, our prompts, our drafters. Raises
    ConfigError."""
    if suite is None:
        return BenchSettings(temperatures=(0.0,), home=home)
    if suite == "quick":
        return BenchSettings(
            limit=4,
            max_tokens=32,
            temperatures=(0.0,),
            arms=(OFF, *REGISTRY, AUTO, *installed(QUICK_PEERS, home)),
            home=home,
            warm_prompts=4,
        )
    if suite == "drafters":
        return BenchSettings(temperatures=(0.0, 0.7, 1.0), arms=(OFF, *REGISTRY, AUTO), home=home)
    if suite == "full":
        lengths = tuple(f"{name}@1-8" for name in REGISTRY)
        arms = (OFF, *REGISTRY, AUTO, *lengths, *PEERS, *FURTHER_PEERS)
        return BenchSettings(temperatures=(0.0, 0.7), arms=arms, home=home)
    raise ConfigError(f"There is no suite {suite!r}. Choose one of: {', '.join(SUITES)}.")


def installed(peers: tuple[str, ...], home: Path | None) -> tuple[str, ...]:
    """Those that can run here without installing anything."""
    folder = settings_for(home).home
    engines = {
        name: name not in RECIPES or environment_of(name, folder).is_complete()
        for name in {PEERS[peer].engine for peer in peers}
    }
    return tuple(peer for peer in peers if engines[PEERS[peer].engine])
