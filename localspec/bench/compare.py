"""Runs a comparison: loads, warms up, alternates the arms prompt by prompt, reports.

Contract: `run_bench` returns plain JSON data, the same whether it ran to its end or to Ctrl-C:
every prompt that all arms have answered is kept, and written while the result grows. Each arm of
ours that learns has a controller of its own. Arms are warm (an unmeasured pass, or the state kept
in a home) unless warm_prompts is 0; the report says which. An arm that fails is left out with its
reason and the others continue; only plain decoding is indispensable. Nothing is written to the home
but what other engines keep there of converted weights and logs.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice
from time import sleep
from typing import Any

import torch

from localspec.bench.arms import Arm, OtherEngines, parse_arms, refusals, require_known
from localspec.bench.cases import (
    OWN_PROMPTS,
    Case,
    Prompt,
    fitting_cases,
    load_prompts,
    repeated,
)
from localspec.bench.exactness import FirstDifference, judge
from localspec.bench.kept import KeptFile
from localspec.bench.results import PromptResult, Results, as_json, is_comparable
from localspec.bench.runs import (
    BenchEngine,
    EngineRunner,
    MeasuredReply,
    Runner,
    open_bench_engine,
    own_controller,
)
from localspec.bench.settings import BenchSettings
from localspec.chat.compare import compare, rotated
from localspec.core.backend import Report
from localspec.core.config import settings_for
from localspec.core.decoding import OFF
from localspec.core.errors import ConfigError, LocalspecError, first_line
from localspec.core.options import LoadOptions
from localspec.engine.calibrate import calibrate

WARM_UP_TOKENS = 16  # the first forwards of a process pay for its set-up
SETTLING_S = 0.03  # idle threads of another engine may spin for a few ms after its last token
FAILURES = (LocalspecError, RuntimeError, MemoryError)


def run_bench(
    options: LoadOptions,
    settings: BenchSettings,
    report: Report,
    others: OtherEngines | None = None,
    out: KeptFile | None = None,
) -> dict[str, Any]:
    """Load what `options` ask for and compare. out: where the result is written while it grows.
    Raises LocalspecError."""
    engines = others.arms if others else {}
    require_known(parse_arms(settings.arms, engines), engines)
    prompts = load_prompts(settings.prompts or OWN_PROMPTS, settings.num_read)
    bench = open_bench_engine(options, settings.home, report)
    return compare_arms(bench, prompts, settings, report, others, out)


def compare_arms(
    bench: BenchEngine,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    report: Report,
    others: OtherEngines | None = None,
    out: KeptFile | None = None,
) -> dict[str, Any]:
    """All arms over the first `limit` prompts on a loaded engine; the result as JSON data. Arms
    learn from the other prompts, or from the same where there are none."""
    arms = parse_arms(settings.arms, others.arms if others else None)
    refused = refusals(arms, bench.statuses)
    limits = bench.render, settings.max_tokens, bench.context_length
    num_measured = len(prompts) if settings.limit is None else settings.limit
    cases, skipped = fitting_cases(prompts[:num_measured], *limits)
    if not cases:
        raise ConfigError(f"None of the prompts can be measured: {skipped[0]['reason']}")
    further, _ = fitting_cases(prompts[num_measured:], *limits)
    results = Results(arms, settings.temperatures, bench.precision, refused, skipped)
    comparison = Comparison(bench, settings, results, others, report)
    ending = None
    try:
        comparison.prepare(cases, further)
        for measured in comparison.measure(repeated(cases, settings.repeats)):
            results.measured.append(measured)
            if out is not None:
                out.offer(lambda: comparison.result("it is not finished."))
    except KeyboardInterrupt:
        ending = "stopped by hand; the prompts measured until then are shown."
    finally:
        comparison.close()
    return comparison.result(ending)


class Comparison:
    """A running comparison. results: also lists the arms that failed, with the reason."""

    def __init__(
        self,
        bench: BenchEngine,
        settings: BenchSettings,
        results: Results,
        others: OtherEngines | None,
        report: Report,
    ) -> None:
        self._bench, self._settings, self._results = bench, settings, results
        self._report = report
        self._others = others.arms if others is not None else {}
        self._other_threads = settings.peer_threads or torch.get_num_threads()
        self._runners = dict[str, Runner]()
        has_shipped = bench.controller.shipped is not None
        self._controller_state = "cold" + ", but for what comes with the models" * has_shipped

    def prepare(self, cases: Sequence[Case], further: Sequence[Case] = ()) -> None:
        """Open the arms, measure costs, warm up, let the arms that learn do so. further: cases that
        are not measured."""
        for arm in self._results.usable():
            if arm.is_other_engine:
                self._open_other(arm)
        engine, controller = self._bench.engine, self._bench.controller
        is_restored = controller.costs.is_measured
        needs_costs = any(arm.is_learning for arm in self._results.usable()) and not is_restored
        for phrase in calibrate(engine, controller) if needs_costs else engine.capture():
            self._report(phrase)
        for arm in self._results.usable():
            if not arm.is_other_engine:
                self._runners[arm.name] = EngineRunner(
                    self._bench, own_controller(self._bench), arm.drafter, arm.num_draft_tokens
                )
        for arm in self._results.usable():
            self._report(f"warming up {arm.name}")
            self._attempt(arm, cases[0], self._settings.temperatures[0], WARM_UP_TOKENS)
        if is_restored:
            self._controller_state = "warm (learnt earlier, from the home)"
        elif self._settings.warm_prompts:
            whose = "other" if further else "of the measured"
            self._learn(further or cases, whose)

    def measure(self, cases: Sequence[Case]) -> Iterator[PromptResult]:
        """Yield every prompt at every temperature, with the arms in turning order."""
        temperatures, arms = self._settings.temperatures, self._results.usable()
        jobs = [(case, temperature) for case in cases for temperature in temperatures]

        def by_case(arms: Sequence[Arm], index: int) -> Sequence[Arm]:
            return rotated(arms, index // len(temperatures))

        samples = compare(self._ask, jobs, arms, 1, threading.Event(), by_case)
        whole = (sample for sample in samples if sample.is_over)
        for number, (case, temperature) in enumerate(jobs, 1):
            answers = [(sample.arm.name, sample.answer) for sample in islice(whole, len(arms))]
            replies = {name: reply for name, reply in answers if reply is not None}
            differences = self._differences(case, temperature, replies)
            measured = PromptResult(case, temperature, replies, differences)
            self._report(f"[{number}/{len(jobs)}] {_progress(measured)}")
            yield measured

    def _ask(
        self, job: tuple[Case, float], arm: Arm
    ) -> Generator[MeasuredReply | None, None, None]:
        is_in = arm.name not in self._results.refused
        yield self._attempt(arm, *job, self._settings.max_tokens) if is_in else None

    def result(self, ending: str | None) -> dict[str, Any]:
        """The result so far. ending: why it is not complete, None where it is."""
        settings, results = self._settings, self._results
        others = [arm.name for arm in results.arms if arm.is_other_engine]
        machine = {
            **self._bench.machine,
            "controller": self._controller_state,
            "prompts": (settings.prompts or OWN_PROMPTS).name,
            "num_prompts": len({each.case.id for each in results.measured}),
            "num_skipped": len(results.skipped),
            "max_tokens": settings.max_tokens,
            "peers": {name: self._runners[name].note for name in others if name in self._runners},
            "peer_threads": self._other_threads,
        }
        return as_json(results, machine, ending)

    def close(self) -> None:
        """End what the arms have started."""
        for runner in self._runners.values():
            runner.close()

    def _open_other(self, arm: Arm) -> None:
        self._report(f"opening {arm.name}")
        home = settings_for(self._settings.home).home
        try:
            runner = self._others[arm.drafter].open(
                self._bench, home, self._other_threads, arm.num_draft_tokens
            )
        except FAILURES as error:
            self._leave_out(arm, first_line(error))
        else:
            self._runners[arm.name] = runner
            self._report(f"{arm.name}: {runner.note}")

    def _learn(self, cases: Sequence[Case], whose: str) -> None:
        """Unmeasured runs over prompts spread through these, so that every task is met."""
        count = self._settings.warm_prompts
        passes = -(-count // len(cases))
        chosen = [
            cases[index * passes * len(cases) // count % len(cases)] for index in range(count)
        ]
        for temperature in self._settings.temperatures:
            for arm in self._results.usable():
                if arm.is_learning:
                    self._report(
                        f"{arm.name} learns from {count} {whose} prompts, T {temperature:g}"
                    )
                    for case in chosen:
                        self._attempt(arm, case, temperature, self._settings.max_tokens)
        self._controller_state = f"warm (unmeasured runs over {count} {whose} prompts)"

    def _attempt(
        self, arm: Arm, case: Case, temperature: float, max_tokens: int
    ) -> MeasuredReply | None:
        """The reply; None when the arm fails, which removes it from the comparison."""
        try:
            return self._runners[arm.name].run(case, case.sampling(temperature), max_tokens)
        except FAILURES as error:
            if arm.drafter == OFF:
                raise  # without plain decoding nothing can be compared
            self._leave_out(arm, f"it failed on {case.id}: {first_line(error)}")
            return None
        finally:
            if arm.is_other_engine:
                sleep(SETTLING_S)

    def _leave_out(self, arm: Arm, reason: str) -> None:
        self._results.refused[arm.name] = reason
        self._report(f"{arm.name}: {reason}")

    def _differences(
        self, case: Case, temperature: float, replies: Mapping[str, MeasuredReply]
    ) -> tuple[FirstDifference, ...]:
        """Of our own arms; of others, which draw with a noise of their own, when greedy."""
        plain, engine = replies[OFF].decided, self._bench.engine
        judged = (
            judge(engine, case, temperature, arm.name, plain, replies[arm.name].decided)
            for arm in self._results.usable()
            if arm.name in replies and is_comparable(arm, temperature)
        )
        return tuple(difference for difference in judged if difference is not None)


def _progress(measured: PromptResult) -> str:
    rates = {arm: reply.tokens_per_second for arm, reply in sorted(measured.replies.items())}
    shown = ", ".join(f"{arm} {rate:.0f}" if rate else f"{arm} -" for arm, rate in rates.items())
    differing = "".join(
        f"; {each.arm} {'near-tie' if each.is_near_tie else 'DIFFERS'} at {each.position}"
        for each in measured.differences
    )
    where = f"T {measured.temperature:g} {measured.case.id}"
    return f"{where}: {shown} tokens/s{differing}"
