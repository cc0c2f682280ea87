"""What is counted of a published head is what it holds once it is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localspec.drafters.block import BlockDrafter
from localspec.drafters.parts import Parts
from localspec.machine.head_bytes import head_bytes
from tests.kit.random_block import write_random
from tests.kit.tiny import tiny_llama, with_cache

CAPACITY = 8192  # long, so that keys and states are most of it


def test_a_block_drafter_takes_what_was_counted(tmp_path: Path) -> None:
    target = with_cache(tiny_llama(), CAPACITY)
    write_random(tmp_path, target)
    held = BlockDrafter.build(Parts(target, heads={"block": tmp_path})).memory_bytes
    assert head_bytes(tmp_path, CAPACITY, 4) == pytest.approx(held, rel=0.25)


def test_layers_with_a_window_are_counted_by_it(tmp_path: Path) -> None:
    target = with_cache(tiny_llama())
    write_random(tmp_path, target)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    whole = head_bytes(tmp_path, CAPACITY, 2)
    kinds = ["sliding_attention"] * config["num_hidden_layers"]
    path.write_text(json.dumps({**config, "layer_types": kinds, "sliding_window": 256}))
    saved = whole - head_bytes(tmp_path, CAPACITY, 2)
    width = config["num_key_value_heads"] * config["head_dim"]
    assert saved == len(kinds) * 2 * width * (CAPACITY - 512) * 2


def test_copies_of_the_targets_tensors_are_not_counted(tmp_path: Path) -> None:
    """Their bytes are the larger part of a file for a target of 150,000 tokens."""
    target = with_cache(tiny_llama())
    write_random(tmp_path, target)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    own = head_bytes(tmp_path, 64, 4)
    path.write_text(json.dumps({**config, "vocab_size": 32}))
    assert head_bytes(tmp_path, 64, 4) - own == 64 * config["hidden_size"] * 4
