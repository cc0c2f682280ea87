"""The arms of a comparison, by name.

`off`, `auto`, a drafter ("draft_model": the controller chooses its length), a drafter at a fixed
length ("draft_model@4", or several at once: "draft_model@1-8"), and the arms of other engines that
a caller brings (`OtherEngines`; this package has none, `tools.peers` has).

Contract: `parse_arms` puts `off` first whether it was asked for or not, since every ratio is
against it. A known drafter that cannot be had is a reason, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.core.backend import DrafterStatus, Report
from localspec.core.decoding import AUTO, OFF
from localspec.core.errors import ConfigError
from localspec.drafters.registry import REGISTRY

if TYPE_CHECKING:  # torch, which the names of arms do not need
    from localspec.bench.runs import BenchEngine, Runner

MAX_FIXED_LENGTH = 64


@dataclass(frozen=True)
class Arm:
    """One side of a comparison. drafter: AUTO, OFF, a drafter's name or another engine's arm.
    num_draft_tokens: the fixed length; None where it is chosen, or nothing is drafted."""

    name: str
    drafter: str
    num_draft_tokens: int | None = None
    is_other_engine: bool = False

    @property
    def is_learning(self) -> bool:
        """Whether it decides by what it has learnt, so that it can be cold or warm."""
        is_fixed = self.drafter == OFF or self.num_draft_tokens is not None
        return not self.is_other_engine and (self.drafter == AUTO or not is_fixed)


@dataclass(frozen=True)
class OtherArm:
    """An arm of another engine. open: (what is compared, HOME, threads, fixed length) to its
    runner; raises LocalspecError where it cannot run here. takes_length: whether NAME@LENGTH
    exists."""

    open: Callable[[BenchEngine, Path, int, int | None], Runner]
    takes_length: bool


@dataclass(frozen=True)
class OtherEngines:
    """Other engines that a caller adds to a comparison. arms: by name. full_suite: their arms in
    `--suite full`. quick_suite: those of `--suite quick` that are installed under a HOME. set_up:
    installs them under a HOME; returns the names of those that are ready, and why by the name of
    each that failed."""

    arms: Mapping[str, OtherArm]
    full_suite: tuple[str, ...]
    quick_suite: Callable[[Path], tuple[str, ...]]
    set_up: Callable[[Path, Report], tuple[list[str], Mapping[str, str]]]


def default_arms() -> tuple[str, ...]:
    """What is compared when no arm is named: the drafters that the planner plans with."""
    planned = (name for name, info in REGISTRY.items() if info.plan_rank is not None)
    return (OFF, *planned, AUTO)


def parse_arms(names: Sequence[str], others: Mapping[str, OtherArm] | None = None) -> list[Arm]:
    """`off` first, then each other arm once, in the order given. Raises ConfigError."""
    given = [each for name in names if name.strip() for each in _spelt_out(name.strip())]
    return [_arm(name, others or {}) for name in dict.fromkeys((OFF, *given))]


def _spelt_out(name: str) -> list[str]:
    """draft_model@1-3 -> draft_model@1, draft_model@2, draft_model@3."""
    drafter, _, lengths = name.partition("@")
    first, dash, last = lengths.partition("-")
    if not dash:
        return [name]
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"{name!r} is no arm. Several lengths are written like {drafter}@1-8.")
    # One length beyond the limit is enough to be refused, however long the range is.
    end = min(int(last), MAX_FIXED_LENGTH + 1)
    return [f"{drafter}@{length}" for length in range(int(first), end + 1)]


def _arm(name: str, others: Mapping[str, OtherArm]) -> Arm:
    drafter, at, length = name.partition("@")
    other = others.get(drafter)
    if not at:
        return Arm(name, drafter, None, other is not None)
    takes_length = drafter != OFF if other is None else other.takes_length
    if not takes_length or not length.isdecimal():
        raise ConfigError(
            f"{name!r} is no arm. A fixed draft length is written like draft_model@4, and only "
            "for what drafts."
        )
    if not 1 <= int(length) <= MAX_FIXED_LENGTH:
        raise ConfigError(
            f"{name!r} asks for {length} draft tokens. Choose 1 to {MAX_FIXED_LENGTH}."
        )
    return Arm(name, drafter, int(length), other is not None)


def require_known(arms: Sequence[Arm], others: Collection[str] = ()) -> None:
    """Raises ConfigError for what nothing is called, before anything is loaded."""
    known = (OFF, AUTO, *REGISTRY, *others)
    for arm in arms:
        if arm.drafter not in known:
            raise ConfigError(
                f"There is no arm called {arm.name!r}. Choose from: {', '.join(known)}."
            )


def refusals(arms: Sequence[Arm], statuses: Sequence[DrafterStatus]) -> dict[str, str]:
    """Arms that cannot run here, each with the reason; other engines are asked when they are
    opened."""
    known = {status.name: status for status in statuses}
    refused = dict[str, str]()
    for arm in arms:
        if arm.drafter in (OFF, AUTO) or arm.is_other_engine:
            continue
        status = known.get(arm.drafter)
        if status is None:
            refused[arm.name] = f"this version has no drafter called {arm.drafter}."
        elif not status.is_available:
            refused[arm.name] = status.reason
    return refused
