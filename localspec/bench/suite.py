"""Runs the comparison: loads, warms up, alternates the sides prompt by prompt, reports.

Contract: `run_bench` returns plain JSON data, the same whether it ran to its end, to its time
limit or to Ctrl-C: what was measured whole (all arms of a prompt) is kept. Arms that learn each
have a controller of their own, so none profits from what another tried. They are warm (an
unmeasured pass, or the state kept in a home) unless warm_prompts is 0; the report says which.
Nothing is written to the home.

Not here: the runs (stage, reference), the rows (report).
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from localspec.bench.arms import DEFAULT_ARMS, TRANSFORMERS, Arm, parse_arms, refusals, rotated
from localspec.bench.exactness import Difference, judge
from localspec.bench.prompts import OWN_PROMPTS, Prompt, load_prompts
from localspec.bench.reference import run_transformers
from localspec.bench.report import Found, Measured, differences_json, rows
from localspec.bench.stage import Case, Run, Stage, own_controller, run_engine
from localspec.core import OFF, SamplingParams
from localspec.engine.calibrate import calibrate
from localspec.engine.controller import Controller
from localspec.errors import ConfigError, LocalspecError
from localspec.machine.options import LoadOptions

Report = Callable[[str], None]
WARM_UP_TOKENS = 16  # the first forwards of a process pay for its set-up


@dataclass(frozen=True)
class BenchSettings:
    """What to compare. prompts: a file, None for our own. limit: the first so many prompts.
    warm_prompts: prompts of the unmeasured pass in which arms learn, 0 to start cold.
    time_limit_s: no new prompt is begun after it. Raises ConfigError."""

    prompts: Path | None = None
    limit: int | None = None
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.7)
    arms: tuple[str, ...] = DEFAULT_ARMS
    home: Path | None = None
    warm_prompts: int = 24
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or (self.limit is not None and self.limit < 1):
            raise ConfigError("--max-tokens and --limit must be at least 1.")
        if self.warm_prompts < 0:
            raise ConfigError("The number of prompts to warm up with cannot be negative.")
        if not self.temperatures or len(set(self.temperatures)) != len(self.temperatures):
            raise ConfigError("--temperatures needs one or more numbers, each once, like 0,0.7.")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # says what is out of range


def listed(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated flag."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def listed_numbers(text: str) -> tuple[float, ...]:
    """The numbers of a comma-separated flag. Raises ConfigError."""
    try:
        return tuple(float(part) for part in listed(text))
    except ValueError as error:
        raise ConfigError(f"{text!r} is no list of numbers. Write them like 0,0.7.") from error


def to_stderr(phrase: str) -> None:
    """Progress for people, apart from the result on stdout."""
    print(phrase, file=sys.stderr, flush=True)


def run_bench(options: LoadOptions, settings: BenchSettings, report: Report) -> dict[str, Any]:
    """Load what `options` ask for and compare. Raises LocalspecError."""
    from localspec.bench.opening import open_stage  # brings the loader and the log

    parse_arms(settings.arms)  # a typing error is said before anything is loaded
    prompts = load_prompts(settings.prompts or OWN_PROMPTS, settings.limit)
    stage = open_stage(options, settings.home, report)
    return compare(stage, prompts, settings, report)


def compare(
    stage: Stage, prompts: Sequence[Prompt], settings: BenchSettings, report: Report
) -> dict[str, Any]:
    """All arms over all prompts on a loaded stage; the report as JSON data."""
    arms = parse_arms(settings.arms)
    refused = refusals(arms, stage.statuses)
    found = Found(arms, settings.temperatures, stage.precision, refused)
    cases = list(_cases(stage, prompts, settings, found))
    bench = _Bench(stage, settings, found, report)
    try:
        bench.prepare(cases)
        for measured in bench.measure(cases):
            found.measured.append(measured)
    except KeyboardInterrupt:
        found.ending = "stopped by hand; the prompts measured until then are shown."
    return _result(stage, settings, found, bench.controller_state)


def _result(
    stage: Stage, settings: BenchSettings, found: Found, controller_state: str
) -> dict[str, Any]:
    path = settings.prompts or OWN_PROMPTS
    machine = {
        **stage.machine,
        "controller": controller_state,
        "prompts": path.name,
        "num_prompts": len({each.case.id for each in found.measured}),
        "num_skipped": len(found.skipped),
        "max_tokens": settings.max_tokens,
    }
    return {
        "machine": machine,
        "rows": rows(found),
        "near_ties": differences_json(found, near_ties=True),
        "differences": differences_json(found, near_ties=False),
        "skipped": found.skipped,
        "ending": found.ending,
    }


def _cases(
    stage: Stage, prompts: Sequence[Prompt], settings: BenchSettings, found: Found
) -> Iterator[Case]:
    """Prompts as token ids; those that do not fit are noted in `found`."""
    for prompt in prompts:
        tokens = tuple(stage.render(prompt.text))
        if len(tokens) + settings.max_tokens > stage.context_length:
            reason = (
                f"{len(tokens)} tokens and {settings.max_tokens} of reply do not fit the context "
                f"of {stage.context_length}."
            )
            found.skipped.append({"prompt": prompt.id, "task": prompt.task, "reason": reason})
            continue
        yield Case(prompt.id, prompt.task, tokens, zlib.crc32(prompt.id.encode()))


class _Bench:
    """One comparison under way."""

    def __init__(self, stage: Stage, settings: BenchSettings, found: Found, report: Report) -> None:
        self._stage = stage
        self._settings = settings
        self._found = found
        self._report = report
        self._controllers: dict[str, Controller] = {}
        self.controller_state = "cold"

    def prepare(self, cases: Sequence[Case]) -> None:
        """Measure costs, give each arm its controller, warm up, let the arms learn."""
        is_restored = self._stage.controller.costs.is_measured
        learning = [arm for arm in self._usable() if arm.is_learning]
        if learning and not is_restored:
            for phrase in calibrate(self._stage.engine, self._stage.controller):
                self._report(phrase)
        self._controllers = {arm.name: own_controller(self._stage) for arm in self._usable()}
        for arm in self._usable() if cases else []:
            self._report(f"warming up {arm.name}")
            self._attempt(arm, cases[0], self._settings.temperatures[0], WARM_UP_TOKENS)
        if is_restored:
            self.controller_state = "warm (learnt earlier, from the home)"
        elif self._settings.warm_prompts and cases:
            self._learn(cases)

    def _learn(self, cases: Sequence[Case]) -> None:
        """Unmeasured runs over prompts spread through the file, so that every task is met."""
        count = min(self._settings.warm_prompts, len(cases))
        chosen = [cases[index * len(cases) // count] for index in range(count)]
        for temperature in self._settings.temperatures:
            for arm in self._usable():
                if arm.is_learning:
                    self._report(f"{arm.name} learns from {count} prompts, T {temperature:g}")
                    for case in chosen:
                        self._attempt(arm, case, temperature, self._settings.max_tokens)
        self.controller_state = f"warm (an unmeasured pass over {count} prompts)"

    def measure(self, cases: Sequence[Case]) -> Iterator[Measured]:
        """Every prompt at every temperature, the arms in a turning order."""
        started = monotonic()
        jobs = [(position, case, t) for position, case in enumerate(cases)
                for t in self._settings.temperatures]  # fmt: skip
        for number, (position, case, temperature) in enumerate(jobs, 1):
            limit_s = self._settings.time_limit_s
            if limit_s is not None and monotonic() - started > limit_s:
                self._found.ending = f"the time limit came before step {number} of {len(jobs)}."
                return
            runs = self._side_by_side(case, temperature, position)
            differences = self._differences(case, runs) if temperature == 0.0 else ()
            self._report(_progress(number, len(jobs), temperature, case, runs, differences))
            yield Measured(case, temperature, runs, differences)

    def _side_by_side(self, case: Case, temperature: float, position: int) -> dict[str, Run]:
        runs = dict[str, Run]()
        for arm in rotated(self._usable(), position):
            run = self._attempt(arm, case, temperature, self._settings.max_tokens)
            if run is not None:
                runs[arm.name] = run
        return runs

    def _usable(self) -> list[Arm]:
        return [arm for arm in self._found.arms if arm.name not in self._found.refused]

    def _attempt(self, arm: Arm, case: Case, temperature: float, max_tokens: int) -> Run | None:
        """The run; None when the arm fails, which takes it out of the comparison."""
        try:
            return self._run(arm, case, temperature, max_tokens)
        except (LocalspecError, RuntimeError, MemoryError) as error:
            if arm.drafter == OFF:
                raise  # without plain decoding nothing can be compared
            first_line = str(error).strip().split("\n")[0] or type(error).__name__
            self._found.refused[arm.name] = f"it failed on {case.id}: {first_line}"
            self._report(f"{arm.name} failed on {case.id}: {first_line}")
            return None

    def _run(self, arm: Arm, case: Case, temperature: float, max_tokens: int) -> Run:
        sampling = case.sampling(temperature)
        if arm.drafter == TRANSFORMERS:
            return run_transformers(self._stage, case, sampling, max_tokens)
        controller = self._controllers[arm.name]
        return run_engine(
            self._stage, controller, arm.drafter, arm.num_draft_tokens, case, sampling, max_tokens
        )

    def _differences(self, case: Case, runs: dict[str, Run]) -> tuple[Difference, ...]:
        plain, engine = runs[OFF].decided, self._stage.engine
        judged = (
            judge(engine, case.id, arm, case.prompt, plain, run.decided)
            for arm, run in runs.items()
            if arm != OFF
        )
        return tuple(difference for difference in judged if difference is not None)


def _progress(
    number: int,
    total: int,
    temperature: float,
    case: Case,
    runs: dict[str, Run],
    differences: Sequence[Difference],
) -> str:
    rates = {arm: run.tokens_per_second for arm, run in sorted(runs.items())}
    shown = ", ".join(f"{arm} {rate:.0f}" if rate else f"{arm} -" for arm, rate in rates.items())
    told = "".join(
        f"; {each.arm} {'near-tie' if each.is_near_tie else 'DIFFERS'} at {each.position}"
        for each in differences
    )
    return f"[{number}/{total}] T {temperature:g} {case.id}: {shown} tokens/s{told}"
