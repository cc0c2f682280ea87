"""The tune-up: measures in about ten seconds what one drafter of each family gains here.

Contract: `tune_up` is a job for `ChatService.enqueue` and uses `Backend.generate` only. On bundled
prompts of each kind of text, at T = 0 and 0.7, it generates a short reply plainly, with each
drafter, and plainly again, each for a share of BUDGET_S. After a cancel the result is what was
measured until then; the controller keeps what it learnt. Gains are ratios of sums, against plain
decoding of the same prompt before and after; unmeasured ones are None. Where other load disturbed
the measurement, the text says so.

Not here: measuring costs (Backend.calibrate), showing the result (web).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from localspec.chat.compare import Answer, Sample, answers, as_listed, compare
from localspec.core.arithmetic import ratio
from localspec.core.backend import Backend, Message, Request
from localspec.core.decoding import OFF, SamplingParams
from localspec.core.units import capital, compared, direction, gain_words
from localspec.core.workloads import recognise
from localspec.drafters.registry import REGISTRY, label_of

BUDGET_S = 10.0
WARM_UP_S = 0.3
MOST_TOKENS = 96
FEWEST_TOKENS = 8  # of one arm, before its speed counts
TEMPERATURES = (0.0, 0.7)
MOST_NAMED = 3  # drafters of which the text says where they are faster
MAX_PLAIN_DRIFT = 1.25  # beyond it another program was computing


@dataclass(frozen=True)
class TunePrompt:
    """A bundled prompt. kind: of text, as the page names it. num_draft_tokens: of each round."""

    kind: str
    text: str
    num_draft_tokens: int


PROMPTS = (
    TunePrompt(
        "code",
        "Write a Python class Stack with the methods push, pop, peek, is_empty and __len__, each "
        "with a docstring. Then write the same class again, with type annotations added.",
        5,
    ),
    TunePrompt("stories", "Tell a short story about a lighthouse keeper and a storm.", 3),
    TunePrompt("chat", "What is a bicycle, and why does it stay upright when it moves?", 3),
)
_Prompt = tuple[TunePrompt, float]  # and its temperature


@dataclass(frozen=True)
class TuneUpRun:
    """One arm on one prompt. num_drafts: rounds in which it had something to propose."""

    kind: str
    temperature: float
    drafter: str
    num_tokens: int
    decode_ms: float
    num_drafts: int


@dataclass(frozen=True)
class TuneUp:
    """The result. num_planned: planned runs; a cancelled tune-up has fewer."""

    runs: tuple[TuneUpRun, ...]
    num_planned: int

    @property
    def is_complete(self) -> bool:
        return len(self.runs) == self.num_planned

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.kind for run in self.runs))

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.drafter for run in self.runs if run.drafter != OFF))

    def tokens_per_second(
        self, drafter: str, kind: str | None = None, temperature: float | None = None
    ) -> float | None:
        runs = self._of(drafter, kind, temperature)
        num_tokens = sum(run.num_tokens for run in runs)
        if num_tokens < FEWEST_TOKENS:
            return None
        return ratio(1000.0 * num_tokens, sum(run.decode_ms for run in runs))

    def gain(
        self, drafter: str, kind: str | None = None, temperature: float | None = None
    ) -> float | None:
        """Speed over that of plain decoding, on the prompts where both were measured. None where
        the drafter never had anything to propose."""
        runs = [(run, self._plain_ms(run)) for run in self._of(drafter, kind, temperature)]
        paired = [(run, plain_ms) for run, plain_ms in runs if plain_ms is not None]
        num_tokens = sum(run.num_tokens for run, _ in paired)
        if num_tokens < FEWEST_TOKENS or not any(run.num_drafts for run, _ in paired):
            return None
        plain_decode_ms = sum(run.num_tokens * plain_ms for run, plain_ms in paired)
        return ratio(plain_decode_ms, sum(run.decode_ms for run, _ in paired)) or None

    @property
    def plain_drift(self) -> float:
        """How far the speed of plain decoding changed between before and after, as a ratio of at
        least 1; the median over the prompts."""
        ratios = []
        for kind, temperature in {(run.kind, run.temperature): None for run in self.runs}:
            per_token_ms = [
                run.decode_ms / run.num_tokens
                for run in self._of(OFF, kind, temperature)
                if run.num_tokens and run.decode_ms > 0
            ]
            if len(per_token_ms) > 1:
                ratios.append(max(per_token_ms) / min(per_token_ms))
        return statistics.median_high(ratios) if ratios else 1.0

    def _plain_ms(self, run: TuneUpRun) -> float | None:
        """Time of one token in the plain runs of the same prompt."""
        runs = self._of(OFF, run.kind, run.temperature)
        return ratio(sum(one.decode_ms for one in runs), sum(one.num_tokens for one in runs))

    def _of(self, drafter: str, kind: str | None, temperature: float | None) -> list[TuneUpRun]:
        return [
            run
            for run in self.runs
            if run.drafter == drafter
            and kind in (None, run.kind)
            and temperature in (None, run.temperature)
        ]


# -- measuring ------------------------------------------------------------------------------


def tune_up(
    backend: Backend,
    cancel: threading.Event,
    report: Callable[[TuneUp], None],
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> TuneUp:
    """Measure until done or cancelled. report: called with the result so far after each run."""
    available = (each.name for each in backend.describe().drafters if each.is_available)
    drafters = one_of_each_family(available)
    # Plain decoding before and after the others: a machine that slows down meanwhile slows it too.
    arms = (OFF, *drafters, OFF) if drafters else (OFF,)
    prompts = [(sample, temperature) for temperature in TEMPERATURES for sample in PROMPTS]
    result = TuneUp((), len(prompts) * len(arms))
    report(result)
    ends_s = _ends_s(clock, clock() + budget_s, result.num_planned)

    def ask(prompt: _Prompt, drafter: str) -> Generator[Answer, None, None]:
        """A reply until its time is over, but of at least FEWEST_TOKENS."""
        end_s = next(ends_s)
        for answer in answers(backend, _request(*prompt, drafter), cancel):
            yield answer
            if answer.stats.num_output_tokens >= FEWEST_TOKENS and clock() >= end_s:
                return

    warm_ups = [(prompts[0], OFF)]  # The first run of a process is slow.
    for run in compare(ask, prompts, arms, 1, cancel, as_listed, warm_ups):
        if run.is_over and not (
            cancel.is_set() and run.answer.stats.num_output_tokens < FEWEST_TOKENS
        ):
            result = replace(result, runs=(*result.runs, _run_of(run)))
            report(result)
    return result


def _ends_s(clock: Callable[[], float], end_s: float, num_runs: int) -> Iterator[float]:
    """Yield when the warm-up ends, and then each run: it has an equal share of the time left."""
    yield clock() + WARM_UP_S
    for num_left in range(num_runs, 0, -1):
        yield clock() + max(0.0, end_s - clock()) / num_left


def _request(sample: TunePrompt, temperature: float, drafter: str) -> Request:
    return Request(
        messages=(Message("user", sample.text),),
        sampling=SamplingParams(temperature=temperature, seed=0),
        max_tokens=MOST_TOKENS,
        drafter=drafter,
        num_draft_tokens=None if drafter == OFF else sample.num_draft_tokens,
        workload=recognise(sample.text),
    )


def _run_of(run: Sample[_Prompt, str, Answer]) -> TuneUpRun:
    (sample, temperature), stats = run.prompt, run.answer.stats
    counts = stats.num_output_tokens, stats.decode_ms, stats.num_drafts
    return TuneUpRun(sample.kind, temperature, run.arm, *counts)


def one_of_each_family(available: Iterable[str]) -> list[str]:
    """The drafters to try: the first of each family, for a dozen in ten seconds would measure
    noise. One that is not registered is a family of its own."""
    names = list(available)
    firsts = {info.family: name for name, info in reversed(REGISTRY.items()) if name in names}
    return [name for name in names if name not in REGISTRY or name in firsts.values()]


# -- as text --------------------------------------------------------------------------------


def in_words(result: TuneUp) -> str:
    """The result as a few sentences: which drafters are faster on what, and what follows."""
    if not result.drafters:
        if result.num_planned and not result.runs:
            return "Nothing was measured: it was cancelled before the first reply."
        return "There is no drafter to try: only decoding without drafting was measured."
    gains = {name: result.gain(name) for name in result.drafters}
    measured = {name: gain for name, gain in gains.items() if gain is not None}
    by_kind = {name: _by_kind(result, name) for name in measured}
    best = {name: max(gains.values()) for name, gains in by_kind.items() if gains}
    ranked = sorted(best, key=lambda name: best[name], reverse=True)
    faster = [name for name in ranked if direction(best[name]) == "faster"]
    if not ranked:
        parts = ["No drafter had anything to propose for the prompts that were measured."]
    elif not faster:
        parts = [_nothing_pays(ranked[0], by_kind[ranked[0]])]
    else:
        parts = [_verdict(name, by_kind[name]) for name in faster[:MOST_NAMED]]
    if result.plain_drift > MAX_PLAIN_DRIFT:
        parts.append(
            "Another program was computing meanwhile: the speed without drafting changed by "
            f"{100 * (result.plain_drift - 1):.0f} %, so trust only large differences."
        )
    if not result.is_complete:
        parts.append(
            f"It was cancelled after {len(result.runs)} of {result.num_planned} runs; what was "
            "learnt is kept."
        )
    return " ".join(parts)


def _by_kind(result: TuneUp, drafter: str) -> dict[str, float]:
    gains = {kind: result.gain(drafter, kind) for kind in result.kinds}
    return {kind: gain for kind, gain in gains.items() if gain is not None}


def _verdict(drafter: str, gains: Mapping[str, float]) -> str:
    """Return the cells of the table as a sentence: "Medusa: 1.9x faster than without drafting on
    code, as fast on chat, 1.1x slower on stories." """
    first, *others = sorted(gains, key=lambda kind: gains[kind], reverse=True)
    cells = [f"{compared(gains[first])} on {first}"]
    cells += [f"{gain_words(gains[kind])} on {kind}" for kind in others]
    return f"{capital(label_of(drafter))}: {', '.join(cells)}."


def _nothing_pays(drafter: str, gains: Mapping[str, float]) -> str:
    return (
        f"No drafter is faster here. The best: {_verdict(drafter, gains)} Drafting stays off and "
        "is tried again from time to time."
    )
