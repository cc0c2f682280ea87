"""Rows decide alike in either form, and rows without numbers are refused."""

from __future__ import annotations

import pytest
import torch

from localspec.core import Proposal, SamplingParams
from localspec.engine.distributions import GreedyRows, SampledRows, target_rows
from localspec.engine.lenient import verify_leniently
from localspec.engine.verify import verify
from localspec.errors import NumericsError
from localspec.leniency import Factor, Leniency, Threshold, Typical

V = 6
SHAPES = [(), (-1,), (-1, 0, 1), (-1, -1, 0, 0, 1), (-1, -1, -1)]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("parents", SHAPES)
@pytest.mark.parametrize("is_drawn", [True, False])
def test_greedy_is_the_one_hot_case(parents: tuple[int, ...], is_drawn: bool) -> None:
    """The short form of a one-hot row gives every verdict that the long form gives."""
    source, seen = rng(5), set()
    for seed in range(200):
        size = len(parents)
        logits = torch.randn(size + 1, V, generator=source)
        tokens = tuple(torch.randint(0, V, (size,), generator=source).tolist())
        probs = torch.rand(size, V, generator=source).softmax(-1) if is_drawn and size else None
        proposal = Proposal(tokens, parents, probs)
        short = target_rows(logits, SamplingParams(), [])
        assert isinstance(short, GreedyRows)
        found = verify(proposal, short, rng(seed))
        assert found == verify(proposal, SampledRows(short.probs), rng(seed))
        seen.add(found.accepted_length)
    assert len(seen) > (1 if parents else 0), "drafts of several lengths must be accepted"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_logits_that_are_not_numbers_are_refused(
    bad: float, temperature: float, place: int
) -> None:
    """In every row that is read: before the draft, within it and after it."""
    logits = torch.zeros(3, V)
    logits[:, 1] = 50.0
    logits[place, 2] = bad
    sampling = SamplingParams(temperature)
    with pytest.raises(NumericsError, match="float32"):
        verify(Proposal((1, 1), (-1, 0)), target_rows(logits, sampling, []), rng())
    drawn = torch.zeros(2, V)
    drawn[:, 1] = 1.0
    with pytest.raises(NumericsError, match="float32"):
        verify(Proposal((1, 1), (-1, 0), drawn), target_rows(logits, sampling, []), rng())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_without_any_possible_token_is_refused(temperature: float) -> None:
    logits = torch.full((1, V), float("-inf"))
    with pytest.raises(NumericsError):
        verify(Proposal(), target_rows(logits, SamplingParams(temperature), []), rng())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_single_forbidden_tokens_are_no_fault(temperature: float) -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    verdict = verify(Proposal(), target_rows(logits, SamplingParams(temperature), []), rng())
    assert verdict.next_token in (0, 2)


def test_a_penalty_moves_the_greedy_choice() -> None:
    logits = torch.tensor([[2.0, 1.9], [2.0, 1.9]])
    sampling = SamplingParams(repetition_penalty=1.5)
    rows = target_rows(logits, sampling, [[1], [1, 0]])
    assert isinstance(rows, GreedyRows) and list(rows.best) == [0, 0]
    assert list(target_rows(logits, sampling, [[0], [1]]).row(0).__dict__.values()) == [1]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("is_drawn", [True, False])
@pytest.mark.parametrize("parents", [(-1, 0), (-1, -1)])
def test_a_row_that_is_never_reached_may_hold_no_numbers(
    parents: tuple[int, ...], is_drawn: bool, temperature: float
) -> None:
    """Plain decoding would never have seen it: a wrong guess must not end a turn."""
    logits = torch.zeros(3, V)
    logits[:, 1] = 50.0
    logits[1] = float("nan")  # behind a token that is refused for certain
    drawn = torch.eye(V)[[2, 3]] if is_drawn else None
    proposal = Proposal((2, 3), parents, drawn, cannot_branch=parents == (-1, 0))
    for seed in range(20):
        rows = target_rows(logits, SamplingParams(temperature), [])
        verdict = verify(proposal, rows, rng(seed))
        assert (verdict.path, verdict.next_token) == ((), 1)
        assert verdict.is_whole is (parents == (-1, -1)), "only rows with a child are looked at"


@pytest.mark.parametrize("rule", [Threshold(0.5), Typical(), Factor(2.0)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_lenient_rule_refuses_a_reached_row_without_numbers_and_no_other(
    rule: Leniency, temperature: float
) -> None:
    logits = torch.zeros(3, V)
    logits[:, 1] = 50.0
    logits[1] = float("nan")
    rows = target_rows(logits, SamplingParams(temperature), [])
    refused = Proposal((2, 3), (-1, 0), confidences=(0.1, 0.9))
    verdict = verify_leniently(refused, rows, rng(), rule)
    assert (verdict.path, verdict.next_token) == ((), 1)
    with pytest.raises(NumericsError):
        verify_leniently(Proposal((1, 3), (-1, 0), confidences=(0.9, 0.9)), rows, rng(), rule)
