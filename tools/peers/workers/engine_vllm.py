"""vLLM on the CPU behind peers/workers/serve: its engine in this process, stepped by hand.

Contract: opened with {"target", "context_length", "dtype", "speculative"}; one way of
speculating for the life of the process, since the engine is built around it. One sequence at a
time, no prefix cache, so that every prompt is read anew. The first token comes with the prefill.
"""

from __future__ import annotations

from importlib import import_module
from time import perf_counter
from typing import Any

COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}


class PeerEngine:
    """One LLMEngine."""

    def __init__(self, opening: dict[str, Any]) -> None:
        arguments: Any = import_module("vllm.engine.arg_utils").EngineArgs
        engine: Any = import_module("vllm.v1.engine.llm_engine").LLMEngine
        self._library: Any = import_module("vllm")
        self._kinds: Any = import_module("vllm.sampling_params").RequestOutputKind
        self._engine = engine.from_engine_args(
            arguments(
                model=opening["target"],
                skip_tokenizer_init=True,
                dtype=opening["dtype"],
                max_model_len=opening["context_length"],
                max_num_seqs=1,
                enforce_eager=False,
                enable_prefix_caching=False,
                speculative_config=opening["speculative"],
                disable_log_stats=opening["speculative"] is None,
            )
        )
        self._is_counting = opening["speculative"] is not None
        self._num_requests = 0
        self.facts = {"version": self._library.__version__}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        before = self._counters()
        self._num_requests += 1
        prompt = {"prompt_token_ids": request["prompt"]}
        self._engine.add_request(str(self._num_requests), prompt, self._sampling(request))
        tokens, times_s = list[int](), list[float]()
        while self._engine.has_unfinished_requests():
            new = [token for output in self._engine.step() for token in output.outputs[0].token_ids]
            tokens += new
            times_s += [perf_counter()] * len(new)
        after = self._counters()
        return {
            "tokens": tokens,
            "token_times_ms": [1000.0 * (time_s - times_s[0]) for time_s in times_s],
            "is_first_in_prefill": True,
            **{name: after[name] - before[name] for name in after},
        }

    def _sampling(self, request: dict[str, Any]) -> Any:
        return self._library.SamplingParams(
            temperature=request["temperature"],
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=request["seed"] if request["temperature"] > 0.0 else None,
            max_tokens=request["max_tokens"],
            stop_token_ids=request["end_ids"],
            ignore_eos=True,  # the ends are named above; the folder's own are not asked
            detokenize=False,
            output_kind=self._kinds.DELTA,
        )

    def _counters(self) -> dict[str, int]:
        """What was drafted so far; nothing where nothing drafts."""
        if not self._is_counting:
            return {}
        counted = {metric.name: metric for metric in self._engine.get_metrics()}
        return {
            ours: int(counted[theirs].value)
            for theirs, ours in COUNTERS.items()
            if theirs in counted
        }
