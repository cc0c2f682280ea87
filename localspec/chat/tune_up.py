"""The tune-up: some ten seconds in which every available drafter shows what it gains here.

Contract: `tune_up` runs as a job of the service (`service.enqueue`) and uses `Backend.generate`
only. On bundled prompts of each kind of text, at T = 0 and 0.7, it writes a short reply plainly,
with one drafter of each way of drafting that is available, and plainly again, each for a share of
BUDGET_S. It ends when told to, and what was measured until then is the result; what the controller
learnt stays with it. Gains are ratios of sums, against plain decoding of the same prompt before and
after; what was not measured is None, and a machine that was too busy to say is said to be.

Not here: the measuring of costs (Backend.calibrate), where the result is shown (web).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from localspec.backend import Backend, Chunk, Message, Request
from localspec.core import OFF, SamplingParams
from localspec.drafters.registry import REGISTRY, label_of
from localspec.workloads import recognise

BUDGET_S = 10.0
WARM_UP_S = 0.3
MOST_TOKENS = 96
FEWEST_TOKENS = 8  # of one arm, before its speed counts
TEMPERATURES = (0.0, 0.7)
WINS, LOSES = 1.05, 0.95  # between them the difference is noise
BUSY = 1.25  # plain speed before and after differs by more: something else was computing


@dataclass(frozen=True)
class Sample:
    """A bundled prompt. kind: of text, as a person names it. num_draft_tokens: drafted at once."""

    kind: str
    text: str
    num_draft_tokens: int


PROMPTS = (
    Sample(
        "code",
        "Write a Python class Stack with the methods push, pop, peek, is_empty and __len__, each "
        "with a docstring. Then write the same class again, with type annotations added.",
        5,
    ),
    Sample("stories", "Tell a short story about a lighthouse keeper and a storm.", 3),
    Sample("chat", "What is a bicycle, and why does it stay upright when it moves?", 3),
)


@dataclass(frozen=True)
class Run:
    """One arm on one prompt. num_drafts: rounds in which it had something to propose."""

    kind: str
    temperature: float
    drafter: str
    num_tokens: int
    decode_ms: float
    num_drafts: int


@dataclass(frozen=True)
class TuneUp:
    """What was measured. num_planned: runs that were meant; fewer were made if it was skipped."""

    target: str
    draft: str | None
    device: str
    runs: tuple[Run, ...]
    num_planned: int
    seconds: float

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
        runs = [run for run in self._of(drafter, kind) if temperature in (None, run.temperature)]
        num_tokens, decode_ms = sum(r.num_tokens for r in runs), sum(r.decode_ms for r in runs)
        if num_tokens < FEWEST_TOKENS or decode_ms <= 0:
            return None
        return 1000.0 * num_tokens / decode_ms

    def gain(
        self, drafter: str, kind: str | None = None, temperature: float | None = None
    ) -> float | None:
        """Times plain speed, over the prompts where both were measured. None where the drafter
        never had anything to propose."""
        paired = [run for run in self._of(drafter, kind) if temperature in (None, run.temperature)]
        plain = {
            (run.kind, run.temperature): self._plain_ms(run.kind, run.temperature) for run in paired
        }
        paired = [run for run in paired if plain[run.kind, run.temperature] is not None]
        if not any(run.num_drafts for run in paired):
            return None
        num_tokens = sum(run.num_tokens for run in paired)
        if num_tokens < FEWEST_TOKENS:
            return None
        # What these tokens would have taken plainly, against what they took.
        plainly_ms = sum(
            run.num_tokens * (plain[run.kind, run.temperature] or 0.0) for run in paired
        )
        took_ms = sum(run.decode_ms for run in paired)
        return plainly_ms / took_ms if took_ms > 0 and plainly_ms > 0 else None

    @property
    def unrest(self) -> float:
        """How far plain speed itself changed between before and after, as a ratio of at least 1;
        the middle one of all prompts."""
        ratios = []
        for kind, temperature in dict.fromkeys((run.kind, run.temperature) for run in self.runs):
            paces = [
                run.decode_ms / run.num_tokens
                for run in self._of(OFF, kind)
                if run.temperature == temperature and run.num_tokens and run.decode_ms > 0
            ]
            if len(paces) > 1:
                ratios.append(max(paces) / min(paces))
        return sorted(ratios)[len(ratios) // 2] if ratios else 1.0

    def _plain_ms(self, kind: str, temperature: float) -> float | None:
        """Of one token, over the plain runs of this prompt."""
        runs = [run for run in self._of(OFF, kind) if run.temperature == temperature]
        num_tokens = sum(run.num_tokens for run in runs)
        return sum(run.decode_ms for run in runs) / num_tokens if num_tokens else None

    def _of(self, drafter: str, kind: str | None) -> list[Run]:
        return [run for run in self.runs if run.drafter == drafter and kind in (None, run.kind)]


# -- measuring ------------------------------------------------------------------------------


def tune_up(
    backend: Backend,
    cancel: threading.Event,
    report: Callable[[TuneUp], None],
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> TuneUp:
    """Measure until done or told to end. report: called with what there is after each run."""
    known, began_s = backend.describe(), clock()
    available = (each.name for each in known.drafters if each.is_available)
    plan = list(_arms(one_of_each_family(available)))
    found = TuneUp(known.target, known.draft, known.device, (), len(plan), 0.0)
    report(found)
    end_s = began_s + budget_s
    _run(backend, PROMPTS[0], 0.0, OFF, cancel, clock() + WARM_UP_S, clock)  # the first is slow
    for number, (sample, temperature, drafter) in enumerate(plan):
        if cancel.is_set():
            break
        share_s = max(0.0, end_s - clock()) / (len(plan) - number)
        run = _run(backend, sample, temperature, drafter, cancel, clock() + share_s, clock)
        if cancel.is_set() and run.num_tokens < FEWEST_TOKENS:
            break
        found = replace(found, runs=(*found.runs, run), seconds=clock() - began_s)
        report(found)
    return found


def one_of_each_family(available: Iterable[str]) -> list[str]:
    """The drafters to try: the first of each family, for a dozen in ten seconds would measure
    noise. One that is not registered is a family of its own."""
    names = list(available)
    firsts = {info.family: name for name, info in reversed(REGISTRY.items()) if name in names}
    return [name for name in names if name not in REGISTRY or name in firsts.values()]


def _arms(drafters: Sequence[str]) -> Iterator[tuple[Sample, float, str]]:
    """Plain, then every drafter, then plain again, prompt by prompt: an early end leaves whole
    prompts, a prompt that was just read is not read again, and a machine that grows slower
    meanwhile is not held against the drafters."""
    for temperature in TEMPERATURES:
        for sample in PROMPTS:
            for drafter in (OFF, *drafters, OFF) if drafters else (OFF,):
                yield sample, temperature, drafter


def _run(
    backend: Backend,
    sample: Sample,
    temperature: float,
    drafter: str,
    cancel: threading.Event,
    end_s: float,
    clock: Callable[[], float],
) -> Run:
    """Until the time is up, but not before enough tokens to count."""
    request = Request(
        messages=(Message("user", sample.text),),
        sampling=SamplingParams(temperature=temperature, seed=0),
        max_tokens=MOST_TOKENS,
        drafter=drafter,
        num_draft_tokens=None if drafter == OFF else sample.num_draft_tokens,
        workload=recognise(sample.text),
    )
    last: Chunk | None = None
    with closing(backend.generate(request, cancel)) as chunks:  # type: ignore[type-var]
        for last in chunks:
            if clock() >= end_s and last.stats.num_output_tokens >= FEWEST_TOKENS:
                break
    assert last is not None, "a backend yields at least one chunk"
    stats = last.stats
    return Run(
        sample.kind,
        temperature,
        drafter,
        stats.num_output_tokens,
        stats.decode_ms,
        stats.num_drafts,
    )


# -- in words -------------------------------------------------------------------------------


def in_words(result: TuneUp) -> str:
    """The result as a few sentences: what wins, what loses, and what follows from it."""
    if not result.drafters:
        if result.num_planned and not result.runs:
            return "Nothing was measured: it was ended before the first reply."
        return "There is no drafter to try: only plain decoding was measured."
    gains = {name: result.gain(name) for name in result.drafters}
    measured = {name: gain for name, gain in gains.items() if gain is not None}
    parts = []
    if not measured:
        parts.append("No drafter had anything to propose in what was measured.")
    elif not any(_pays(result, name) for name in measured):
        parts.append(_nothing_pays(result, measured))
    else:
        best = max(measured, key=lambda name: _best(result, name))
        parts.append(_verdict(result, best))
        others = [name for name in measured if name != best and _pays(result, name)]
        parts += [_verdict(result, name) for name in others[:2]]
    if result.unrest > BUSY:
        parts.append(
            f"Something else was computing meanwhile: plain speed itself changed by "
            f"{100 * (result.unrest - 1):.0f} %, so trust only large differences."
        )
    if not result.is_complete:
        parts.append(
            f"It was ended early, after {len(result.runs)} of {result.num_planned} tries; what "
            "was learnt stays."
        )
    return " ".join(parts)


def _best(result: TuneUp, drafter: str) -> float:
    return max((result.gain(drafter, kind) or 0.0 for kind in result.kinds), default=0.0)


def _pays(result: TuneUp, drafter: str) -> bool:
    return _best(result, drafter) >= WINS


def _verdict(result: TuneUp, drafter: str) -> str:
    """ "The draft model wins on code (1.9 times) and loses on stories (0.9 times), so ..." """
    by_kind = {kind: result.gain(drafter, kind) for kind in result.kinds}
    known = {kind: gain for kind, gain in by_kind.items() if gain is not None}
    wins = [f"{kind} ({gain:.1f} times)" for kind, gain in known.items() if gain >= WINS]
    loses = [f"{kind} ({gain:.2f} times)" for kind, gain in known.items() if gain <= LOSES]
    even = [kind for kind, gain in known.items() if LOSES < gain < WINS]
    said = f"{_name(drafter)} wins on {_listed(wins)}"
    if loses:
        said += f"; it loses on {_listed(loses)}, so it switches itself off there"
    if even:
        said += f"; on {_listed(even)} it makes no difference"
    return f"{said}."


def _nothing_pays(result: TuneUp, measured: Mapping[str, float]) -> str:
    best = max(measured, key=lambda name: measured[name])
    return (
        "Nothing pays here: plain decoding was at least as fast on everything that was tried. The "
        f"nearest was {_name(best).lower()} with {measured[best]:.2f} times plain speed. So "
        "drafting stays off, and is tried again now and then."
    )


def _name(drafter: str) -> str:
    label = label_of(drafter)
    return label[0].upper() + label[1:]


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
