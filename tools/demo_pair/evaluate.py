"""Measures a pair: held-out losses, acceptance of the draft, repetition, and sample answers.

Contract: pure measurement on plain torch models, nothing is trained or written. Acceptance is the
mean over positions of the target's own output of sum min(p, q); at temperature 0 it is the share
of equal argmaxes. Repetition is that of `bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from localspec.bench.statistics import repetition
from tools.demo_pair.sampling import Sample, answers
from tools.demo_pair.tokenizer import encode_prompt

JUDGING_QUESTIONS = (
    "Hello!", "How are you today?", "Who are you?", "What can you do?", "Thanks, bye!",
    "What is speculative decoding?", "How does speculative decoding work?",
    "What is the acceptance rate?",
    "What does gamma mean?", "What are tokens per second?", "Why is it faster with a draft?",
    "What is 7 plus 5?", "What is 23 - 8?", "6 * 7", "What is the capital of France?",
    "What is the capital of Japan?", "List three fruits.", "Name four colours as bullet points.",
    "Make a JSON object with name Anna, age 31 and city Oslo.",
    "Write a Python function that adds two numbers.",
    "Write a Python function that reverses a string.",
    "Write this in upper case: the small dog sleeps.", "Fix this sentence: the cat is on teh table",
    "Summarise this: The pipeline opens at nine. It closes at six. On Sundays it stays closed.",
    "Tell me a short story about a brave fox.", "What is a volcano?", "How do I make tea?",
    "Who won the football match yesterday?", "Explain quantum entanglement.",
    "Why is the sky blue?",
)  # fmt: skip


@dataclass(frozen=True)
class PairReport:
    """The figures of a pair. acceptance and repetition: by temperature."""

    held_out_loss: dict[str, float]
    acceptance: dict[float, float]
    repetition: dict[float, float]
    answers: tuple[tuple[str, str], ...]


@torch.no_grad()
def overlap(target: LlamaForCausalLM, draft: LlamaForCausalLM, sample: Sample) -> Tensor:
    """Return the chance of acceptance at each position of an answer, [m]."""
    target_logits, draft_logits = (_logits(model, sample) for model in (target, draft))
    if sample.temperature == 0:
        return (target_logits.argmax(-1) == draft_logits.argmax(-1)).float()
    p = (target_logits / sample.temperature).softmax(-1)
    q = (draft_logits / sample.temperature).softmax(-1)
    return torch.minimum(p, q).sum(-1)


def _logits(model: LlamaForCausalLM, sample: Sample) -> Tensor:
    """Those that predict each token of the answer, [m, V] fp32."""
    tokens = torch.tensor([[*sample.prompt, *sample.answer[:-1]]], device=model.device)
    made: Tensor = model(
        input_ids=tokens, use_cache=False, logits_to_keep=len(sample.answer)
    ).logits
    return made[0].float()


def acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, samples: Sequence[Sample]
) -> float:
    return float(torch.cat([overlap(target, draft, sample) for sample in samples]).mean())


def answer_all(
    target: LlamaForCausalLM,
    prompts: Sequence[list[int]],
    temperature: float,
    max_length: int,
    seed: int,
) -> list[Sample]:
    return list(answers(target, [(one, temperature) for one in prompts], max_length, seed))


def judging_answers(target: LlamaForCausalLM, tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    found = []
    for question in JUDGING_QUESTIONS:
        prompt = encode_prompt(tokenizer, [{"role": "user", "content": question}])
        sample = answer_all(target, [prompt], 0.0, 160, 0)[0]
        found.append((question, tokenizer.decode(list(sample.answer), skip_special_tokens=True)))
    return tuple(found)


def evaluate_pair(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    held_out_loss: dict[str, float],
    max_length: int = 128,
) -> PairReport:
    """Measure acceptance and repetition at T = 0, 0.7 and 1, and answer the questions."""
    accepted: dict[float, float] = {}
    repeated: dict[float, float] = {}
    for temperature in (0.0, 0.7, 1.0):
        samples = answer_all(target, prompts, temperature, max_length, seed=11)
        accepted[temperature] = acceptance(target, draft, samples)
        repeated[temperature] = repetition(sample.answer for sample in samples) or 0.0
    return PairReport(held_out_loss, accepted, repeated, judging_answers(target, tokenizer))
