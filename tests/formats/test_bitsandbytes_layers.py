"""Layers that bitsandbytes wrote are taken as they say they are only where their sizes agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from localspec.core.errors import ModelError
from localspec.formats.bitsandbytes_layers import check_bitsandbytes

STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64]}
NESTED = {**STATE, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
Tensors = dict[str, torch.Tensor]


def in_4_bits(state: dict[str, Any], **parts: torch.Tensor) -> Tensors:
    made = {"absmax": torch.zeros(64), "quant_map": torch.zeros(16)}
    if "nested_blocksize" in state:
        made |= {"nested_absmax": torch.zeros(1), "nested_quant_map": torch.zeros(256)}
    made["quant_state.bitsandbytes__nf4"] = as_bytes(json.dumps(state))
    named = {f"a.weight.{name}": each for name, each in (made | parts).items() if name != "weight"}
    packed = torch.zeros(2048, 1, dtype=torch.uint8)
    return {"a.weight": parts.get("weight", packed), **named}


def as_bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def in_8_bits(num_scales: int) -> Tensors:
    return {"a.weight": torch.zeros(64, 32, dtype=torch.int8), "a.SCB": torch.zeros(num_scales)}


def check(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors")
    check_bitsandbytes([folder / "model.safetensors"], "a model")


@pytest.mark.parametrize(
    "tensors",
    [
        in_4_bits(STATE),
        in_4_bits(NESTED),
        in_4_bits(STATE, weight=torch.zeros(1024, 1, dtype=torch.bfloat16)),  # so it may be stored
        in_8_bits(64),
    ],
)
def test_what_the_library_writes_is_taken(tensors: Tensors, tmp_path: Path) -> None:
    check(tmp_path, tensors)


@pytest.mark.parametrize(
    "tensors",
    [
        in_4_bits({**STATE, "blocksize": -64}),  # it ended the process
        in_4_bits({**STATE, "blocksize": "x"}),
        in_4_bits({**STATE, "shape": [64, 128]}),
        in_4_bits({**STATE, "shape": [-64, -64]}),
        in_4_bits({**STATE, "shape": "x"}),
        in_4_bits({**STATE, "quant_type": "fp4"}),
        in_4_bits({"quant_type": "nf4"}),
        in_4_bits(STATE, absmax=torch.zeros(32)),
        in_4_bits(STATE, quant_map=torch.zeros(8)),
        in_4_bits(STATE, weight=torch.zeros(1024, 1, dtype=torch.uint8)),
        in_4_bits(STATE, **{"quant_state.bitsandbytes__nf4": as_bytes("[1")}),
        in_4_bits(STATE, **{"quant_state.bitsandbytes__nf4": as_bytes("[1]")}),
        in_4_bits({**NESTED, "nested_blocksize": 0}),
        in_4_bits(NESTED, nested_quant_map=torch.zeros(1)),
        in_4_bits(NESTED, nested_absmax=torch.zeros(2)),
        in_8_bits(1),
        in_8_bits(32),
        {"a.SCB": torch.zeros(64)},
    ],
)
def test_a_layer_of_another_size_is_refused(tensors: Tensors, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not laid out as bitsandbytes says"):
        check(tmp_path, tensors)
