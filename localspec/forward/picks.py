"""Which rows of a mixture go to which expert, and where the results of a row stand then.

The rows of all experts are gathered at once, one expert after the other, so that only the products
run expert by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from localspec.forward.upload import indices


@dataclass(frozen=True)
class Picks:
    """The choices of all rows of a forward, `num_chosen` each.

    experts: those that are chosen, ascending. sizes: how many gathered rows each of them reads.
    rows: the row that stands at each gathered place. places: first of every row the gathered place
    of the lowest of its experts, then of the next lowest, and so on, [num_chosen * n]. ranks: of
    the same choices, the number of the share in [n * num_chosen]."""

    experts: tuple[int, ...]
    sizes: list[int]
    rows: torch.Tensor
    places: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, chosen: torch.Tensor, least: int) -> Picks:
        """chosen: the experts of each row, [n, num_chosen]. least: how many rows an expert reads at
        least, the last one repeated (`weights.dense.fewest_rows`)."""
        of_rows: list[list[int]] = chosen.tolist()
        by_expert = dict[int, list[int]]()  # the rows of each
        for row, experts in enumerate(of_rows):
            for expert in experts:
                by_expert.setdefault(expert, []).append(row)
        numbers, sizes, gathered = sorted(by_expert), list[int](), list[int]()
        next_place = dict[int, int]()  # where the next row of each expert stands
        for expert in numbers:
            rows = by_expert[expert]
            next_place[expert] = len(gathered)
            sizes.append(max(least, len(rows)))
            gathered += rows + rows[-1:] * (sizes[-1] - len(rows))
        by_row = _in_turn(of_rows, next_place)
        places, ranks = (list(chain(*part)) for part in by_row)
        both = indices([*gathered, *places, *ranks], chosen.device)
        parts = torch.split(both, [len(gathered), len(places), len(ranks)])
        return cls(tuple(numbers), sizes, *parts)


def _in_turn(
    of_rows: Sequence[Sequence[int]], next_place: dict[int, int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return, for the lowest expert of every row, then for the next lowest, and so on, the places
    of the rows and the numbers of their shares. next_place: written to."""
    num_chosen = len(of_rows[0])
    places: list[list[int]] = [[] for _ in range(num_chosen)]
    ranks: list[list[int]] = [[] for _ in range(num_chosen)]
    for row, experts in enumerate(of_rows):
        for turn, rank in enumerate(sorted(range(num_chosen), key=experts.__getitem__)):
            expert = experts[rank]
            places[turn].append(next_place[expert])
            ranks[turn].append(row * num_chosen + rank)
            next_place[expert] += 1
    return places, ranks
