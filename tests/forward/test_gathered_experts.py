"""Experts that are taken from stacks by index, as on a GPU: the logits of transformers, no wait for
the host in any step, and little more memory than they take afterwards while they are loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gguf import GGUFWriter

from localspec.forward import graphs
from localspec.forward.block import Block
from localspec.forward.cache import WIDEST, native_cache
from localspec.forward.decoder import Decoder, kv_shape_of
from localspec.forward.experts_beside import ExpertsBeside, SharedExpert
from localspec.forward.gathered_experts import GatheredExperts
from localspec.forward.graphs import CapturedDecoder
from localspec.forward.load import load_model
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.gguf_models import opened_gguf
from localspec.weights import mxfp4, nf4
from localspec.weights.library import bitsandbytes
from localspec.weights.linear import FEW_ROWS, Linear
from localspec.weights.nf4 import Nf4Linear
from localspec.weights.precision import Precision
from localspec.weights.stored import Grouped, Mxfp4, Nf4
from tests.kit.card_int4 import imitate_card
from tests.kit.decoders import layers_of, weights_of
from tests.kit.fake_card import CUDA, fake_card, fake_module, memory_of_card
from tests.kit.families import small
from tests.kit.gguf_files import VOCABULARY, write_gguf
from tests.kit.mxfp4 import saved_in_mxfp4
from tests.kit.packed import LAYOUTS, packed_folder
from tests.kit.tiny import CPU
from tests.kit.tracing import UncapturedPool

FAMILIES = ("qwen3_5_moe", "gemma4, experts beside", "gpt_oss", "qwen3_moe")
TEXT = tuple((7 * place + place * place + 3) % 47 + 1 for place in range(230))
PROMPT = 200
EVEN = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 256}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "gemma4, experts beside": {"moe_intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 64},
}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Precision, "stacks_experts", True)


def even(family: str, **changed: Any) -> Any:
    """Of shapes that every format of 4 bits takes."""
    return small(family, **{**EVEN, **OF_FAMILY.get(family, {}), **changed})


@cache
def module(family: str) -> Any:
    made = even(family)
    made.set_attn_implementation("eager")
    return made


def decoder(family: str, kept: Precision | None = None) -> Decoder:
    kept = kept or Precision(FP32, CPU)
    weights = weights_of(module(family), kept, 256)
    assert all(isinstance(mixture_of(block), GatheredExperts) for block in weights.blocks)
    return Decoder(weights, native_cache(kv_shape_of(weights, 256), FP32, CPU))


def mixture_of(block: Block) -> Any:
    part = block.feed_forward
    return part.experts if isinstance(part, ExpertsBeside | SharedExpert) else part


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, most: float = 1e-5) -> None:
    assert float((found - wanted).abs().max()) <= most * float(wanted.abs().max())


@cache
def of_transformers(family: str) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = module(family)(torch.tensor([TEXT]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_and_rows_of_every_width_give_the_logits_of_transformers(family: str) -> None:
    most = 1e-4 if family == "qwen3_5_moe" else 1e-5  # its recurrence is summed in another order
    native, wanted = decoder(family), of_transformers(family)
    assert_equal(native.forward(TEXT[:PROMPT]), wanted[:PROMPT], most)
    for width in (*range(1, 9), 15, 16, 17, 30):
        native.cache.rollback(PROMPT)
        rows = native.forward(TEXT[PROMPT:][:width])
        assert_equal(rows, wanted[PROMPT:][:width], most)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_a_step_has_the_same_bits_beside_other_rows(family: str) -> None:
    part = mixture_of(decoder(family).weights.blocks[0])
    rows = torch.randn(FEW_ROWS, 64, generator=torch.Generator().manual_seed(1))
    shares, chosen = part.router(rows)
    alone = [part._one_row(rows[n : n + 1], shares[n], chosen[n]) for n in range(FEW_ROWS)]
    assert torch.equal(torch.cat(alone), part(rows))


@pytest.mark.parametrize("num_equal", [2, 3, 6])
def test_experts_that_the_router_rates_alike_are_chosen_as_torch_chooses(num_equal: int) -> None:
    """In a few rows and in many."""
    part = mixture_of(decoder("qwen3_5_moe").weights.blocks[0])
    generator = torch.Generator().manual_seed(num_equal)
    rated = torch.randn(20, 6, generator=generator)
    rated[:, :num_equal] = rated.amax(-1, keepdim=True)  # two of them are chosen
    rows = torch.randn(20, 64, generator=generator)
    numbers = torch.softmax(rated, -1).topk(2)
    shares = numbers.values / numbers.values.sum(-1, keepdim=True)
    wanted = torch.zeros_like(rows)
    for row in range(20):
        for share, expert in zip(shares[row], numbers.indices[row], strict=True):
            inner = part.gate_up.chosen(expert[None])(rows[row : row + 1])
            wanted[row] += share * part.down.chosen(expert[None])(part.activation(inner))[0]

    class Rated:
        has_invariant_rows = reads_host = False

        def __call__(self, routed: torch.Tensor) -> torch.Tensor:
            return rated[: routed.shape[0]]

    object.__setattr__(part.router, "linear", Rated())
    assert_equal(part(rows), wanted)
    assert_equal(part(rows[:5]), wanted[:5])


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gemma4, experts beside"])
def test_experts_in_4_bits_give_the_logits_of_their_unpacked_weights(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4, "has_kernel", lambda device: False)
    kept = Precision(FP32, CPU, "nf4")
    found = decoder(family, kept)
    assert {mixture_of(block).down.kind for block in found.weights.blocks} == {Nf4}
    monkeypatch.setattr(Precision, "stacks_experts", False)
    weights = weights_of(module(family), kept, 256)
    wanted = Decoder(weights, native_cache(kv_shape_of(weights, 256), FP32, CPU))
    for piece in (TEXT[:20], TEXT[20:23]):
        assert_equal(found.forward(piece), wanted.forward(piece))


# -- folders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [None, 4])
def test_gpt_oss_stays_in_mxfp4(bits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the other layers in 4 bits too."""
    made = saved_in_mxfp4(small("gpt_oss", hidden_size=64, intermediate_size=96), tmp_path)
    opened = load_model(tmp_path, FP32, CPU, 64, bits)
    parts = [mixture_of(block) for block in opened.model.weights.blocks]
    assert {part.kind for each in parts for part in (each.gate_up, each.down)} == {Mxfp4}
    with torch.no_grad():
        wanted = made(torch.tensor([TEXT[:40]])).logits[0]
    off = float((opened.model.forward(TEXT[:40]) - wanted).norm() / wanted.norm())
    assert off < 1e-5 if bits is None else 1e-3 < off < 0.3


@pytest.mark.parametrize("layout", ["awq", "gptq", "compressed int4, zero points"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "gemma4, experts beside"])
def test_a_packed_folder_keeps_its_experts_in_its_own_groups(
    family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_card(monkeypatch)
    pack, settings, _ = LAYOUTS[layout]
    made = packed_folder(tmp_path, pack, settings, even(family, **ONE_LAYER))
    opened = load_model(tmp_path, FP32, CPU, 64, 4)
    parts = [mixture_of(block) for block in opened.model.weights.blocks]
    assert {part.kind for each in parts for part in (each.gate_up, each.down)} == {Grouped}
    assert opened.repacking_error is not None and 0.0 < opened.repacking_error < 0.01
    with torch.no_grad():
        wanted = made(torch.tensor([TEXT[:20]])).logits[0]
    assert float((opened.model.forward(TEXT[:20]) - wanted).norm() / wanted.norm()) < 0.1


def mixture_as_gguf(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a file as Q4_K_M, with Q4_K and, for down, Q6_K, and the values of its tensors."""

    def describe(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        writer.add_expert_count(3)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(256)

    made = small(
        "qwen3_moe", vocab_size=64, hidden_size=256, intermediate_size=256,
        moe_intermediate_size=256, num_experts=3, num_hidden_layers=1, head_dim=64,
    )  # fmt: skip
    kinds = dict.fromkeys(("embed_tokens", "lm_head", "gate"), "F32")
    file = folder / "m.gguf"
    values = write_gguf(file, made, "Q4_K", "qwen3moe", describe, {**kinds, "down_proj": "Q6_K"})
    return opened_gguf(file, folder), values


def test_a_gguf_file_keeps_its_experts_in_its_own_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_card(monkeypatch)
    folder, values = mixture_as_gguf(tmp_path)
    opened = load_model(folder, FP32, CPU, 64, 4)
    part = mixture_of(opened.model.weights.blocks[0])
    assert (part.gate_up.kind, part.down.kind) == (Grouped, Grouped), "Q6_K is rounded"
    begin = "model.layers.0.mlp.experts."
    for chosen in range(3):
        layer = part.gate_up.chosen(torch.tensor([chosen]))
        halves = [values[f"{begin}{half}_proj.weight"][chosen] for half in ("gate", "up")]
        down = part.down.chosen(torch.tensor([chosen]))
        off = _off(layer, torch.cat(halves)), _off(down, values[f"{begin}down_proj.weight"][chosen])
        assert off[0] < 0.01 < off[1] < 0.1


def _off(layer: Linear, wanted: torch.Tensor) -> float:
    return float((layer(torch.eye(256)).T - wanted).norm() / wanted.norm())


# -- a card ----------------------------------------------------------------------------------


def on_card(family: str, capacity: int = 64) -> Decoder:
    kinds = ["linear_attention"] * (family == "qwen3_5_moe") + ["full_attention"]
    module = even(family, num_hidden_layers=len(kinds), layer_types=kinds)
    fake = fake_module(module, BF16)
    weights = weights_of(fake, Precision(BF16, CUDA, "nf4"), capacity)
    cache = native_cache(kv_shape_of(weights, capacity), BF16, CUDA)
    return Decoder(weights, cache)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_moe", "gemma4, experts beside", "gpt_oss"])
def test_every_step_of_a_mixture_is_captured_and_none_waits_for_the_host(family: str) -> None:
    few = patch.multiple(graphs, COARSE_WIDTHS=(1, WIDEST), FINE_WIDTHS=())
    with few, fake_card() as traffic:
        model = CapturedDecoder(on_card(family), UncapturedPool())
        assert model.is_capturable and len(list(model.capture())) == 2 and model.notice is None
        traffic.clear()
        for width in (1, 5, WIDEST):
            model.forward(TEXT[:width], num_logits=1)
        assert not traffic.reads and not traffic.uploads


@pytest.mark.parametrize("family", ["gemma4, experts beside", "gpt_oss"])
def test_a_prompt_waits_once_a_layer(family: str) -> None:
    with fake_card(number=3.0) as traffic:  # rows of every expert
        model = on_card(family)
        traffic.clear()
        assert model.forward(TEXT[:20], num_logits=1).shape == (1, 48)
        assert sum(traffic.reads.values()) == len(model.weights.blocks) and not traffic.uploads


@pytest.mark.slow
@pytest.mark.parametrize("has_kernel", [False, True])
def test_gpt_oss_in_mxfp4_waits_for_nothing_on_a_card(
    has_kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its other layers in NF4."""
    monkeypatch.setattr(mxfp4, "has_kernel", lambda *given: has_kernel)
    bitsandbytes()
    saved_in_mxfp4(small("gpt_oss", hidden_size=64, intermediate_size=96, **ONE_LAYER), tmp_path)
    with fake_card() as traffic, memory_of_card() as memory:
        model = load_model(tmp_path, BF16, CUDA, 64, bits=4).model
        assert isinstance(model, Decoder) and isinstance(layers_of(model)[0], Nf4Linear)
        part = mixture_of(model.weights.blocks[0])
        assert part.gate_up.weight_bytes + part.down.weight_bytes == 4 * 3 * 64 * 96 * 4.25 / 8
        assert model.weight_bytes <= memory.used
        traffic.clear()
        assert model.forward(TEXT[:4]).shape == (4, 48)
        assert not traffic.reads and not traffic.uploads


@pytest.mark.slow
def test_a_card_rounds_the_experts_of_a_gguf_file_that_are_in_more_bits(tmp_path: Path) -> None:
    folder, _ = mixture_as_gguf(tmp_path)
    with fake_card() as traffic:
        opened = load_model(folder, BF16, CUDA, 64, 4)
        part = mixture_of(opened.model.weights.blocks[0])
        assert (part.gate_up.kind, part.down.kind) == (Grouped, Grouped)
        assert part.gate_up.weight_bytes + part.down.weight_bytes == 3 * 3 * 256 * 256 * 5 / 8
        planned, _ = shape_from_folder(folder).loaded_bytes("4-bit", "bf16", 64, "cuda")
        assert opened.model.weight_bytes == pytest.approx(planned, rel=0.05)
        traffic.clear()
        assert opened.model.forward(TEXT[:5]).shape == (5, 64)
        assert not traffic.reads and not traffic.uploads


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_loading_takes_an_expert_more_than_the_stacks(kind: Any) -> None:
    """On the card; a copy of a layer's experts would be twice as much."""
    fake = small("qwen3_moe", hidden_size=512, moe_intermediate_size=512, num_experts=8,
                 num_hidden_layers=1)  # fmt: skip
    with fake_card(), memory_of_card() as memory:
        weights = weights_of(fake, Precision(BF16, CUDA, kind), 64)
        of_expert = 3 * 512 * 512 * 2
        assert weights.weight_bytes <= memory.used < weights.weight_bytes + of_expert
        assert memory.most_used < memory.used + 3 * of_expert
