"""One message, one reply, without a page: what `generate` prints.

Contract: loads, measures costs first where the choice of drafter is the controller's and some of
them were never measured, and returns plain JSON data. With a home the learnt state is taken up
from there and written back; without one the run starts cold. Nothing else is logged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from localspec.backend import Chunk, Request, TurnStats
from localspec.chat.local import LocalBackend
from localspec.config import settings_for
from localspec.errors import LocalspecError
from localspec.leniency import as_data, label
from localspec.load import open_local_backend
from localspec.options import LoadOptions
from localspec.record.store import STATE_KEY, Store
from localspec.workloads import Decision


def answer(options: LoadOptions, request: Request, home: Path | None) -> dict[str, Any]:
    """The reply of `request` as the JSON object of `generate`. Raises LocalspecError."""
    store = Store.open(settings_for(home).database) if home is not None else None
    try:
        state = store.load_state(STATE_KEY) if store is not None else None
        backend = open_local_backend(options, state, _silent)
        _notify((*(store.notices if store is not None else ()), *backend.describe().notices))
        if backend.lacks_costs(request):
            for _ in backend.calibrate(threading.Event()):
                pass
        result = collect(backend, request)
        if store is not None:
            store.save_state(STATE_KEY, backend.snapshot())
        return result
    finally:
        if store is not None:
            store.close()


def collect(backend: LocalBackend, request: Request) -> dict[str, Any]:
    """Run the turn to its end. Raises LocalspecError when it ended in an error."""
    chunks = list(backend.generate(request, threading.Event()))
    last = chunks[-1]
    if last.finish_reason == "error":
        raise LocalspecError(last.error or "The engine stopped without saying why.")
    return reply_json(chunks, last.stats)


def reply_json(chunks: list[Chunk], stats: TurnStats) -> dict[str, Any]:
    """The fixed form of `generate --json`."""
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "tokens": [token for chunk in chunks for token in chunk.tokens],
        "provenance": [name for chunk in chunks for name in chunk.provenance],
        "finish_reason": chunks[-1].finish_reason,
        "stats": stats_json(stats),
    }


def stats_json(stats: TurnStats) -> dict[str, Any]:
    return {
        "drafter": stats.drafter,
        "num_output_tokens": stats.num_output_tokens,
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "draft_share": stats.draft_share,
        "mean_accepted_length": stats.mean_accepted_length,
        "tokens_per_second": stats.tokens_per_second,
        "ttft_ms": stats.ttft_ms,
        "prefill_ms": stats.prefill_ms,
        "decode_ms": stats.decode_ms,
        "speedup": stats.speedup,
        "exact": stats.exact,
        "num_lenient_tokens": stats.num_lenient_tokens,
        "reason": stats.reason,
    }


def labelled(result: dict[str, Any], decision: Decision) -> dict[str, Any]:
    """The result with the kind of text, the rule and what is to be said of it; `label` is "exact"
    for an exact reply."""
    stats, rule = result["stats"], decision.leniency
    said = label(stats["num_lenient_tokens"], stats["num_output_tokens"])
    return {
        **result,
        "workload": decision.workload.name,
        "is_workload_recognised": decision.is_recognised,
        "leniency": None if rule is None else as_data(rule),
        "label": "exact" if rule is None else said,
    }


def note_of(result: dict[str, Any], is_leniency_asked: bool) -> str:
    """The line below a reply: how it was checked, where that was not exactly or not as asked."""
    if result["leniency"] is not None:
        return f"\n[{result['label']}; kind of text: {result['workload']}]"
    return f"\n[exact: {result['workload']} has no threshold]" if is_leniency_asked else ""


def _silent(phrase: str) -> None:
    """Phases are for people who watch; a command prints its result."""


def _notify(notices: Iterable[str]) -> None:
    for notice in notices:
        print(notice, file=sys.stderr)
