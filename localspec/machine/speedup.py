"""The speedup to expect of a drafter, from costs and acceptance that were measured.

Contract: S = max over the draft length of E(n) / (n*c + v(n + 1)), where E is the tokens a round
yields, c a drafted token's cost and v a verification's, both in plain steps. Without
measurements there is no answer: None, never a default.

Source: Leviathan et al. 2023 (arXiv 2211.17192), with the measured verification curve in place
of their flat one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measurement:
    """What was measured of one target in one precision on this machine.

    verify_ms: milliseconds by number of tokens in one forward; 1 is a plain step.
    draft_step_ms: milliseconds of one drafted token, by drafter.
    acceptance: by drafter, the chance that draft token i survives given that all before it did;
    the last value stands for every later position.
    draft: name of the draft model behind "draft_model".
    """

    target: str
    precision: str
    verify_ms: Mapping[int, float]
    draft_step_ms: Mapping[str, float] = field(default_factory=dict)
    acceptance: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    draft: str | None = None


@dataclass(frozen=True)
class Speedup:
    value: float
    num_draft_tokens: int


def expected_tokens(acceptance: tuple[float, ...], num_draft_tokens: int) -> float:
    """Tokens one round yields on average, the corrected or bonus token counted."""
    total, survives = 1.0, 1.0
    for position in range(num_draft_tokens):
        survives *= acceptance[min(position, len(acceptance) - 1)]
        total += survives
    return total


def verify_ms_at(verify_ms: Mapping[int, float], width: int) -> float | None:
    """Milliseconds at a width, on straight lines between the measured; None outside them."""
    if width in verify_ms:
        return verify_ms[width]
    below = max((known for known in verify_ms if known < width), default=None)
    above = min((known for known in verify_ms if known > width), default=None)
    if below is None or above is None:
        return None
    share = (width - below) / (above - below)
    return verify_ms[below] + share * (verify_ms[above] - verify_ms[below])


def expected_speedup(measured: Measurement, drafter: str) -> Speedup | None:
    """The best speedup over plain decoding and its draft length; None when not measured.

    It may lie below 1: the drafter then costs more than it saves at every length.
    """
    plain_ms = measured.verify_ms.get(1)
    acceptance = measured.acceptance.get(drafter)
    step_ms = measured.draft_step_ms.get(drafter)
    if not plain_ms or not acceptance or step_ms is None:
        return None
    options = []
    for length in range(1, max(measured.verify_ms)):
        verify_ms = verify_ms_at(measured.verify_ms, length + 1)
        if verify_ms is not None:
            cost = (length * step_ms + verify_ms) / plain_ms
            options.append(Speedup(expected_tokens(acceptance, length) / cost, length))
    return max(options, key=lambda each: each.value, default=None)
