"""What a quantised copy shares, costs, answers and refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from localspec.core.errors import ModelError
from localspec.forward.quantise import quantised_copy, quantised_twin
from localspec.weights import precision
from localspec.weights.int4 import Int4Linear
from localspec.weights.library import bitsandbytes
from localspec.weights.precision import Kind, kind_for
from tests.kit.tiny import KINDS, on_transformers, tiny_llama, with_cache

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def narrow_llama() -> Any:
    """In shapes that cannot be quantised: its rows are no whole groups of 64."""
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
    assert {id(tensor) for tensor in copy.parameters()} <= {id(t) for t in module.parameters()}
    assert copy.model.embed_tokens.weight is module.model.embed_tokens.weight
    assert copy.model.norm.weight is module.model.norm.weight
    for path in ("lm_head", "model.layers.0.mlp.up_proj"):
        assert type(copy.get_submodule(path)) is not nn.Linear
        assert type(module.get_submodule(path)) is nn.Linear


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_answers_nearly_as_its_original(kind: Kind) -> None:
    for module in (tiny_llama(), biased_qwen()):
        wanted = logits_of(module)
        got = logits_of(quantised_copy(module, kind)[0])
        assert got.dtype == wanted.dtype
        difference = float((got - wanted).norm() / wanted.norm())
        assert 0.0 < difference < 0.3  # 0 would mean that nothing was quantised


@pytest.mark.parametrize("kind", KINDS)
def test_a_native_twin_answers_nearly_as_its_original(kind: Kind) -> None:
    model = with_cache(tiny_llama())
    twin = quantised_twin(model, kind)
    assert twin.model.cache is model.cache and twin.weight_bytes > 0
    wanted = model.forward([3, 1, 4])
    model.cache.rollback(0)
    assert 0.0 < float((twin.model.forward([3, 1, 4]) - wanted).norm() / wanted.norm()) < 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_goes_in_and_comes_out(kind: Kind) -> None:
    module = tiny_llama().to(torch.bfloat16)
    assert logits_of(quantised_copy(module, kind)[0]).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_quantised_layers_alone(kind: Kind) -> None:
    module = tiny_llama()
    layers = [each for each in module.modules() if type(each) is nn.Linear]
    held = quantised_copy(module, kind)[1]
    if kind == "int8":
        assert held == sum(each.weight.numel() + 12 * each.out_features for each in layers)
        return
    scale_bits = (16, 32)  # of a group: both formats of 4 bits keep them in bf16 on a processor
    weights = sum(each.weight.numel() for each in layers)
    least, most = (weights * (4 + bits / 64) / 8 for bits in scale_bits)
    assert least <= held <= most


def test_nf4_is_taken_where_a_kernel_multiplies_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = list[str]()
    for is_there in (True, False):
        monkeypatch.setattr(
            bitsandbytes().functional, "has_avx512bf16", lambda there=is_there: there
        )
        kinds.append(kind_for(torch.device("cpu")))
    assert kinds == ["nf4", "int8"] and kind_for(torch.device("cuda")) == "nf4"
    monkeypatch.setattr(precision, "has_fbgemm", lambda: False)
    assert kind_for(torch.device("cpu")) == "int4"
    with pytest.raises(ModelError, match="no proven 4-bit path on mps"):
        kind_for(torch.device("mps"))


def test_a_processor_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitsandbytes().functional, "has_avx512bf16", lambda: False)
    with pytest.raises(ModelError, match=r"no instructions for bf16"):
        quantised_twin(with_cache(tiny_llama()), "nf4")


def test_shapes_that_no_kernel_takes_are_refused_with_a_remedy() -> None:
    for model in (on_transformers(narrow_llama(), 16), with_cache(narrow_llama(), 16)):
        with pytest.raises(
            ModelError, match=r"Only 0% .* take layers in full precision of 64 .* another draft"
        ):
            quantised_twin(model, "int4")


def test_a_copy_of_a_model_in_4_bits_is_refused_with_the_reason() -> None:
    twin = quantised_twin(with_cache(tiny_llama(), 16), "int4")
    with pytest.raises(ModelError, match="take layers in full precision"):
        quantised_twin(twin.model, "int4")


def test_a_layer_of_an_odd_shape_stays_shared() -> None:
    module = tiny_llama()
    module.model.layers[0].mlp.odd = nn.Linear(60, 8, bias=False)
    copy, _ = quantised_copy(module, "int4")
    assert copy.model.layers[0].mlp.odd.weight is module.model.layers[0].mlp.odd.weight
    assert type(copy.model.layers[0].mlp.up_proj) is not nn.Linear


def test_a_copy_cannot_be_saved() -> None:
    copy, _ = quantised_copy(tiny_llama(), "int4")
    with pytest.raises(ModelError, match="cannot be saved"):
        copy.state_dict()


def test_kernels_that_answer_wrongly_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Int4Linear, hidden: torch.Tensor) -> torch.Tensor:
        return torch.ones(hidden.shape[0], 1)

    monkeypatch.setattr(Int4Linear, "__call__", broken)
    with pytest.raises(ModelError, match=r"off from the layer they stand for"):
        quantised_copy(tiny_llama(), "int4")


def test_a_missing_operator_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise AttributeError("no operator _weight_int4pack_mm_for_cpu")

    monkeypatch.setattr(Int4Linear, "__call__", absent)
    with pytest.raises(ModelError, match=r"int4 kernels do not run here .* another drafter"):
        quantised_copy(tiny_llama(), "int4")


def test_damaged_weights_are_refused() -> None:
    module = tiny_llama()
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    for kind in get_args(Kind):
        with pytest.raises(ModelError):
            quantised_copy(module, kind)


@pytest.mark.slow
def test_nothing_is_fetched_compiled_or_logged_on_import() -> None:
    """`kernels` stands in for the package by which bitsandbytes would ask a hub."""
    script = (
        "import sys, types\n"
        "trap = types.ModuleType('kernels')\n"
        "trap.get_kernel = lambda *a, **k: print('ASKED')\n"
        "sys.modules['kernels'] = trap\n"
        "from localspec.weights.library import bitsandbytes\n"
        "bitsandbytes()\n"
        "assert sys.modules['kernels'] is trap\n"
        "assert 'torch._dynamo' not in sys.modules, 'the compiler takes a second'\n"
        "print('done')\n"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["done"]
    assert found.stderr == ""
