"""Heads that draft on their own outputs: pairs and rows of a tree give what the text gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from localspec.forward.heads.autoregressive import AutoregressiveHead
from localspec.forward.heads.eagle_files import read_eagle
from localspec.forward.heads.files import WEIGHTS
from tests.kit.random_eagle import write_random
from tests.kit.tiny import tiny_llama, with_cache

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
CAPACITY = 64


def target_with_head(folder: Path) -> tuple[Any, AutoregressiveHead]:
    target = with_cache(tiny_llama(), CAPACITY)
    write_random(folder, target)
    return target, AutoregressiveHead(read_eagle(folder, target), CAPACITY)


def read_all(target: Any, head: AutoregressiveHead, text: list[int]) -> torch.Tensor:
    """The last pair's output, [1, d], of a text that was never seen before."""
    target.cache.rollback(0)
    features = target.follow(head.layers)
    target.forward(text[:-1])
    head.forget(0)
    head.reuse(text)
    return head.read(text, features).forward()


def test_pairs_read_in_pieces_give_what_they_give_at_once(tmp_path: Path) -> None:
    target, head = target_with_head(tmp_path)
    whole = read_all(target, head, TEXT)
    features = target.follow(head.layers)
    head.forget(0)
    for end in (2, 5, 6, len(TEXT)):
        head.reuse(TEXT[:end])
        piece = head.read(TEXT[:end], features).forward()
    assert torch.allclose(whole, piece, atol=1e-5)


def test_a_draft_starts_from_the_last_pair_also_where_it_was_read_before(tmp_path: Path) -> None:
    target, head = target_with_head(tmp_path)
    wanted = read_all(target, head, TEXT).clone()
    features = target.follow(head.layers)
    for text in (TEXT, TEXT[:-1], TEXT):
        head.start(text, features).forward()
        assert head.cache.tokens == text[1:]
    for _ in range(2):
        assert torch.allclose(head.start(TEXT, features).forward(), wanted, atol=1e-5)


def test_an_edited_text_keeps_only_the_pairs_before_the_edit(tmp_path: Path) -> None:
    target, head = target_with_head(tmp_path)
    edited = [*TEXT[:4], 30, *TEXT[5:]]
    wanted = read_all(target, head, edited).clone()
    read_all(target, head, TEXT)
    target.cache.reuse(edited[:-1])
    target.forward(edited[target.cache.length : -1])
    assert head.reuse(edited) == 3, "pair 3 already holds the token that was changed"
    assert torch.allclose(
        head.read(edited, target.follow(head.layers)).forward(), wanted, atol=1e-5
    )


def test_a_text_with_another_first_token_keeps_no_pair(tmp_path: Path) -> None:
    target, head = target_with_head(tmp_path)
    read_all(target, head, TEXT)
    assert head.reuse([40, *TEXT[1:]]) == 0


def test_rows_of_a_tree_see_their_own_ancestors_alone(tmp_path: Path) -> None:
    """A branch beside others gives what it gives alone, as a chain."""
    target, head = target_with_head(tmp_path)
    root, count = read_all(target, head, TEXT), len(TEXT) - 1
    open_one = torch.zeros(1, 1, dtype=torch.bool)
    first = head.branch([20], root, [count], open_one).forward()
    alone = head.branch([21], first, [count + 1], torch.zeros(1, 2, dtype=torch.bool)).forward()
    head.forget(count)
    assert torch.equal(head.extend(21, head.extend(20, root).forward()).forward(), alone)
    head.forget(count)
    both = head.branch(
        [30, 20], root.repeat(2, 1), [count] * 2, ~torch.eye(2, dtype=torch.bool)
    ).forward()
    assert torch.allclose(both[1:], first, atol=1e-5)
    blocked = torch.tensor([[False, True, False, True], [True, False, True, False]])
    deeper = head.branch([31, 21], both, [count + 1] * 2, blocked).forward()
    assert torch.allclose(deeper[1:], alone, atol=1e-5)
    wrong = head.branch([21], both[1:], [count + 1], torch.zeros(1, 5, dtype=torch.bool)).forward()
    assert not torch.allclose(wrong, alone, atol=1e-3), "the mask must matter"


def test_a_tree_leaves_no_trace_in_the_pairs(tmp_path: Path) -> None:
    target, head = target_with_head(tmp_path)
    longer = [*TEXT, 7, 8]
    wanted = read_all(target, head, longer).clone()
    root, count = read_all(target, head, TEXT), len(TEXT) - 1
    head.branch(
        [7], root, [count], torch.zeros(1, 1, dtype=torch.bool)
    ).forward()  # the right token
    target.forward(longer[target.cache.length : -1])
    assert head.reuse(longer) == count
    assert torch.allclose(
        head.read(longer, target.follow(head.layers)).forward(), wanted, atol=1e-5
    )


def test_memory_covers_weights_and_cache(tmp_path: Path) -> None:
    _, head = target_with_head(tmp_path)
    stored = sum(t.numel() * t.element_size() for t in load_file(tmp_path / WEIGHTS).values())
    assert head.memory_bytes >= stored + head.cache.kv_bytes
