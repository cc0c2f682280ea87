"""What a quantised copy shares, costs, answers and refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from localspec.errors import ModelError
from localspec.forward import quantise
from localspec.forward.quantise import (
    Int8Linear,
    Kind,
    cheapest_kind,
    quantised_copy,
    quantised_twin,
)
from localspec.forward.weight_layout import TIMED_PASSES
from tests.tiny import on_transformers, tiny_llama, with_cache

KINDS: tuple[Kind, ...] = ("nf4", "int8")
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def narrow_llama() -> Any:
    """In shapes that NF4 cannot take: its rows are no whole blocks of 64."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def biased_qwen() -> Any:
    """fp32, with a bias on q, k and v."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    module = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.q_proj.bias.normal_()
    return module


@torch.inference_mode()
def logits_of(module: Any) -> torch.Tensor:
    found: torch.Tensor = module(input_ids=TOKENS, use_cache=False).logits[0]
    return found  # [8, V]


@pytest.mark.parametrize("kind", KINDS)
def test_the_original_answers_bit_for_bit_as_before(kind: Kind) -> None:
    for module in (tiny_llama(), biased_qwen()):
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        logits = logits_of(module)
        logits_of(quantised_copy(module, kind)[0])
        assert torch.equal(logits_of(module), logits)
        for name, tensor in module.state_dict().items():
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_everything_but_the_layers_is_shared(kind: Kind) -> None:
    module = tiny_llama()
    copy, _ = quantised_copy(module, kind)
    own = {id(tensor) for tensor in copy.parameters()} - {id(t) for t in module.parameters()}
    assert copy.lm_head.weight is module.lm_head.weight
    assert copy.model.embed_tokens.weight is module.model.embed_tokens.weight
    assert copy.model.norm.weight is module.model.norm.weight
    assert len(own) == (0 if kind == "int8" else 2 * 7)  # int8 weights lie in packed objects
    assert type(copy.model.layers[0].mlp.up_proj) is not nn.Linear
    assert type(module.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize(("kind", "limit"), [("nf4", 0.3), ("int8", 0.05)])
def test_a_copy_answers_nearly_as_its_original(kind: Kind, limit: float) -> None:
    for module in (tiny_llama(), biased_qwen()):
        wanted = logits_of(module)
        got = logits_of(quantised_copy(module, kind)[0])
        assert got.dtype == wanted.dtype
        difference = float((got - wanted).norm() / wanted.norm())
        assert 0.0 < difference < limit  # 0 would mean that nothing was quantised


@pytest.mark.parametrize(("kind", "limit"), [("nf4", 0.3), ("int8", 0.05)])
def test_a_native_twin_answers_nearly_as_its_original(kind: Kind, limit: float) -> None:
    model = with_cache(tiny_llama())
    twin = quantised_twin(model, kind)
    assert twin.model.cache is model.cache and twin.weight_bytes > 0
    wanted = model.forward([3, 1, 4])
    model.cache.rollback(0)
    assert 0.0 < float((twin.model.forward([3, 1, 4]) - wanted).norm() / wanted.norm()) < limit


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_goes_in_and_comes_out(kind: Kind) -> None:
    module = tiny_llama().to(torch.bfloat16)
    assert logits_of(quantised_copy(module, kind)[0]).dtype == torch.bfloat16


def test_bytes_are_those_of_the_quantised_layers_alone() -> None:
    module = tiny_llama()
    linears = [m for m in module.model.modules() if type(m) is nn.Linear]
    weights = sum(linear.weight.numel() for linear in linears)
    rows = sum(linear.out_features for linear in linears)
    int8 = quantised_copy(module, "int8")[1]
    assert weights + 4 * rows <= int8 <= 2 * weights + 16 * rows
    nf4 = quantised_copy(module, "nf4")[1]
    table = 64 * len(linears)  # the 16 values of NF4, once a layer
    assert weights // 2 + weights // 32 <= nf4 <= weights // 2 + weights // 16 + table


def test_every_nf4_tensor_is_counted() -> None:
    copy, declared = quantised_copy(biased_qwen(), "nf4")
    measured = 0
    for layer in copy.model.modules():
        if type(layer).__name__ == "Linear4bit":
            tensors = [*layer.parameters(), *vars(layer.weight.quant_state).values()]
            held = {t.data_ptr(): t.nbytes for t in tensors if isinstance(t, torch.Tensor)}
            measured += sum(held.values())
    assert measured > 0
    assert declared >= measured


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory after malloc_trim")
def test_int8_takes_no_more_memory_than_it_declares() -> None:
    """24 layers of 1024 x 1024 in a process of their own; 2 MiB for everything else."""
    script = (
        "import ctypes, psutil, torch\n"
        "from localspec.forward.quantise import Int8Linear\n"
        "def held():\n"
        "    ctypes.CDLL('libc.so.6').malloc_trim(0)\n"
        "    return psutil.Process().memory_info().rss\n"
        "linear, row = torch.nn.Linear(1024, 1024), torch.ones(1, 1024)\n"
        "with torch.inference_mode():\n"
        "    Int8Linear(linear)(row)\n"
        "    before = held()\n"
        "    layers = [Int8Linear(linear) for _ in range(24)]\n"
        "    [layer(row) for layer in layers]\n"
        "    print(held() - before, sum(layer.weight_bytes for layer in layers))\n"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    measured, declared = (int(word) for word in output.split())
    assert 24 * 2**20 * 0.8 < measured < declared + 2 * 2**20


def test_shapes_that_nf4_cannot_take_are_refused_with_a_remedy() -> None:
    for model in (on_transformers(narrow_llama(), 16), with_cache(narrow_llama(), 16)):
        with pytest.raises(ModelError, match=r"Only 0% .* NF4 takes layers of 64 .* another draft"):
            quantised_twin(model, "nf4")


def test_a_layer_of_an_odd_shape_stays_shared() -> None:
    module = tiny_llama()
    module.model.layers[0].mlp.odd = nn.Linear(60, 8, bias=False)
    copy, _ = quantised_copy(module, "nf4")
    assert copy.model.layers[0].mlp.odd.weight is module.model.layers[0].mlp.odd.weight
    assert type(copy.model.layers[0].mlp.up_proj) is not nn.Linear


def test_a_copy_cannot_be_saved() -> None:
    copy, _ = quantised_copy(tiny_llama(), "nf4")
    with pytest.raises(ModelError, match="cannot be saved"):
        copy.state_dict()


def test_kernels_that_answer_wrongly_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Int8Linear, hidden: torch.Tensor) -> torch.Tensor:
        return torch.ones(*hidden.shape[:-1], self.out_features)

    monkeypatch.setattr(Int8Linear, "forward", broken)
    with pytest.raises(ModelError, match=r"off from the layer they stand for"):
        quantised_copy(tiny_llama(), "int8")


def test_a_missing_operator_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(linear: nn.Linear) -> torch.Tensor:
        raise AttributeError("no operator quantize_per_channel")

    monkeypatch.setattr(quantise, "_per_row_int8", absent)
    with pytest.raises(ModelError, match=r"int8 kernels do not run here .* another drafter"):
        quantised_copy(tiny_llama(), "int8")


def test_damaged_weights_are_refused() -> None:
    module = tiny_llama()
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    for kind in KINDS:
        with pytest.raises(ModelError):
            quantised_copy(module, kind)


def test_values_that_are_not_numbers_pass_through_an_int8_layer() -> None:
    layer = Int8Linear(nn.Linear(64, 32))
    with torch.inference_mode():
        out = layer(torch.full((1, 2, 64), float("nan")))
    assert out.shape == (1, 2, 32)
    assert bool(out.isnan().all())


@pytest.mark.slow
def test_nothing_is_fetched_and_nothing_is_logged_on_import() -> None:
    """`kernels` stands in for the package by which bitsandbytes would ask a hub."""
    script = (
        "import sys, types\n"
        "trap = types.ModuleType('kernels')\n"
        "trap.get_kernel = lambda *a, **k: print('ASKED')\n"
        "sys.modules['kernels'] = trap\n"
        "from localspec.forward.quantise import _bitsandbytes\n"
        "_bitsandbytes()\n"
        "assert sys.modules['kernels'] is trap\n"
        "print('done')\n"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["done"]
    assert found.stderr == ""


def clock_of(*pass_times: float) -> Iterator[float]:
    """A clock by which each format's passes take the given time, NF4's first."""
    now = 0.0
    for seconds in pass_times:
        for _ in range(TIMED_PASSES + 1):
            yield now
            now += seconds
            yield now


@pytest.mark.parametrize("make", [with_cache, on_transformers])
@pytest.mark.parametrize(
    ("nf4_s", "int8_s", "kind"), [(0.002, 0.003, "nf4"), (0.003, 0.002, "int8")]
)
def test_the_cheaper_format_is_chosen(make: Any, nf4_s: float, int8_s: float, kind: Kind) -> None:
    ticks = clock_of(nf4_s, int8_s)
    assert cheapest_kind(make(tiny_llama()), clock=lambda: next(ticks)) == kind


def test_a_format_that_cannot_be_used_leaves_the_choice_to_the_other() -> None:
    assert cheapest_kind(on_transformers(narrow_llama(), 16)) == "int8"


def test_a_timed_part_stands_for_the_whole() -> None:
    """NF4 cannot take the odd layer; its time counts for that layer as well."""
    module = tiny_llama()
    module.model.layers[0].mlp.odd = nn.Linear(60, 8 * 1024, bias=False)
    ticks = clock_of(0.002, 0.003)
    assert cheapest_kind(on_transformers(module), clock=lambda: next(ticks)) == "int8"
