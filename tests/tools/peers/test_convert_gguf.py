"""A model folder as GGUF: every weight under llama.cpp's name, and what cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from localspec.core.errors import ModelError
from localspec.formats.folder_files import weight_files
from tools.peers.convert_gguf import architecture_of, convert, interleaved
from tools.peers.llama_cpp import converted


@pytest.fixture
def shipped_draft(root: Path) -> Path:
    return root / "assets" / "demo" / "draft"


def written(folder: Path, out: Path, precision: str) -> dict[str, tuple[str, torch.Tensor]]:
    convert(folder, out, precision)
    return {
        one.name: (one.tensor_type.name, torch.tensor(dequantize(one.data, one.tensor_type)))
        for one in GGUFReader(out).tensors
    }


def test_the_shipped_draft_is_written_whole(shipped_draft: Path, tmp_path: Path) -> None:
    source = dict[str, torch.Tensor]()
    for file in weight_files(shipped_draft):
        source |= load_file(file)
    found = written(shipped_draft, tmp_path / "draft.gguf", "bf16")
    assert len(found) == len(source)
    for name, wanted in (
        ("token_embd.weight", source["model.embed_tokens.weight"]),
        ("output_norm.weight", source["model.norm.weight"]),
        ("blk.1.ffn_down.weight", source["model.layers.1.mlp.down_proj.weight"]),
        ("blk.0.attn_v.weight", source["model.layers.0.self_attn.v_proj.weight"]),
        ("blk.0.attn_q.weight", interleaved(source["model.layers.0.self_attn.q_proj.weight"], 4)),
    ):
        assert torch.equal(found[name][1], wanted.float()), name


def test_beside_4_bits_embedding_and_head_are_kept_in_8(
    shipped_draft: Path, tmp_path: Path
) -> None:
    kinds = {
        name: kind for name, (kind, _) in written(shipped_draft, tmp_path / "a", "q4_0").items()
    }
    assert kinds["blk.0.ffn_up.weight"] == "Q4_0" and kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.gate.weight", "visual.patch.weight"])
def test_a_tensor_without_a_counterpart_is_refused(
    shipped_draft: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "config.json").write_text(
        (shipped_draft / "config.json").read_text("utf-8"), "utf-8"
    )
    save_file({name: torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=name):
        convert(tmp_path, tmp_path / "a.gguf", "f32")


def test_families_and_rotations_that_are_not_known_are_refused(shipped_draft: Path) -> None:
    config = json.loads((shipped_draft / "config.json").read_text("utf-8"))
    assert architecture_of(config) == architecture_of(config | {"model_type": "mistral"})
    with pytest.raises(ModelError, match="gemma3"):
        architecture_of({"model_type": "gemma3"})
    with pytest.raises(ModelError, match="rotary"):
        architecture_of({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}})


def test_the_halves_of_each_head_are_interleaved() -> None:
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleaved(rows, 1)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert interleaved(torch.arange(8.0), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]  # a bias


def test_weights_are_written_once_and_an_unknown_family_is_named(
    shipped_draft: Path, tmp_path: Path
) -> None:
    first = converted(shipped_draft, "bf16", tmp_path)
    written = first.stat().st_mtime_ns
    assert converted(shipped_draft, "bf16", tmp_path) == first
    assert first.stat().st_mtime_ns == written
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "mamba"}')
    save_file({"weight": torch.ones(4, 4)}, unknown / "model.safetensors")
    with pytest.raises(ModelError, match="this is mamba"):
        converted(unknown, "bf16", tmp_path)
    assert list((tmp_path / "peers" / "gguf").iterdir()) == [first]
