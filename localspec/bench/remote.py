"""A throughput test of somebody's server, as its users meet it: many requests, streamed.

Contract: at each concurrency every prompt is asked of each arm, the arms by turns, so that all meet
the same load; a few requests before that are not counted. With two arms the first speculates and
the second does not, and the advice compares them; of one alone it goes by acceptance. The second
arm is the server of `--plain`, or the same server where it takes the drafter from the request. What
was drafted is the difference of the server's counters over the whole run, which nobody else may use
meanwhile, else what the replies tell. Unknown is null.

TTFT and inter-token times are the client's, from the request to the first text, and between two
events of the stream; an event of a server that speculates may hold several tokens. tpot_ms: from
the first to the last event, by the tokens after the first. speedup is of tokens over time of all
runs, of_one_at_a_time the same against one plain reply after the other, both with their 95 %
interval over the repetitions. num_differing: replies whose text is not that of the first arm
without speculation at the first concurrency; of one arm alone its own.

Not here: comparing ways of drafting of the engine here (compare), the advice and the table
(remote_report).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from localspec.bench.cases import Prompt
from localspec.bench.remote_report import PLAIN, SPECULATIVE, advice
from localspec.bench.statistics import IntervalEstimate, Timed, rate_ratio
from localspec.chat.compare import Answer, answers, compare
from localspec.core.arithmetic import percentile
from localspec.core.backend import Message, Request
from localspec.core.decoding import AUTO, OFF, SamplingParams
from localspec.core.errors import ConfigError, LocalspecError
from localspec.core.options import RemoteServer
from localspec.core.speculation import DecodeCounts
from localspec.core.turn_stats import TurnStats
from localspec.remote.counters import Counters
from localspec.remote.server import ServerBackend

WARM_REQUESTS, WARM_TOKENS = 2, 16  # at least so many requests before each run
MOST_LOOKS, LOOK_S = 50, 0.1  # at counters that move
PERCENTILES = (50, 95, 99)
DRAFT_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass(frozen=True)
class ServerArm:
    """drafter: that each request names; AUTO leaves it to the server."""

    name: str
    backend: ServerBackend
    drafter: str = AUTO


@dataclass(frozen=True)
class Load:
    """So many requests at the same time. time: of the repetition, from 0."""

    concurrency: int
    time: int


@dataclass(frozen=True)
class Run:
    """All requests to one arm, once. answers: in the order of the prompts, None of one that failed.
    counts: what was drafted, in the order of DRAFT_COUNTS, None where that is not known."""

    answers: tuple[Answer | None, ...]
    faults: tuple[str, ...]
    seconds: float
    counts: tuple[int | None, ...]
    batch: dict[str, Any] | None

    @property
    def whole(self) -> list[Answer]:
        return [answer for answer in self.answers if answer is not None]

    @property
    def timed(self) -> Timed:
        return sum(each.stats.num_output_tokens for each in self.whole), 1000.0 * self.seconds


Runs = Mapping[tuple[str, int], Sequence[Run]]  # of an arm's name and a concurrency


def run_remote(
    servers: Sequence[RemoteServer],
    prompts: Sequence[Prompt],
    concurrencies: Sequence[int],
    max_tokens: int,
    temperature: float,
    say: Callable[[str], None],
    repeats: int = 1,
) -> dict[str, Any]:
    """The result as plain JSON data. repeats: how often the arms take turns at each concurrency,
    with other seeds. Raises ConfigError."""
    if not prompts or not concurrencies or min(concurrencies) < 1:
        raise ConfigError("A test needs prompts, and --concurrency numbers of at least 1.")
    loads = [Load(each, time) for each in dict.fromkeys(concurrencies) for time in range(repeats)]

    def ask(load: Load, arm: ServerArm) -> Generator[Run, None, None]:
        say(f"{arm.name}: {len(prompts)} requests, {load.concurrency} at the same time")
        requests = [_request(each, max_tokens, temperature, arm, load.time) for each in prompts]
        yield _run(arm, requests, load.concurrency)

    runs = defaultdict[tuple[str, int], list[Run]](list)
    with ExitStack() as stack:
        backends = [
            stack.enter_context(closing(ServerBackend(one, counts_replies=False)))
            for one in servers
        ]
        arms = _arms(backends)
        for sample in compare(ask, loads, arms, 1, threading.Event()):
            if sample.is_over:
                runs[sample.arm.name, sample.prompt.concurrency].append(sample.answer)
        described = [arm.backend.describe() for arm in arms]
    rows = _rows(runs, [arm.name for arm in arms], list(dict.fromkeys(concurrencies)))
    return {
        "servers": [
            {"name": arm.name, "model": one.target, "program": one.server and one.server.name}
            for arm, one in zip(arms, described, strict=True)
        ],
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "repeats": repeats,
        "rows": rows,
        "advice": list(advice(rows)),
    }


def _arms(backends: Sequence[ServerBackend]) -> list[ServerArm]:
    """Return the speculating arm, and the plain one where there is any."""
    first, *others = backends
    plain = [ServerArm(PLAIN, each) for each in others]
    if not others and first.takes_drafter:
        plain = [ServerArm(PLAIN, first, OFF)]
    return [ServerArm(SPECULATIVE, first), *plain]


def _request(
    prompt: Prompt, max_tokens: int, temperature: float, arm: ServerArm, time: int
) -> Request:
    seed = zlib.crc32(prompt.id.encode()) + time
    sampling = SamplingParams(temperature=temperature, seed=seed)
    return Request((Message("user", prompt.text),), sampling, max_tokens, drafter=arm.drafter)


def _run(arm: ServerArm, requests: Sequence[Request], concurrency: int) -> Run:
    backend = arm.backend
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(lambda one: _answer(backend, one), _warm_requests(arm, concurrency)))
        before, started_s = _settled(backend), time.monotonic()
        replies = list(pool.map(lambda one: _answer(backend, one), requests))
        took_s = time.monotonic() - started_s
        after = _settled(backend)
    own = tuple(each if isinstance(each, Answer) else None for each in replies)
    return Run(
        own,
        tuple(each for each in replies if isinstance(each, str)),
        took_s,
        _draft_counts(before, after, [each.stats for each in own if each is not None]),
        _batch(backend, requests) if concurrency > 1 else None,
    )


def _warm_requests(arm: ServerArm, concurrency: int) -> list[Request]:
    """Return as many as run at the same time. They ask something else than the prompts, so that no
    prompt stands in the server's caches from an earlier run."""
    return [
        Request(
            (Message("user", f"Name {number} rivers."),),
            SamplingParams(seed=0),
            WARM_TOKENS,
            drafter=arm.drafter,
        )
        for number in range(2, 2 + max(WARM_REQUESTS, concurrency))
    ]


def _answer(backend: ServerBackend, request: Request) -> Answer | str:
    """Return the whole answer, or why there is none."""
    try:
        return deque(answers(backend, request, threading.Event()), maxlen=1)[0]
    except LocalspecError as error:
        return str(error)


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


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    found = {f"p{each}": percentile(values, each / 100) for each in PERCENTILES}
    known = {name: value for name, value in found.items() if value is not None}
    return known or None


def _draft_counts(
    before: Counters | None, after: Counters | None, stats: Sequence[TurnStats]
) -> tuple[int | None, ...]:
    """What was drafted in the run, by the counters where it has them, else by the replies."""
    if before is not None and after is not None:
        is_alone = after.num_finished - before.num_finished == len(stats)
        sums = tuple(int(getattr(after, name) - getattr(before, name)) for name in DRAFT_COUNTS)
        return sums if is_alone else (None,) * len(DRAFT_COUNTS)
    return tuple(_sum([one.told(name) for one in stats]) for name in DRAFT_COUNTS)


def _sum(counts: Sequence[int | None]) -> int | None:
    """The sum of known counts; None where one of them is not known, or there is none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


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


def _rows(runs: Runs, names: Sequence[str], concurrencies: Sequence[int]) -> list[dict[str, Any]]:
    """One row for each concurrency and arm."""
    base = names[-1]  # the plain arm, where there is one
    first = runs[base, concurrencies[0]]
    rows = []
    for concurrency in concurrencies:
        for name in names:
            own = runs[name, concurrency]
            plain = runs[base, concurrency] if name != PLAIN and base == PLAIN else ()
            row = {
                "server": name,
                "concurrency": concurrency,
                **_figures(own),
                **_ratio(own, plain).columns("speedup"),
                **_ratio(own, runs.get((base, 1), ())).columns("of_one_at_a_time"),
                "num_differing": sum(map(_num_differing, own, first)),
            }
            rows.append(row)
    return rows


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    whole = list(chain.from_iterable(run.whole for run in runs))
    seconds = sum(run.seconds for run in runs)
    counts = [_sum(each) for each in zip(*(run.counts for run in runs), strict=True)]
    told = {n: count for n, count in zip(DRAFT_COUNTS, counts, strict=True) if count is not None}
    rates = DecodeCounts(**told) if "num_accepted_tokens" in told else DecodeCounts()
    stats = [answer.stats for answer in whole]
    return {
        "num_requests": sum(len(run.answers) for run in runs),
        "num_failed": sum(len(run.faults) for run in runs),
        "faults": sorted({fault for run in runs for fault in run.faults}),
        "seconds": seconds,
        "requests_per_second": len(whole) / seconds,
        "tokens_per_second": sum(one.num_output_tokens for one in stats) / seconds,
        "ttft_ms": _spread([one.ttft_ms for one in stats if one.ttft_ms is not None]),
        "inter_token_ms": _spread(list(chain.from_iterable(map(_gaps_ms, whole)))),
        "tpot_ms": _spread([ms for one in stats if (ms := _tpot_ms(one)) is not None]),
        "num_reused_tokens": _sum([one.told("num_reused_tokens") for one in stats]),
        **dict(zip(DRAFT_COUNTS, counts, strict=True)),
        "acceptance_rate": rates.acceptance_rate,
        "mean_accepted_length": rates.mean_accepted_length,
        "batch": runs[-1].batch,
    }


def _gaps_ms(answer: Answer) -> list[float]:
    """Between the events of its stream."""
    return [1000.0 * (after_s - before_s) for before_s, after_s in pairwise(answer.arrived_s)]


def _tpot_ms(stats: TurnStats) -> float | None:
    num_after_first = stats.num_output_tokens - 1
    return stats.decode_ms / num_after_first if num_after_first > 0 else None


def _ratio(runs: Sequence[Run], others: Sequence[Run]) -> IntervalEstimate:
    """Tokens over time, runs over others, each repetition paired; unknown without others."""
    if not others:
        return IntervalEstimate()
    return rate_ratio([run.timed for run in runs], [run.timed for run in others])


def _num_differing(run: Run, first: Run) -> int:
    """Replies whose text is not that of the first run."""
    pairs = zip(run.answers, first.answers, strict=True)
    return sum(None not in (a, b) and a.text != b.text for a, b in pairs)  # type: ignore[union-attr]
