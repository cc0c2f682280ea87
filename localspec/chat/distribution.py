"""Compares many short sampled replies with and without drafting, position by position.

Contract: `DistributionTest.run` is a job for `ChatService.enqueue`, bounded in time and by its
cancel; every reply has its own seed, and the two arms alternate. At each position of each prompt
the token counts of the arms are compared by Pearson's chi-squared test of homogeneity; tokens too
rare for it (expected below 5 in either arm) are pooled into one class by their sum over both arms.
P-values are corrected for the number of positions (Holm), so that a correct engine fails one run in
a hundred. A reply that has ended is a class of its own.

A small p-value is evidence of a fault; a large one is no proof of equality, but bounds how large a
difference could go unseen. `sentence` says so.

Source: Holm, Scand. J. Statist. 6 (1979); the survival function for integer degrees of freedom:
Abramowitz and Stegun 26.4.4 and 26.4.5.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from localspec.arithmetic import ratio
from localspec.backend import Backend, Message, Request, chunks_of
from localspec.core import OFF, SamplingParams
from localspec.errors import LocalspecError

PROMPTS = (
    "Name a colour.",
    "Write the first words of a story about the sea.",
    "Say something about the weather.",
)
NUM_TOKENS = 6
AT_A_TIME = 5  # replies of each arm before the next prompt: the prompt stays in the cache
ALPHA = 0.01
LEAST_SHARE = 0.1  # accepted draft tokens among all; with fewer the test shows little
LEAST_EXPECTED = 5.0
ENDED = -1  # the class of replies that ended before a position
Z_TWO_SIDED, Z_POWER = 2.576, 1.282  # at ALPHA, and to see nine of ten

TrialPhase = Literal["waiting", "running", "done", "cancelled", "failed"]


@dataclass(frozen=True)
class Comparison:
    """One position of one prompt. p_value: None where there is one class only."""

    prompt: int
    place: int
    num_classes: int
    num_pooled: int
    statistic: float
    p_value: float | None
    holm: float | None = None


@dataclass(frozen=True)
class TrialView:
    """The test at one moment. drafter: of the drafting arm. num_replies: of each arm.
    share_drafted: accepted draft tokens among all tokens of the drafting arm."""

    drafter: str
    phase: TrialPhase = "waiting"
    num_replies: int = 0
    seconds: float = 0.0
    limit_s: float = 0.0
    share_drafted: float | None = None
    comparisons: tuple[Comparison, ...] = ()
    error: str | None = None

    @property
    def smallest(self) -> float | None:
        """The smallest corrected p-value."""
        return min((one.holm for one in self.comparisons if one.holm is not None), default=None)

    @property
    def is_suspicious(self) -> bool:
        return self.smallest is not None and self.smallest < ALPHA

    @property
    def is_telling(self) -> bool:
        """Whether enough draft tokens were accepted for a fault to show."""
        return self.share_drafted is not None and self.share_drafted >= LEAST_SHARE

    @property
    def visible_shift(self) -> float | None:
        """The difference in one token's share that nine of ten such tests would find, at worst."""
        per_prompt = self.num_replies / len(PROMPTS)
        if per_prompt < 1:
            return None
        return min(1.0, (Z_TWO_SIDED + Z_POWER) * math.sqrt(2 * 0.25 / per_prompt))


class DistributionTest:
    """See the module. drafter: drafts with the fixed length num_draft_tokens."""

    def __init__(
        self, sampling: SamplingParams, drafter: str, num_draft_tokens: int, limit_s: float
    ) -> None:
        self._sampling = sampling
        self._num_draft_tokens = num_draft_tokens
        self._counts: dict[tuple[str, int, int], Counter[int]] = defaultdict(Counter)
        self._num_tokens = self._num_accepted = 0
        self.view = TrialView(drafter, limit_s=limit_s)

    def run(self, backend: Backend, cancel: threading.Event) -> None:
        """The job. After a cancel the counts so far are compared."""
        started_s, seeds = time.monotonic(), itertools.count(1)
        self.view = replace(self.view, phase="running")
        try:
            while not cancel.is_set() and time.monotonic() - started_s < self.view.limit_s:
                for prompt, _ in itertools.product(range(len(PROMPTS)), range(AT_A_TIME)):
                    for arm in (OFF, self.view.drafter):
                        self._draw(backend, cancel, arm, prompt, next(seeds))
                if not cancel.is_set():
                    self.view = replace(
                        self.view,
                        num_replies=self.view.num_replies + AT_A_TIME * len(PROMPTS),
                        seconds=time.monotonic() - started_s,
                        share_drafted=ratio(self._num_accepted, self._num_tokens),
                    )
        except LocalspecError as error:
            self.view = replace(self.view, phase="failed", error=str(error))
            raise
        self.view = replace(
            self.view,
            phase="cancelled" if cancel.is_set() else "done",
            seconds=time.monotonic() - started_s,
            comparisons=corrected(self._compared()),
        )

    def _draw(
        self, backend: Backend, cancel: threading.Event, arm: str, prompt: int, seed: int
    ) -> None:
        request = Request(
            (Message("user", PROMPTS[prompt]),),
            replace(self._sampling, seed=seed),
            NUM_TOKENS,
            drafter=arm,
            num_draft_tokens=None if arm == OFF else self._num_draft_tokens,
        )
        chunks = list(chunks_of(backend, request, cancel))
        if cancel.is_set():  # a reply cut short has no token at the later positions
            return
        tokens = [token for chunk in chunks for token in chunk.tokens]
        for place in range(NUM_TOKENS):
            found = tokens[place] if place < len(tokens) else ENDED
            self._counts[arm, prompt, place][found] += 1
        if arm != OFF:
            self._num_tokens += len(tokens)
            self._num_accepted += chunks[-1].stats.num_accepted_tokens

    def _compared(self) -> list[Comparison]:
        counts, drafter = self._counts, self.view.drafter
        return [
            compare(prompt, place, counts[OFF, prompt, place], counts[drafter, prompt, place])
            for prompt, place in itertools.product(range(len(PROMPTS)), range(NUM_TOKENS))
        ]


def compare(
    prompt: int, place: int, plain: Mapping[int, int], drafted: Mapping[int, int]
) -> Comparison:
    """Pearson's test that both counts come from one distribution."""
    classes, num_pooled = pooled(plain, drafted)
    totals = [sum(column) for column in zip(*classes, strict=True)] if classes else [0, 0]
    if len(classes) < 2 or not all(totals):
        return Comparison(prompt, place, len(classes), num_pooled, 0.0, None)
    whole = sum(totals)
    statistic = sum(
        (seen - expected) ** 2 / expected
        for row in classes
        for seen, expected in zip(row, (sum(row) * total / whole for total in totals), strict=True)
    )
    p_value = chi_squared_survival(statistic, len(classes) - 1)
    return Comparison(prompt, place, len(classes), num_pooled, statistic, p_value)


def pooled(
    plain: Mapping[int, int], drafted: Mapping[int, int]
) -> tuple[list[tuple[int, int]], int]:
    """Counts by class, and how many rare tokens share a class. Chosen by the sum of both arms only:
    a choice by one arm's counts would bias the test."""
    totals = sum(plain.values()), sum(drafted.values())
    share = min(totals) / max(1, sum(totals))
    pairs = sorted(((plain.get(t, 0), drafted.get(t, 0)) for t in {*plain, *drafted}), key=sum)
    num_rare = sum(sum(pair) * share < LEAST_EXPECTED for pair in pairs)
    if not num_rare:
        return pairs, 0
    num_rest = sum(sum(pair) for pair in pairs[:num_rare])
    if num_rest * share < LEAST_EXPECTED and num_rare < len(pairs):
        num_rare += 1  # together still too rare: they join the rarest class
    rest = (sum(a for a, _ in pairs[:num_rare]), sum(b for _, b in pairs[:num_rare]))
    return [*pairs[num_rare:], rest], num_rare


def corrected(found: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """With Holm's correction for the number of tests."""
    tested = sorted(one.p_value for one in found if one.p_value is not None)
    scaled = (min(1.0, (len(tested) - rank) * p) for rank, p in enumerate(tested))
    holm = dict[float | None, float](zip(tested, itertools.accumulate(scaled, max), strict=True))
    return tuple(replace(one, holm=holm.get(one.p_value)) for one in found)


def chi_squared_survival(statistic: float, degrees: int) -> float:
    """P(X >= statistic) of a chi-squared variable with `degrees` >= 1 degrees of freedom."""
    x = statistic / 2.0
    if x <= 0.0:
        return 1.0
    # Q(a + 1, x) = Q(a, x) + x^a e^-x / Gamma(a + 1), from a = 1/2 or a = 1 up to degrees / 2.
    a, survival = (0.5, math.erfc(math.sqrt(x))) if degrees % 2 else (1.0, math.exp(-x))
    while a < degrees / 2.0:
        survival += math.exp(a * math.log(x) - x - math.lgamma(a + 1.0))
        a += 1.0
    return min(1.0, survival)


def sentence(view: TrialView) -> str:
    """The result, what it shows and what it does not."""
    tested = [one for one in view.comparisons if one.p_value is not None]
    if not tested:
        return "Nothing was compared: there were too few replies. Let it run longer."
    head = (
        f"{view.num_replies} replies of {NUM_TOKENS} tokens with drafting by {view.drafter} and as "
        f"many without, over {len(PROMPTS)} prompts: {len(tested)} comparisons, corrected for "
        "their number."
    )
    share = 100 * (view.share_drafted or 0.0)
    if not view.is_telling and not view.is_suspicious:
        found = (
            f"only {share:.1f} % of its tokens were drafted" if share else "it accepted no draft"
        )
        return (
            f"{head} But {found}, so drafting was hardly tested. Choose another drafter above and "
            "run it again."
        )
    drafted = f"{share:.0f} % of the tokens with drafting were accepted drafts."
    if view.is_suspicious:
        return (
            f"{head} {drafted} The smallest corrected p-value is {view.smallest:.2g}, below "
            f"{ALPHA:g}: evidence that drafting changes the text on this machine. A correct "
            "engine fails so in one run of a hundred; run it again, and report it if it returns."
        )
    shift = 100 * (view.visible_shift or 1.0)
    return (
        f"{head} {drafted} The smallest corrected p-value is {view.smallest:.2g}: no sign that "
        "drafting changes the text. That is no proof of equality: a change of less than about "
        f"{shift:.0f} percentage points in a token's share of a position could go unseen with this "
        "many replies, and only these prompts, positions and this temperature were tested."
    )
