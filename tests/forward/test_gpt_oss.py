"""gpt-oss on the native decoder: sinks, windows and experts as transformers computes them, from a
dense folder and from one in MXFP4; drafts change no reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache as remembered
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import DraftPlan, Outcome, Proposal, SamplingParams, chain
from localspec.core.errors import ModelError
from localspec.engine.engine import Engine
from localspec.formats.decoder_settings import settings_of
from localspec.forward.decoder import Decoder
from localspec.forward.load import load_model
from localspec.forward.row_check import has_invariant_rows
from localspec.weights.mxfp4 import Mxfp4Linear
from tests.kit.families import small
from tests.kit.mxfp4 import saved_in_mxfp4
from tests.kit.tiny import CPU, NEEDS_BF16, Plans, play, with_cache, with_plain_cache

WINDOW = 6
TEXT = tuple((7 * place + 3) % 47 + 1 for place in range(40))
TREE = (-1, 0, 0, 1, 2, 2, -1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=11)
# As OpenAI publishes it, without the sizes.
PUBLISHED = {
    "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 150000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                     "original_max_position_embeddings": 4096, "truncate": False},
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


@remembered
def module() -> Any:
    """Strong sinks: a wrong slot, window or sink changes the text."""
    made = small("gpt_oss", hidden_size=64, intermediate_size=96, num_hidden_layers=4)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.q_proj.weight.mul_(2.0)
            layer.self_attn.sinks.copy_(4.0 * torch.rand(4, generator=generator) - 1.0)
    return made


def of_transformers(tokens: Sequence[int], made: Any = None) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = (made or module())(torch.tensor([list(tokens)])).logits[0]
    return logits


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 24])
def test_a_prompt_and_tokens_one_by_one_give_the_logits_of_transformers(length: int) -> None:
    native, wanted = with_cache(module(), 64), of_transformers(TEXT[: length + 8])
    assert_equal(native.forward(TEXT[:length]), wanted[:length])
    steps = torch.cat([native.forward([token]) for token in TEXT[length : length + 8]])
    assert_equal(steps, wanted[length:])


@pytest.mark.parametrize("make", [with_cache, with_plain_cache], ids=["processor", "plain cache"])
def test_rows_of_every_width_give_the_logits_of_transformers(make: Any) -> None:
    native, wanted = make(module(), 64), of_transformers(TEXT)
    for start in (3, WINDOW - 1, WINDOW, 20):
        for width in (*range(1, 9), 15, 16):
            native.cache.rollback(0)
            native.forward(TEXT[:start])
            assert_equal(native.forward(TEXT[start:][:width]), wanted[start:][:width])


def test_a_path_of_a_tree_gives_the_logits_of_its_chain() -> None:
    native, nodes = with_cache(module(), 64), [5, 6, 7, 8, 9, 10, 11]
    native.forward(TEXT[:10])
    found = native.forward(nodes, TREE)
    for path in ((0, 1, 3), (0, 2, 4), (0, 2, 5), (6,)):
        wanted = of_transformers([*TEXT[:10], *(nodes[node] for node in path)])
        assert_equal(found[list(path)], wanted[10:])


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=NEEDS_BF16), torch.float32])
def test_a_row_has_the_same_bits_at_every_width(dtype: torch.dtype) -> None:
    """Sums of more than 1,024 products: a row that alone chose an expert has other bits."""
    made = small("gpt_oss", hidden_size=64, intermediate_size=1088, num_hidden_layers=2)
    native = with_cache(made.to(dtype), 64)
    assert has_invariant_rows(native)
    whole = native.forward(TEXT)
    for width in (1, 2, 5, 9, 16):
        native.cache.rollback(0)
        pieces = [native.forward(TEXT[at : at + width]) for at in range(0, len(TEXT), width)]
        assert torch.equal(torch.cat(pieces), whole)


class WrongAt:
    """Guesses a known reply, wrong at one place of each draft."""

    name = "guesser"
    shapes_itself = False
    block_length = None
    memory_bytes = 0

    def __init__(self, reply: Sequence[int], prompt_length: int, wrong_at: int) -> None:
        self._reply, self._prompt_length, self._wrong_at = reply, prompt_length, wrong_at

    def signal(self, sequence: decoding.Sequence) -> str:
        return "s"

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        place = len(sequence.tokens) - self._prompt_length
        guesses = list(self._reply[place : place + plan.num_draft_tokens])
        if self._wrong_at < len(guesses):
            guesses[self._wrong_at] = guesses[self._wrong_at] % 47 + 1
        return chain(tuple(guesses))

    def observe(self, sequence: decoding.Sequence, outcome: Outcome) -> None:
        pass


@pytest.mark.parametrize("wrong_at", range(6))
def test_a_rejection_at_any_place_of_a_draft_leaves_the_reply_as_it_is(wrong_at: int) -> None:
    prompt, native = TEXT[:9], with_cache(module(), 64)
    plain = play(Engine(native, {}), prompt, Plans(("off", 0)), 30, SAMPLED).tokens
    drafter = WrongAt(plain[len(prompt) :], len(prompt), wrong_at)
    policy = Plans(("guesser", 6))
    drafted = play(Engine(native, {"guesser": drafter}), prompt, policy, 30, SAMPLED)
    assert drafted.tokens == plain
    full = [step for step in policy.steps if step.num_draft_tokens == 6]
    assert full and {step.num_accepted_tokens for step in full} == {wrong_at}


def test_an_edited_and_a_regenerated_turn_read_as_afresh() -> None:
    native = with_cache(module(), 64)
    play(Engine(native, {}), TEXT[:12], Plans(("off", 0)), 20, SAMPLED)
    for prompt in (TEXT[:12], (*TEXT[:8], 1, 2, 3)):  # regenerated, then edited
        afresh = play(Engine(with_cache(module(), 64), {}), prompt, Plans(("off", 0)), 20, SAMPLED)
        again = play(Engine(native, {}), prompt, Plans(("off", 0)), 20, SAMPLED)
        assert again.tokens == afresh.tokens


# -- folders ---------------------------------------------------------------------------------


def test_a_dense_folder_is_read(tmp_path: Path) -> None:
    module().save_pretrained(str(tmp_path))
    opened = load_model(tmp_path, torch.float32, CPU, 64)
    assert isinstance(opened.model, Decoder) and opened.has_invariant_rows
    assert_equal(opened.model.forward(TEXT), of_transformers(TEXT))


def test_a_folder_in_mxfp4_stays_in_it_and_gives_the_logits_of_its_values(tmp_path: Path) -> None:
    made = saved_in_mxfp4(small("gpt_oss", hidden_size=64, intermediate_size=96), tmp_path)
    opened = load_model(tmp_path, torch.float32, CPU, 64)
    assert isinstance(opened.model, Decoder)
    assert opened.has_invariant_rows and opened.unread is None
    assert_equal(opened.model.forward(TEXT), of_transformers(TEXT, made))
    linears = [each for each in opened.model.weights.linears if isinstance(each, Mxfp4Linear)]
    packed = sum(each.weight.blocks.nbytes + each.weight.scales.nbytes for each in linears)
    assert packed == 3 * 4 * 3 * 64 * 96 * 4.25 / 8  # layers, experts, matrices


def test_a_folder_without_a_part_of_an_expert_is_refused(tmp_path: Path) -> None:
    """Also one whose experts have another size than its config.json says."""
    saved_in_mxfp4(small("gpt_oss", hidden_size=64, intermediate_size=96), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for changed, fact in (
        ({"intermediate_size": 64}, "have another shape than its config.json says"),
        ({"num_local_experts": 8}, "have another shape than its config.json says"),
        ({"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}, "lacks some of its"),
    ):
        path.write_text(json.dumps({**config, **changed}))
        with pytest.raises(ModelError, match=fact):
            load_model(tmp_path, torch.float32, CPU, 64)


def test_more_experts_for_a_token_than_there_are_is_an_error_in_words() -> None:
    """transformers said: selected index k out of range."""
    with pytest.raises(ModelError, match=r"chooses 9 of 4 experts.*Fetch it again"):
        settings_of({**PUBLISHED, "num_local_experts": 4, "num_experts_per_tok": 9})


def test_the_published_config_is_read_without_asking_transformers() -> None:
    settings = settings_of(PUBLISHED)
    assert settings.windows == (128, None) * 12
    assert settings.mixture is not None and settings.mixture.limit == 7.0
    assert settings.mixture.steepness == 1.702 and settings.mixture.num_chosen == 4
