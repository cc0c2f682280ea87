"""The first replies of fresh starts: `bench --cold-starts N`.

Contract: every start is a process of its own with nothing learnt, not even in a home: it loads,
measures costs as the app does before the first reply (for plain decoding too, since that warms the
forwards up), and answers SHORT_PROMPT and then the first prompt of the file. Starts of `auto` and
of plain decoding alternate, and which goes first alternates too. A ratio is that of the two decode
rates of a pair; reported are medians over the pairs. Results are JSON data, kept pair by pair.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median_low
from threading import Event
from typing import Any, TypeVar

from localspec.bench.cases import OWN_PROMPTS, load_prompts
from localspec.bench.kept import KeptFile
from localspec.bench.settings import BenchSettings
from localspec.bench.statistics import median_of
from localspec.bench.tables import Column, aligned, limits, number, shown, text
from localspec.core.arithmetic import ratio
from localspec.core.backend import Report
from localspec.core.decoding import AUTO, OFF, SamplingParams
from localspec.core.errors import ConfigError
from localspec.core.options import LoadOptions

SHORT_PROMPT = "hi"
SEED = 1
MEASURED = (
    "Each start is a new process with nothing learnt. Starts of auto and off alternate; a ratio is "
    "that of the decode rates of two starts. Shown are medians."
)
COLUMNS = (
    number("T", "temperature", "g"),
    Column("prompt", lambda row: row["prompt"][:24].split("\n")[0]),
    text("starts", "num_starts"),
    text("tokens", "num_tokens"),
    number("off tokens/s", "off_tokens_per_second", ".1f"),
    number("auto to off", "auto_ratio", ".2f"),
    limits("95 % interval", "auto_ratio"),
)

Done = TypeVar("Done")
Started = Mapping[str, Any]  # of one start: its "machine", its "replies" in the order of prompts
Start = Callable[[LoadOptions, str, Sequence[str], float, int], Started]


def first_replies(
    options: LoadOptions, drafter: str, prompts: Sequence[str], temperature: float, max_tokens: int
) -> Started:
    """Load with nothing learnt and answer these messages one after another."""
    from localspec.bench.runs import machine_facts
    from localspec.core.backend import Message, Request
    from localspec.core.workloads import recognise
    from localspec.loading.local_backend import open_local_backend

    backend = open_local_backend(options, None, lambda _: None)
    for _ in backend.calibrate(Event()):
        pass
    replies = list[dict[str, Any]]()
    for prompt in prompts:
        request = Request(
            messages=(Message("user", prompt),),
            sampling=SamplingParams(temperature, seed=SEED),
            max_tokens=max_tokens,
            drafter=drafter,
            workload=recognise(prompt),
        )
        stats = [chunk.stats for chunk in backend.generate(request, Event())][-1]
        reply = {
            "prompt": prompt,
            "num_tokens": stats.num_output_tokens,
            "tokens_per_second": stats.tokens_per_second,
            "ttft_ms": stats.ttft_ms,
            "reason": stats.reason or "",
        }
        replies.append(reply)
    return {"machine": machine_facts(backend.loaded.description), "replies": replies}


def in_fresh_process(work: Callable[..., Done], *arguments: Any) -> Done:
    """What the work returns in a new process, which ends with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


FRESH: Start = partial(in_fresh_process, first_replies)


def run_cold_starts(
    options: LoadOptions,
    settings: BenchSettings,
    num_starts: int,
    report: Report,
    out: KeptFile,
    start: Start = FRESH,
) -> dict[str, Any]:
    """`num_starts` starts of each of `auto` and `off` at every temperature; fewer after Ctrl-C.
    Raises LocalspecError."""
    if num_starts < 1:
        raise ConfigError("--cold-starts must be at least 1.")
    usual = load_prompts(settings.prompts or OWN_PROMPTS, 1)[0].text
    prompts, fresh = (SHORT_PROMPT, usual), replace(options, home=None)
    facts = {"num_starts": num_starts, "max_tokens": settings.max_tokens}
    result: dict[str, Any] = {"machine": {}, **facts, "rows": [], "starts": [], "ending": None}
    try:
        for temperature in settings.temperatures:
            pairs = list[Mapping[str, Started]]()
            earlier_rows = result["rows"]
            for number in range(1, num_starts + 1):
                order = (AUTO, OFF) if number % 2 else (OFF, AUTO)
                pair = {
                    arm: start(fresh, arm, prompts, temperature, settings.max_tokens)
                    for arm in order
                }
                pairs.append(pair)
                result["machine"] = pair[AUTO]["machine"]
                result["rows"] = [*earlier_rows, *_rows(temperature, pairs)]
                result["starts"] += [
                    {"temperature": temperature, "start": number, "arm": arm,
                     "replies": made["replies"]}
                    for arm, made in pair.items()
                ]  # fmt: skip
                out.offer(lambda: {**result, "ending": "it is not finished."})
                ratios = ", ".join(shown(ratio, ".2f") for ratio in _ratios(pair))
                report(f"start {number} of {num_starts}, T {temperature:g}: auto to off {ratios}")
    except KeyboardInterrupt:
        result["ending"] = "stopped by hand; the starts until then are shown."
    return result


def _ratios(pair: Mapping[str, Started]) -> list[float | None]:
    """Of each prompt the rate of `auto` over plain decoding's."""
    return [
        ratio(own["tokens_per_second"], plain["tokens_per_second"])
        for own, plain in zip(pair[AUTO]["replies"], pair[OFF]["replies"], strict=True)
    ]


def _rows(temperature: float, pairs: Sequence[Mapping[str, Started]]) -> list[dict[str, Any]]:
    """One row for each prompt, over all starts at one temperature."""
    made = list[dict[str, Any]]()
    for place, first in enumerate(pairs[0][AUTO]["replies"]):
        ratios = [ratio for pair in pairs if (ratio := _ratios(pair)[place]) is not None]
        plain = [pair[OFF]["replies"][place]["tokens_per_second"] for pair in pairs]
        lengths = [made["replies"][place]["num_tokens"] for pair in pairs for made in pair.values()]
        row = {
            "temperature": temperature,
            "prompt": first["prompt"],
            "num_starts": len(ratios),
            "num_tokens": median_low(lengths),
            "off_tokens_per_second": median_of([rate for rate in plain if rate]).value,
            **median_of(ratios).columns("auto_ratio"),
        }
        made.append(row)
    return made


def render_cold_starts(result: Mapping[str, Any]) -> str:
    """The table for people, and what was measured."""
    if not result["rows"]:
        return f"Incomplete: {result['ending']}"
    machine = result["machine"]
    where = (
        f"{machine['target']}, {machine['dtype']}, on {machine['device']}, "
        f"{machine['num_threads']} threads, at most {result['max_tokens']} tokens a reply"
    )
    ending = [] if result["ending"] is None else [f"Incomplete: {result['ending']}"]
    return "\n".join([where, MEASURED, "", *aligned(COLUMNS, result["rows"]), *ending])
