"""Folders in published layouts, made by the written layout, answer as their dense weights do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from localspec.core.errors import ModelError
from localspec.forward.decoder import Decoder
from localspec.forward.grouped import Int4Linear
from localspec.forward.nf4 import has_kernel
from localspec.forward.unpack import fields, gptq
from localspec.forward.weights import load_model, load_module
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.memory import Room
from localspec.machine.plans import PlanRequest
from tests.kit.tiny import CPU, tiny_llama

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
GROUP = 32
Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]  # of a layer: its tensors, and what they stand for
Pack = Callable[[torch.Tensor], Packed]


def words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] unsigned numbers as [n, m * bits / 32] words, number by number. order: which number
    of a word stands at each place, None: the first one lowest."""
    per_word = 32 // bits
    by_word = numbers.long().view(numbers.shape[0], -1, per_word)
    held = by_word if order is None else by_word[..., list(order)]
    made = (held << torch.arange(0, 32, bits)).sum(-1)
    return (made - (made >> 31 << 32)).to(torch.int32)


def in_groups(weight: torch.Tensor, bits: int = 4, size: int = GROUP) -> tuple[torch.Tensor, ...]:
    """Unsigned numbers [out, in], zero points and scales [out, groups], rounded to fp16."""
    grouped = weight.view(weight.shape[0], -1, size)
    low, high = grouped.amin(-1), grouped.amax(-1)
    top = (1 << bits) - 1
    scales = ((high - low) / top).half().float()
    zeros = (-low / scales).round().clamp(1, top)
    spread = scales.repeat_interleave(size, 1)
    numbers = (weight / spread + zeros.repeat_interleave(size, 1)).round().clamp(0, top)
    return numbers.int(), zeros.int(), scales


def dense(
    numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, size: int = GROUP
) -> torch.Tensor:
    wide = zeros.repeat_interleave(size, 1), scales.repeat_interleave(size, 1)
    return (numbers - wide[0]).float() * wide[1]


def as_awq(weight: torch.Tensor) -> Packed:
    numbers, zeros, scales = in_groups(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(numbers.T, 4, order),
        "qzeros": words(zeros.T, 4, order),
        "scales": scales.T.half().contiguous(),
    }, dense(numbers, zeros, scales)


def as_gptq(bits: int = 4, less: int = 1, is_shuffled: bool = False) -> Pack:
    """less: what version 1 takes from a zero point. is_shuffled: inputs belong to groups in no
    order (desc_act)."""

    def pack(weight: torch.Tensor) -> Packed:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        order = order if is_shuffled else torch.arange(weight.shape[1])
        numbers, zeros, scales = in_groups(weight[:, order], bits)
        back = order.argsort()
        groups = (torch.arange(weight.shape[1]) // GROUP)[back].int()
        return {
            "qweight": words(numbers[:, back], bits).T.contiguous(),
            "qzeros": words((zeros - less).T, bits),
            "scales": scales.T.half().contiguous(),
            "g_idx": groups,
        }, dense(numbers, zeros, scales)[:, back]

    return pack


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


def as_compressed(bits: int = 4, is_symmetric: bool = False, size: int = GROUP) -> Pack:
    def pack(weight: torch.Tensor) -> Packed:
        numbers, zeros, scales = in_groups(weight, bits, size)
        if is_symmetric:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
        made = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            made["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return made, dense(numbers, zeros, scales, size)

    return pack


def as_int8_rows(weight: torch.Tensor) -> Packed:
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def as_int8_rows_with_zeros(weight: torch.Tensor) -> Packed:
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scales = (high - low) / 255
    zeros = (-128 - low / scales).round()
    numbers = (weight / scales + zeros).round().clamp(-128, 127).to(torch.int8)
    held = {"weight": numbers, "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    return held, (numbers.float() - zeros) * scales


def as_fp8(rows: int, columns: int, name: str = "weight_scale_inv") -> Pack:
    """One scale for each block of so many rows and columns; a last one is cut short."""

    def pack(weight: torch.Tensor) -> Packed:
        sizes = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales, wide = torch.empty(sizes), torch.empty(weight.shape)
        for down in range(sizes[0]):
            for right in range(sizes[1]):
                place = (
                    slice(down * rows, (down + 1) * rows),
                    slice(right * columns, (right + 1) * columns),
                )
                scales[down, right] = weight[place].abs().max() / 448
                wide[place] = scales[down, right]
        numbers = (weight / wide).to(torch.float8_e4m3fn)
        held = scales.reshape(()) if scales.numel() == 1 else scales
        return {"weight": numbers, name: held.clone()}, numbers.float() * wide

    return pack


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "strategy": "group", **weights}}
    settings = {"format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", **settings}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
LAYOUTS: dict[str, tuple[Pack, dict[str, Any], str]] = {
    "awq": (as_awq, AWQ, "AWQ, 4-bit, groups of 32"),
    "gptq": (as_gptq(), GPTQ, "GPTQ, 4-bit, groups of 32"),
    "gptq of 8 bits": (as_gptq(8), {**GPTQ, "bits": 8}, "GPTQ, 8-bit, groups of 32"),
    "gptq out of order": (
        as_gptq(is_shuffled=True),
        {**GPTQ, "desc_act": True},
        "GPTQ, 4-bit, groups of 32, inputs out of order",
    ),
    "gptq, version 2": (
        as_gptq(less=0),
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        "GPTQ, 4-bit, groups of 32",
    ),
    "compressed int4": (
        as_compressed(is_symmetric=True),
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=True),
        "compressed 4-bit, groups of 32",
    ),
    "compressed int4, zero points": (
        as_compressed(),
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=False),
        "compressed 4-bit, groups of 32",
    ),
    "compressed int4, smaller groups": (  # which torch has no kernel for
        as_compressed(size=16),
        compressed("pack-quantized", num_bits=4, group_size=16, symmetric=False),
        "compressed 4-bit, groups of 16",
    ),
    "compressed int8, packed": (
        as_compressed(8),
        compressed("pack-quantized", num_bits=8, group_size=GROUP, symmetric=False),
        "compressed 8-bit, groups of 32",
    ),
    "compressed int8, rows": (
        as_int8_rows,
        compressed("int-quantized", num_bits=8, strategy="channel"),
        "compressed 8-bit",
    ),
    "compressed int8, rows with zero points": (
        as_int8_rows_with_zeros,
        compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        "compressed 8-bit",
    ),
    "compressed FP8, rows": (
        as_fp8(1, 10_000, "weight_scale"),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        "compressed FP8",
    ),
    "FP8, blocks": (
        as_fp8(48, 48),
        {"quant_method": "fp8", "weight_block_size": [48, 48]},
        "FP8, blocks of 48 x 48",
    ),
    "FP8, tensors": (as_fp8(10_000, 10_000), {"quant_method": "fp8"}, "FP8"),
    "FP8, rows": (as_fp8(1, 10_000, "weight_scale"), {"quant_method": "fbgemm_fp8"}, "FP8"),
}  # fmt: skip


def packed_folder(folder: Path, pack: Pack, settings: dict[str, Any], module: Any = None) -> Any:
    """A model, else a tiny Llama, whose linear layers but the head are packed; gives it dense."""
    module = module or tiny_llama()
    module.config.save_pretrained(str(folder))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": settings}))
    tensors, state = Tensors(), module.state_dict()
    for name, tensor in list(state.items()):
        if "_proj." not in name:
            tensors[name] = tensor.clone()
            continue
        parts, state[name] = pack(tensor)
        tensors |= {name.removesuffix("weight") + part: held for part, held in parts.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    module.load_state_dict(state)
    return module


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
    held = [m for m in load_module(tmp_path, dtype, CPU, 4).modules() if type(m) is Int4Linear]
    assert len(held) == (14 if layout in KEPT or not has_kernel(CPU) else 0)
    assert all(layer.error < 0.01 for layer in held)
    assert (opened.repacking_error is not None) == (layout in KEPT)


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
    assert PlanRequest(shape, Room("cpu", 2**40)).precisions == ("4-bit",)
