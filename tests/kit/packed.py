"""Folders of weights that are packed as AWQ, GPTQ, compressed-tensors or FP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.kit.tiny import tiny_llama

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


PACKED_STATES = ("in_proj_qkv.weight", "in_proj_z.weight")  # of gated delta nets


def _packed_experts(name: str, stack: torch.Tensor, pack: Pack) -> tuple[Tensors, torch.Tensor]:
    """stack: [experts, out, in], gate and up as one."""
    begin, _, part = name.rpartition(".")
    halves = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    tensors, unpacked = Tensors(), list[torch.Tensor]()
    for number, weight in enumerate(stack):
        packed = [pack(each.contiguous()) for each in weight.chunk(len(halves))]
        unpacked.append(torch.cat([values for _, values in packed]))
        for half, (parts, _) in zip(halves, packed, strict=True):
            tensors |= {f"{begin}.{number}.{half}.{key}": held for key, held in parts.items()}
    return tensors, torch.stack(unpacked)


def packed_folder(folder: Path, pack: Pack, settings: dict[str, Any], module: Any = None) -> Any:
    """A model, else a tiny Llama, whose linear layers but the head are packed, experts one by one;
    gives it dense."""
    module = module or tiny_llama()
    module.config.save_pretrained(str(folder))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": settings}))
    tensors, state = Tensors(), module.state_dict()
    for name, tensor in list(state.items()):
        if tensor.ndim == 3 and ".experts." in name:
            of_experts, state[name] = _packed_experts(name, tensor, pack)
            tensors |= of_experts
            continue
        if "_proj." not in name and not name.endswith(PACKED_STATES):
            if name == "lm_head.weight" and module.config.tie_word_embeddings:
                continue
            tensors[name] = tensor.clone()
            continue
        parts, state[name] = pack(tensor)
        tensors |= {name.removesuffix("weight") + part: held for part, held in parts.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    module.load_state_dict(state)
    return module
