"""Measures how much of each drafter's drafts a target accepts: `train accepted`.

Contract: every drafter that can be built runs over every prompt at every temperature, in the engine
as it chats. The acceptance is recorded by kind of text as in chats, and written to a file from
which first chats on other machines start. A drafter that fails is left out, and reported.

Not here: the file (controller.shipped_acceptance), the estimator (controller.acceptance).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.bench.cases import Case
from localspec.bench.runs import BenchEngine, EngineRunner, bench_engine_of
from localspec.chat.local import Loaded
from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import Costs
from localspec.controller.shipped_acceptance import Origin, refusal, write_accepted
from localspec.core.backend import Report
from localspec.core.errors import ConfigError, LocalspecError, StoreError
from localspec.core.files import why_not_writable
from localspec.core.flags import require_temperatures
from localspec.core.options import LoadOptions
from localspec.core.workloads import recognise
from localspec.engine.calibrate import calibrate
from localspec.loading.drafters import heads_of, marks_of
from localspec.loading.local_backend import open_local_backend
from localspec.machine.sources import resolve
from localspec.training.prompt_files import TrainingPrompt


@dataclass(frozen=True)
class AcceptedSettings:
    """max_tokens: of each reply. Raises ConfigError, RequestError."""

    load: LoadOptions
    prompts: Sequence[TrainingPrompt]
    temperatures: tuple[float, ...]
    max_tokens: int
    out: Path

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"--max-tokens is {self.max_tokens}, but must be at least 1.")
        require_temperatures(self.temperatures)


def measure_accepted(settings: AcceptedSettings, report: Report) -> tuple[Origin, list[str]]:
    """Measure and write; the drafters that were measured. Raises LocalspecError, before anything
    is measured where the file could not be written."""
    if why := why_not_writable(settings.out):
        raise StoreError(refusal(settings.out, why))
    loaded = open_local_backend(settings.load, None, report).loaded
    source = resolve(settings.load)
    bench = bench_engine_of(loaded, source)
    cases = _cases(loaded, settings)
    # It knows nothing, not even what ships: that may be what is measured again. Every prompt counts
    # alike, not the last ones most.
    controller = Controller(bench.engine.drafters, Costs(), Acceptance(discount=1.0), Costs())
    for phrase in calibrate(bench.engine, controller):
        report(phrase)
    measured = [
        name
        for name in bench.engine.drafters
        if _is_measured(bench, controller, name, cases, settings, report)
    ]
    facts = bench.machine
    origin = Origin(
        str(facts["target"]),
        facts["draft"],
        bench.precision,
        len(cases),
        settings.temperatures,
        settings.max_tokens,
        marks_of(source, heads_of(source)[0]),
    )
    write_accepted(settings.out, origin, controller.snapshot()["acceptance"])
    return origin, measured


def _cases(loaded: Loaded, settings: AcceptedSettings) -> list[Case]:
    """The prompts that fit, each with the kind of text that the app would recognise."""
    found = list[Case]()
    for place, asked in enumerate(settings.prompts):
        prompt = tuple(loaded.template.render(asked.opening))
        if len(prompt) + settings.max_tokens > loaded.context_length:
            continue
        text = asked.opening[-1].content
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        found.append(Case(name, "asked", prompt, place, recognise(text)))
    if not found:
        raise ConfigError(
            f"None of {len(settings.prompts)} prompts fits the context of "
            f"{loaded.context_length} tokens with a reply of {settings.max_tokens}. Give shorter "
            "prompts, or a smaller --max-tokens."
        )
    return found


def _is_measured(
    bench: BenchEngine,
    controller: Controller,
    name: str,
    cases: Sequence[Case],
    settings: AcceptedSettings,
    report: Report,
) -> bool:
    runner = EngineRunner(bench, controller, name)
    for temperature in settings.temperatures:
        report(f"{name}: {len(cases)} prompts at T {temperature:g}")
        for case in cases:
            try:
                runner.run(case, case.sampling(temperature), settings.max_tokens)
            except (LocalspecError, RuntimeError, MemoryError) as error:
                report(f"{name} is left out: {error}")
                return False
    return True
