"""What to compare, and the suites of `--suite`.

Contract: `suite_settings` returns complete settings; flags beside it replace single values.
`quick` takes the other engines that are installed and stays under three minutes on a laptop;
`drafters` compares every way of drafting at three temperatures; `full` adds every fixed length and
every other engine, and one that is missing is a row that says how to install it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from localspec.bench.arms import OtherEngines, default_arms
from localspec.core.config import settings_for
from localspec.core.decoding import AUTO, OFF
from localspec.core.errors import ConfigError
from localspec.core.flags import require_temperatures, require_threads
from localspec.drafters.registry import REGISTRY

SUITES = ("quick", "drafters", "full")


@dataclass(frozen=True)
class BenchSettings:
    """prompts: a file, None for our own. limit: only the first so many prompts are measured.
    warm_prompts: prompts of an unmeasured pass in which arms learn, of those behind the limit where
    there are any (more than there are: several passes), 0 to start cold. repeats: how often each
    prompt is measured, with a seed of its own each time.
    peer_threads: of other engines, None: as many as ours. Raises ConfigError, RequestError."""

    prompts: Path | None = None
    limit: int | None = None
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.7)
    arms: tuple[str, ...] = field(default_factory=default_arms)
    home: Path | None = None
    warm_prompts: int = 24
    repeats: int = 1
    peer_threads: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or (self.limit is not None and self.limit < 1):
            raise ConfigError("--max-tokens and --limit must be at least 1.")
        if self.peer_threads is not None:
            require_threads("--peer-threads", self.peer_threads)
        if self.warm_prompts < 0 or self.repeats < 1:
            raise ConfigError("--warm must be at least 0, and --repeats at least 1.")
        require_temperatures(self.temperatures)

    @property
    def num_read(self) -> int | None:
        """Prompts to measure and, behind them, to learn from; None for all of the file."""
        return None if self.limit is None else self.limit + self.warm_prompts


def suite_settings(
    suite: str | None, home: Path | None, others: OtherEngines | None = None
) -> BenchSettings:
    """The settings of a suite; None: greedy decoding, our prompts, the usual drafters. Raises
    ConfigError."""
    if suite is None:
        return BenchSettings(temperatures=(0.0,), home=home)
    if suite == "quick":
        installed = others.quick_suite(settings_for(home).home) if others is not None else ()
        return BenchSettings(
            limit=4,
            max_tokens=32,
            temperatures=(0.0,),
            arms=(OFF, *REGISTRY, AUTO, *installed),
            home=home,
            warm_prompts=4,
        )
    if suite == "drafters":
        return BenchSettings(temperatures=(0.0, 0.7, 1.0), arms=(OFF, *REGISTRY, AUTO), home=home)
    if suite == "full":
        lengths = tuple(f"{name}@1-8" for name in REGISTRY)
        engines = others.full_suite if others is not None else ()
        arms = (OFF, *REGISTRY, AUTO, *lengths, *engines)
        return BenchSettings(temperatures=(0.0, 0.7), arms=arms, home=home)
    raise ConfigError(f"There is no suite {suite!r}. Choose one of: {', '.join(SUITES)}.")
