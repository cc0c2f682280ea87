"""llama.cpp behind peers/workers/serve: plain decoding, prompt lookup and a draft model.

Contract: opened with {"target", "draft", "context_length", "num_threads", "is_fp32"}. A request
carries "mode" (plain, lookup or draft) and "num_draft_tokens". Plain decoding calls the library
token by token without the binding's own loop, which only adds time; the speculative modes are
the binding's: `Llama.generate` verifies whatever a LlamaDraftModel proposes by drawing from the
target at each position and keeping the draft as long as it says the same, which is exact at any
temperature. The prompt but for its last token is read before the clock of decoding starts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

BATCH_LENGTH = 512


class PeerEngine:
    """One target, read once for plain decoding and once for verifying."""

    def __init__(self, opening: dict[str, Any]) -> None:
        self._library: Any = import_module("llama_cpp")
        self._opening = opening
        self._plain: Plain | None = None
        self._verifying: Any = None
        self._draft: Greedy | None = None
        if opening["draft"] is not None:
            self._draft = Greedy(self._library, self._model(opening["draft"], False))
        self.facts = {
            "version": self._library.__version__,
            "system": self._library.llama_print_system_info().decode(),
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"]
        if request["mode"] == "plain":
            if self._plain is None:
                self._plain = Plain(self._library, self._model(self._opening["target"], False))
            self._plain.read(prompt[:-1])
            prefilled = perf_counter()
            tokens, times_s = _taken(self._plain.written(prompt[-1], request), request)
            counts = dict[str, int]()
        else:
            model, counter = self._verifier(request)
            model.reset()
            if len(prompt) > 1:
                model.eval(prompt[:-1])
            counter.get_ready(prompt)
            prefilled = perf_counter()
            tokens, times_s = _taken(_generated(model, request), request)
            counts = counter.counts(len(prompt), tokens)
        return {
            "tokens": tokens,
            "token_times_ms": [1000.0 * (time_s - prefilled) for time_s in times_s],
            "is_first_in_prefill": False,
            **counts,
        }

    def _verifier(self, request: dict[str, Any]) -> tuple[Any, Counter]:
        if self._verifying is None:
            self._verifying = self._model(self._opening["target"], True)
        count = request["num_draft_tokens"]
        if request["mode"] == "lookup":
            guess = self._library.llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=count)
            counter = Counter(guess, None)
        else:
            assert self._draft is not None, "opened without a draft"
            self._draft.num_tokens = count
            counter = Counter(self._draft, self._draft)
        self._verifying.draft_model = counter
        return self._verifying, counter

    def _model(self, path: str, has_all_logits: bool) -> Any:
        # The cache is f16 as llama.cpp has it by default, except where fp32 is to be compared.
        kinds = {"type_k": 0, "type_v": 0} if self._opening["is_fp32"] else {}
        return self._library.Llama(
            model_path=path,
            n_ctx=self._opening["context_length"],
            n_batch=BATCH_LENGTH,
            n_threads=self._opening["num_threads"],
            n_threads_batch=self._opening["num_threads"],
            logits_all=has_all_logits,
            flash_attn=True,  # a third faster here; llama.cpp's own programs choose it too
            verbose=False,
            **kinds,
        )


def _taken(tokens: Iterator[int], request: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens up to an end or the limit, and when each came."""
    ends, taken, times_s = set(request["end_ids"]), list[int](), list[float]()
    for token in tokens:
        taken.append(token)
        times_s.append(perf_counter())
        if token in ends or len(taken) >= request["max_tokens"]:
            break
    return taken, times_s


def _generated(model: Any, request: dict[str, Any]) -> Iterator[int]:
    model.set_seed(request["seed"])
    generated: Iterator[int] = model.generate(
        request["prompt"],
        temp=request["temperature"],
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        repeat_penalty=1.0,
    )
    return generated


class Plain:
    """Decoding by the library's own calls: one batch, one decode, one draw a token."""

    def __init__(self, library: Any, model: Any) -> None:
        self._library, self._model = library, model
        self._context = model._ctx.ctx
        self._memory = library.llama_get_memory(self._context)
        self.num_held = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Start anew with these tokens in the cache."""
        self.rollback(0)
        self.extend(tokens)
        self._library.llama_synchronize(self._context)

    def rollback(self, length: int) -> None:
        self._library.llama_memory_seq_rm(self._memory, 0, length, -1)
        self.num_held = length

    def extend(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), BATCH_LENGTH):
            part = tokens[start : start + BATCH_LENGTH]
            array = (self._library.llama_token * len(part))(*part)
            batch = self._library.llama_batch_get_one(array, len(part))
            code = self._library.llama_decode(self._context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            self.num_held += len(part)

    def written(self, last: int, request: dict[str, Any]) -> Generator[int, None, None]:
        """Tokens after `last`, without end."""
        sampler = self._sampler(request["temperature"], request["seed"])
        try:
            while True:
                self.extend((last,))
                last = self._library.llama_sampler_sample(sampler, self._context, -1)
                yield last
        finally:
            self._library.llama_sampler_free(sampler)

    def _sampler(self, temperature: float, seed: int) -> Any:
        library = self._library
        parameters = library.llama_sampler_chain_default_params()
        sampler = library.llama_sampler_chain_init(parameters)
        if temperature > 0.0:
            library.llama_sampler_chain_add(sampler, library.llama_sampler_init_temp(temperature))
            library.llama_sampler_chain_add(sampler, library.llama_sampler_init_dist(seed))
        else:
            library.llama_sampler_chain_add(sampler, library.llama_sampler_init_greedy())
        return sampler


class Greedy:
    """A draft model for the binding: reads what is new and writes `num_tokens` greedily."""

    def __init__(self, library: Any, model: Any) -> None:
        self._plain = Plain(library, model)
        self._request = {"temperature": 0.0, "seed": 0}
        self._held = list[int]()
        self.num_tokens = 0

    def read(self, prompt: Sequence[int]) -> None:
        self._plain.read(prompt)
        self._held = list(prompt)

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        tokens: list[int] = input_ids.tolist()
        shared = _shared_length(self._held, tokens[:-1])
        self._plain.rollback(shared)
        self._plain.extend(tokens[shared:-1])
        writing = self._plain.written(tokens[-1], self._request)
        drafted = [next(writing) for _ in range(self.num_tokens)]
        writing.close()
        self._held = [*tokens, *drafted[:-1]]  # the last one was drawn and never read
        return np.array(drafted, dtype=np.intc)


def _shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How far two lists agree; they seldom differ before their last few entries."""
    length = min(len(one), len(other))
    for index in range(length):
        if one[index] != other[index]:
            return index
    return length


class Counter:
    """Passes a draft on and notes how much was drafted, and after how many tokens."""

    def __init__(self, guess: Any, draft: Greedy | None) -> None:
        self._guess, self._draft = guess, draft
        self._drafts = list[tuple[int, int]]()  # (tokens known before it, tokens drafted)

    def get_ready(self, prompt: Sequence[int]) -> None:
        """Let a draft model read the prompt too, which belongs to prefill."""
        if self._draft is not None:
            self._draft.read(prompt[:-1])

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        drafted = self._guess(input_ids, **kwargs)
        self._drafts.append((len(input_ids), len(drafted)))
        return drafted

    def counts(self, prompt_length: int, tokens: Sequence[int]) -> dict[str, int]:
        """A round ends where the next draft begins, or with the output; all but its last token
        were drafted."""
        ends = [*(known for known, _ in self._drafts), prompt_length + len(tokens)]
        lengths = [after - before for before, after in pairwise(ends)]
        drafted = [count for _, count in self._drafts]
        accepted = [
            min(count, max(0, length - 1)) for count, length in zip(drafted, lengths, strict=True)
        ]
        return {
            "num_drafts": sum(count > 0 for count in drafted),
            "num_draft_tokens": sum(drafted),
            "num_accepted_tokens": sum(accepted),
        }
