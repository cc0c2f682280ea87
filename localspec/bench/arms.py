"""The sides of a comparison, by name.

`off`, `auto`, a drafter ("draft_model": the controller chooses its length), a drafter at a fixed
length ("draft_model@4"), and `transformers`, the library's own `generate` on the same weights.

Contract: `parse_arms` puts `off` first whether it was asked for or not, since every ratio is
against it. A known drafter that cannot be had is a reason, not an error.

Not here: running an arm (stage, reference).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localspec.backend import DrafterStatus
from localspec.core import AUTO, OFF
from localspec.errors import ConfigError

TRANSFORMERS = "transformers"
DEFAULT_ARMS = (OFF, "ngram", "draft_model", "self_quant", AUTO)
MAX_FIXED_LENGTH = 64


@dataclass(frozen=True)
class Arm:
    """One side. drafter: AUTO, OFF, TRANSFORMERS or a drafter's name. num_draft_tokens: fixed
    length, None where the controller chooses or nothing is drafted."""

    name: str
    drafter: str
    num_draft_tokens: int | None = None

    @property
    def is_learning(self) -> bool:
        """Whether it decides by what it has learnt, so that it can be cold or warm."""
        return self.drafter not in (OFF, TRANSFORMERS) and self.num_draft_tokens is None


def parse_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """`off` first, then each other arm once, in the order given. Raises ConfigError."""
    wanted = dict.fromkeys((OFF, *(name.strip() for name in names if name.strip())))
    return tuple(_arm(name) for name in wanted)


def _arm(name: str) -> Arm:
    drafter, at, length = name.partition("@")
    if not at:
        return Arm(name, drafter)
    if drafter in (OFF, TRANSFORMERS) or not length.isdigit():
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
    """Arms that cannot run here, each with the reason. Raises ConfigError for an unknown name."""
    known = {status.name: status for status in statuses}
    refused = dict[str, str]()
    for arm in arms:
        if arm.drafter in (OFF, AUTO, TRANSFORMERS):
            continue
        status = known.get(arm.drafter)
        if status is None and arm.drafter not in DEFAULT_ARMS:
            names = ", ".join(dict.fromkeys((*DEFAULT_ARMS, *known, TRANSFORMERS)))
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
