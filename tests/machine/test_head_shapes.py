"""What is counted of a published head is what it holds once it is read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from localspec.drafters.block import BlockDrafter
from localspec.drafters.parts import Parts
from localspec.formats.head_folder import is_block_drafter
from localspec.loading import fitting
from localspec.machine.head_shapes import head_shape_in
from tests.kit.random_block import write_random
from tests.kit.tiny import tiny_llama, with_cache

CAPACITY = 8192  # long, so that keys and states are most of it


def head_bytes(folder: Path, context_length: int, number_bytes: int) -> int:
    return sum(head_shape_in(folder).held_bytes(context_length, number_bytes))


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


def test_heads_are_counted_one_beside_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself would fit; the head that is named first has the room."""
    target, names = with_cache(tiny_llama()), ("eagle", "block")
    for name in names:
        write_random(tmp_path / name, target)
    needed = head_bytes(tmp_path / "block", 64, 4)
    hardware = SimpleNamespace(device_name="the card")
    place: Any = SimpleNamespace(hardware=hardware, context_length=64, dtype=torch.float32)
    heads = {name: tmp_path / name for name in names}
    for free, lacking in ((2 * needed, []), (2 * needed - 1, ["block"]), (0, [*names])):
        monkeypatch.setattr(fitting, "free_bytes_now", lambda hardware, free=free: free)
        refused = fitting.heads_without_room(tmp_path / "target", heads, place)
        assert [*refused] == lacking
        assert all("context of 64 tokens stays" in str(each) for each in refused.values())


def test_an_assistants_own_embedding_is_counted(tmp_path: Path) -> None:
    """It is narrower than the target's, and the larger part of the files."""
    config = {"model_type": "gemma4_assistant", "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (32, 8), "pre_projection.weight": (8, 32)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    shape = head_shape_in(tmp_path)
    assert (shape.kind, shape.num_params, shape.num_copied) == ("assistant", 2 * 32 * 8, 0)
    assert shape.held_bytes(1000, 2) == (2 * 2 * 32 * 8, 0), "it holds nothing of the text"


@pytest.mark.parametrize(
    "damage",
    [{"transformer_layer_config": [1]}, {"layer_types": [7, 7], "sliding_window": 1}, None],
)
def test_a_damaged_head_does_not_stop_the_load(
    tmp_path: Path, damage: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is wrong with it when it is read."""
    write_random(tmp_path, with_cache(tiny_llama()))
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    path.write_text("[" if damage is None else json.dumps({**whole, "architectures": 5, **damage}))
    monkeypatch.setattr(fitting, "free_bytes_now", lambda hardware: 2**40)
    place: Any = SimpleNamespace(hardware=None, context_length=64, dtype=torch.float32)
    assert fitting.heads_without_room(tmp_path / "target", {"block": tmp_path}, place) == {}
    if damage is not None:
        assert not is_block_drafter(json.loads(path.read_text()))
