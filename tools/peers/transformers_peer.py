"""The `transformers` arms: the library's own `generate`, plain and assisted.

Contract: same weights, precision, threads and prompt ids; the library's default cache. It runs
the very module our engine runs, or where ours has none, its own of the same folder. Tokens are
noted as they are handed out. The first come with the prefill, so decoding is timed from there
(replies.after_first_ms), without the set-up of `generate`, which is charged to nobody.

Assisted by a draft model the library chooses its lengths by its own default settings, or always
drafts `num_draft_tokens`; it reads those settings from the draft's generation config.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from localspec.bench.cases import Case
from localspec.bench.runs import BenchEngine, MeasuredReply, MemoryGauge
from localspec.core.decoding import SamplingParams
from localspec.core.errors import ModelError
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.forward.by_transformers import load_module
from localspec.forward.load import DTYPES
from localspec.forward.model import CausalLM
from tools.peers.replies import after_first_ms, output_of

DEFAULT_LOOKUP_LENGTH = 10  # as the library's own examples have it


class TokenClock(BaseStreamer):
    """Notes when each decoded token was handed out, in seconds; those of one round together."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._has_seen_prompt = False

    def put(self, value: Any) -> None:
        if self._has_seen_prompt:
            self.times_s += [perf_counter()] * value.numel()
        self._has_seen_prompt = True

    def end(self) -> None:
        """Nothing to close."""


class Modules:
    """transformers' modules of the compared models, found or loaded when first asked for."""

    def __init__(self, bench: BenchEngine, num_threads: int) -> None:
        self._bench = bench
        self.num_threads = num_threads
        self._loaded = dict[str, Any]()

    @property
    def end_ids(self) -> frozenset[int]:
        return self._bench.end_ids

    @property
    def target(self) -> Any:
        """Raises ModelError where transformers cannot run the target."""
        return self._module("target", self._bench.engine.target, self._bench.target_folder)

    @property
    def draft(self) -> Any:
        """Raises ModelError where there is no draft model."""
        drafter = self._bench.engine.drafters.get("draft_model")
        if drafter is None:
            raise ModelError("there is no draft model that transformers could be assisted by.")
        assert isinstance(drafter, DraftModelDrafter), "the registry's own class"
        return self._module("draft", drafter.model, self._bench.draft_folder)

    def _module(self, name: str, model: Any, folder: Path | None) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._found(name, model, folder)
        return self._loaded[name]

    def _found(self, name: str, model: Any, folder: Path | None) -> Any:
        if isinstance(model, CausalLM):
            return model.module
        if folder is None:
            raise ModelError(f"the {name} does not run on transformers here.")
        if self._bench.precision not in DTYPES:
            raise ModelError(
                f"transformers cannot load a {self._bench.precision} copy of the {name} beside "
                "ours. Compare in float32, bfloat16 or float16."
            )
        device = self._bench.engine.target.device
        return load_module(folder, DTYPES[self._bench.precision], device)


@dataclass(frozen=True)
class TransformersPeer:
    """One way of `generate`. lookup_length: None without prompt lookup. assistant: None without
    a draft model. assistant_length: None leaves it to the library's default settings."""

    module: Any
    end_ids: frozenset[int]
    num_threads: int
    lookup_length: int | None = None
    assistant: Any = None
    assistant_length: int | None = None
    note: str = "the library's own generate"

    def run(self, case: Case, sampling: SamplingParams, max_tokens: int) -> MeasuredReply:
        memory, clock = MemoryGauge(), TokenClock()
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        prompt = torch.tensor([case.prompt], device=self.module.device)  # [1, P]
        with threads(self.num_threads), _settings_of(self.assistant, self.assistant_length):
            output = self.module.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._generation_config(sampling, max_tokens),
                streamer=clock,
                **({} if self.assistant is None else {"assistant_model": self.assistant}),
            )
        decided = tuple(output[0, prompt.shape[1] :].tolist())
        found = _reply(decided, self.end_ids, clock)
        return replace(found, peak_memory_bytes=memory.peak_bytes())

    def close(self) -> None:
        """The modules belong to what is compared."""

    def _generation_config(self, sampling: SamplingParams, max_tokens: int) -> GenerationConfig:
        """Every value set, so that nothing of the model folder's own settings is taken over."""
        ends = sorted(self.end_ids)
        drawn = (
            {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
            if sampling.temperature > 0.0
            else {"do_sample": False}
        )
        lookup = {"prompt_lookup_num_tokens": self.lookup_length} if self.lookup_length else {}
        return GenerationConfig(
            max_new_tokens=max_tokens,
            repetition_penalty=1.0,
            use_cache=True,
            num_beams=1,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            **drawn,
            **lookup,
        )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch with so many threads until the block ends."""
    own = torch.get_num_threads()
    if count == own:  # setting it again would still start the threads anew
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(own)


@contextmanager
def _settings_of(assistant: Any, length: int | None) -> Iterator[None]:
    """The draft's generation config with nothing but what this arm asks for, while it runs."""
    if assistant is None:
        yield
        return
    fixed = {
        "num_assistant_tokens": length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    own = assistant.generation_config
    assistant.generation_config = GenerationConfig(**({} if length is None else fixed))
    try:
        yield
    finally:
        assistant.generation_config = own


def _reply(decided: tuple[int, ...], end_ids: frozenset[int], clock: TokenClock) -> MeasuredReply:
    tokens = output_of(decided, end_ids)
    times_ms = tuple(1000.0 * (time_s - clock.times_s[0]) for time_s in clock.times_s)
    return MeasuredReply(
        tokens=tokens,
        decided=decided,
        decode_ms=after_first_ms(times_ms) if times_ms else None,
    )


def transformers_peer(modules: Modules, mode: str, length: int | None) -> TransformersPeer:
    """The arm of this mode. Raises ModelError where transformers cannot run it."""
    end_ids, num_threads = modules.end_ids, modules.num_threads
    if mode == "lookup":
        chosen = length or DEFAULT_LOOKUP_LENGTH
        return TransformersPeer(
            modules.target,
            end_ids,
            num_threads,
            lookup_length=chosen,
            note=f"prompt lookup of {chosen}",
        )
    if mode == "draft":
        lengths = f"always {length} tokens" if length else "its default settings"
        return TransformersPeer(
            modules.target,
            end_ids,
            num_threads,
            assistant=modules.draft,
            assistant_length=length,
            note=f"assisted by the draft model, {lengths}",
        )
    return TransformersPeer(modules.target, end_ids, num_threads)
