"""A model loaded from a file in a published format answers as its unpacked weights do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

from localspec.core.errors import ModelError
from localspec.formats.folder_files import weight_files
from localspec.forward.decoder import Decoder
from localspec.forward.load import load_model
from localspec.machine.gguf_models import opened_gguf
from localspec.weights.int4 import Int4Linear
from localspec.weights.stored import Grouped
from tests.kit.decoders import layers_of
from tests.kit.gguf_files import VOCABULARY, write_gguf
from tests.kit.tiny import CPU, tiny_llama, tiny_qwen

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def loaded(file: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(opened_gguf(file, file.parent), dtype, CPU, 32).model


def logits_with(module: Any, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    module.load_state_dict(weights, strict=False)
    with torch.inference_mode():
        found: torch.Tensor = module(input_ids=torch.tensor([TOKENS])).logits[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0"])
def test_a_llama_of_each_kind_answers_as_its_unpacked_weights_do(kind: str, tmp_path: Path) -> None:
    module = tiny_llama()
    dense = write_gguf(tmp_path / "tiny.gguf", module, kind, describe=VOCABULARY)
    model = loaded(tmp_path / "tiny.gguf")
    assert isinstance(model, Decoder)
    wanted = logits_with(module, dense)
    assert torch.allclose(model.forward(TOKENS), wanted, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_k_kinds_answer_as_their_unpacked_weights_do(
    kind: str, family: str, tmp_path: Path
) -> None:
    module = tiny_qwen(family)
    dense = write_gguf(tmp_path / "tiny.gguf", module, kind, family, VOCABULARY)
    model = loaded(tmp_path / "tiny.gguf")
    assert isinstance(model, Decoder)
    wanted = logits_with(module, dense)
    assert torch.allclose(model.forward(TOKENS), wanted, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "Q4_0"), ("qwen3", "Q4_K"), ("qwen2", "Q4_0")]
)
def test_in_4_bits_a_file_keeps_its_own(family: str, kind: str, tmp_path: Path) -> None:
    module = tiny_llama() if family == "llama" else tiny_qwen(family)
    dense = write_gguf(tmp_path / "tiny.gguf", module, kind, family, VOCABULARY)
    folder = opened_gguf(tmp_path / "tiny.gguf", tmp_path)
    model = load_model(folder, torch.float32, CPU, 32, bits=4).model
    assert isinstance(model, Decoder)
    wanted = logits_with(module, dense)
    assert torch.allclose(model.forward(TOKENS), wanted, atol=1e-2 * float(wanted.abs().max()))
    layers = layers_of(model)
    assert all(isinstance(each, Int4Linear) and each.error < 5e-3 for each in layers)


def test_unpacked_weights_are_the_very_values_of_the_format(tmp_path: Path) -> None:
    module = tiny_llama()
    dense = write_gguf(tmp_path / "tiny.gguf", module, "Q4_0", describe=VOCABULARY)
    model = loaded(tmp_path / "tiny.gguf", torch.bfloat16)
    held = model.weights.blocks[1].linears[-1].dense().weight
    assert torch.equal(held, dense["model.layers.1.mlp.down_proj.weight"].bfloat16())


def test_a_scaled_rotation_is_read_from_the_factors_in_the_file(tmp_path: Path) -> None:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    module = type(tiny_llama())(type(tiny_llama().config)(**{
        **tiny_llama().config.to_dict(), "rope_parameters": scaled, "head_dim": 16,
    })).eval()  # fmt: skip
    plain = module.config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    factors = 1.0 / (module.model.rotary_emb.inv_freq * plain)

    def describe(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        writer.add_tensor("rope_freqs.weight", factors.numpy())

    dense = write_gguf(tmp_path / "tiny.gguf", module, describe=describe)
    model = loaded(tmp_path / "tiny.gguf")
    assert torch.allclose(model.forward(TOKENS), logits_with(module, dense), atol=1e-4)
    inverse = module.model.rotary_emb.inv_freq
    assert torch.allclose(model.weights.tables[0][0][5, :8], (5 * inverse).cos(), atol=1e-5)


def test_a_kind_without_a_reader_is_refused_by_its_name(tmp_path: Path) -> None:
    import numpy as np
    from gguf.constants import GGMLQuantizationType

    def describe(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        raw = np.zeros((64, 16), np.int8)
        writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=GGMLQuantizationType.I8)

    module = tiny_llama(num_layers=1)
    state = module.state_dict()
    state.pop("model.layers.0.mlp.up_proj.weight")
    module.state_dict = lambda: state
    write_gguf(tmp_path / "odd.gguf", module, describe=describe)
    with pytest.raises(ModelError, match=r"odd.gguf holds blk.0.ffn_up.weight as I8.*Q4_K_M"):
        loaded(tmp_path / "odd.gguf")


def test_the_weights_stay_in_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), describe=VOCABULARY)
    folder = opened_gguf(tmp_path / "tiny.gguf", tmp_path)
    assert weight_files(folder) == [tmp_path / "tiny.gguf"]
    assert not list(folder.glob("*.safetensors"))


def test_inputs_that_move_by_whole_groups_stay_in_groups_for_the_kernel() -> None:
    values = torch.arange(3 * 128).view(3, 128) % 16
    scales = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    weight = Grouped(values.to(torch.uint8), scales, -scales, 4)
    halves = torch.arange(128).view(2, 2, 32).transpose(0, 1).flatten()
    moved = weight.columns(halves)
    assert torch.equal(moved.dense(), weight.dense()[:, halves]) and moved.is_kept
    order = torch.randperm(128, generator=torch.Generator().manual_seed(2))
    mixed = weight.columns(order)
    assert torch.equal(mixed.dense(), weight.dense()[:, order]) and not mixed.is_kept
