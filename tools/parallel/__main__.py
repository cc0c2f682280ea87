"""`python -m tools.parallel --prompts FILE.jsonl`: several replies at the same time, measured.

For every number of sequences and every temperature the arms take turns, in alternating order: plain
decoding one reply after the other, plain decoding together, and `auto` together. Every arm answers
the same prompts with the same seeds; replies that differ between arms are counted. Ratios are of
tokens over time of all turns, with their 95 % interval over the turns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from localspec.bench.cases import load_prompts
from localspec.bench.statistics import Timed, rate_ratio
from localspec.bench.tables import Column, as_markdown, number, shown, text, with_limits
from localspec.cli.flags import JsonFlag, finish, loading_only, run_app, to_stderr
from localspec.core.arithmetic import percentile
from localspec.core.backend import Backend, Chunk, Message, Request
from localspec.core.decoding import AUTO, OFF, SamplingParams
from localspec.core.flag_values import listed_numbers
from localspec.core.options import LoadOptions
from localspec.loading.local_backend import open_local_backend

SERIAL, TOGETHER, DRAFTED = "one at a time", "together", "together, auto"
ARMS = {SERIAL: OFF, TOGETHER: OFF, DRAFTED: AUTO}
WARM_TOKENS = 24
PERCENTS = (50, 95, 99)

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@dataclass
class TimedReply:
    """One reply, measured: seconds since all were asked, and its output tokens."""

    arrived_s: list[float] = field(default_factory=list)  # of each chunk with tokens
    tokens: list[int] = field(default_factory=list)

    def take(self, chunk: Chunk, now_s: float) -> None:
        if chunk.tokens:
            self.arrived_s.append(now_s)
            self.tokens += chunk.tokens

    @property
    def gaps_ms(self) -> list[float]:
        return [1000.0 * (after - before) for before, after in pairwise(self.arrived_s)]


def answered(backend: Backend, requests: Sequence[Request], together: bool) -> list[TimedReply]:
    """Ask all; the next chunk of each in turn, or one reply after the other. No cache holds
    anything of their prompts."""
    backend.close()  # of a local backend: empties the caches
    replies = [TimedReply() for _ in requests]
    started_s, cancel = perf_counter(), threading.Event()
    for group in [list(range(len(requests)))] if together else [[i] for i in range(len(requests))]:
        open_ones: dict[int, Iterator[Chunk]] = {}
        for place in group:
            open_ones[place] = backend.generate(requests[place], cancel)
        while open_ones:
            for place, chunks in tuple(open_ones.items()):
                chunk = next(chunks, None)
                if chunk is None:
                    del open_ones[place]
                else:
                    replies[place].take(chunk, perf_counter() - started_s)
    return replies


def timed(run: Sequence[TimedReply]) -> Timed:
    """Output tokens, and ms until the last of them, prompts included."""
    last_s = max(each.arrived_s[-1] for each in run if each.arrived_s)
    return sum(len(each.tokens) for each in run), 1000.0 * last_s


def figures(runs: Sequence[list[TimedReply]]) -> dict[str, float | None]:
    replies = list(chain.from_iterable(runs))
    num_tokens, ms = (sum(values) for values in zip(*map(timed, runs), strict=True))
    own = [
        (len(each.tokens) - 1) / (each.arrived_s[-1] - each.arrived_s[0])
        for each in replies
        if len(each.arrived_s) > 1
    ]
    gaps_ms = list(chain.from_iterable(each.gaps_ms for each in replies))
    return {
        "tokens_per_second": 1000.0 * num_tokens / ms,
        "tokens_per_second_each": median(own) if own else None,
        **percentiles("ttft_ms", [1000.0 * each.arrived_s[0] for each in replies]),
        **percentiles("gap_ms", gaps_ms),
    }


def percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{percent}": percentile(values, percent / 100) for percent in PERCENTS}


@app.command()
@loading_only("profile", "model", "draft", "dtype")
def parallel(
    prompts: Annotated[Path, typer.Option(help="JSON lines as `bench` reads them.")],
    sequences: Annotated[str, typer.Option(help="How many at the same time.")] = "1,2,4,8,16",
    temperatures: Annotated[str, typer.Option(help="Each is measured.")] = "0,0.7",
    max_tokens: Annotated[int, typer.Option(help="Of a reply.")] = 64,
    turns: Annotated[int, typer.Option(help="How often the arms take turns.")] = 2,
    *,
    options: LoadOptions,
    as_json: JsonFlag = False,
) -> None:
    """Measure several replies at the same time."""
    counts = listed_numbers(sequences, int)
    options = replace(options, context=2048, parallel=max(counts))
    asked = [each.text for each in load_prompts(prompts, max(counts) * turns)]
    found = list[dict[str, Any]]()
    with closing(open_local_backend(options, None, to_stderr)) as backend:
        for phrase in backend.calibrate(threading.Event()):
            to_stderr(phrase)
        for temperature in listed_numbers(temperatures, float):
            for count in counts:
                found += measured(backend, asked, temperature, count, turns, max_tokens)
                to_stderr(str(found[-3:]))
    finish({"cells": found}, as_markdown(COLUMNS, found), as_json)


def measured(
    backend: Backend,
    asked: Sequence[str],
    temperature: float,
    count: int,
    turns: int,
    max_tokens: int,
) -> list[dict[str, Any]]:
    """One row for each arm."""

    def requests(arm: str, turn: int, length: int) -> list[Request]:
        texts = [asked[(turn * count + place) % len(asked)] for place in range(count)]
        return [
            Request(
                (Message("user", text),),
                SamplingParams(temperature, seed=seed),
                max_tokens=length,
                drafter=ARMS[arm],
            )
            for seed, text in enumerate(texts)
        ]

    runs: dict[str, list[list[TimedReply]]] = {arm: [] for arm in ARMS}
    answered(backend, requests(DRAFTED, 0, WARM_TOKENS), together=True)
    for turn in range(turns):
        for arm in list(ARMS)[:: -1 if turn % 2 else 1]:
            runs[arm].append(answered(backend, requests(arm, turn, max_tokens), arm != SERIAL))
    return [row_of(temperature, count, arm, runs) for arm in ARMS]


def row_of(
    temperature: float, count: int, arm: str, runs: dict[str, list[list[TimedReply]]]
) -> dict[str, Any]:
    tokens, serial = (
        [each.tokens for each in chain.from_iterable(runs[one])] for one in (arm, SERIAL)
    )
    times = {one: [timed(run) for run in found] for one, found in runs.items()}
    return {
        "temperature": temperature,
        "sequences": count,
        "arm": arm,
        **figures(runs[arm]),
        **rate_ratio(times[arm], times[TOGETHER]).columns("of_plain"),
        **rate_ratio(times[arm], times[SERIAL]).columns("of_serial"),
        "num_differing": sum(one != other for one, other in zip(tokens, serial, strict=True)),
    }


def spread(heading: str, name: str) -> Column:
    return Column(
        heading, lambda row: " / ".join(shown(row[f"{name}_p{each}"], ".0f") for each in PERCENTS)
    )


COLUMNS = (
    number("T", "temperature", "g"),
    text("sequences"),
    text("arm"),
    number("tokens/s", "tokens_per_second", ".1f"),
    number("each", "tokens_per_second_each", ".1f"),
    with_limits("of plain together", "of_plain"),
    with_limits("of one at a time", "of_serial"),
    spread("TTFT ms P50 / 95 / 99", "ttft_ms"),
    spread("between ms P50 / 95 / 99", "gap_ms"),
    number("differ", "num_differing", "d"),
)


if __name__ == "__main__":
    run_app(app)
