"""The exported folder is the model, in pieces small enough for a repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tools.demo_pair.decoder import Decoder
from tools.demo_pair.export import MAX_SHARD_BYTES, export_model, llama_weights, make_shards


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
