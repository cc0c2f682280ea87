"""Weights in MXFP4, and folders of gpt-oss as OpenAI publishes them: made of random numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from localspec.weights.stored import Mxfp4

Tensors = dict[str, torch.Tensor]


def random_mxfp4(*shape: int, seed: int = 0) -> Mxfp4:
    """shape: [..., out, in]. Weights up to about 0.8."""
    generator = torch.Generator().manual_seed(seed)
    of_blocks = (*shape[:-1], shape[-1] // 32)
    blocks = torch.randint(0, 256, (*of_blocks, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 125, of_blocks, generator=generator, dtype=torch.uint8)
    return Mxfp4(blocks, scales)


def with_experts_in_mxfp4(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
    """The tensors of a gpt-oss with other experts: as a published folder holds them, and the same
    unpacked, [experts, in, out]."""
    published, unpacked = dict(tensors), dict(tensors)
    for seed, name in enumerate(sorted(tensors)):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, num_in, num_out = tensors[name].shape
            weight = random_mxfp4(count, num_out, num_in, seed=seed)
            del published[name]
            published |= {f"{name}_blocks": weight.blocks, f"{name}_scales": weight.scales}
            unpacked[name] = weight.dense(torch.float32).mT.contiguous()
    return published, unpacked


def saved_in_mxfp4(module: Any, folder: Path) -> Any:
    """Save a gpt-oss with experts in MXFP4 and return the module with the same weights."""
    published, unpacked = with_experts_in_mxfp4(module.state_dict())
    module.load_state_dict(unpacked)
    folder.mkdir(exist_ok=True)
    config = {**module.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(published, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return module
