"""Nonlinear functions of the numbers of rows, with the same bits wherever a number stands.

torch's kernels for a processor take whole vectors of numbers, and round the numbers that are left
over otherwise. Its threads share a tensor evenly, so a number of threads such as 6 leaves some over
in the middle of it, at places that change with the number of rows. Rows therefore go to a kernel in
pieces that its threads share in whole vectors, filled up where a row is not made of whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]

STEP_BYTES = 128  # Of the numbers that a kernel takes at once, at most: two vectors.
VECTOR_STEP = STEP_BYTES // 2  # As many numbers of bf16, for threads that share a tensor.
GRAIN = 32768  # Numbers that torch gives a thread at least.
GELU_GRAIN = 16384  # Numbers from which on torch gives a gelu to all threads.


class Steady:
    """A function of each number of a tensor, [n, ...] to [n, ...].

    takes_all_threads: whether its kernel shares more than GELU_GRAIN numbers among all threads."""

    def __init__(self, function: Activation, takes_all_threads: bool = False) -> None:
        self._function = function
        self._takes_all_threads = takes_all_threads
        self._bound = GELU_GRAIN if takes_all_threads else GRAIN

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        numel = rows.numel()
        if rows.device.type != "cpu" or not numel:
            return self._function(rows)
        if missing := -(numel // rows.shape[0]) % (STEP_BYTES // rows.itemsize):
            whole = F.pad(rows.flatten(1), (0, missing))  # no row ends within a vector
            return self(whole)[:, :-missing].reshape(rows.shape)
        if numel <= self._bound:
            return self._function(rows)
        width, num_threads = numel // rows.shape[0], torch.get_num_threads()
        sizes = piece_sizes(rows.shape[0], width, num_threads, self._takes_all_threads)
        if len(sizes) == 1:
            return self._function(rows)
        return torch.cat([self._function(piece) for piece in torch.split(rows, list(sizes))])


@lru_cache(maxsize=4096)
def piece_sizes(
    num_rows: int, width: int, num_threads: int, takes_all_threads: bool = False
) -> tuple[int, ...]:
    """Return how many rows of `width` numbers go to a kernel at once, as many as can."""
    sizes = list[int]()
    while left := num_rows - sum(sizes):
        wholes = (
            size
            for size in range(left, 1, -1)
            if _is_shared_whole(size * width, num_threads, takes_all_threads)
        )
        sizes.append(next(wholes, 1))
    return tuple(sizes)


def _is_shared_whole(numel: int, num_threads: int, takes_all_threads: bool) -> bool:
    """True if threads share so many numbers in whole vectors."""
    if numel <= (GELU_GRAIN if takes_all_threads else GRAIN):
        return True
    shares = {-(-numel // num_threads)}
    if not takes_all_threads:
        shares.add(-(-numel // min(num_threads, -(-numel // GRAIN))))
    return all(share % VECTOR_STEP == 0 for share in shares)


silu = Steady(F.silu)
sigmoid = Steady(torch.sigmoid)
softplus = Steady(F.softplus)
_gelu = Steady(partial(F.gelu, approximate="tanh"), takes_all_threads=True)

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": silu,
    "gelu_pytorch_tanh": _gelu,
    "gelu_new": _gelu,  # the same, in other kernels
    "relu2": lambda rows: F.relu(rows).square(),
}


def steep_silu(rows: torch.Tensor, steepness: float) -> torch.Tensor:
    """Return rows * sigmoid(steepness * rows)."""
    return rows * sigmoid(steepness * rows)
