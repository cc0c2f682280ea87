"""How a flag is declared, and how its value is read and checked.

A flag is declared once, beside the type of the parameter or of the field that takes its value:
`port: Annotated[int, Flag("0 takes a free one.", least=0, most=65535)] = 8000`. `cli.flags` reads
a command line by these declarations; nothing here knows a library for command lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from localspec.core.decoding import SamplingParams
from localspec.core.errors import ConfigError

# The largest seed that a flag takes. SQLite's integers leave room to count on from it.
LARGEST_SEED = 2**62
N = TypeVar("N", int, float)
# Threads that a person may ask for, for each core of the computer. More only wait for each other.
MOST_FOR_EACH_CORE = 4


@dataclass(frozen=True)
class Flag:
    """The declaration of one flag. metavar: stands for the value in the help. least, most: bounds
    of a number. choices: the only values. name: as it is written, where that is not the name of
    the parameter. is_positional: the value is given without a name. gone: for a flag of an earlier
    version, the sentence that names what does the same now."""

    help: str = ""
    metavar: str | None = None
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] | None = None
    name: str | None = None
    is_positional: bool = False
    gone: str | None = None


Selection = Callable[[str], bool]
SeedFlag = Annotated[int, Flag("Seed of all draws.", least=0, most=LARGEST_SEED)]


def only(*names: str) -> Selection:
    """Return a selection of a dataclass's flags: `Annotated[LoadOptions, only("model")]`."""
    return lambda name: name in names


def without(*names: str) -> Selection:
    """Return the selection of all flags of a dataclass but these."""
    return lambda name: name not in names


def option(name: str) -> str:
    """Return the flag of a parameter as it is written: "--draft-device" for draft_device."""
    return f"--{name.replace('_', '-')}"


def listed(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated flag."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def listed_numbers(text: str, kind: type[N]) -> tuple[N, ...]:
    """The numbers of a comma-separated flag. Raises ConfigError."""
    try:
        return tuple(kind(part) for part in listed(text))
    except ValueError as error:
        said = "whole numbers. Write them like 1,4,16" if kind is int else "numbers, like 0,0.7"
        raise ConfigError(f"{text!r} is no list of {said}.") from error


def require_threads(flag: str, count: int) -> int:
    """The count. Raises ConfigError for one that no step could be run with: more threads than
    the system can start end the process."""
    most = MOST_FOR_EACH_CORE * (os.cpu_count() or 1)
    if not 1 <= count <= most:
        raise ConfigError(
            f"{flag} is {count}, but must lie between 1 and {most} on this computer: "
            f"{MOST_FOR_EACH_CORE} for each of its cores."
        )
    return count


def require_temperatures(temperatures: Sequence[float]) -> None:
    """Raises ConfigError, RequestError unless one can sample at all of them, each once."""
    if not temperatures or len(set(temperatures)) != len(temperatures):
        raise ConfigError("--temperatures needs one or more numbers, each once, like 0,0.7.")
    for temperature in temperatures:
        SamplingParams(temperature=temperature)  # says what is out of range
