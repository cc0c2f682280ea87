"""EAGLE's head: pairs and rows of a tree give what the whole text gives, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.errors import ModelError
from localspec.forward.heads.eagle import EagleHead
from localspec.forward.heads.eagle_files import load_head
from localspec.forward.heads.files import CONFIG, WEIGHTS
from tests.drafters.random_eagle import write_random
from tests.tiny import tiny_llama, with_cache

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
CAPACITY = 64


def target_with_head(folder: Path) -> tuple[Any, EagleHead]:
    target = with_cache(tiny_llama(), CAPACITY)
    write_random(folder, target)
    return target, EagleHead(load_head(folder, target), CAPACITY)


def read_all(target: Any, head: EagleHead, text: list[int]) -> torch.Tensor:
    """The last pair's output, [1, d], of a text that was never seen before."""
    target.cache.rollback(0)
    features = target.follow(head.layers)
    target.forward(text[:-1])
    head.forget(0)
    head.reuse(text)
    return head.read(text, features)


def test_pairs_read_in_pieces_give_what_they_give_at_once(tmp_path: Path) -> None:
    target, head = target_with_head(tmp_path)
    whole = read_all(target, head, TEXT)
    features = target.follow(head.layers)
    head.forget(0)
    for end in (2, 5, 6, len(TEXT)):
        head.reuse(TEXT[:end])
        piece = head.read(TEXT[:end], features)
    assert torch.allclose(whole, piece, atol=1e-5)


def test_an_edited_text_keeps_only_the_pairs_before_the_edit(tmp_path: Path) -> None:
    target, head = target_with_head(tmp_path)
    edited = [*TEXT[:4], 30, *TEXT[5:]]
    wanted = read_all(target, head, edited).clone()
    read_all(target, head, TEXT)
    target.cache.reuse(edited[:-1])
    target.forward(edited[target.cache.length : -1])
    assert head.reuse(edited) == 3, "pair 3 already holds the token that was changed"
    assert torch.allclose(head.read(edited, target.follow(head.layers)), wanted, atol=1e-5)


def test_a_text_with_another_first_token_keeps_no_pair(tmp_path: Path) -> None:
    target, head = target_with_head(tmp_path)
    read_all(target, head, TEXT)
    assert head.reuse([40, *TEXT[1:]]) == 0


def test_rows_of_a_tree_see_their_own_ancestors_alone(tmp_path: Path) -> None:
    """A branch beside others gives what it gives alone, as a chain."""
    target, head = target_with_head(tmp_path)
    root, count = read_all(target, head, TEXT), len(TEXT) - 1
    open_one = torch.zeros(1, 1, dtype=torch.bool)
    first = head.branch([20], root, [count], open_one)
    alone = head.branch([21], first, [count + 1], torch.zeros(1, 2, dtype=torch.bool))
    head.forget(count)
    both = head.branch([30, 20], root.repeat(2, 1), [count] * 2, ~torch.eye(2, dtype=torch.bool))
    assert torch.allclose(both[1:], first, atol=1e-5)
    blocked = torch.tensor([[False, True, False, True], [True, False, True, False]])
    deeper = head.branch([31, 21], both, [count + 1] * 2, blocked)
    assert torch.allclose(deeper[1:], alone, atol=1e-5)
    wrong = head.branch([21], both[1:], [count + 1], torch.zeros(1, 5, dtype=torch.bool))
    assert not torch.allclose(wrong, alone, atol=1e-3), "the mask must matter"


def test_a_tree_leaves_no_trace_in_the_pairs(tmp_path: Path) -> None:
    target, head = target_with_head(tmp_path)
    longer = [*TEXT, 7, 8]
    wanted = read_all(target, head, longer).clone()
    root, count = read_all(target, head, TEXT), len(TEXT) - 1
    head.branch([7], root, [count], torch.zeros(1, 1, dtype=torch.bool))  # the right token
    target.forward(longer[target.cache.length : -1])
    assert head.reuse(longer) == count
    assert torch.allclose(head.read(longer, target.follow(head.layers)), wanted, atol=1e-5)


def test_memory_covers_weights_and_cache(tmp_path: Path) -> None:
    _, head = target_with_head(tmp_path)
    stored = sum(t.numel() * t.element_size() for t in load_file(tmp_path / WEIGHTS).values())
    assert head.memory_bytes >= stored + head.cache.kv_bytes


# -- what does not fit ------------------------------------------------------------------------


def change_config(folder: Path, part: str, **values: object) -> None:
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    content[part] |= values
    (folder / CONFIG).write_text(json.dumps(content), encoding="utf-8")


def change_tensors(folder: Path, **values: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS) | values
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("target", {"hidden_size": 128}, "hidden_size 128; this one has 64"),
        ("target", {"vocab_size": 99}, "vocab_size 99; this one has 64"),
        ("target", {"num_layers": 9}, "num_layers 9; this one has 2"),
        ("settings", {"layers": [0, 7]}, r"reads the layers \[0, 7\]"),
        ("settings", {"layers": []}, "reads the layers"),
        ("settings", {"hidden_size": 32}, "rows are 32 wide"),
        ("settings", {"num_heads": 0}, "num_heads is 0"),
        ("settings", {"num_heads": True}, "num_heads is True"),
        ("settings", {"rope_base": "10k"}, "rope_base is '10k'"),
        ("settings", {"rope_base": 10**400}, "rope_base is 1000"),
        ("settings", {"num_kv_heads": 3}, "do not divide"),
        ("settings", {"speed": 3}, "speed is missing from its settings or unknown"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, part: str, values: dict[str, object], said: str
) -> None:
    target, _ = target_with_head(tmp_path)
    change_config(tmp_path, part, **values)
    with pytest.raises(ModelError, match=said):
        load_head(tmp_path, target)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fuse.weight": None}, "lacks fuse.weight"),
        ({"spare.weight": torch.ones(2)}, "holds spare.weight"),
        ({"down.weight": torch.ones(2, 2)}, "must be floating point"),
        ({"final_norm.weight": torch.ones(64, dtype=torch.int64)}, "int64"),
        ({"final_norm.weight": torch.full((64,), float("nan"))}, "no numbers"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, values: dict[str, torch.Tensor | None], said: str
) -> None:
    target, _ = target_with_head(tmp_path)
    change_tensors(tmp_path, **values)
    with pytest.raises(ModelError, match=said):
        load_head(tmp_path, target)


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no head"):
        load_head(tmp_path, with_cache(tiny_llama(), CAPACITY))
