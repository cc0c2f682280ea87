"""Distilling a draft raises its acceptance, and the figures measure what they say."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from localspec.training.train_loop import Schedule
from tools.demo_pair import dialogues
from tools.demo_pair.decoder import hidden_states, hidden_with_exit, llama_config
from tools.demo_pair.distil import (
    distil,
    head_divergence,
    new_draft,
    pack_samples,
    write_sample_pack,
)
from tools.demo_pair.evaluate import acceptance, answer_all
from tools.demo_pair.packs import BatchStream, Pack, TextSource
from tools.demo_pair.pretrain import PretrainSettings
from tools.demo_pair.sampling import Sample
from tools.demo_pair.tokenizer import PAD_ID, TURN_END_ID, encode_prompt

SEED = 13


def make_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Draw prompts of at most 64 tokens."""
    rng = Random(SEED)
    drawn = [dialogues.generate(rng).messages()[:1] for _ in range(count)]
    return [encode_prompt(tokenizer, chat)[:64] for chat in drawn]


@pytest.mark.slow  # trains
def test_distilling_raises_acceptance(
    decoder: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompts = make_prompts(tokenizer, 24)
    samples = answer_all(decoder, prompts, 1.0, 24, SEED)
    draft = new_draft(llama_config(420, 1, 32, 64, 2, context_length=256), decoder, SEED)
    before = acceptance(decoder, draft, samples)
    write_sample_pack(samples, 96, tmp_path / "own", Random(SEED))
    stream = BatchStream(
        [TextSource(Pack(tmp_path / "own"), 1.0, 1.0)], 768, SEED, torch.device("cpu")
    )
    settings = PretrainSettings(Schedule(6e-3, num_steps=30), tmp_path / "draft")
    distil(draft, decoder, stream, settings, lambda line: None)
    after = acceptance(decoder, draft, samples)
    assert after > before + 0.05, f"seed {SEED}: {before:.3f} to {after:.3f}"


def test_a_model_accepts_all_of_its_own_tokens(
    decoder: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    prompts = make_prompts(tokenizer, 4)
    for temperature in (0.0, 0.7):
        samples = answer_all(decoder, prompts, temperature, 12, SEED)
        assert acceptance(decoder, decoder, samples) == pytest.approx(1.0, abs=1e-5)


def test_the_divergence_of_equal_distributions_is_zero() -> None:
    generator = torch.Generator().manual_seed(SEED)
    hidden, head = torch.randn(5, 8, generator=generator), torch.randn(20, 8, generator=generator)
    same = head_divergence(hidden, head, hidden, head, torch.ones(5))
    other = head_divergence(hidden, head, -hidden, head, torch.ones(5))
    assert float(same) == pytest.approx(0.0, abs=1e-5)
    assert float(other) > 0.1


def test_packed_samples_weigh_the_answer_and_never_the_filling() -> None:
    samples = [Sample((5, 6, 7), (8, 9, TURN_END_ID), 0.0), Sample((5,) * 30, (9,) * 4, 0.7)]
    rows = pack_samples(samples, 15, Random(SEED))
    for ids, weights in rows:
        assert len(ids) == len(weights) == 16
        assert all(weight == 0.0 for one, weight in zip(ids, weights, strict=True) if one == PAD_ID)
    heavy = sum(weight == 1.0 for _, weights in rows for weight in weights)
    assert heavy == 7


def test_each_answer_belongs_to_its_prompt_and_ends_with_its_turn(
    decoder: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    prompts = [
        prompt[-length:]
        for length, prompt in zip((7, 20, 13), make_prompts(tokenizer, 3), strict=True)
    ]
    together = answer_all(decoder, prompts, 0.0, 24, SEED)
    alone = [answer_all(decoder, [prompt], 0.0, 24, SEED)[0] for prompt in prompts]
    assert sorted(together, key=str) == sorted(alone, key=str)
    assert all(TURN_END_ID not in sample.answer[:-1] for sample in together)


def test_a_draft_of_the_same_widths_starts_as_the_targets_first_layers(
    decoder: LlamaForCausalLM,
) -> None:
    draft = new_draft(llama_config(420, 1, 32, 64, 2, context_length=256), decoder, seed=3)
    tokens = torch.arange(10)[None]
    _, left = hidden_with_exit(decoder, tokens, 1, frozenset())
    assert torch.allclose(hidden_states(draft, tokens), left, atol=1e-6)
