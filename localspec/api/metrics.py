"""/metrics for Prometheus: vLLM's names where vLLM has one, ours for what only localspec knows.

Contract: every turn counts, of pages and of programs, when it has ended; nothing is done while it
runs. Gauges are read when they are asked for. What is not known of a turn is left out, so a ratio
of two sums is of the turns that have both: `localspec:plain_reply_seconds` over
`localspec:compared_reply_seconds` is the speedup, accepted over drafted tokens the acceptance rate.

Source: docs.vllm.ai, "Production metrics"; the definitions are those of `backend.TurnStats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from localspec.chat.service import ChatService, Reply
from localspec.core import FinishReason, Step

MODEL = ("model_name", "engine")  # vLLM's labels; one engine runs here
ENGINE = "0"
MILLISECONDS = 1000.0
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
COUNTED = (  # of a turn: the metric, what it is, and the figure
    ("vllm:prompt_tokens", "Tokens of prompts.", "num_prompt_tokens"),
    ("vllm:generation_tokens", "Tokens of replies.", "num_output_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found.", "num_reused_tokens"),
    ("vllm:spec_decode_num_drafts", "Rounds that drafted.", "num_drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", "num_draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Of these, accepted.", "num_accepted_tokens"),
    ("localspec:energy_joules", "Of the card in replies.", "energy_joules"),
)
TIMED = {
    "vllm:time_to_first_token_seconds": "ttft_ms",
    "vllm:e2e_request_latency_seconds": "reply_ms",
    "vllm:request_prefill_time_seconds": "prefill_ms",
    "vllm:request_decode_time_seconds": "decode_ms",
}
FINISHED: dict[FinishReason | None, str] = {
    "eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort",
}  # fmt: skip


class Metrics:
    """Those of one service. Counts from now on."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._gauges()
        service.worker.when_ended = self.count

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def count(self, reply: Reply) -> None:
        """A reply that has ended."""
        turn, end = reply.pending.settings, reply.pending.end
        model = (turn.model if turn is not None else None) or ""
        reason = FINISHED.get(reply.view.finish_reason, "error")
        self._add("vllm:request_success", "Replies that ended.", 1, model, finished_reason=reason)
        source = reply.pending.conversation.source
        self._add("localspec:replies", "Replies by who asked.", 1, model, source=source)
        stats = None if end is None else end.stats
        if end is None or stats is None:
            return
        for metric, what, name in COUNTED:
            self._add(metric, what, stats.told(name), model)
        if stats.told("num_reused_tokens") is not None:
            looked_up = "vllm:prefix_cache_queries"
            self._add(looked_up, "Prompt tokens looked up.", stats.num_prompt_tokens, model)
        if stats.plain_reply_ms is not None:
            plain, own = "localspec:plain_reply_seconds", "localspec:compared_reply_seconds"
            self._add(plain, "Of compared replies, undrafted.", _s(stats.plain_reply_ms), model)
            self._add(own, "Of compared replies.", _s(stats.reply_ms), model)
        for metric, name in TIMED.items():
            self._see(metric, SECONDS, _s(stats.told(name)), model)
        self._count_rounds(end.steps, model)

    def _count_rounds(self, steps: Sequence[Step], model: str) -> None:
        for number, step in enumerate(steps):
            for place in range(step.num_output_tokens):
                if number or place:  # the first token is TTFT's
                    seconds = _s(step.round_ms / step.num_output_tokens)
                    self._see("vllm:inter_token_latency_seconds", TOKEN_SECONDS, seconds, model)
            if step.is_probe and step.plain_ms is not None:
                lost = _s(max(0.0, step.round_ms - step.plain_ms))
                told = "Lost by rounds that try out, against plain decoding."
                self._add("localspec:exploration_seconds", told, lost, model)
            if step.num_draft_tokens:
                self._count_draft(step, model)

    def _count_draft(self, step: Step, model: str) -> None:
        accepted = step.num_accepted_tokens
        rejected = step.num_draft_tokens - accepted
        by = {"drafter": step.drafter}
        self._see("localspec:draft_length_tokens", LENGTHS, step.num_draft_tokens, model, **by)
        self._add("localspec:accepted_tokens", "Draft tokens accepted.", accepted, model, **by)
        self._add("localspec:rejected_tokens", "Draft tokens not accepted.", rejected, model, **by)
        for place in range(accepted):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            self._add(name, "Accepted, by place in the draft.", 1, model, position=str(place))

    # made when they first have a value

    def _add(self, name: str, told: str, value: float | None, model: str, **more: str) -> None:
        if value is None:
            return
        if name not in self._counters:
            labels = (*MODEL, *more)
            self._counters[name] = Counter(name, told, labels, registry=self._registry)
        self._counters[name].labels(model, ENGINE, *more.values()).inc(value)

    def _see(
        self,
        name: str,
        buckets: Sequence[float],
        value: float | None,
        model: str,
        **more: str,
    ) -> None:
        if value is None:
            return
        if name not in self._histograms:
            told = name.partition(":")[2].replace("_", " ")
            self._histograms[name] = Histogram(
                name, told, (*MODEL, *more), registry=self._registry, buckets=buckets
            )
        self._histograms[name].labels(model, ENGINE, *more.values()).observe(value)

    def _gauges(self) -> None:
        service = self._service

        memory = Gauge("localspec:memory_bytes", "Held.", ("part",), registry=self._registry)
        for part in ("target", "kv_cache", "drafters"):
            memory.labels(part).set_function(partial(self._held_bytes, part))
        for name, told, read in (
            ("running", "Replies under way.", lambda: float(len(service.worker.running))),
            ("waiting", "Replies that wait.", lambda: float(service.worker.num_waiting)),
        ):
            gauge = Gauge(f"vllm:num_requests_{name}", told, registry=self._registry)
            gauge.set_function(read)

    def _held_bytes(self, part: str) -> float:
        loaded = self._service.lifecycle.loaded
        if loaded is None:
            return 0.0
        target, kv_cache = loaded.target_bytes or 0, loaded.kv_bytes or 0
        drafters = (loaded.held_bytes or 0) - target - kv_cache
        return float({"target": target, "kv_cache": kv_cache, "drafters": drafters}[part])


def _s(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / MILLISECONDS
