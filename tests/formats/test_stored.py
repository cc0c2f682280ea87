"""What a config.json says of its weights is read, or refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.core.errors import ModelError
from localspec.formats.stored import stored_of

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": WEIGHTS}},
}
ROTATION = {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"}]}


def test_layers_that_are_left_whole_are_read() -> None:
    rules = {"dynamic": {"-:.*gate$": {}}, "extra_config": {"model.layers.0.mlp": {"bits": 16}}}
    given = {"quantization_config": GPTQ}
    assert stored_of({"quantization_config": GPTQ | rules}, "Tiny") == stored_of(given, "Tiny")


def test_empty_transforms_and_sparsity_are_nothing() -> None:
    given = COMPRESSED | {"transform_config": {}, "sparsity_config": {}}
    found = stored_of({"quantization_config": given}, "Tiny")
    assert found is not None
    assert found.title == "compressed 4-bit, groups of 128"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quantization_config": COMPRESSED | {
                "transform_config": {"config_groups": {"R4": ROTATION}}
            }},
            "rotated while they compute",
        ),
        ({"quantization_config": GPTQ | {"pack_dtype": "int64"}}, "packed into int64"),
        (
            {"quantization_config": GPTQ | {"dynamic": {
                "-:.*experts.*": {}, "+:.*down_proj.*": {"bits": 8, "group_size": 128}
            }}},
            "GPTQ, 4-bit, groups of 128, and some layers with bits 8; .* one kind for all",
        ),
        (
            {"quantization_config": COMPRESSED | {"config_groups": {
                "group_0": {"weights": WEIGHTS}, "group_1": {"weights": WEIGHTS | {"num_bits": 8}}
            }}},
            r"several kinds \(int4, groups of 128 and int8, groups of 128\)",
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, "in the format mlx"),
        (
            {"quantization": {"bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}},
            "in the format mlx",
        ),
    ],
)  # fmt: skip
def test_weights_that_would_be_read_wrongly_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        stored_of(config, "Tiny")


@pytest.mark.parametrize(
    "given",
    [
        COMPRESSED | {"config_groups": [1]},
        COMPRESSED | {"config_groups": {"group_0": {"weights": None}}},
        COMPRESSED | {"sparsity_config": 5},
        COMPRESSED | {"transform_config": 5},
        {"quant_method": "gguf", "kinds": 5},
        {"quant_method": "fp8", "weight_block_size": 7},
        GPTQ | {"bits": None},
    ],
)
def test_damaged_settings_are_refused_in_words(given: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="cannot be understood"):
        stored_of({"quantization_config": given}, "Tiny")


def test_awq_is_read_by_its_old_names_too() -> None:
    new = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}
    found = [stored_of({"quantization_config": given}, "Tiny") for given in (new, old)]
    assert found[0] is not None and found[0] == found[1]


def test_bitsandbytes_with_neither_precision_keeps_a_model_as_it_computes() -> None:
    given = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}
    assert stored_of({"quantization_config": given}, "Tiny") is None
