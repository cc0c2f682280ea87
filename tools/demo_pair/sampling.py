"""Samples answers to many prompts at once, for distillation and evaluation.

Contract: a model answers as a target does for localspec.training (collect), each prompt at a
temperature of its own, up to the end of its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from localspec.training.collect import CollectPlan, Question, batches, write
from tools.demo_pair.tokenizer import END_OF_TEXT_ID, TURN_END_ID

END_IDS = frozenset((TURN_END_ID, END_OF_TEXT_ID))


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer as token ids, with the end token if the answer got there."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float


def answers(
    model: LlamaForCausalLM, asked: Iterable[tuple[list[int], float]], max_length: int, seed: int
) -> Iterator[Sample]:
    """In the order in which they end. asked: prompts with their temperatures."""
    questions = [Question("", "", tuple(prompt), temperature) for prompt, temperature in asked]
    generator = torch.Generator().manual_seed(seed)
    for batch in batches(questions, CollectPlan(0.0, max_length)):
        for place, answer in write(model, END_IDS, batch, max_length, generator):
            yield Sample(batch[place].prompt, answer, batch[place].temperature)
