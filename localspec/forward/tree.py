"""Parents of a draft as tensors: depths and the attention mask.

Contract: pure functions. A token sees everything cached, itself and its ancestors. One
`parents` list describes chains, trees and lookahead windows alike (every visibility pattern of
arXiv 2402.02057 is the ancestor relation of some parents list).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from localspec.forward.upload import uploaded


def depths(parents: Sequence[int]) -> list[int]:
    """Distance of each node from what is cached, 0 for its direct children."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def paths_of(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The nodes from the root to each node, itself included."""
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        found.append((node,) if parent < 0 else (*found[parent], node))
    return found


def leaf_paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the paths from the root to each node that has no child."""
    inner = set(parents)
    return [path for node, path in enumerate(paths_of(parents)) if node not in inner]


def tree_mask(parents: Sequence[int], start: int, device: torch.device) -> torch.Tensor:
    """Mask of a tree after `start` cached tokens: [1, 1, n, start + n], True = visible."""
    size = len(parents)
    among = [[False] * size for _ in parents]  # of the tree's own tokens
    for node, path in enumerate(paths_of(parents)):
        for step in path:
            among[node][step] = True
    visible = uploaded(among, torch.bool, device)
    return F.pad(visible, (start, 0), value=True)[None, None]


def additive_mask(
    num_tokens: int,
    parents: Sequence[int] | None,
    start: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> torch.Tensor | None:
    """Mask to add to attention scores after `start` cached tokens, [1, 1, n, start + n]: 0 where
    a token sees, -inf where not. parents: None for a chain. window: how many positions up to its
    own a token sees, None for all. None for one token that sees all."""
    if num_tokens == 1 and (window is None or start < window):
        return None
    hidden = visible_mask(num_tokens, parents, start, device, window).logical_not_()
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def visible_mask(
    num_tokens: int,
    parents: Sequence[int] | None,
    start: int,
    device: torch.device,
    window: int | None = None,
) -> torch.Tensor:
    """What each token sees after `start` cached ones, [1, 1, n, start + n], True = visible.
    parents: None for a chain. window: how many positions up to its own a token sees, None for all;
    a position of a tree is its depth's."""
    if parents is None:
        seen = torch.ones(num_tokens, start + num_tokens, dtype=torch.bool, device=device)
        seen = seen.tril_(start)[None, None]
    else:
        seen = tree_mask(parents, start, device)
    if window is None or start + num_tokens <= window:
        return seen
    places = torch.arange(start + num_tokens, device=device)
    if parents is not None:
        places[start:] = uploaded([start + depth for depth in depths(parents)], torch.int64, device)
    return seen & (places[start:, None] - places < window)


def block_mask(
    num_tokens: int, parents: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Mask to add to the scores of new tokens among themselves, [n, n]."""
    mask = additive_mask(num_tokens, parents, 0, dtype, device)
    return torch.zeros(1, 1, dtype=dtype, device=device) if mask is None else mask[0, 0]


def slot_mask(
    positions: torch.Tensor,
    slots: torch.Tensor,
    block: torch.Tensor,
    columns: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Mask to add to the scores of n new rows over the slots of a layer, [1, 1, n, num_slots].
    Tensors in, tensors out, without work on the host.

    positions: of the rows, [n]. slots: the positions whose slots they are written to, [n],
    ascending without a gap; position p has slot p modulo the number of slots. block: additive, what
    the rows see of each other, [n, n]; they see every position before the first. columns: all
    slots, ascending, [num_slots]. window: how many positions up to its own a row sees, None for
    all."""
    num_slots = columns.shape[0]
    last = slots[:1] - 1
    held = last - torch.remainder(last - columns, num_slots)  # the position in every slot
    # Filled in place: a number in `where` would be copied from the host, which stops a capture.
    past = torch.zeros_like(columns, dtype=block.dtype).masked_fill_(held < 0, float("-inf"))
    own = torch.remainder(slots, num_slots)
    mask = past.repeat(block.shape[0], 1).index_copy_(1, own, block)
    if window is not None:
        held = held.index_copy(0, own, positions)
        mask.masked_fill_(positions[:, None] - held >= window, float("-inf"))
    return mask[None, None]


def children(parents: Sequence[int]) -> dict[int, list[int]]:
    """Children of each node in proposal order; key -1 is the root."""
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found
