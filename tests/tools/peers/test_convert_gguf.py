"""The parts of the conversion that need no gguf: names, layouts, number formats, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tools.peers.workers.convert_gguf import (
    Unsupported,
    architecture_of,
    as_bf16,
    gguf_name,
    kind_of,
    permuted,
    tensors,
)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.layers.11.self_attn.q_proj.bias", "blk.11.attn_q.bias"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.3.self_attn.k_norm.weight", "blk.3.attn_k_norm.weight"),
    ],
)
def test_tensors_get_llama_cpps_names(name: str, wanted: str) -> None:
    assert gguf_name(name) == wanted


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.gate.weight", "visual.patch.weight"])
def test_a_tensor_without_a_counterpart_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        gguf_name(name)


def test_families_and_rotations_that_are_not_known_are_refused() -> None:
    assert architecture_of({"model_type": "mistral"}) == "llama"
    with pytest.raises(Unsupported, match="gemma3"):
        architecture_of({"model_type": "gemma3"})
    with pytest.raises(Unsupported, match="rotary"):
        architecture_of({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}})


def test_the_halves_of_each_head_are_interleaved_in_queries_and_keys_alone() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)  # 2 heads of 4
    queries = permuted("model.layers.0.self_attn.q_proj.weight", rows, 2, 1)
    assert queries[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    keys = permuted("model.layers.0.self_attn.k_proj.weight", rows, 2, 1)  # one head of 8
    assert keys[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    bias = permuted("model.layers.0.self_attn.q_proj.bias", np.arange(8.0), 2, 1)
    assert bias.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert permuted("model.layers.0.self_attn.v_proj.weight", rows, 2, 1) is rows


def test_bf16_is_rounded_as_torch_rounds() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    values[:2] = torch.tensor([1.00390625, 1.01171875])  # ties
    wanted = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (as_bf16(values.numpy()) == wanted).all()


def test_every_stored_format_is_read_as_fp32(tmp_path: Path) -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(4))
    for name, dtype in (("a", torch.float32), ("b", torch.float16), ("c", torch.bfloat16)):
        save_file({f"{name}.weight": values.to(dtype)}, tmp_path / f"model-{name}.safetensors")
    read = dict(tensors(tmp_path))
    assert list(read) == ["a.weight", "b.weight", "c.weight"]
    for (_, found), dtype in zip(
        read.items(), (torch.float32, torch.float16, torch.bfloat16), strict=True
    ):
        assert found.dtype == np.float32
        assert (found == values.to(dtype).float().numpy()).all()


def test_a_format_that_is_not_known_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(Unsupported, match="I8"):
        dict(tensors(tmp_path))


def test_beside_4_bits_embedding_and_head_are_kept_in_8() -> None:
    block = "model.layers.0.mlp.up_proj.weight"
    kinds = {precision: kind_of(block, precision) for precision in ("bf16", "q8_0", "q4_0")}
    assert kinds == {"bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
    assert (
        kind_of("lm_head.weight", "q4_0") == kind_of("model.embed_tokens.weight", "q8_0") == "Q8_0"
    )
    assert kind_of("lm_head.weight", "bf16") == "BF16"


def test_the_shipped_pair_can_be_written(root: Path) -> None:
    for name in ("target", "draft"):
        folder = root / "assets" / "demo" / name
        config = json.loads((folder / "config.json").read_text())
        assert architecture_of(config) == "llama"
        assert all(gguf_name(tensor) for tensor, _ in tensors(folder))
