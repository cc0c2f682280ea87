"""A draft model reads the first tokens and the latest of a text that exceeds its cache."""

from __future__ import annotations

import pytest
import torch

from localspec.core.decoding import DraftPlan, SamplingParams
from localspec.core.draft_window import NUM_SINKS, num_read, read_part, room_for, start_of
from localspec.drafters.draft_model import DraftModelDrafter
from tests.kit.tiny import TableModel, turn_of

CAPACITIES = (48, 64, 4096)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_what_is_read_fits_with_room_for_a_draft_and_is_half_a_cache_at_least(
    capacity: int,
) -> None:
    for length in range(1, 5 * capacity, max(1, capacity // 50)):
        part = read_part(range(length), capacity)
        assert len(part) == num_read(length, capacity) <= capacity - room_for(capacity)
        assert len(part) >= min(length, capacity // 2 - room_for(capacity))
        assert list(part[:NUM_SINKS]) == list(range(length))[:NUM_SINKS]
        assert part[-1] == length - 1, "the latest token is the one to go on from"


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_start_moves_seldom(capacity: int) -> None:
    starts = [start_of(length, capacity) for length in range(1, 8 * capacity)]
    assert starts == sorted(starts)
    assert len(set(starts)) <= 18, "by half a cache at a time"


def test_a_text_that_fits_is_read_as_it_is() -> None:
    tokens = list(range(100))
    assert read_part(tokens, 256) is tokens


def test_a_long_text_costs_the_draft_one_cache_and_later_rounds_read_what_is_new() -> None:
    read = list[int]()

    def logits(context: tuple[int, ...]) -> torch.Tensor:
        read.append(len(context))
        return torch.zeros(64)

    drafter = DraftModelDrafter(TableModel(logits, 64, capacity=64), 64)
    sequence = turn_of(tuple(number % 60 for number in range(5000)), SamplingParams())
    assert len(drafter.propose(sequence, DraftPlan("d", 4)).tokens) == 4
    assert max(read) <= 64
    read.clear()
    sequence.append([33])
    drafter.propose(sequence, DraftPlan("d", 4))
    assert len(read) == 4, "one row for each draft token"
