"""The exported folder is the model, in pieces small enough for a repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from localspec.errors import ModelError
from tools.demo_pair.decoder import Decoder
from tools.demo_pair.export import (
    MAX_SHARD_BYTES,
    export_model,
    llama_weights,
    load_exported,
    make_shards,
    widened,
)


def test_transformers_gives_the_same_logits_as_the_plain_model(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    export_model(decoder, tokenizer, tmp_path, torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(4, 420, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        plain, exported = decoder(tokens), loaded(tokens).logits
    assert plain.std() > 0.1, "logits are flat, so the comparison says nothing"
    assert torch.allclose(plain, exported, atol=1e-4)


def test_generation_stops_at_the_end_of_a_turn_and_of_a_text(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export_model(decoder, tokenizer, tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text("utf-8"))
    ends = {tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
    assert set(settings["eos_token_id"]) == ends


def test_shards_keep_every_weight_and_the_limit(decoder: Decoder) -> None:
    weights = llama_weights(decoder)
    limit = 40_000
    shards = make_shards(weights, limit)
    assert len(shards) > 1
    assert [name for shard in shards for name in shard] == list(weights)
    for shard in shards:
        size = sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
        assert size <= limit or len(shard) == 1
    assert MAX_SHARD_BYTES < 15 * 1024 * 1024


def test_a_second_export_leaves_no_old_shards(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "model-00001-of-00009.safetensors").write_bytes(b"old")
    export_model(decoder, tokenizer, tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_a_wider_model_computes_the_same_and_its_new_units_can_learn(decoder: Decoder) -> None:
    tokens = torch.arange(24).view(2, 12)
    wide = widened(decoder, 96, seed=1)
    assert torch.allclose(wide(tokens), decoder(tokens), atol=1e-5)
    wide(tokens).square().mean().backward()
    gradient = wide.blocks[0].down.weight.grad
    assert gradient is not None and bool((gradient[:, 64:] != 0).any())


def test_a_model_cannot_be_made_narrower(decoder: Decoder) -> None:
    with pytest.raises(ModelError, match="cannot shrink"):
        widened(decoder, 32, seed=1)


def test_an_exported_model_comes_back(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export_model(decoder, tokenizer, tmp_path / "model", torch.float32)
    again = load_exported(tmp_path / "model")
    assert all(torch.equal(p, q) for p, q in zip(
        again.state_dict().values(), decoder.state_dict().values(), strict=True
    ))  # fmt: skip


def test_a_model_of_another_kind_is_refused(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export_model(decoder, tokenizer, tmp_path / "model", torch.float32)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    with pytest.raises(ModelError, match="not a model of the kind"):
        load_exported(tmp_path / "model")
