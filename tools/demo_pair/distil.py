"""Trains a shallow draft to predict the target, on the corpus and on text that the target wrote.

Contract: `sample_answers` lets the target answer prompts and returns what it wrote; `distil`
trains the draft on the target's distribution over such rows mixed with packed text, with the loss
of localspec.training's drafts. The loop is that of `pretrain` and not localspec.training's: it
reads packs of fixed length and updates bf16 weights with Muon.
Source: on-policy distillation for drafts, Zhou et al. 2023 (arXiv 2310.08461).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from localspec.core.backend import Report
from localspec.training.draft import divergence
from tools.demo_pair.decoder import hidden_states, new_decoder
from tools.demo_pair.packs import BatchStream, PackedBatch
from tools.demo_pair.pretrain import (
    LossFunction,
    PretrainSettings,
    compile_layers,
    compiled,
    pretrain,
)
from tools.demo_pair.prompts import PromptPlan
from tools.demo_pair.sampling import Sample, answers
from tools.demo_pair.tokenizer import PAD_ID

Divergence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


TEMPERATURES = (0.0, 0.0, 0.4, 0.7, 1.0)  # of the target's own text, drawn evenly
LONGEST_ANSWER = 128  # tokens


@dataclass(frozen=True)
class OwnTextPlan(PromptPlan):
    """Prompts for the target's own text, and how its answers are packed."""

    pack_name: str = "own"
    row_length: int = 256
    minutes_share: float = 1.0


SHORT_PROMPTS = OwnTextPlan(
    12_000, 200, (250, 700), 0.15, pack_name="own_short", minutes_share=0.75
)
LONG_PROMPTS = OwnTextPlan(
    600, 2176, (2000, 8000), 0.9, pack_name="own_long", row_length=2304, minutes_share=0.25
)


def sample_answers(
    target: LlamaForCausalLM,
    prompts: Sequence[list[int]],
    plan: OwnTextPlan,
    minutes: float,
    seed: int,
    report: Report,
) -> list[Sample]:
    """Let the target answer until the prompts or its share of the minutes are used up."""
    rng, samples = Random(seed), list[Sample]()
    asked = [(prompt, rng.choice(TEMPERATURES)) for prompt in rng.sample(prompts, len(prompts))]
    until = time.monotonic() + 60 * minutes * plan.minutes_share
    for sample in answers(target, asked, LONGEST_ANSWER, seed):
        samples.append(sample)
        if time.monotonic() > until:
            break
    num_tokens = sum(len(sample.answer) for sample in samples)
    report(f"The target wrote {len(samples)} answers, {num_tokens} tokens.")
    return samples


def pack_samples(
    samples: Sequence[Sample], length: int, rng: Random
) -> list[tuple[list[int], list[float]]]:
    """Put samples into rows of `length` + 1; answers weigh 1, prompts 0.1.

    Of a prompt that is too long the end is kept.
    """
    rows: list[tuple[list[int], list[float]]] = []
    ids: list[int] = []
    weights: list[float] = []
    for sample in rng.sample(list(samples), len(samples)):
        prompt = sample.prompt[-max(0, length + 1 - len(sample.answer)) :]
        size = len(prompt) + len(sample.answer)
        if ids and len(ids) + size > length + 1:
            rows.append(pad_row(ids, weights, length))
            ids, weights = [], []
        ids = [*ids, *prompt, *sample.answer]
        weights = [*weights, *([0.1] * len(prompt)), *([1.0] * len(sample.answer))]
    if ids:
        rows.append(pad_row(ids, weights, length))
    return rows


def pad_row(ids: list[int], weights: list[float], length: int) -> tuple[list[int], list[float]]:
    """Cut or fill a row to `length` + 1; filling has no weight."""
    missing = max(0, length + 1 - len(ids))
    return (ids + [PAD_ID] * missing)[: length + 1], (weights + [0.0] * missing)[: length + 1]


def head_divergence(
    hidden: Tensor, head: Tensor, target_hidden: Tensor, target_head: Tensor, weights: Tensor
) -> Tensor:
    """The loss. hidden: [N, H]; head: [V, H]; weights: [N]."""
    draft = functional.linear(hidden, head).float()  # [N, V]
    target = functional.linear(target_hidden, target_head).float()
    return divergence(draft, target, weights)


def distil_loss(target: LlamaForCausalLM, measure: Divergence = head_divergence) -> LossFunction:

    def loss(draft: LlamaForCausalLM, batch: PackedBatch) -> Tensor:
        inputs = batch.tokens[:, :-1]
        with torch.no_grad():
            wanted = hidden_states(target, inputs).flatten(0, 1)
        found = hidden_states(draft, inputs).flatten(0, 1)
        heads = draft.lm_head.weight, target.lm_head.weight
        return measure(found, heads[0], wanted, heads[1], batch.weights.flatten())

    return loss


def new_draft(config: LlamaConfig, target: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """With the target's embedding and norm if the widths agree, and its first layers if theirs do
    too (a target trained to be left early drafts with those already); else small weights."""
    draft = new_decoder(config, seed).to(target.device, target.dtype)
    if config.hidden_size == target.config.hidden_size:
        sizes = ("intermediate_size", "num_attention_heads")
        has_its_layers = all(getattr(config, n) == getattr(target.config, n) for n in sizes)
        its = target.state_dict()
        kept = {name: its[name] for name in its if has_its_layers or ".layers." not in name}
        draft.load_state_dict(kept, strict=False)  # it has fewer layers
    return draft


def write_sample_pack(samples: Sequence[Sample], length: int, folder: Path, rng: Random) -> int:
    """Write samples as a pack; return its number of rows."""
    rows = pack_samples(samples, length, rng)
    assert rows, "no samples to pack: give sampling more minutes or more prompts"
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", np.asarray([ids for ids, _ in rows], dtype=np.uint16))
    weights = np.rint(100 * np.asarray([row for _, row in rows]))
    np.save(folder / "weights.npy", weights.astype(np.uint8))
    return len(rows)


def distil(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    stream: BatchStream,
    settings: PretrainSettings,
    report: Report,
) -> int:
    """Train the draft until the budget is used up; return the tokens it has seen."""
    target.requires_grad_(False)
    if settings.is_compiled:
        compile_layers(target)
    loss = distil_loss(target, compiled(head_divergence, settings.is_compiled))
    # The embedding starts from the target's, so it moves more slowly than the fresh layer.
    gentle = replace(settings, adam_rate_ratio=0.25)
    return pretrain(draft, stream, gentle, report, loss).num_tokens
