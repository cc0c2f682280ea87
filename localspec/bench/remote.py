"""A throughput test of somebody's server, as its users meet it: many requests, streamed.

Contract: at each concurrency every prompt is asked once of each server, the servers in turn, so
that both meet the same load; a few requests before that are not counted. With two servers, the
first speculates and the second does not, and the advice compares them; of one alone it goes by
acceptance. What was drafted is the difference of the server's counters over the whole run, which
nobody else may use meanwhile, else what the replies tell. Unknown is null.

TTFT and inter-token times are the client's, from the request to the first text, and between two
events of the stream; an event of a server that speculates may hold several tokens. tpot_ms: from
the first to the last event, by the tokens after the first.

Not here: comparing ways of drafting of the engine here (compare).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from localspec.bench.cases import Prompt
from localspec.bench.tables import DASH, Column, aligned, number, text
from localspec.core.arithmetic import percentile, ratio
from localspec.core.backend import Message, Request
from localspec.core.decoding import SamplingParams
from localspec.core.errors import ConfigError, LocalspecError
from localspec.core.options import RemoteServer
from localspec.core.speculation import DecodeCounts
from localspec.core.turn_stats import TurnStats
from localspec.core.units import took
from localspec.remote.counters import Counters
from localspec.remote.server import ServerBackend

WARM_REQUESTS = 2  # of each server before each run
MOST_LOOKS, LOOK_S = 50, 0.1  # at counters that move
PERCENTILES = (50, 95, 99)
# Acceptance rates between which the advice changes.
GOOD, FAIR = 0.7, 0.4
FASTER, SLOWER = 1.05, 0.95  # times plain decoding


@dataclass(frozen=True)
class Answered:
    """One request. gaps_ms: between the events of its stream. fault: why it failed."""

    stats: TurnStats | None
    gaps_ms: tuple[float, ...] = ()
    fault: str | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.stats is None else self.stats.num_output_tokens


def run_remote(
    servers: Sequence[RemoteServer],
    prompts: Sequence[Prompt],
    concurrencies: Sequence[int],
    max_tokens: int,
    temperature: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The result as plain JSON data. Raises ConfigError."""
    if not prompts or not concurrencies or min(concurrencies) < 1:
        raise ConfigError("A test needs prompts, and --concurrency numbers of at least 1.")
    requests = [_request(prompt, max_tokens, temperature) for prompt in prompts]
    with ExitStack() as stack:
        backends = [
            stack.enter_context(closing(ServerBackend(one, counts_replies=False)))
            for one in servers
        ]
        names = ["speculative", "plain"][: len(backends)]
        rows = list[dict[str, Any]]()
        for concurrency in concurrencies:
            for name, backend in zip(names, backends, strict=True):
                say(f"{name}: {len(requests)} requests, {concurrency} at the same time")
                row = _run(backend, requests, concurrency)
                rows.append({"server": name, "concurrency": concurrency, **row})
        described = [backend.describe() for backend in backends]
    rows = _with_speedups(rows)
    return {
        "servers": [
            {"name": name, "model": one.target, "program": one.server and one.server.name}
            for name, one in zip(names, described, strict=True)
        ],
        "num_prompts": len(requests),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "rows": rows,
        "advice": list(_advice(rows)),
    }


def _request(prompt: Prompt, max_tokens: int, temperature: float) -> Request:
    sampling = SamplingParams(temperature=temperature, seed=zlib.crc32(prompt.id.encode()))
    return Request((Message("user", prompt.text),), sampling, max_tokens)


def _run(backend: ServerBackend, requests: Sequence[Request], concurrency: int) -> dict[str, Any]:
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(lambda one: _answer(backend, one), requests[:WARM_REQUESTS]))
        before, started_s = _settled(backend), time.monotonic()
        answered = list(pool.map(lambda one: _answer(backend, one), requests))
        took_s = time.monotonic() - started_s
        after = _settled(backend)
    whole = [one for one in answered if one.fault is None]
    stats = [one.stats for one in whole if one.stats is not None]
    num_tokens = sum(one.num_tokens for one in whole)
    faults = sorted({one.fault for one in answered if one.fault is not None})
    return {
        "num_requests": len(answered),
        "num_failed": len(answered) - len(whole),
        "faults": faults,
        "seconds": took_s,
        "requests_per_second": len(whole) / took_s,
        "tokens_per_second": num_tokens / took_s,
        "ttft_ms": _spread([one.ttft_ms for one in stats if one.ttft_ms is not None]),
        "inter_token_ms": _spread([gap for one in whole for gap in one.gaps_ms]),
        "tpot_ms": _spread(list(_tpot_ms(stats))),
        **_drafts(before, after, stats),
        "batch": _batch(backend, requests) if concurrency > 1 else None,
    }


def _answer(backend: ServerBackend, request: Request) -> Answered:
    times_s, stats, fault = list[float](), None, None
    try:
        for chunk in backend.generate(request, threading.Event()):
            stats, fault = chunk.stats, chunk.error
            if chunk.text or chunk.thinking:
                times_s.append(time.monotonic())
    except LocalspecError as error:
        fault = str(error)
    gaps = (1000.0 * (after_s - before_s) for before_s, after_s in pairwise(times_s))
    return Answered(stats, tuple(gaps), fault)


def _settled(backend: ServerBackend) -> Counters | None:
    """The counters once they stand still: they follow the end of a reply after some ms. Where
    others use the server too they may never."""
    found = backend.counters()
    for _ in range(MOST_LOOKS):
        time.sleep(LOOK_S)
        before, found = found, backend.counters()
        if before == found:
            break
    return found


def _tpot_ms(stats: Sequence[TurnStats]) -> Iterator[float]:
    for one in stats:
        if one.num_output_tokens > 1:
            yield one.decode_ms / (one.num_output_tokens - 1)


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    found = {f"p{each}": percentile(values, each / 100) for each in PERCENTILES}
    known = {name: value for name, value in found.items() if value is not None}
    return known or None


def _drafts(
    before: Counters | None, after: Counters | None, stats: Sequence[TurnStats]
) -> dict[str, Any]:
    """What was drafted in the run, by the counters where it has them, else by the replies."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    if before is not None and after is not None:
        is_alone = after.num_finished - before.num_finished == len(stats)
        sums = [int(getattr(after, name) - getattr(before, name)) for name in names]
        counts = sums if is_alone else [None] * 3
    else:
        of_replies = [[one.told(name) for one in stats] for name in names]
        counts = [None if None in each or not each else sum(each) for each in of_replies]
    told = {name: count for name, count in zip(names, counts, strict=True) if count is not None}
    rates = DecodeCounts(**told) if "num_accepted_tokens" in told else DecodeCounts()
    return {
        **dict(zip(names, counts, strict=True)),
        "acceptance_rate": rates.acceptance_rate,
        "mean_accepted_length": rates.mean_accepted_length,
    }


def _batch(backend: ServerBackend, requests: Sequence[Request]) -> dict[str, Any] | None:
    """All requests as one batch of SGLang's native interface; None of other servers."""
    started_s = time.monotonic()
    replies = backend.generate_batch(requests)
    if replies is None:
        return None
    took_s = time.monotonic() - started_s
    told = [one.num_output_tokens for one in replies]
    tokens = None if None in told else sum(count or 0 for count in told)
    drafts = [one.drafts for one in replies if one.drafts is not None]
    drafted = DecodeCounts(
        num_draft_tokens=sum(one.num_draft_tokens for one in drafts),
        num_accepted_tokens=sum(one.num_accepted_tokens for one in drafts),
    )
    return {
        "seconds": took_s,
        "tokens_per_second": None if tokens is None else tokens / took_s,
        "acceptance_rate": drafted.acceptance_rate,
    }


def _with_speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """speedup: tokens per second of the run, times those of the plain server under this load."""
    plain = {
        row["concurrency"]: row["tokens_per_second"] for row in rows if row["server"] == "plain"
    }
    return [
        {
            **row,
            "speedup": None
            if row["server"] == "plain"
            else ratio(row["tokens_per_second"], plain.get(row["concurrency"])),
        }
        for row in rows
    ]


def _advice(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each load of the server that speculates."""
    for row in rows:
        if row["server"] == "plain":
            continue
        rate, gain = row["acceptance_rate"], row["speedup"]
        at = f"With {row['concurrency']} at the same time"
        if gain is not None:
            yield f"{at} speculation is {gain:.2f} times plain: {_by_gain(gain, rate)}"
        elif row["num_draft_tokens"] == 0:
            yield f"{at} the server drafted nothing."
        elif rate is not None:
            yield f"{at} {rate:.0%} of its guesses are right: {_by_rate(rate)}"
        else:
            yield f"{at} it is not known what was drafted."


def _by_gain(gain: float, rate: float | None) -> str:
    if gain >= FASTER:
        return "keep it."
    if gain > SLOWER:
        return "it makes no difference that this test can see."
    if rate is not None and rate >= GOOD:
        return (
            "its guesses are right, but checking or making them costs too much under this load. "
            "Turn it off there, or use a cheaper way of drafting."
        )
    return "start the server with fewer speculative tokens, or without speculation."


def _by_rate(rate: float) -> str:
    if rate >= GOOD:
        return "more speculative tokens may be faster. Compare with --plain."
    if rate >= FAIR:
        return "that is usual. Compare with --plain, and try one token fewer."
    return "most of the work is thrown away. Use fewer speculative tokens, or another draft."


COLUMNS = (
    text("at once", "concurrency"),
    text("server"),
    number("req/s", "requests_per_second", ".2f"),
    number("tok/s", "tokens_per_second", ".1f"),
    Column("TTFT P50/95/99", lambda row: _triple(row["ttft_ms"])),
    Column("between P50/95/99", lambda row: _triple(row["inter_token_ms"])),
    number("accepted", "acceptance_rate", ".0%"),
    number("mean length", "mean_accepted_length", ".2f"),
    number("times plain", "speedup", ".2f"),
    number("failed", "num_failed", "d"),
)


def render_remote(result: Mapping[str, Any]) -> str:
    faults = sorted({fault for row in result["rows"] for fault in row["faults"]})
    return "\n".join([*aligned(COLUMNS, result["rows"]), "", *result["advice"], *faults])


def _triple(spread: Mapping[str, float] | None) -> str:
    return DASH if spread is None else " / ".join(map(took, spread.values()))
