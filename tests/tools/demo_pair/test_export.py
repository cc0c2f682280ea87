"""The exported folder is the model, in pieces small enough for a repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from localspec.core.errors import ModelError
from tools.demo_pair import export
from tools.demo_pair.export import export_model, load_exported, widened


def test_generation_stops_at_the_end_of_a_turn_and_of_a_text(
    decoder: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export_model(decoder, tokenizer, tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text("utf-8"))
    ends = {tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
    assert set(settings["eos_token_id"]) == ends


def test_an_export_is_cut_into_shards_within_the_limit(
    decoder: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 40_000)
    export.export_model(decoder, tokenizer, tmp_path)
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1 and (tmp_path / "model.safetensors.index.json").is_file()
    assert all(shard.stat().st_size < 42_000 for shard in shards)


def test_a_second_export_leaves_no_old_shards(
    decoder: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "model-00001-of-00009.safetensors").write_bytes(b"old")
    export_model(decoder, tokenizer, tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_a_wider_model_computes_the_same_and_its_new_units_can_learn(
    decoder: LlamaForCausalLM,
) -> None:
    tokens = torch.arange(24).view(2, 12)
    wide = widened(decoder, 96, seed=1)
    assert torch.allclose(wide(tokens).logits, decoder(tokens).logits, atol=1e-5)
    wide(tokens).logits.square().mean().backward()
    gradient = wide.model.layers[0].mlp.down_proj.weight.grad
    assert gradient is not None and bool((gradient[:, 64:] != 0).any())


def test_a_model_cannot_be_made_narrower(decoder: LlamaForCausalLM) -> None:
    with pytest.raises(ModelError, match="cannot shrink"):
        widened(decoder, 32, seed=1)


def test_an_exported_model_comes_back(
    decoder: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export_model(decoder, tokenizer, tmp_path / "model", torch.float32)
    again = load_exported(tmp_path / "model")
    assert all(torch.equal(p, q) for p, q in zip(
        again.state_dict().values(), decoder.state_dict().values(), strict=True
    ))  # fmt: skip


def test_a_model_of_another_kind_is_refused(
    decoder: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export_model(decoder, tokenizer, tmp_path / "model", torch.float32)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    with pytest.raises(ModelError, match="not a model of the kind"):
        load_exported(tmp_path / "model")
