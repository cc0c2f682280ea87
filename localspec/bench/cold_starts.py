"""The first replies of fresh starts: `bench --cold-starts N`.

Contract: every start is a process of its own with nothing learnt, not even in a home: it loads,
measures costs as the app does before the first reply (for plain decoding too, since that warms the
forwards up), and answers SHORT_PROMPT and then one usual prompt. Starts of `auto` and of plain
decoding alternate, and which goes first alternates too. The ratio of a pair is that of their decode
rates; reported is the median over the pairs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from localspec.bench.arms import Report
from localspec.bench.cases import OWN_PROMPTS, load_prompts
from localspec.bench.report import aligned, interval, shown
from localspec.bench.settings import BenchSettings
from localspec.bench.statistics import median_ratio
from localspec.core import AUTO, OFF, SamplingParams
from localspec.errors import ConfigError
from localspec.options import LoadOptions

SHORT_PROMPT = "hi"
SEED = 1
HEADINGS = ("T", "prompt", "starts", "tokens", "off tokens/s", "auto to off", "95 % interval")


@dataclass(frozen=True)
class FirstReply:
    """One reply of a fresh process. reason: why its drafter was used."""

    prompt: str
    num_tokens: int
    tokens_per_second: float | None
    ttft_ms: float | None
    reason: str


Start = Callable[[LoadOptions, str, Sequence[str], float, int], list[FirstReply]]


def first_replies(
    options: LoadOptions, drafter: str, prompts: Sequence[str], temperature: float, max_tokens: int
) -> list[FirstReply]:
    """Load with nothing learnt and answer these messages one after another."""
    from localspec.backend import Message, Request
    from localspec.load import open_local_backend
    from localspec.workloads import recognise

    backend = open_local_backend(options, None, lambda _: None)
    for _ in backend.calibrate(Event()):
        pass
    found = list[FirstReply]()
    for prompt in prompts:
        request = Request(
            messages=(Message("user", prompt),),
            sampling=SamplingParams(temperature, seed=SEED),
            max_tokens=max_tokens,
            drafter=drafter,
            workload=recognise(prompt),
        )
        stats = [chunk.stats for chunk in backend.generate(request, Event())][-1]
        found.append(
            FirstReply(
                prompt, stats.num_output_tokens, stats.tokens_per_second, stats.ttft_ms,
                stats.reason or "",
            )
        )  # fmt: skip
    return found


def in_fresh_process(
    options: LoadOptions, drafter: str, prompts: Sequence[str], temperature: float, max_tokens: int
) -> list[FirstReply]:
    """`first_replies` in a new process, which ends with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        asked = pool.submit(first_replies, options, drafter, prompts, temperature, max_tokens)
        return asked.result()


def run_cold_starts(
    options: LoadOptions,
    settings: BenchSettings,
    num_starts: int,
    report: Report,
    start: Start = in_fresh_process,
) -> dict[str, Any]:
    """`num_starts` starts of each of `auto` and `off` at every temperature, as JSON data. Raises
    LocalspecError."""
    if num_starts < 1:
        raise ConfigError("--cold-starts must be at least 1.")
    usual = load_prompts(settings.prompts or OWN_PROMPTS, 1)[0].text
    prompts, fresh = (SHORT_PROMPT, usual), replace(options, home=None)
    starts, rows = list[dict[str, Any]](), list[dict[str, Any]]()
    for temperature in settings.temperatures:
        pairs = list[dict[str, list[FirstReply]]]()
        for number in range(num_starts):
            pair = dict[str, list[FirstReply]]()
            for arm in (OFF, AUTO) if number % 2 else (AUTO, OFF):
                pair[arm] = start(fresh, arm, prompts, temperature, settings.max_tokens)
                starts.append(
                    {"temperature": temperature, "start": number + 1, "arm": arm,
                     "replies": [vars(reply) for reply in pair[arm]]}
                )  # fmt: skip
            pairs.append(pair)
            told = f"start {number + 1} of {num_starts}, T {temperature:g}"
            report(f"{told}: auto to off {', '.join(shown(r, '.2f') for r in _ratios(pair))}")
        rows += [
            {"temperature": temperature, **_row(place, pairs)} for place in range(len(prompts))
        ]
    return {"num_starts": num_starts, "rows": rows, "starts": starts}


def _ratios(pair: Mapping[str, Sequence[FirstReply]]) -> list[float | None]:
    """Of each prompt the rate of `auto` over plain decoding's."""
    return [
        own.tokens_per_second / plain.tokens_per_second
        if own.tokens_per_second and plain.tokens_per_second
        else None
        for own, plain in zip(pair[AUTO], pair[OFF], strict=True)
    ]


def _row(place: int, pairs: Sequence[Mapping[str, Sequence[FirstReply]]]) -> dict[str, Any]:
    """One prompt over all starts."""
    known = [ratio for pair in pairs if (ratio := _ratios(pair)[place]) is not None]
    rates = [rate for pair in pairs if (rate := pair[OFF][place].tokens_per_second) is not None]
    found, plain = median_ratio(known), median_ratio(rates)
    first = pairs[0][AUTO][place]
    return {
        "prompt": first.prompt,
        "num_starts": len(known),
        "num_tokens": first.num_tokens,
        "off_tokens_per_second": plain.value,
        "auto_ratio": found.value,
        "auto_ratio_low": found.low,
        "auto_ratio_high": found.high,
    }


def render_cold_starts(result: Mapping[str, Any]) -> str:
    """The table for people."""
    lines = [
        (
            f"{row['temperature']:g}",
            row["prompt"][:24].split("\n")[0],
            str(row["num_starts"]),
            str(row["num_tokens"]),
            shown(row["off_tokens_per_second"], ".1f"),
            shown(row["auto_ratio"], ".2f"),
            interval(row["auto_ratio_low"], row["auto_ratio_high"]),
        )
        for row in result["rows"]
    ]
    return "\n".join(aligned([HEADINGS, *lines]))
