"""`python -m tools.parallel --prompts FILE.jsonl`: several replies at the same time, measured.

For every number of sequences and every temperature the arms take turns: plain decoding one reply
after the other, plain decoding together, and `auto` together. Every arm answers the same prompts
with the same seeds; replies that differ between arms are counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from localspec.backend import Backend, Chunk, Message, Request
from localspec.bench.cases import load_prompts
from localspec.core import AUTO, OFF, SamplingParams
from localspec.flags import (
    DraftFlag,
    DtypeFlag,
    JsonFlag,
    ModelFlag,
    ProfileFlag,
    finish,
    listed_numbers,
    run_app,
    to_stderr,
)
from localspec.load import open_local_backend
from localspec.options import LoadOptions

SERIAL, TOGETHER, DRAFTED = "one at a time", "together", "together, auto"
ARMS = {SERIAL: OFF, TOGETHER: OFF, DRAFTED: AUTO}
WARM_TOKENS = 24
PERCENTS = (50, 95, 99)

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@dataclass
class Reply:
    """One reply, measured: seconds since all were asked, and its output tokens."""

    arrived_s: list[float] = field(default_factory=list)  # of each chunk with tokens
    tokens: list[int] = field(default_factory=list)

    def take(self, chunk: Chunk, now_s: float) -> None:
        if chunk.tokens:
            self.arrived_s.append(now_s)
            self.tokens += chunk.tokens

    @property
    def gaps_ms(self) -> list[float]:
        pairs = zip(self.arrived_s, self.arrived_s[1:], strict=False)
        return [1000.0 * (after - before) for before, after in pairs]


def answered(backend: Backend, requests: Sequence[Request], together: bool) -> list[Reply]:
    """Ask all; the next chunk of each in turn, or one reply after the other. No cache holds
    anything of their prompts."""
    backend.close()  # of a local backend: empties the caches
    replies = [Reply() for _ in requests]
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


def quantile(values: Sequence[float], share: float) -> float | None:
    found = sorted(values)
    return found[min(len(found) - 1, int(share * len(found)))] if found else None


def figures(runs: Sequence[list[Reply]]) -> dict[str, float | None]:
    """Of the runs of one arm. Rates are of the whole time, prompts included."""
    replies = list(chain.from_iterable(runs))
    seconds = sum(max(each.arrived_s[-1] for each in run if each.arrived_s) for run in runs)
    own = [
        (len(each.tokens) - 1) / (each.arrived_s[-1] - each.arrived_s[0])
        for each in replies
        if len(each.arrived_s) > 1
    ]
    gaps = list(chain.from_iterable(each.gaps_ms for each in replies))
    return {
        "tokens_per_second": sum(len(each.tokens) for each in replies) / seconds,
        "tokens_per_second_each": median(own) if own else None,
        **quantiles("ttft_ms", [1000.0 * each.arrived_s[0] for each in replies]),
        **quantiles("gap_ms", gaps),
    }


def quantiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{percent}": quantile(values, percent / 100) for percent in PERCENTS}


@app.command()
def parallel(
    prompts: Annotated[Path, typer.Option(help="JSON lines as `bench` reads them.")],
    sequences: Annotated[str, typer.Option(help="How many at the same time.")] = "1,2,4,8,16",
    temperatures: Annotated[str, typer.Option(help="Each is measured.")] = "0,0.7",
    max_tokens: Annotated[int, typer.Option(help="Of a reply.")] = 64,
    turns: Annotated[int, typer.Option(help="How often the arms take turns.")] = 2,
    profile: ProfileFlag = None,
    model: ModelFlag = None,
    draft: DraftFlag = None,
    dtype: DtypeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure several replies at the same time."""
    counts = [int(number) for number in listed_numbers(sequences)]
    options = LoadOptions(profile, model, draft, dtype=dtype, context=2048, parallel=max(counts))
    asked = [each.text for each in load_prompts(prompts, max(counts) * turns)]
    found = list[dict[str, Any]]()
    with closing(open_local_backend(options, None, to_stderr)) as backend:
        for phrase in backend.calibrate(threading.Event()):
            to_stderr(phrase)
        for temperature in listed_numbers(temperatures):
            for count in counts:
                found += measured(backend, asked, temperature, count, turns, max_tokens)
                to_stderr(str(found[-3:]))
    finish({"cells": found}, table(found), as_json)


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

    runs: dict[str, list[list[Reply]]] = {arm: [] for arm in ARMS}
    answered(backend, requests(DRAFTED, 0, WARM_TOKENS), together=True)
    for turn in range(turns):
        for arm in ARMS:
            runs[arm].append(answered(backend, requests(arm, turn, max_tokens), arm != SERIAL))
    plain = [each.tokens for each in chain.from_iterable(runs[SERIAL])]
    rows = list[dict[str, Any]]()
    for arm, found in runs.items():
        tokens = [each.tokens for each in chain.from_iterable(found)]
        differing = sum(one != other for one, other in zip(tokens, plain, strict=True))
        row = {"temperature": temperature, "sequences": count, "arm": arm}
        rows.append({**row, **figures(found), "num_differing": differing})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """ "of plain": the rate over that of plain decoding together."""
    names = " / ".join(f"P{percent}" for percent in PERCENTS)
    columns = f"T|sequences|arm|tokens/s|of plain|each|TTFT {names}, ms|gap {names}, ms|differ"
    lines = [f"| {columns.replace('|', ' | ')} |", "|---" * 9 + "|"]
    plain = {
        (row["temperature"], row["sequences"]): row["tokens_per_second"]
        for row in rows
        if row["arm"] == TOGETHER
    }
    for row in rows:
        share = row["tokens_per_second"] / plain[row["temperature"], row["sequences"]]
        ttft, gaps = (
            " / ".join(f"{row[f'{name}_p{percent}']:.0f}" for percent in PERCENTS)
            for name in ("ttft_ms", "gap_ms")
        )
        lines.append(
            f"| {row['temperature']:g} | {row['sequences']} | {row['arm']} "
            f"| {row['tokens_per_second']:.1f} | {share:.2f} "
            f"| {row['tokens_per_second_each'] or 0:.1f} | {ttft} | {gaps} "
            f"| {row['num_differing']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_app(app)
