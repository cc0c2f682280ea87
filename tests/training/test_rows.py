"""SplitRows keep what was said and weigh it once; what is held out stays held out."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from localspec.core.errors import ConfigError
from localspec.training.rows import Answer, TokenRow, make_batches, padded, split_rows, to_rows


def answers(count: int) -> list[Answer]:
    return [
        Answer(f"chat {i}", tuple(range(1, 6)), tuple(range(10, 14)), heat)
        for i in range(count)
        for heat in (0.0, 1.0)
    ]


def test_a_short_answer_is_one_row_with_its_prompt_weighing_little() -> None:
    (row,) = to_rows(Answer("a", (1, 2, 3), (4, 5), 0.0), 10)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5]
    assert row.weights.tolist() == pytest.approx([0.1, 0.1, 1.0, 1.0])


def test_of_a_long_prompt_the_end_is_kept() -> None:
    (row,) = to_rows(Answer("a", tuple(range(100)), (7, 8), 0.0), 10)
    assert row.tokens.tolist() == [*range(91, 100), 7, 8]


def test_a_long_answer_is_cut_so_that_each_token_weighs_once() -> None:
    said = tuple(range(1000, 1095))
    rows = to_rows(Answer("a", (1, 2, 3), said, 0.0), 20)
    weighed = [
        int(token)
        for row in rows
        for token, weight in zip(row.tokens[1:], row.weights, strict=True)
        if weight == 1.0
    ]
    assert weighed == list(said)
    assert all(len(row) <= 20 for row in rows)


def test_answers_of_one_conversation_stay_together() -> None:
    given = [Answer(one.group, (len(one.group), i), one.answer, one.temperature)
             for i, one in enumerate(answers(60))]  # fmt: skip
    rows = split_rows(given, 20)
    held_out = {tuple(row.tokens.tolist()) for row in rows.held_out}
    groups = {one.group for one in given if (*one.prompt, *one.answer) in held_out}
    assert 1 <= len(groups) < 20
    assert len(rows.held_out) == 2 * len(groups)
    assert len(rows.train) + len(rows.held_out) == 120


def test_what_is_held_out_stays_so_when_more_is_collected() -> None:
    def groups_held_out(count: int) -> set[str]:
        given = [Answer(f"chat {i}", (i, 1), (2, 3), 0.0) for i in range(count)]
        rows = split_rows(given, 20)
        return {f"chat {row.tokens[0]}" for row in rows.held_out}

    few, many = groups_held_out(50), groups_held_out(200)
    assert few <= many
    assert not {f"chat {i}" for i in range(50)} - few & many - few


def test_two_conversations_are_enough_and_one_is_not() -> None:
    rows = split_rows(answers(2), 20)
    assert rows.train and rows.held_out
    with pytest.raises(ConfigError, match="one is held out"):
        split_rows(answers(1), 20)


def test_batches_hold_every_row_once_and_no_more_tokens_than_allowed() -> None:
    rng = Random(3)
    rows = [
        TokenRow(np.full(n + 1, i, dtype=np.int32), np.ones(n, dtype=np.float32))
        for i, n in enumerate(rng.choices(range(1, 40), k=300))
    ]
    batches = make_batches(rows, 100, Random(1))
    assert sorted(int(row.tokens[0]) for batch in batches for row in batch) == list(range(300))
    assert all(len(batch) * max(map(len, batch)) <= 100 for batch in batches)
    assert [list(map(len, b)) for b in batches] == [
        list(map(len, b)) for b in make_batches(rows, 100, Random(1))
    ]


def test_filling_has_no_weight() -> None:
    long = TokenRow(np.arange(6, dtype=np.int32), np.ones(5, dtype=np.float32))
    short = TokenRow(np.arange(3, dtype=np.int32), np.ones(2, dtype=np.float32))
    tokens, weights = padded([long, short])
    assert tokens.shape == (2, 6) and weights.shape == (2, 5)
    assert weights[1].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
