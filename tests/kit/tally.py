"""Counts the cases of a test that tries many faults, and what was lost in them.

A test that asks for the fixture `tally` has two sizes: a few cases in the suite, all of them with
`python -m tests --endurance`, which runs these tests alone and prints a line for each; with
`--part k/n` too, one of n parts of those that try a fault at every call. Only with all cases are
measurements held against their limits: beside other programs they say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

PROPERTY = "tally"  # under this name the counts are reported
MAX_SHOWN = 10

T = TypeVar("T")


@dataclass
class Tally:
    """is_whole: all cases are tried. part: (k, n) tries the k-th of n parts of the cases of
    `some`, so that what takes hours can be done in pieces. figures: what was measured, for the
    report."""

    is_whole: bool
    part: tuple[int, int] = (1, 1)
    num_cases: int = 0
    losses: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def size(self, quick: int, whole: int) -> int:
        return whole if self.is_whole else quick

    def some(self, cases: Sequence[T], quick: int) -> Sequence[T]:
        """All of the cases, of this part; in the suite so many of them, spread evenly."""
        if self.is_whole:
            number, num_parts = self.part
            ends = [len(cases) * each // num_parts for each in (number - 1, number)]
            return cases[slice(*ends)]
        spread = max(1.0, len(cases) / quick)
        return [cases[int(place * spread)] for place in range(min(quick, len(cases)))]

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case; whatever it raises is a loss, and the other cases still run."""
        self.num_cases += 1
        try:
            yield
        except Exception as error:
            self.losses.append(f"{name}: {type(error).__name__}: {error}")

    def measured(self, what: str, found: float, most: float, unit: str) -> None:
        """Show a measurement. With all cases, where nothing runs beside the test, more than `most`
        is a loss; the suite asserts no measurement."""
        self.figures.append(f"{what} {found:.3g} {unit}")
        with self.case(what):
            assert not self.is_whole or found <= most, f"{found:.3g} {unit} is more than {most:g}"

    @property
    def told(self) -> str:
        """The counts and figures in one line."""
        return ", ".join((f"{self.num_cases} cases, {len(self.losses)} losses", *self.figures))

    def check(self) -> None:
        assert self.num_cases, "no case was tried"
        assert not self.losses, "\n".join([self.told, *self.losses[:MAX_SHOWN]])
