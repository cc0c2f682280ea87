"""Samples answers to many prompts at once, for distillation and evaluation.

Contract: prompts of one batch have the same length (`group_by_length` cuts them so), so that no
padding enters the cache; each answer has its own temperature; answers stop at the end of the turn.
No top-k, no penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from localspec.training.collect import choose
from tools.demo_pair.tokenizer import END_OF_TEXT_ID, TURN_END_ID


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer as token ids, with the end token if the answer got there."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float


@torch.no_grad()
def write_answers(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_length: int,
    generator: torch.Generator,
) -> list[Sample]:
    """Answer prompts of equal length together."""
    assert len({len(prompt) for prompt in prompts}) == 1, "prompts of a batch must have one length"
    device = model.device
    heat = torch.tensor(temperatures, device=device)
    tokens = torch.tensor(prompts, device=device)  # [B, n]
    output = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    written: list[Tensor] = []
    is_open = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for _ in range(max_length):
        chosen = choose(output.logits[:, -1], heat, generator)  # [B]
        written.append(chosen)
        is_open &= (chosen != TURN_END_ID) & (chosen != END_OF_TEXT_ID)
        if not bool(is_open.any()):
            break
        output = model(
            input_ids=chosen[:, None], past_key_values=output.past_key_values, use_cache=True
        )
    answers = torch.stack(written, dim=1).tolist()  # [B, m]
    return [
        Sample(tuple(prompt), tuple(cut_at_end(answer)), temperature)
        for prompt, answer, temperature in zip(prompts, answers, temperatures, strict=True)
    ]


def cut_at_end(answer: Sequence[int]) -> list[int]:
    """Drop what follows the first end token."""
    for place, token in enumerate(answer):
        if token in (TURN_END_ID, END_OF_TEXT_ID):
            return list(answer[: place + 1])
    return list(answer)


def fill_front(prompt: Sequence[int], multiple: int) -> list[int]:
    """Put end-of-text tokens before a prompt until its length is a multiple."""
    return [END_OF_TEXT_ID] * (-len(prompt) % multiple) + list(prompt)


def group_by_length(prompts: Sequence[list[int]], batch_size: int) -> list[list[list[int]]]:
    """Form batches of exactly equal length, shortest first; rare lengths make small batches."""
    groups: dict[int, list[list[int]]] = {}
    for prompt in prompts:
        groups.setdefault(len(prompt), []).append(prompt)
    batches = []
    for _, group in sorted(groups.items()):
        batches += [group[start : start + batch_size] for start in range(0, len(group), batch_size)]
    return batches
