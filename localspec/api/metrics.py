"""/metrics for Prometheus: vLLM's names where vLLM has one, ours for what only localspec knows.

Contract: every turn counts, of pages and of programs, when it has ended; nothing is done while it
runs. Gauges are read when they are asked for. The counters of a loaded model are there from 0 on,
for Prometheus sees no growth in a first value. What is not known of a turn is left out, so a ratio
of two sums is of the turns that have both: `localspec:plain_reply_seconds` over
`localspec:compared_reply_seconds` is the speedup, accepted over drafted tokens the acceptance rate.

Source: docs.vllm.ai, "Production metrics"; the definitions are those of `backend.TurnStats`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from localspec.chat.service import ChatService, Reply
from localspec.core.decoding import FinishReason, Step
from localspec.core.filling import guesses_of
from localspec.record.rows import API, PAGE

MODEL = ("model_name", "engine")  # vLLM's labels; one engine runs here
ENGINE = "0"
MILLISECONDS = 1000.0
UNDER_WAY, IN_QUEUE = "Replies under way.", "Replies that wait."
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
POSITIONS = tuple(str(place) for place in range(16))  # Longer drafts are rare.
# Each counter: what it is, and its further labels with the values that are known at the start; for
# "drafter" these are the drafters that are loaded.
COUNTERS: Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]] = {
    "vllm:request_success": (
        "Replies that ended.", {"finished_reason": ("stop", "length", "abort", "error")}
    ),
    "vllm:prompt_tokens": ("Tokens of prompts.", {}),
    "vllm:generation_tokens": ("Tokens of replies.", {}),
    "vllm:prefix_cache_hits": ("Prompt tokens found.", {}),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up.", {}),
    "vllm:spec_decode_num_drafts": ("Rounds that drafted.", {}),
    "vllm:spec_decode_num_draft_tokens": ("Tokens drafted.", {}),
    "vllm:spec_decode_num_accepted_tokens": ("Of these, accepted.", {}),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "Accepted, by place in the draft.", {"position": POSITIONS}
    ),
    "localspec:replies": ("Replies by who asked.", {"source": (PAGE, API)}),
    "localspec:plain_reply_seconds": ("Of compared replies, undrafted.", {}),
    "localspec:compared_reply_seconds": ("Of compared replies.", {}),
    "localspec:exploration_seconds": (
        "Lost by rounds that try out, against plain decoding.", {}
    ),
    "localspec:accepted_tokens": ("Draft tokens accepted.", {"drafter": ()}),
    "localspec:rejected_tokens": ("Draft tokens not accepted.", {"drafter": ()}),
    "localspec:energy_joules": ("Of the card in replies.", {}),
}  # fmt: skip
UNSURE = ("localspec:energy_joules",)  # A card may have no counter, which is not 0 joules.
COUNTED = {  # Of a turn: the counter and the figure.
    "vllm:prompt_tokens": "num_prompt_tokens",
    "vllm:generation_tokens": "num_output_tokens",
    "vllm:prefix_cache_hits": "num_reused_tokens",
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
    "localspec:energy_joules": "energy_joules",
}
TIMED = {
    "vllm:time_to_first_token_seconds": "ttft_ms",
    "vllm:e2e_request_latency_seconds": "reply_ms",
    "vllm:request_prefill_time_seconds": "prefill_ms",
    "vllm:request_decode_time_seconds": "decode_ms",
}
# Each histogram: its buckets, and its further labels as above.
HISTOGRAMS: Mapping[str, tuple[Sequence[float], Mapping[str, tuple[str, ...]]]] = {
    **{name: (SECONDS, {}) for name in TIMED},
    "vllm:inter_token_latency_seconds": (TOKEN_SECONDS, {}),
    "localspec:draft_length_tokens": (LENGTHS, {"drafter": ()}),
}
FINISHED: dict[FinishReason | None, str] = {
    "eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort",
}  # fmt: skip


class Metrics:
    """Those of one service. Counts from now on."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._registry = registry = CollectorRegistry()
        self._counters = {
            name: Counter(name, told, (*MODEL, *more), registry=registry)
            for name, (told, more) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, _said(name), (*MODEL, *more), registry=registry, buckets=buckets)
            for name, (buckets, more) in HISTOGRAMS.items()
        }
        self._memory = Gauge("localspec:memory_bytes", "Held.", (*MODEL, "part"), registry=registry)
        self._running = Gauge("vllm:num_requests_running", UNDER_WAY, MODEL, registry=registry)
        self._waiting = Gauge("vllm:num_requests_waiting", IN_QUEUE, MODEL, registry=registry)
        self._reading = threading.Lock()
        service.worker.when_ended = self.count

    def text(self) -> bytes:
        """In Prometheus' text format."""
        with self._reading:
            self._begin()
            self._look()
            return generate_latest(self._registry)

    def _begin(self) -> None:
        """Let the counters of what is loaded be there, at 0 where they are new. A server may not
        tell a figure, and the counter of that is never there."""
        known = self._service.lifecycle.known
        if known is None or known.server is not None:
            return
        drafters = tuple(one.name for one in known.drafters if one.is_available)
        for name, (_, more) in (*COUNTERS.items(), *HISTOGRAMS.items()):
            if name not in UNSURE:
                metric = self._counters.get(name) or self._histograms[name]
                for labels in product(*(values or drafters for values in more.values())):
                    metric.labels(known.target, ENGINE, *labels)

    def _look(self) -> None:
        """Read the gauges."""
        known, worker = self._service.lifecycle.known, self._service.worker
        model = ("" if known is None else known.target, ENGINE)
        for gauge in (self._memory, self._running, self._waiting):
            gauge.clear()  # of a model that was there before
        self._running.labels(*model).set(len(worker.running))
        self._waiting.labels(*model).set(worker.num_waiting)
        for part in ("target", "kv_cache", "drafters"):
            self._memory.labels(*model, part).set(self._held_bytes(part))

    def count(self, reply: Reply) -> None:
        """A reply that has ended."""
        turn, end = reply.pending.settings, reply.pending.end
        model = (turn.model if turn is not None else None) or ""
        reason = FINISHED.get(reply.view.finish_reason, "error")
        self._add("vllm:request_success", 1, model, reason)
        source = reply.pending.conversation.source
        self._add("localspec:replies", 1, model, source)
        stats = None if end is None else end.stats
        if end is None or stats is None:
            return
        for metric, name in COUNTED.items():
            self._add(metric, stats.told(name), model)
        if stats.told("num_reused_tokens") is not None:
            self._add("vllm:prefix_cache_queries", stats.num_prompt_tokens, model)
        if stats.plain_reply_ms is not None:
            self._add("localspec:plain_reply_seconds", _s(stats.plain_reply_ms), model)
            self._add("localspec:compared_reply_seconds", _s(stats.reply_ms), model)
        for metric, name in TIMED.items():
            self._see(metric, _s(stats.told(name)), model)
        self._count_rounds(end.steps, model)

    def _count_rounds(self, steps: Sequence[Step], model: str) -> None:
        for number, step in enumerate(steps):
            for place in range(step.num_output_tokens):
                if number or place:  # the first token is TTFT's
                    seconds = _s(step.round_ms / step.num_output_tokens)
                    self._see("vllm:inter_token_latency_seconds", seconds, model)
            if step.is_probe and step.plain_ms is not None:
                lost = _s(max(0.0, step.round_ms - step.plain_ms))
                self._add("localspec:exploration_seconds", lost, model)
            if step.num_draft_tokens:
                self._count_draft(step, model)

    def _count_draft(self, step: Step, model: str) -> None:
        self._see("localspec:draft_length_tokens", step.num_draft_tokens, model, step.drafter)
        for drafter, guesses in guesses_of(step).items():
            accepted = guesses.num_accepted_tokens
            self._add("localspec:accepted_tokens", accepted, model, drafter)
            rejected = guesses.num_draft_tokens - accepted
            self._add("localspec:rejected_tokens", rejected, model, drafter)
        for place in range(step.num_accepted_tokens):
            self._add("vllm:spec_decode_num_accepted_tokens_per_pos", 1, model, str(place))

    def _add(self, name: str, value: float | None, model: str, *labels: str) -> None:
        if value is not None:
            self._counters[name].labels(model, ENGINE, *labels).inc(value)

    def _see(self, name: str, value: float | None, model: str, *labels: str) -> None:
        if value is not None:
            self._histograms[name].labels(model, ENGINE, *labels).observe(value)

    def _held_bytes(self, part: str) -> float:
        loaded = self._service.lifecycle.loaded
        if loaded is None:
            return 0.0
        target, kv_cache = loaded.target_bytes or 0, loaded.kv_bytes or 0
        drafters = (loaded.held_bytes or 0) - target - kv_cache
        return float({"target": target, "kv_cache": kv_cache, "drafters": drafters}[part])


def _said(name: str) -> str:
    return name.partition(":")[2].replace("_", " ")


def _s(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / MILLISECONDS
