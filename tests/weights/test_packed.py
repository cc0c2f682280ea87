"""Folders in published layouts, made by the written layout, answer as their dense weights do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from localspec.core.errors import ModelError
from localspec.forward.decoder import Decoder
from localspec.forward.load import load_model
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.memory import Room
from localspec.machine.model import Model
from localspec.machine.plans import PlanRequest
from localspec.weights.int4 import Int4Linear
from localspec.weights.nf4 import has_kernel
from localspec.weights.packed import fields, gptq
from tests.kit.decoders import layers_of
from tests.kit.packed import (
    AWQ,
    GPTQ,
    GROUP,
    LAYOUTS,
    Packed,
    as_awq,
    as_compressed,
    as_fp8,
    as_gptq,
    compressed,
    dense,
    packed_folder,
    words,
)
from tests.kit.tiny import CPU, tiny_llama

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("stored", [7, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_the_zero_of_symmetric_gptq_is_the_middle(stored: int, version: str) -> None:
    """Qwen3.5-27B-GPTQ-Int4 names version 1, which keeps 7, and keeps 8."""
    parts, _ = as_gptq()(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    settings = {"bits": 4, "group_size": GROUP, "sym": True, "checkpoint_format": version}
    parts["qzeros"] = words(torch.full((2, 64), stored), 4)
    numbers = fields(parts["qweight"], 4, 0).T
    found = gptq(parts, settings)
    assert found is not None
    assert torch.equal(
        found.dense(), dense(numbers, torch.full((64, 2), 8), parts["scales"].T.float())
    )
    parts["qzeros"][0, 0] += 1
    with pytest.raises(ValueError, match="several zeros"):
        gptq(parts, settings)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_folder_answers_as_its_dense_weights_do(layout: str, tmp_path: Path) -> None:
    pack, settings, title = LAYOUTS[layout]
    module = packed_folder(tmp_path, pack, settings)
    model = load_model(tmp_path, torch.float32, CPU, 32).model
    assert isinstance(model, Decoder)
    with torch.inference_mode():
        wanted = module(input_ids=torch.tensor([TOKENS])).logits[0]
    assert torch.allclose(model.forward(TOKENS), wanted, atol=1e-4 * float(wanted.abs().max()))
    assert shape_from_folder(tmp_path).stored_as == title
    down = module.model.layers[1].mlp.down_proj.weight
    held = model.weights.blocks[1].linears[-1].dense()
    assert held is not None and torch.equal(held.weight, down)


SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
DELTA = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16,
         "layer_types": ["linear_attention", "full_attention"] * 2}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "gemma4_text": {
        **EXPERTS, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 2,
        "attention_k_eq_v": True, "sliding_window": 6, "enable_moe_block": True, "top_k_experts": 2,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "num_experts_per_tok": 2, "norm_topk_prob": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["awq", "gptq", "compressed int4", "FP8, rows"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_packed_hybrid_or_mixture_answers_as_its_dense_weights_do(
    family: str, layout: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, **HYBRIDS[family])
    module = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    pack, settings, title = LAYOUTS[layout]
    packed_folder(tmp_path, pack, settings, module)
    opened = load_model(tmp_path, torch.float32, CPU, 64)
    assert opened.notice is None, "it runs natively"
    with torch.inference_mode():
        wanted = module(input_ids=torch.tensor([TOKENS])).logits[0]
    rows = opened.model.forward(TOKENS)
    assert torch.allclose(rows, wanted, atol=1e-4 * float(wanted.abs().max()))
    shape = shape_from_folder(tmp_path)
    assert shape.stored_as == title and shape.is_native


def test_joined_experts_in_8_bit_floats_are_read_with_their_scales(tmp_path: Path) -> None:
    """As transformers saves them: without them every weight would be too large or too small."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SMALL, **HYBRIDS["qwen3_moe"])
    module = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    pack, tensors, state = as_fp8(32, 32), dict[str, torch.Tensor](), module.state_dict()
    for name, tensor in state.items():
        tensors[name] = tensor.clone()
        if ".experts." in name:
            packed = [pack(matrix) for matrix in tensor]
            for part, end in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                tensors[f"{name}{end}"] = torch.stack([parts[part] for parts, _ in packed])
            state[name] = torch.stack([values for _, values in packed])
    config.save_pretrained(str(tmp_path))
    path = tmp_path / "config.json"
    stored = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": stored}))
    save_file(tensors, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    module.load_state_dict(state)
    with torch.inference_mode():
        wanted = module(input_ids=torch.tensor([TOKENS])).logits[0]
    model = load_model(tmp_path, torch.float32, CPU, 64).model
    assert torch.allclose(model.forward(TOKENS), wanted, atol=1e-4 * float(wanted.abs().max()))
    loose = {name: each for name, each in tensors.items() if not name.endswith("_scale_inv")}
    save_file(loose, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"experts.*not laid out as its config.json says"):
        load_model(tmp_path, torch.float32, CPU, 64)


KEPT = ["awq", "gptq", "gptq, version 2", "compressed int4", "compressed int4, zero points"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((layout, torch.float32) for layout in LAYOUTS), ("awq", torch.bfloat16)],
)
def test_in_4_bits_a_folder_keeps_its_own_where_they_can_be(
    layout: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pack, settings, _ = LAYOUTS[layout]
    module = packed_folder(tmp_path, pack, settings)
    opened = load_model(tmp_path, dtype, CPU, 32, bits=4)
    assert isinstance(opened.model, Decoder)
    with torch.inference_mode():
        wanted = module(input_ids=torch.tensor([TOKENS])).logits[0]
    off = float((opened.model.forward(TOKENS) - wanted).norm() / wanted.norm())
    assert off < {torch.float32: 0.01, torch.bfloat16: 0.05}[dtype] or layout not in KEPT
    assert all(isinstance(each, Int4Linear) for each in layers_of(opened.model)) == (
        layout in KEPT or not has_kernel(CPU)
    )
    assert (opened.repacking_error is not None) == (layout in KEPT)
    assert opened.repacking_error is None or opened.repacking_error < 0.01


def test_a_layer_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> Packed:
        tensors, made = as_awq(weight)
        return {name: each for name, each in tensors.items() if name != "scales"}, made

    packed_folder(tmp_path, pack, AWQ)
    with pytest.raises(ModelError, match=r"packed weight model.layers.0.*_proj in .*scales"):
        load_model(tmp_path, torch.float32, CPU, 32)


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("awq", dict.fromkeys(("scales", "qzeros"), lambda t: t.repeat(2, 1)), "groups of 16"),
        ("awq", {"scales": lambda t: t[:, :-8], "qzeros": lambda t: t[:, :-1]}, "56 rows"),
        ("gptq out of order", {"g_idx": lambda t: t - 1}, "inputs of other groups"),
        ("compressed int4", {"weight_scale": lambda t: t[:, :1].repeat(1, 3)}, "3 groups of"),
    ],
)  # fmt: skip
def test_scales_that_do_not_belong_to_the_weights_are_refused(
    layout: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Most would be read as they are, and the model would answer wrongly without a word."""
    real, settings, _ = LAYOUTS[layout]

    def pack(weight: torch.Tensor) -> Packed:
        parts, made = real(weight)
        changed = {name: change(parts[name]).contiguous() for name, change in changes.items()}
        return parts | changed, made

    packed_folder(tmp_path, pack, settings)
    with pytest.raises(ModelError, match=f"not laid out as its config.json says .{said}"):
        load_model(tmp_path, torch.float32, CPU, 32)


@pytest.mark.parametrize("layout", ["gptq of 8 bits", "compressed int4"])
def test_layers_in_different_bits_are_refused_by_name(layout: str, tmp_path: Path) -> None:
    """The config.json names one number of bits, and a layer's sizes tell another."""
    real, settings, _ = LAYOUTS[layout]
    of_layer = iter([real, as_gptq(4) if "gptq" in layout else as_compressed(8)])

    def pack(weight: torch.Tensor) -> Packed:
        return next(of_layer, real)(weight)

    packed_folder(tmp_path, pack, settings)
    with pytest.raises(ModelError, match=r"different bits: model.layers.0.*_proj is in [48] bits"):
        load_model(tmp_path, torch.float32, CPU, 32)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "hqq"}, "keeps its weights in the format hqq, which is not read here"),
        ({"quant_method": "exl2", "bits": 4}, "in the format exl2"),
        ({"bits": 4}, "in a format that its config does not name"),
        ({**AWQ, "version": "gemv"}, "AWQ of 4 bits in the layout gemv"),
        ({**GPTQ, "bits": 3}, "GPTQ of 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "in the layout marlin"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "nvfp4-pack-quantized"),
        ({"quant_method": "compressed-tensors"}, "cannot be understood"),
    ],
)
def test_what_is_not_read_is_named_with_what_would_do(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    packed_folder(tmp_path, as_awq, settings)
    for read in (shape_from_folder, lambda folder: load_model(folder, torch.float32, CPU, 32)):
        with pytest.raises(ModelError, match=said):
            read(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bitsandbytes_folder_is_loaded_as_it_is(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_llama().save_pretrained(tmp_path / "whole")
    config: Any = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    module: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", quantization_config=config, dtype=torch.bfloat16, device_map={"": CPU}
    )
    module.save_pretrained(tmp_path / "kept")
    model = load_model(tmp_path / "kept", dtype, CPU, 32).model
    with torch.inference_mode():
        wanted = module(input_ids=torch.tensor([TOKENS])).logits[0].float()
    assert float((model.forward(TOKENS) - wanted).norm() / wanted.norm()) < 0.05
    shape = shape_from_folder(tmp_path / "kept")
    packed = Model("packed", known_shape=shape)
    assert PlanRequest(packed, Room("cpu", 2**40)).precisions == ("4-bit",)
