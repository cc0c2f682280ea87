"""vLLM's CPU build as an arm: one process for each way of speculating.

Contract: bench.runs.Runner. The engine runs in the worker's own process with as many threads as
ours: its default of several processes would keep one core for its scheduler. Intel's OpenMP is
loaded first, as its manual asks for speed. With speculation only greedy decoding is run: in this
build (0.32.0) sampled text then is not the target's at all (over 300 seeds the second token
differed from plain sampling by a total variation of 0.99), so a rate of it would mean nothing. Such
a run is empty and its figures are unknown.

Not here: what the worker does with a request (workers/engine_vllm).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from localspec.bench.cases import Case
from localspec.bench.runs import BenchEngine, MeasuredReply
from localspec.core.decoding import SamplingParams
from localspec.core.errors import ModelError
from localspec.forward.load import DTYPES
from tools.peers.environments import GIB, python_of
from tools.peers.replies import reply_of, request_for
from tools.peers.worker import WORKERS, PeerWorker

OPENING_LIMIT_S = 900.0  # the first start compiles
RUN_LIMIT_S = 600.0
DEFAULT_DRAFT_LENGTH = 3
DEFAULT_LOOKUP_LENGTH = 5


class VllmPeer:
    """One engine, kept alive for the whole comparison."""

    def __init__(
        self, bench: BenchEngine, home: Path, num_threads: int, mode: str, length: int | None
    ) -> None:
        """Raises SetupError where it is not installed, ModelError where it cannot run this."""
        speculative, told = _speculative(bench, mode, length)
        self._end_ids = bench.end_ids
        python = python_of("vllm", home)
        log = home / "peers" / "logs" / f"vllm-{mode}{length or ''}.log"
        self._worker = PeerWorker(
            "vLLM",
            [
                *_environment(bench, home, num_threads, python),
                str(python),
                str(WORKERS / "serve.py"),
                "engine_vllm",
            ],
            {
                "target": str(bench.target_folder),
                "context_length": bench.context_length,
                "dtype": bench.precision,
                "speculative": speculative,
            },
            log,
            OPENING_LIMIT_S,
        )
        self._is_speculative = speculative is not None
        limit = "; only greedy: sampled, its text is not the target's" if speculative else ""
        self.note = f"vLLM {self._worker.facts['version']} on the CPU, {told}{limit}"

    def run(self, case: Case, sampling: SamplingParams, max_tokens: int) -> MeasuredReply:
        if self._is_speculative and sampling.temperature > 0.0:
            return MeasuredReply(tokens=(), decided=(), decode_ms=None)
        request = request_for(case, sampling, max_tokens, self._end_ids)
        return reply_of(self._worker.ask(request, RUN_LIMIT_S), self._end_ids)

    def close(self) -> None:
        self._worker.close()


def is_linux() -> bool:
    return sys.platform == "linux"


def _speculative(
    bench: BenchEngine, mode: str, length: int | None
) -> tuple[Mapping[str, Any] | None, str]:
    """vLLM's own settings for this arm, and in words. Raises ModelError."""
    if not is_linux():
        raise ModelError("vLLM's CPU build is compared on Linux only.")
    if bench.target_folder is None or bench.precision not in DTYPES:
        raise ModelError(
            f"vLLM needs a model folder in {', '.join(DTYPES)}; this comparison runs in "
            f"{bench.precision}."
        )
    if mode == "plain":
        return None, "without speculation"
    if mode == "lookup":
        count = length or DEFAULT_LOOKUP_LENGTH
        lookup = {
            "method": "ngram",
            "num_speculative_tokens": count,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
        return lookup, f"n-gram lookup of {count}"
    if bench.draft_folder is None:
        raise ModelError("there is no draft model that vLLM could be assisted by.")
    count = length or DEFAULT_DRAFT_LENGTH
    draft = {
        "method": "draft_model",
        "model": str(bench.draft_folder),
        "num_speculative_tokens": count,
    }
    return draft, f"draft model, always {count} tokens"


def _environment(bench: BenchEngine, home: Path, num_threads: int, python: Path) -> list[str]:
    """A command that sets what the libraries read when they are loaded."""
    # Room for the target's cache and a draft's of the same size, and some for its own pages.
    kv_gib = 1 + ceil(2 * bench.engine.target.cache.kv_bytes / GIB)
    settings = {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(home / "peers" / "vllm-cache"),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "KMP_BLOCKTIME": "5",  # ms; idle threads must not burn while another side is timed
        "KMP_TPAUSE": "0",
    }
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        settings["LD_PRELOAD"] = str(openmp)
    return ["env", *(f"{name}={value}" for name, value in settings.items())]
