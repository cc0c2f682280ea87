"""Experts in the host's memory beside a GPU, and experts in 4 bits on a processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.errors import ModelError
from localspec.forward.block import Experts
from localspec.forward.decoder import Decoder
from localspec.forward.experts_beside import ExpertsBeside, SharedExpert
from localspec.forward.host_experts import HostExperts
from localspec.forward.load import load_model
from localspec.weights import nf4
from localspec.weights.int4 import Int4Linear
from localspec.weights.linear import PlainLinear
from localspec.weights.nf4 import Nf4Linear
from tests.kit.fake_card import CUDA, fake_card
from tests.kit.families import small
from tests.kit.mxfp4 import saved_in_mxfp4
from tests.kit.tiny import CPU, tiny_llama

TEXT = tuple((7 * place + place * place + 3) % 47 + 1 for place in range(20))
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "gemma4, experts beside": {"moe_intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gpt_oss": {},
}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
FP32, BF16 = torch.float32, torch.bfloat16


def saved(folder: Path, family: str) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 64, **SIZES[family], **ONE_LAYER}
    module = small(family, **sizes)
    if family == "gpt_oss":
        return saved_in_mxfp4(module, folder)
    module.save_pretrained(str(folder))
    return module


def mixture_of(model: Any) -> Any:
    assert isinstance(model, Decoder)
    part = model.weights.blocks[0].feed_forward
    return part.experts if isinstance(part, ExpertsBeside | SharedExpert) else part


@pytest.mark.slow
@pytest.mark.parametrize("family", SIZES)
def test_experts_stay_on_the_host_and_the_rest_goes_to_the_card(
    family: str, tmp_path: Path
) -> None:
    """A layer waits once for its rows, and again where the router reads them otherwise."""
    module = saved(tmp_path, family)
    with fake_card() as traffic:
        whole = load_model(tmp_path, BF16, CUDA, 64).model
        model = load_model(tmp_path, BF16, CUDA, 64, experts_device=CPU).model
        assert isinstance(model, Decoder) and not model.is_capturable
        part = mixture_of(model)
        assert isinstance(part, HostExperts)
        linears = [linear for linear in part.experts.linears if isinstance(linear, PlainLinear)]
        assert all(linear.weight.device == CPU for linear in linears)
        of_experts = sum(
            tensor.numel() for name, tensor in module.named_parameters() if ".experts." in name
        )
        freed = whole.weight_bytes - model.weight_bytes
        assert freed >= 2 * of_experts if family != "gpt_oss" else freed >= of_experts // 2
        traffic.clear()
        assert model.forward(TEXT[:3]).device == CUDA
        assert sum(traffic.reads.values()) >= 1


def test_rows_go_through_the_experts_in_the_precision_of_the_host(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3_moe")
    experts = mixture_of(load_model(tmp_path, FP32, CPU, 64).model)
    assert isinstance(experts, Experts)
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    routed = rows.flip(0)
    made = HostExperts(experts, FP32).mixed(rows, routed)
    assert made.dtype == BF16
    assert torch.equal(made, experts.mixed(rows.float(), routed.float()).bfloat16())
    with pytest.raises(ModelError, match="A draft model would do"):
        HostExperts(experts, FP32).with_linears(lambda linear: linear)


@pytest.mark.parametrize("family", SIZES)
def test_a_processor_keeps_experts_in_4_bits_where_that_is_asked_for(
    family: str, tmp_path: Path
) -> None:
    module = saved(tmp_path, family)
    opened = load_model(tmp_path, FP32, CPU, 64, bits=4)
    model = opened.model
    assert opened.has_invariant_rows
    linears = mixture_of(model).linears[1:]
    kind = Nf4Linear if nf4.has_kernel(CPU) else Int4Linear
    assert all(isinstance(linear, kind) != (family == "gpt_oss") for linear in linears)
    with torch.no_grad():
        wanted = module(torch.tensor([TEXT])).logits[0]
    assert float((model.forward(TEXT) - wanted).norm() / wanted.norm()) < 0.5


def test_a_model_of_another_path_cannot_have_experts_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama().save_pretrained(str(tmp_path))
    monkeypatch.setattr("localspec.forward.load.NATIVE", {})
    with pytest.raises(ModelError, match=r"experts.*cannot stay in the RAM.*Leave them on the GPU"):
        load_model(tmp_path, FP32, CPU, 64, experts_device=torch.device("cpu"))
