"""What a reader waits for and what a token costs: the columns beside the rates.

Contract: `columns` are pure functions of one arm's runs; what no run knows is None. Times of the
host and shares of bandwidth are measured apart (measures.extras), and `with_extras` fills them
into a finished result. Waits between tokens are pooled over all replies of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from localspec.arithmetic import percentile
from localspec.bench.figures import inter_token_ms
from localspec.bench.stage import Run
from localspec.bench.table import DASH, aligned, shown
from localspec.core import OFF

TITLE = "Latency and cost, over all prompts"
HEADINGS = (
    "arm", "T", "first token ms", "prefill tokens/s", "wait P50 ms", "P95", "P99",
    "host ms a round", "peak memory", "joules a token", "of bandwidth",
)  # fmt: skip
GIB = 2**30


def columns(runs: Sequence[Run]) -> dict[str, Any]:
    """The part of a row that is about time and cost."""
    waits = [wait for run in runs for wait in inter_token_ms(run.token_times_ms)]
    first = [run.ttft_ms for run in runs if run.ttft_ms is not None]
    peaks = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
    low, high = _quartiles([r.tokens_per_second for r in runs if r.tokens_per_second is not None])
    return {
        "rate_low": low,
        "rate_high": high,
        "ttft_ms": median(first) if first else None,
        "prefill_tokens_per_second": _prefill_rate(runs),
        "itl_p50_ms": percentile(waits, 0.50),
        "itl_p95_ms": percentile(waits, 0.95),
        "itl_p99_ms": percentile(waits, 0.99),
        "host_ms_per_round": _host_ms(runs),
        "peak_memory_bytes": max(peaks, default=None),
        "energy_joules_per_token": _joules_a_token(runs),
        "mean_context_length": _mean_context(runs),
        "bandwidth_share": None,
    }


def _quartiles(rates: Sequence[float]) -> tuple[float | None, float | None]:
    """Half of the prompts lie between these rates; None below two prompts."""
    if len(rates) < 2:
        return None, None
    low, _, high = quantiles(rates, n=4, method="inclusive")
    return low, high


def _prefill_rate(runs: Sequence[Run]) -> float | None:
    timed = [
        (run.num_prompt_tokens, run.prefill_ms)
        for run in runs
        if run.num_prompt_tokens is not None and run.prefill_ms
    ]
    total_ms = sum(ms for _, ms in timed)
    return 1000.0 * sum(count for count, _ in timed) / total_ms if timed else None


def _host_ms(runs: Sequence[Run]) -> float | None:
    timed = [(r.host_ms, r.num_rounds) for r in runs if r.host_ms is not None and r.num_rounds]
    return sum(ms for ms, _ in timed) / sum(count for _, count in timed) if timed else None


def _joules_a_token(runs: Sequence[Run]) -> float | None:
    """Energy of the decoding alone, like the rate."""
    known = [(r.energy_joules, len(r.tokens)) for r in runs if r.energy_joules is not None]
    num_tokens = sum(count for _, count in known)
    return sum(joules for joules, _ in known) / num_tokens if num_tokens else None


def _mean_context(runs: Sequence[Run]) -> float | None:
    """Tokens before the one decoded, in the mean over all decoded tokens."""
    known = [(r.num_prompt_tokens, len(r.tokens)) for r in runs if r.num_prompt_tokens is not None]
    num_tokens = sum(count for _, count in known)
    total = sum(count * (prompt + (count - 1) / 2) for prompt, count in known)
    return total / num_tokens if num_tokens else None


def with_extras(result: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a comparison with what `measures.extras` found, filled into its rows too."""
    host = {(each["arm"], each["temperature"]): each["host_ms_per_round"]
            for each in extras["host"]}  # fmt: skip
    made = list[dict[str, Any]]()
    for row in result["rows"]:
        host_ms = host.get((row["arm"], row["temperature"]), row["host_ms_per_round"])
        share = bandwidth_share(row, extras) if row["arm"] == OFF else None
        made.append({**row, "host_ms_per_round": host_ms, "bandwidth_share": share})
    return {**result, "rows": made, **extras}


def bandwidth_share(row: Mapping[str, Any], extras: Mapping[str, Any]) -> float | None:
    """Bytes that plain decoding reads a second, over the bytes that can be read a second."""
    read, limit = extras["bytes_per_token"], extras["bandwidth_bytes_per_second"]
    rate, context = row["tokens_per_second"], row["mean_context_length"]
    if read is None or limit is None or rate is None or context is None:
        return None
    num_bytes = read["weight_bytes"] + read["kv_bytes_per_context_token"] * context
    return float(num_bytes * rate / limit)


def table(rows: Sequence[Mapping[str, Any]], task: str) -> list[str]:
    """One line for each arm and temperature over this task; columns that nobody knows are left
    out, and nothing is shown when no column is left."""
    chosen = [row for row in rows if row["task"] == task and row["num_prompts"]]
    lines = [_cells(row) for row in chosen]
    kept = [i for i in range(len(HEADINGS)) if i < 2 or any(line[i] != DASH for line in lines)]
    if len(kept) == 2:
        return []
    picked = [[line[i] for i in kept] for line in (HEADINGS, *lines)]
    return ["", TITLE, *aligned(picked)]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    peak = row["peak_memory_bytes"]
    return (
        row["arm"],
        f"{row['temperature']:g}",
        shown(row["ttft_ms"], ".1f"),
        shown(row["prefill_tokens_per_second"], ".0f"),
        shown(row["itl_p50_ms"], ".2f"),
        shown(row["itl_p95_ms"], ".2f"),
        shown(row["itl_p99_ms"], ".2f"),
        shown(row["host_ms_per_round"], ".3f"),
        DASH if peak is None else f"{peak / GIB:.2f} GiB",
        shown(row["energy_joules_per_token"], ".3g"),
        shown(row["bandwidth_share"], ".0%"),
    )
