"""The formulas of speculative decoding, each once. No torch.

Contract: pure functions; what is made of an unknown is None. acceptance[i] is the chance that
draft token i is accepted given that all before it were; the last value stands for every later
position.

    E(γ) = 1 + Σ_{j=1..γ} Π_{i<j} acceptance[i]     tokens that a round yields
    R(γ) = E(γ) / T(γ)                              tokens per ms; T is what the round takes

Source: Leviathan et al. 2023 (arXiv 2211.17192). Their speedup is R(γ)·T(0) for a verification that
costs the same at every width; here T is whatever was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from localspec.core.arithmetic import ratio

NEGLIGIBLE = 1e-3

# Fewer tokens are not compared with plain decoding: their few rounds differ by chance. Of the
# beginnings of 35 replies of the demo on a busy machine, one in ten measured at most 0.22 times
# (2 tokens) and 0.37 times (4 tokens) plain decoding; from 8 on 0.5 to 0.6. A rule by the time
# taken would leave out fast replies.
MIN_COMPARED_TOKENS = 8
NoSpeedup = Literal["load_changed", "shared", "too_short"]


@dataclass(frozen=True, kw_only=True)
class DecodeCounts:
    """What was decoded and drafted, of one turn or of several together, and the rates by it: each
    is a ratio of sums, None where it has nothing to divide by. The names are vLLM's."""

    num_output_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_checked_tokens: int | None = 0
    decode_ms: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        return ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def checked_acceptance_rate(self) -> float | None:
        """Accepted of the draft tokens that were checked: one after a wrong token never is."""
        return ratio(self.num_accepted_tokens, self.num_checked_tokens)

    @property
    def draft_share(self) -> float | None:
        return ratio(self.num_accepted_tokens, self.num_output_tokens)

    @property
    def mean_accepted_length(self) -> float | None:
        accepted = ratio(self.num_accepted_tokens, self.num_drafts)
        return None if accepted is None else 1.0 + accepted

    @property
    def mean_num_draft_tokens(self) -> float | None:
        return ratio(self.num_draft_tokens, self.num_drafts)

    @property
    def tokens_per_second(self) -> float | None:
        return ratio(1000.0 * self.num_output_tokens, self.decode_ms)


def num_checked(parents: Sequence[int], path: Sequence[int], num_accepted: int) -> int:
    """Return how many draft tokens were compared with the target's choice: those that follow the
    root (-1) or an accepted token. path: nodes that verification accepted; num_accepted: as many of
    them belong to the reply, which otherwise ended with the last of these."""
    reached = {-1, *path[:num_accepted]}
    if num_accepted < len(path):
        reached.discard(path[num_accepted - 1] if num_accepted else -1)
    return sum(parent in reached for parent in parents)


def expected_tokens(acceptance: Sequence[float], num_draft_tokens: int) -> float:
    """E(γ): the bonus or corrected token, and each draft token's chance to survive."""
    expected, survival, last = 1.0, 1.0, len(acceptance) - 1
    for position in range(num_draft_tokens):
        survival *= acceptance[min(position, last)]
        expected += survival
    return expected


def best_length(acceptance: Sequence[float], round_ms: Sequence[float]) -> tuple[int, float]:
    """γ >= 1 with the highest R(γ), and that R. round_ms[γ]: what a round with γ draft tokens
    takes. Tokens whose chance to survive is NEGLIGIBLE are not drafted."""
    best, best_rate, expected, survival = 1, 0.0, 1.0, 1.0
    last = len(acceptance) - 1
    for length in range(1, len(round_ms)):
        survival *= acceptance[min(length - 1, last)]
        expected += survival
        if expected > best_rate * round_ms[length]:
            best, best_rate = length, expected / round_ms[length]
        if survival < NEGLIGIBLE:
            break
    return best, best_rate


def interpolated(points: Mapping[int, float], place: float) -> float:
    """The value at `place` on straight lines between the points; the nearest point's outside."""
    known = sorted(points)
    right = bisect_left(known, place)
    if right == 0:
        return points[known[0]]
    if right == len(known):
        return points[known[-1]]
    low, high = known[right - 1], known[right]
    share = (place - low) / (high - low)
    return points[low] + share * (points[high] - points[low])


def no_speedup(
    plain_ms: float | None, num_output_tokens: int, was_shared: bool = False
) -> NoSpeedup | None:
    """Why one reply that drafted has none. plain_ms: None where the load is not known. was_shared:
    other replies were in its forwards."""
    if was_shared:
        return "shared"
    if plain_ms is None:
        return "load_changed"
    return "too_short" if num_output_tokens < MIN_COMPARED_TOKENS else None


def speedup(plain_ms: float | None, took_ms: float | None) -> float | None:
    """Times plain decoding: what the same tokens take without drafting over what they took."""
    return None if plain_ms is None or not took_ms else plain_ms / took_ms


def plain_reply_ms(
    reply_ms: float | None, decode_ms: float, plain_decode_ms: float | None
) -> float | None:
    """A whole reply without drafting: the rounds are plain ones. The rest (the target's prefill,
    text and page) takes as long."""
    if reply_ms is None or plain_decode_ms is None:
        return None
    return reply_ms - decode_ms + plain_decode_ms


@dataclass(frozen=True)
class Speedup:
    """Times plain decoding, at the draft length where that is highest. Below 1: it never pays."""

    value: float
    num_draft_tokens: int


def best_speedup(
    acceptance: Sequence[float], draft_step_ms: float, verify_ms: Mapping[int, float]
) -> Speedup | None:
    """max over γ >= 1 of R(γ)·v(1), where T(γ) = γ·c + v(γ + 1) over the widths from 1 to the
    widest measured. None where not even two widths were measured."""
    widest, plain_ms = max(verify_ms, default=0), verify_ms.get(1)
    if not plain_ms or widest < 2:
        return None
    widths = range(2, widest + 1)
    drafted = [(n - 1) * draft_step_ms + interpolated(verify_ms, n) for n in widths]
    length, rate = best_length(acceptance, [plain_ms, *drafted])
    return Speedup(rate * plain_ms, length)


@dataclass(frozen=True)
class Measurement:
    """What was measured of one target in one precision on this machine. Unknown is absent.

    verify_ms: milliseconds by number of tokens in one forward; 1 is a plain step.
    draft_step_ms: milliseconds of one draft token, by drafter. acceptance: by drafter, as above.
    draft: name of the draft model behind "draft_model". has_experts_in_ram: the processor computed
    the target's experts.
    """

    target: str
    precision: str
    verify_ms: Mapping[int, float]
    draft_step_ms: Mapping[str, float] = field(default_factory=dict)
    acceptance: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    draft: str | None = None
    has_experts_in_ram: bool = False

    def expected_speedup(self, drafter: str) -> Speedup | None:
        """Of one drafter over plain decoding; None where a part of it was not measured."""
        rates, step_ms = self.acceptance.get(drafter), self.draft_step_ms.get(drafter)
        if not rates or step_ms is None:
            return None
        return best_speedup(rates, step_ms, self.verify_ms)
