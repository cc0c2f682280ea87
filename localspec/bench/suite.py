"""Runs the comparison: loads, warms up, alternates the sides prompt by prompt, reports.

Contract: `run_bench` returns plain JSON data, the same whether it ran to its end, to its time
limit or to Ctrl-C: what was measured whole (all arms of a prompt) is kept. Arms that learn are
warm (an unmeasured pass, or the state kept in a home) unless warm_prompts is 0; the report says
which. Nothing is written to the home but what peers keep of converted weights and their logs.

Not here: running the arms (contest), the rows (report), what is measured apart (measures).
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from localspec.bench.arms import default_arms, parse_arms, refusals
from localspec.bench.by_drafter import cells
from localspec.bench.contest import Contest
from localspec.bench.latency import with_extras
from localspec.bench.measures import extras
from localspec.bench.peers.room import PeerRoom
from localspec.bench.prompts import OWN_PROMPTS, Prompt, load_prompts
from localspec.bench.report import Found, differences_json, rows, timed_runs
from localspec.bench.stage import Case, Stage
from localspec.config import settings_for
from localspec.core import SamplingParams
from localspec.errors import ConfigError, LocalspecError
from localspec.options import LoadOptions
from localspec.placement import require_threads
from localspec.workloads import recognise

Report = Callable[[str], None]


@dataclass(frozen=True)
class BenchSettings:
    """What to compare. prompts: a file, None for our own. limit: the first so many prompts.
    warm_prompts: prompts of the unmeasured pass in which arms learn (more than there are: several
    passes), 0 to start cold. repeats: how often each prompt is measured, with a seed of its own.
    time_limit_s: no new prompt is begun after it. peer_threads: of the peers, None: as many as
    ours. Raises ConfigError."""

    prompts: Path | None = None
    limit: int | None = None
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.7)
    arms: tuple[str, ...] = field(default_factory=default_arms)
    home: Path | None = None
    warm_prompts: int = 24
    repeats: int = 1
    time_limit_s: float | None = None
    peer_threads: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or (self.limit is not None and self.limit < 1):
            raise ConfigError("--max-tokens and --limit must be at least 1.")
        if self.peer_threads is not None:
            require_threads("--peer-threads", self.peer_threads)
        if self.warm_prompts < 0 or self.repeats < 1:
            raise ConfigError("--warm must be at least 0, and --repeats at least 1.")
        require_temperatures(self.temperatures)


def require_temperatures(temperatures: Sequence[float]) -> None:
    """Raises ConfigError, RequestError unless one can sample at all of them, each once."""
    if not temperatures or len(set(temperatures)) != len(temperatures):
        raise ConfigError("--temperatures needs one or more numbers, each once, like 0,0.7.")
    for temperature in temperatures:
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
    """Load what `options` ask for, compare, and measure what is measured apart. Raises
    LocalspecError."""
    from localspec.bench.opening import open_stage  # brings the loader and the log

    parse_arms(settings.arms)  # a typing error is said before anything is loaded
    prompts = load_prompts(settings.prompts or OWN_PROMPTS, settings.limit)
    stage = open_stage(options, settings.home, report)
    cases, skipped = fitting_cases(stage, prompts, settings.max_tokens)
    if not cases:
        raise ConfigError(f"None of the prompts can be measured: {skipped[0]['reason']}")
    result = compare(stage, prompts, settings, report)
    if result["ending"] is not None:
        return result  # whoever stopped it does not want to wait for more
    try:
        return with_extras(result, extras(stage, cases, settings, report))
    except KeyboardInterrupt:
        ending = "stopped by hand before costs were measured apart; the comparison is whole."
    except (LocalspecError, RuntimeError, MemoryError) as error:
        ending = f"costs could not be measured apart ({error}); the comparison is whole."
    return {**result, "ending": ending}


def compare(
    stage: Stage, prompts: Sequence[Prompt], settings: BenchSettings, report: Report
) -> dict[str, Any]:
    """All arms over all prompts on a loaded stage; the report as JSON data."""
    arms = parse_arms(settings.arms)
    refused = refusals(arms, stage.statuses)
    cases, skipped = fitting_cases(stage, prompts, settings.max_tokens)
    found = Found(arms, settings.temperatures, stage.precision, refused, skipped)
    num_threads = settings.peer_threads or torch.get_num_threads()
    room = PeerRoom(stage, settings_for(settings.home).home, num_threads)
    contest = Contest(stage, settings, found, room, report)
    try:
        contest.prepare(cases)
        for measured in contest.measure(repeated(cases, settings.repeats)):
            found.measured.append(measured)
    except KeyboardInterrupt:
        found.ending = "stopped by hand; the prompts measured until then are shown."
    finally:
        room.close()
    return _result(stage, settings, found, contest.controller_state, room)


def _result(
    stage: Stage,
    settings: BenchSettings,
    found: Found,
    controller_state: str,
    room: PeerRoom,
) -> dict[str, Any]:
    path, made = settings.prompts or OWN_PROMPTS, rows(found)
    machine = {
        **stage.machine,
        "controller": controller_state,
        "prompts": path.name,
        "num_prompts": len({each.case.id for each in found.measured}),
        "num_skipped": len(found.skipped),
        "max_tokens": settings.max_tokens,
        "peers": room.notes,
        "peer_threads": room.num_threads,
    }
    return {
        "machine": machine,
        "rows": made,
        "cells": cells(made, timed_runs(found)),
        "near_ties": differences_json(found, near_ties=True),
        "differences": differences_json(found, near_ties=False),
        "skipped": found.skipped,
        "ending": found.ending,
    }


def repeated(cases: Sequence[Case], times: int) -> list[Case]:
    """All cases so many times over; from the second time on each has another name and seed."""
    return [
        replace(case, id=f"{case.id}#{time}", seed=case.seed + time) if time else case
        for time in range(times)
        for case in cases
    ]


def fitting_cases(
    stage: Stage, prompts: Sequence[Prompt], max_tokens: int
) -> tuple[list[Case], list[dict[str, str]]]:
    """Prompts as token ids, and those that do not fit, each with the reason."""
    cases, skipped = list[Case](), list[dict[str, str]]()
    for prompt in prompts:
        tokens = tuple(stage.render(prompt.text))
        if len(tokens) + max_tokens <= stage.context_length:
            seed, kind = zlib.crc32(prompt.id.encode()), recognise(prompt.text)
            cases.append(Case(prompt.id, prompt.task, tokens, seed, kind))
            continue
        reason = (
            f"{len(tokens)} tokens and {max_tokens} of reply do not fit the context of "
            f"{stage.context_length}."
        )
        skipped.append({"prompt": prompt.id, "task": prompt.task, "reason": reason})
    return cases, skipped
