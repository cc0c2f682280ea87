"""Every course that chance can take through drafting and verification, with its probability.

The random source is replaced. A draw of a drafter takes every possible token in turn, a comparison
with a uniform number is answered both ways, and the last draw of a round hands over its whole row.
So a distribution is computed instead of sampled, and a test of it has neither noise nor a seed.

A uniform number is an interval that each comparison narrows: a number that is compared twice is the
same number. Numbers and draws are independent of each other here; that the real ones are is for a
test with the real source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch

from localspec.core import Proposal, Verdict
from localspec.drafters import drafting, tree_growth
from localspec.engine import distributions, verify

Text = tuple[int, ...]
Rows = dict[Text, torch.Tensor]
Result = TypeVar("Result")


class Course:
    """One course of events. given: its first choices; after them the first possible one is made.
    others: the choices that begin the courses which part from this one after `given`."""

    def __init__(self, given: Text) -> None:
        self.weight = 1.0
        self.others = list[Text]()
        self.last_row = torch.empty(0)  # what the last token was to be drawn from
        self._given = given
        self._made = list[int]()

    def pick(self, chances: Sequence[float]) -> int:
        """One of several events with these chances."""
        place = len(self._made)
        possible = [event for event, chance in enumerate(chances) if chance > 0.0]
        if place < len(self._given):
            event = self._given[place]
        else:
            event = possible[0]
            self.others += [(*self._made, other) for other in possible[1:]]
        self._made.append(event)
        self.weight *= chances[event]
        return event

    def draw_draft(self, row: torch.Tensor, rng: Any) -> int:
        return self.pick((row.double() / row.double().sum()).tolist())

    def draw_last(self, row: torch.Tensor, rng: Any) -> int:
        self.last_row = row.double() / row.double().sum()
        return int(row.argmax())

    def uniforms(self, count: int, rng: Any) -> list[Uniform]:
        return [Uniform(self) for _ in range(count)]


class Uniform:
    """A number in [low, high), narrowed by each comparison."""

    def __init__(self, course: Course) -> None:
        self._course, self._low, self._high = course, 0.0, 1.0

    def __lt__(self, bound: float) -> bool:
        if bound >= self._high:
            return True
        if bound <= self._low:
            return False
        below = (bound - self._low) / (self._high - self._low)
        is_below = self._course.pick((below, 1.0 - below)) == 0
        self._low, self._high = (self._low, bound) if is_below else (bound, self._high)
        return is_below


def courses(
    run: Callable[[], Result], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, Result, torch.Tensor]]:
    """(probability, what `run` returned, the row [V] its last token was to be drawn from)."""
    waiting: list[Text] = [()]
    while waiting:
        course = Course(waiting.pop())
        for module in (drafting, tree_growth):
            monkeypatch.setattr(module, "draw", course.draw_draft)
        monkeypatch.setattr(distributions, "draw", course.draw_last)
        monkeypatch.setattr(verify, "uniforms", course.uniforms)
        result = run()
        waiting += course.others
        yield course.weight, result, course.last_row


def texts_of(proposal: Proposal) -> list[Text]:
    """The drafted tokens down to each node, itself included."""
    found = list[Text]()
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def target_of(proposal: Proposal, target: Rows) -> torch.Tensor:
    """The target's rows of a round, [n + 1, V]."""
    return torch.stack([target[()], *(target[text] for text in texts_of(proposal))])


def path_of(proposal: Proposal, verdict: Verdict) -> Text:
    """The accepted tokens."""
    return tuple(proposal.tokens[node] for node in verdict.path)


def first_two(
    rounds: Iterable[tuple[float, Text, torch.Tensor]], row_after: Callable[[Text], torch.Tensor]
) -> torch.Tensor:
    """Chances of the first two tokens, [V, V] fp64, from (probability, accepted tokens, row of the
    next token) of every course of a round. Where a round gives one token, plain decoding goes on.
    """
    size, total = len(row_after(())), 0.0
    found = torch.zeros(size, size, dtype=torch.float64)
    for weight, path, last in rounds:
        total += weight
        if len(path) >= 2:
            found[path[0], path[1]] += weight
        elif path:
            found[path[0]] += weight * last
        else:
            found += weight * last[:, None] * _after_one(row_after)
    assert total == pytest.approx(1.0, abs=1e-6), "some courses are missing, or came twice"
    return found


def _after_one(row_after: Callable[[Text], torch.Tensor]) -> torch.Tensor:
    """The rows after each first token, [V, V]; a row without numbers counts as 0."""
    rows = [row_after((token,)) for token in range(len(row_after(())))]
    return torch.stack(rows).double().nan_to_num()


def wanted_two(row_after: Callable[[Text], torch.Tensor]) -> torch.Tensor:
    """What the target alone gives, [V, V]."""
    return row_after(()).double()[:, None] * _after_one(row_after)


def largest_error(
    rounds: Iterable[tuple[float, Text, torch.Tensor]], row_after: Callable[[Text], torch.Tensor]
) -> float:
    """How far the first two tokens are from the target's own, at the worst pair."""
    return float((first_two(rounds, row_after) - wanted_two(row_after)).abs().max())
