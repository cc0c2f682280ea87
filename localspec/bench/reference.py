"""The `transformers` arm: the library's own `generate` on the very module our engine runs.

Contract: same weights, precision, threads and prompt ids; the library's default cache. Each
token's time is noted as it is handed out. The first one comes with the prefill, so decoding is
timed from there: the mean time of the later forwards, taken for every forward. That is our own
definition (all decoded tokens over all decode forwards, prefill apart) without the set-up of
`generate`, which is charged to nobody.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from localspec.bench.stage import Case, Run, Stage
from localspec.core import SamplingParams
from localspec.errors import ModelError
from localspec.forward.model import CausalLM


class TokenClock(BaseStreamer):
    """Notes when each decoded token was handed out, in seconds."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._has_seen_prompt = False

    def put(self, value: Any) -> None:
        if self._has_seen_prompt:
            self.times_s.append(perf_counter())
        self._has_seen_prompt = True

    def end(self) -> None:
        """Nothing to close."""


def run_transformers(stage: Stage, case: Case, sampling: SamplingParams, max_tokens: int) -> Run:
    """One reply by transformers. Raises ModelError when the target is not a transformers module."""
    target = stage.engine.target
    if not isinstance(target, CausalLM):
        raise ModelError("the target does not run on transformers here.")
    clock = TokenClock()
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    prompt = torch.tensor([case.prompt], device=target.device)  # [1, P]
    output = target.module.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=_generation_config(stage.end_ids, sampling, max_tokens),
        streamer=clock,
    )
    decided = tuple(output[0, prompt.shape[1] :].tolist())
    has_ended = bool(decided) and decided[-1] in stage.end_ids
    tokens = decided[:-1] if has_ended else decided
    return Run(tokens, decided, decode_ms(clock.times_s))


def decode_ms(times_s: list[float]) -> float | None:
    """Time of all forwards, the first at the mean of the others; None below two tokens."""
    if len(times_s) < 2:
        return None
    mean_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
    return 1000.0 * mean_s * len(times_s)


def _generation_config(
    end_ids: frozenset[int], sampling: SamplingParams, max_tokens: int
) -> GenerationConfig:
    """Every value set, so that nothing of the model folder's own settings is taken over."""
    ends = sorted(end_ids)
    drawn = (
        {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        if sampling.temperature > 0.0
        else {"do_sample": False}
    )
    return GenerationConfig(
        max_new_tokens=max_tokens,
        repetition_penalty=1.0,
        use_cache=True,
        num_beams=1,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **drawn,
    )
