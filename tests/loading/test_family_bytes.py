"""What a plan counts for a model of 2026 is what loading allocates, on a processor and on a card:
weights, tables of angles, the cache with its windows, and states."""

from __future__ import annotations

from functools import cache as remembered
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.precisions import Precision
from localspec.forward.decoder import Decoder
from localspec.forward.delta_net import DeltaNet
from localspec.forward.load import load_model
from localspec.loading.fitting import load_at, needed_bytes
from localspec.loading.placement import Place
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.hardware import probe
from localspec.weights.library import bitsandbytes
from localspec.weights.precision import Bits
from tests.kit.fake_card import CUDA, fake_card, memory_of_card
from tests.kit.families import small
from tests.kit.mxfp4 import saved_in_mxfp4
from tests.kit.tiny import CPU

pytestmark = pytest.mark.slow  # imports transformers
# Of a layer with a state: two fp32 matrices of a piece of 64 tokens, whatever the model's width.
CONSTANT_BYTES = 2 * 4 * 64 * 64
CONTEXT = {"cpu": 512, "cuda": 8192}  # a card's cache has spare slots, which a plan sets aside
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "sliding_window": 64,
    "max_position_embeddings": 8192,
}  # fmt: skip
MIXTURE = {"moe_intermediate_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {},
    "qwen3_5_moe": {**MIXTURE, "shared_expert_intermediate_size": 256},
    "gemma4, values from keys": {},
    "gemma4, keys of earlier layers": {"vocab_size_per_layer_input": 1024},
    "gemma4, experts beside": MIXTURE,
    "gpt_oss": {},
}


@remembered
def module_of(family: str) -> Any:
    sizes = {**SIZES, **FAMILIES[family]}
    return small(family, **sizes).bfloat16()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    if request.param == "gpt_oss":
        saved_in_mxfp4(module_of(request.param), path)
    else:
        module_of(request.param).save_pretrained(path)
    return path


@pytest.mark.parametrize("bits", [None, 4])
def test_on_a_processor(family_folder: Path, bits: Bits | None) -> None:
    there = Place(probe(), CPU, torch.float32, bits, CONTEXT["cpu"])
    model = load_at(family_folder, there).model
    assert isinstance(model, Decoder)
    inputs = model.weights.per_layer_inputs
    held = model.weight_bytes + model.cache.kv_bytes
    held += 0 if inputs is None else inputs.table.nbytes
    assert needed_bytes(family_folder, there) == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("bits", [None, 4])
def test_on_a_card(family_folder: Path, bits: Bits | None) -> None:
    bitsandbytes()
    shape = shape_from_folder(family_folder)
    precision: Precision = "4-bit" if bits else "bf16"
    counted = shape.loaded_bytes(precision, "bf16", CONTEXT["cuda"], "cuda")
    with fake_card(), memory_of_card() as memory:
        model = load_model(family_folder, torch.bfloat16, CUDA, CONTEXT["cuda"], bits).model
        assert isinstance(model, Decoder)
        constants = CONSTANT_BYTES * sum(isinstance(each, DeltaNet) for each in mixers_of(model))
        assert memory.used - constants == pytest.approx(sum(counted), rel=0.05)
        assert model.cache.kv_bytes == pytest.approx(counted[1], rel=0.05)


def mixers_of(model: Decoder) -> list[Any]:
    return [block.mixer for block in model.weights.blocks]
