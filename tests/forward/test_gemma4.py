"""Gemma 4, whose layers differ in heads, head size and whose keys they read: equal to transformers'
eager forward on both sides of a window, the same bits at every width, and the same cache after
rejections, edits and further turns."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache as remembered
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.core.decoding import OFF, SamplingParams
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.lookup import Lookup
from localspec.drafters.ngram import NgramDrafter
from localspec.engine.engine import Engine
from localspec.forward import attention
from localspec.forward.block import FeedForward
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder, run_together
from localspec.forward.features import LAST
from localspec.forward.graphs import CapturedDecoder
from localspec.forward.load import load_model
from localspec.forward.model import kv_shape
from localspec.forward.passes import Rows
from localspec.forward.row_check import has_invariant_rows
from tests.kit.decoders import decoder_of
from tests.kit.fake_card import CUDA, fake_card, fake_module
from tests.kit.families import SETTINGS, SHAPE, assert_close, small
from tests.kit.tiny import CPU, Plans, play, with_cache, with_plain_cache
from tests.kit.tracing import TracingPool, UncapturedPool

NAMES = [name for name in SETTINGS if name.startswith("gemma4")]
SHARED = "gemma4, keys of earlier layers"
WINDOW = 6
TREE = (-1, 0, 0, 1, 2, 2, -1)


def text(size: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(1, 48), k=size)


@remembered
def module(name: str) -> Any:
    made = small(name)
    made.set_attn_implementation("eager")
    return made


@remembered
def decoder(name: str) -> Decoder:
    return with_cache(module(name), 90)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    decoder(request.param).cache.rollback(0)
    return str(request.param)


def afresh(model: Decoder, tokens: list[int]) -> torch.Tensor:
    model.cache.rollback(0)
    return model.forward(tokens)


def eager(name: str, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = module(name)(input_ids=torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("size", [WINDOW - 1, WINDOW, WINDOW + 1, 33, 65])
def test_it_equals_the_eager_forward_around_the_window(name: str, size: int) -> None:
    tokens, model = text(size), decoder(name)
    wanted = eager(name, tokens)
    assert_close(model.forward(tokens), wanted)
    model.cache.rollback(0)
    assert_close(torch.cat([model.forward([token]) for token in tokens]), wanted)


def test_every_width_gives_the_same_bits(name: str) -> None:
    tokens, model = text(48), decoder(name)
    wanted = model.forward(tokens)
    for width in range(1, 17):
        model.cache.rollback(20)
        rows = [model.forward(tokens[at : at + width]) for at in range(20, 48, width)]
        assert torch.equal(torch.cat(rows), wanted[20:])


def test_a_path_of_a_tree_has_the_bits_of_its_chain(name: str) -> None:
    before, nodes, model = text(20), text(len(TREE), 2), decoder(name)
    model.forward(before)
    found = model.forward(nodes, TREE)
    for path in ((0, 1, 3), (0, 2, 4), (0, 2, 5), (6,)):
        model.cache.rollback(len(before))
        chain = model.forward([nodes[node] for node in path])
        assert torch.equal(found[list(path)], chain)


@pytest.mark.parametrize("size", [3, 20])
def test_a_rejection_at_every_position_leaves_the_cache_as_it_was(name: str, size: int) -> None:
    tokens, guesses, model = text(size + 17), text(16, 3), decoder(name)
    wanted = model.forward(tokens)[size:]
    for num_right in range(17):
        model.cache.rollback(size)
        model.forward([*tokens[size : size + num_right], *guesses[num_right:]])
        model.cache.rollback(size + num_right)
        assert torch.equal(model.forward(tokens[size + num_right :]), wanted[num_right:])


def test_a_path_that_is_kept_reads_on_as_its_chain(name: str) -> None:
    before, nodes, model = text(20), text(len(TREE), 2), decoder(name)
    wanted = model.forward([*before, nodes[0], nodes[2], nodes[5], 7])[-1]
    model.cache.rollback(len(before))
    model.forward(nodes, TREE)
    model.cache.keep(len(before), (0, 2, 5))
    assert torch.equal(model.forward([7])[-1], wanted)


def test_an_edited_text_is_read_as_afresh(name: str) -> None:
    first, second, model = text(40), [*text(25), *text(20, 4)], decoder(name)
    wanted = model.forward(second)
    model.cache.rollback(0)
    model.forward(first)
    length = model.cache.reuse(second)
    assert length == 25
    assert torch.equal(model.forward(second[length:]), wanted[length:])


@pytest.mark.parametrize("drafter", ["lookup", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_changes_no_reply(name: str, drafter: str, temperature: float) -> None:
    model, sampling = decoder(name), SamplingParams(temperature, seed=3)
    draft = DraftModelDrafter(with_cache(module(NAMES[0]), 90), 48)
    engine = Engine(model, {"lookup": NgramDrafter(Lookup()), "draft": draft})
    prompt = (*text(9), *text(9))
    plain = play(engine, prompt, Plans((OFF, 0)), 20, sampling).tokens
    model.cache.rollback(0)
    policy = Plans((drafter, 3), (drafter, 7))
    assert play(engine, prompt, policy, 20, sampling).tokens == plain
    again = (*plain, *text(4, 5))  # the next turn
    found = play(engine, again, policy, 20, sampling).tokens
    model.cache.rollback(0)
    assert play(engine, again, Plans((OFF, 0)), 20, sampling).tokens == found


@pytest.mark.parametrize("name", [SHARED, "gemma4, values from keys"])
def test_captured_steps_are_those_of_the_decoder(name: str) -> None:
    before, model = text(20), decoder(name)
    captured = CapturedDecoder(with_plain_cache(module(name), 48), TracingPool())
    for _ in captured.capture():
        pass
    assert captured.notice is None
    captured.forward(before)
    for nodes, parents in ((text(5), None), (text(1), None), (text(len(TREE), 2), TREE)):
        wanted = afresh(model, before), model.forward(nodes, parents)
        captured.cache.rollback(len(before))
        assert_close(captured.forward(nodes, parents), wanted[1])


def test_no_step_on_a_card_waits_for_the_table_of_inputs() -> None:
    tiny = small(SHARED)
    with fake_card() as traffic:
        shape = kv_shape(tiny.config, 64)
        fake = fake_module(tiny, torch.bfloat16)
        model = decoder_of(fake, KVCache(shape, torch.bfloat16, CUDA, num_spare=16))
        captured = CapturedDecoder(model, UncapturedPool())
        for _ in captured.capture():
            pass
        assert model.weights.per_layer_inputs is not None
        assert model.weights.per_layer_inputs.table.device == CPU
        traffic.clear()
        captured.forward(text(40), num_logits=1)
        captured.forward(text(3))
        assert captured.notice is None and not traffic.uploads and not traffic.reads


class Counting:
    """A feed-forward part that notes how many rows go through it."""

    def __init__(self, part: FeedForward, num_rows: list[int]) -> None:
        self._part, self._num_rows = part, num_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self._num_rows.append(rows.shape[0])
        return self._part(rows)


def test_of_a_prompt_layers_without_keys_compute_the_end_alone() -> None:
    model, tokens, num_rows = decoder(SHARED), text(60), list[int]()
    blocks = [
        replace(block, feed_forward=Counting(block.feed_forward, num_rows))
        for block in model.weights.blocks
    ]
    counted = Decoder(replace(model.weights, blocks=tuple(blocks)), model.cache.another())
    wanted = counted.forward(tokens)
    assert num_rows == [60] * 6
    for num_logits in (1, 3, 9):
        num_rows.clear()
        counted.cache.rollback(0)
        assert torch.equal(counted.forward(tokens, num_logits=num_logits), wanted[-num_logits:])
        assert num_rows[:3] == [60] * 3 and all(count < 16 for count in num_rows[3:])
    assert torch.equal(counted.forward([5]), afresh(model, [*tokens, 5])[-1:])
    # A drafter that reads the last state alone changes nothing, and finds it.
    features = counted.follow((LAST,), of_last_row=True)
    num_rows.clear()
    counted.cache.rollback(0)
    counted.forward(tokens, num_logits=1)
    assert num_rows[:3] == [60] * 3 and all(count < 16 for count in num_rows[3:])
    assert torch.equal(counted.head(features.rows(LAST, 59, 60)), wanted[-1:])
    counted.follow((LAST,))  # a drafter that reads all of them does
    num_rows.clear()
    counted.cache.rollback(0)
    counted.forward(tokens, num_logits=1)
    assert num_rows == [60] * 6


def test_a_followed_layer_without_keys_computes_every_row_of_a_prompt() -> None:
    model, tokens = decoder(SHARED), text(60)
    model.cache.rollback(0)
    (wanted,) = run_together([Rows(model, tokens)], keep=(4,))
    model.cache.rollback(0)
    (found,) = run_together([Rows(model, tokens, num_logits=1)], keep=(4,))
    assert torch.equal(found.hidden[4], wanted.hidden[4])


def test_the_load_sees_the_same_bits_in_layers_of_every_kind() -> None:
    assert has_invariant_rows(decoder(SHARED))


def published(folder: Path, name: str) -> Any:
    """A folder as it is published: for images too, with keys of layers that read those of others,
    and sizes said once for all layers of a kind."""
    made = small(name)
    family = made.config.model_type.removesuffix("_text")
    made.save_pretrained(str(folder))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(made.config.num_hidden_layers):
        for part in ("k_proj", "v_proj"):
            path = f"model.layers.{layer}.self_attn.{part}.weight"
            if name == SHARED:
                tensors.setdefault(path, torch.ones(16, 32))
    renamed = {
        key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors")
    text_config = {**SHAPE, **SETTINGS[name], "rms_norm_eps": 1e-6,
                   "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
    config = {"model_type": family, "text_config": text_config, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return made


def test_a_published_folder_loads_natively(name: str, tmp_path: Path) -> None:
    made = published(tmp_path, name)
    opened = load_model(tmp_path, torch.float32, CPU, 64)
    assert isinstance(opened.model, Decoder) and opened.notice is None
    with torch.no_grad():
        wanted = made(input_ids=torch.arange(1, 20)[None]).logits[0]
    assert_close(opened.model.forward(range(1, 20)), wanted)


def test_the_table_of_inputs_stays_on_the_host_as_its_file_holds_it(tmp_path: Path) -> None:
    published(tmp_path, SHARED)
    with fake_card():
        opened = load_model(tmp_path, torch.bfloat16, CUDA, 64)
    inputs = opened.model.weights.per_layer_inputs
    assert inputs.table.device == CPU and inputs.table.dtype == torch.float32


def test_keys_of_wide_heads_are_not_lent_and_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, model = text(40), with_plain_cache(module(SHARED), 48)
    wanted = model.forward(tokens)
    model.cache.rollback(0)
    monkeypatch.setattr(attention, "WIDEST_LENT_HEAD", 16)
    assert_close(model.forward(tokens), wanted)
