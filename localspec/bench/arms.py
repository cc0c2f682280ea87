"""The sides of a comparison, by name.

`off`, `auto`, a drafter ("draft_model": the controller chooses its length), a drafter at a fixed
length ("draft_model@4", or several at once: "draft_model@1-8"), and the peers: other engines on
the same weights ("transformers", "llama_cpp_draft@3").

Contract: `parse_arms` puts `off` first whether it was asked for or not, since every ratio is
against it. A known drafter that cannot be had is a reason, not an error.

Not here: running an arm (stage, peers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from localspec.backend import DrafterStatus
from localspec.core import AUTO, OFF
from localspec.drafters.registry import REGISTRY
from localspec.errors import ConfigError

TRANSFORMERS, LLAMA_CPP, VLLM = "transformers", "llama_cpp", "vllm"
MAX_FIXED_LENGTH = 64

Mode = Literal["plain", "lookup", "draft"]


@dataclass(frozen=True)
class PeerKind:
    """Which engine a peer's arm runs, and how it guesses."""

    engine: str
    mode: Mode = "plain"


PEERS: Mapping[str, PeerKind] = {
    "transformers": PeerKind(TRANSFORMERS),
    "transformers_lookup": PeerKind(TRANSFORMERS, "lookup"),
    "transformers_draft": PeerKind(TRANSFORMERS, "draft"),
    "llama_cpp": PeerKind(LLAMA_CPP),
    "llama_cpp_lookup": PeerKind(LLAMA_CPP, "lookup"),
    "llama_cpp_draft": PeerKind(LLAMA_CPP, "draft"),
    "vllm": PeerKind(VLLM),
    "vllm_lookup": PeerKind(VLLM, "lookup"),
    "vllm_draft": PeerKind(VLLM, "draft"),
}


@dataclass(frozen=True)
class Arm:
    """One side. drafter: AUTO, OFF, a peer's or a drafter's name. num_draft_tokens: fixed
    length, None where the controller or the peer chooses, or nothing is drafted."""

    name: str
    drafter: str
    num_draft_tokens: int | None = None

    @property
    def is_peer(self) -> bool:
        return self.drafter in PEERS

    @property
    def is_learning(self) -> bool:
        """Whether it decides by what it has learnt, so that it can be cold or warm."""
        return self.drafter != OFF and not self.is_peer and self.num_draft_tokens is None


def default_arms() -> tuple[str, ...]:
    """What is compared when no arm is named: the drafters that the planner plans with."""
    planned = (name for name, info in REGISTRY.items() if info.plan_rank is not None)
    return (OFF, *planned, AUTO)


def parse_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """`off` first, then each other arm once, in the order given. Raises ConfigError."""
    given = [each for name in names if name.strip() for each in _spelt_out(name.strip())]
    return tuple(_arm(name) for name in dict.fromkeys((OFF, *given)))


def _spelt_out(name: str) -> list[str]:
    """draft_model@1-3 -> draft_model@1, draft_model@2, draft_model@3."""
    drafter, _, lengths = name.partition("@")
    first, dash, last = lengths.partition("-")
    if not dash:
        return [name]
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"{name!r} is no arm. Several lengths are written like {drafter}@1-8.")
    # One beyond the limit suffices to be refused, however long the range that was asked for.
    return [
        f"{drafter}@{length}"
        for length in range(int(first), min(int(last), MAX_FIXED_LENGTH + 1) + 1)
    ]


def _arm(name: str) -> Arm:
    drafter, at, length = name.partition("@")
    if not at:
        return Arm(name, drafter)
    is_plain = drafter in PEERS and PEERS[drafter].mode == "plain"
    if drafter == OFF or is_plain or not length.isdigit():
        raise ConfigError(
            f"{name!r} is no arm. A fixed draft length is written like draft_model@4, and only "
            "for what drafts."
        )
    if not 1 <= int(length) <= MAX_FIXED_LENGTH:
        raise ConfigError(
            f"{name!r} asks for {length} draft tokens. Choose 1 to {MAX_FIXED_LENGTH}."
        )
    return Arm(name, drafter, int(length))


def refusals(arms: Sequence[Arm], statuses: Sequence[DrafterStatus]) -> dict[str, str]:
    """Arms that cannot run here, each with the reason; peers are asked when they are opened.
    Raises ConfigError for an unknown name."""
    known = {status.name: status for status in statuses}
    refused = dict[str, str]()
    for arm in arms:
        if arm.drafter in (OFF, AUTO) or arm.is_peer:
            continue
        status = known.get(arm.drafter)
        if status is None and arm.drafter not in REGISTRY:
            names = ", ".join(dict.fromkeys((OFF, AUTO, *REGISTRY, *known, *PEERS)))
            raise ConfigError(f"There is no arm called {arm.name!r}. Choose from: {names}.")
        if status is None:
            refused[arm.name] = f"this version has no drafter called {arm.drafter}."
        elif not status.is_available:
            refused[arm.name] = status.reason
    return refused


def rotated(arms: Sequence[Arm], position: int) -> list[Arm]:
    """The order of the arms at the prompt of this position: each arm goes first in its turn.

    A machine that grows warm or busy then slows all sides alike. After each cycle the direction
    changes and after two the turn shifts by one, so that no task of a file that takes its tasks
    in turns always meets one order, and no arm always follows the same other.
    """
    cycle = position // len(arms)
    start = (position + cycle // 2) % len(arms)
    order = [*arms[start:], *arms[:start]]
    return order if cycle % 2 == 0 else order[::-1]
