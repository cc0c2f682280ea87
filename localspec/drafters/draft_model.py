"""A smaller model of the same family drafts, token by token, in a cache of its own.

Contract: at temperature 0 a deterministic chain (argmax, no probs); above it every token is
drawn from the draft's own distribution under the request's sampling, and that very row is
handed to verification. The draft ends only after a token was drawn, by a rule that has seen
nothing later. Catches up with the sequence by its cache's longest common prefix.

Source: speculative sampling, arXiv 2211.17192 and 2302.01318.
"""

from __future__ import annotations

import math

import torch

from localspec.core import DraftPlan, Proposal, SamplingParams, Sequence, Step, chain
from localspec.drafters.parts import Parts
from localspec.engine.sampling import distributions, draw
from localspec.errors import ModelError
from localspec.forward.model import LanguageModel, prefill


class DraftModelDrafter:
    """Drafts with `model`, whose token ids are the target's."""

    name = "draft_model"

    def __init__(self, model: LanguageModel, target_vocab_size: int) -> None:
        self.model = model
        self._target_vocab_size = target_vocab_size

    @classmethod
    def build(cls, parts: Parts) -> DraftModelDrafter:
        if parts.draft is None:
            raise ModelError(parts.draft_refusal)
        return cls(parts.draft, parts.target.vocab_size)

    @property
    def memory_bytes(self) -> int:
        return self.model.weight_bytes + self.model.cache.kv_bytes

    def signal(self, sequence: Sequence) -> str | None:
        room = self.model.cache.shape.capacity - len(sequence.tokens)
        return "model" if room > 0 else None

    def prepare(self, sequence: Sequence) -> None:
        if self.signal(sequence) is not None:
            self._catch_up(sequence)

    def foresee(self, sequence: Sequence) -> tuple[int, ...]:
        return ()

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        room = self.model.cache.shape.capacity - len(sequence.tokens)
        if room <= 0:  # a draft may know a shorter context than its target
            return Proposal()
        self._catch_up(sequence)
        return autoregress(self.model, sequence, plan.shortened(room), self._target_vocab_size)

    def observe(self, sequence: Sequence, step: Step) -> None:
        """Nothing: `propose` finds what it missed."""

    def _catch_up(self, sequence: Sequence) -> None:
        """Hold all tokens but the last few, which the first draft step takes along."""
        wanted = sequence.tokens[:-1]
        missing = wanted[self.model.cache.reuse(wanted) :]
        if len(missing) > 8:
            prefill(self.model, missing)


def autoregress(
    model: LanguageModel, sequence: Sequence, plan: DraftPlan, target_vocab_size: int
) -> Proposal:
    """Draft up to plan.num_draft_tokens tokens from where the model's cache stands.

    target_vocab_size: rows beyond it or short of it are cut or padded, since families pad their
    vocabularies differently; a padded id can never be drawn.
    """
    sampling = sequence.sampling
    is_penalised = sampling.repetition_penalty != 1.0
    pending = sequence.tokens[model.cache.length :]
    tokens, rows, confidences = list[int](), list[torch.Tensor](), list[float]()
    for index in range(plan.num_draft_tokens):
        logits = model.forward(pending, num_logits=1)  # [1, V_draft]
        history = [*sequence.tokens, *tokens] if is_penalised else []
        row = _next_row(logits, sampling, history, target_vocab_size)  # [V]
        confidence, peak = (value.item() for value in row.max(dim=-1))
        if math.isnan(confidence):  # a damaged draft costs time, never correctness
            break
        token = int(peak) if sampling.temperature == 0.0 else draw(row, sequence.rng)
        tokens.append(token)
        confidences.append(confidence)
        rows.append(row)
        pending = [token]
        if plan.keep_drafting is not None and not plan.keep_drafting(index, confidence):
            break
    drawn = torch.stack(rows) if sampling.temperature > 0.0 and rows else None  # [n, V]
    return chain(tuple(tokens), drawn, tuple(confidences))


def _next_row(
    logits: torch.Tensor, sampling: SamplingParams, history: list[int], vocab_size: int
) -> torch.Tensor:
    """The draft's distribution over the target's ids, [V]. Plain softmax when greedy: its peak
    is the token, its height the confidence."""
    missing = vocab_size - logits.shape[-1]
    if missing < 0:
        logits = logits[:, :vocab_size]
    elif missing > 0:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    if sampling.temperature == 0.0:
        unscaled = SamplingParams(1.0, repetition_penalty=sampling.repetition_penalty)
        return distributions(logits, unscaled, [history])[0]
    return distributions(logits, sampling, [history])[0]
