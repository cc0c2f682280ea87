"""Rules that accept more draft tokens than exact checking would; only a person chooses one.

Contract: a `Leniency` is a frozen value of the request (SamplingParams.leniency). With one, replies
are no longer the target's own. `parsed` reads the short form of flags and pages,
`as_data` is what the log keeps. Raises RequestError for a value out of range.

Not here: what a rule does with a draft (engine.lenient), which rule a kind of text has (workloads).
Source: typical acceptance is Medusa's (arXiv 2401.10774), the lenience factor Leviathan et al.'s
(arXiv 2211.17192, appendix).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from localspec.core.errors import RequestError
from localspec.core.units import counted

MAX_FACTOR = 100.0


@dataclass(frozen=True)
class Threshold:
    """By the drafter's confidence: above `threshold` a token is accepted unchecked, else only where
    it is the target's choice. 1 is exact; 0 accepts everything of a drafter that gives a
    confidence."""

    threshold: float

    def __post_init__(self) -> None:
        _require("threshold", self.threshold, 0.0, 1.0)


@dataclass(frozen=True)
class Typical:
    """Accept what is likely enough to the target: p(x) > min(epsilon, delta * exp(-H(p)))."""

    epsilon: float = 0.3
    delta: float = 0.09

    def __post_init__(self) -> None:
        _require("epsilon", self.epsilon, 0.0, 1.0)
        _require("delta", self.delta, 0.0, 1.0)


@dataclass(frozen=True)
class Factor:
    """Accept what would be the target's choice were it so many times as likely."""

    factor: float = 2.0

    def __post_init__(self) -> None:
        _require("factor", self.factor, 1.0, MAX_FACTOR)


Leniency = Threshold | Typical | Factor
THRESHOLD = "threshold"
_RULES: Mapping[str, type[Leniency]] = {
    rule.__name__.lower(): rule for rule in (Threshold, Typical, Factor)
}


def as_data(rule: Leniency) -> dict[str, str | float]:
    """The rule as plain JSON data."""
    return {"rule": type(rule).__name__.lower(), **asdict(rule)}


def label(num_lenient_tokens: int, num_output_tokens: int) -> str:
    """The label of every lenient reply, wherever it is shown."""
    tokens = counted(num_output_tokens, "token")
    return f"lenient: {num_lenient_tokens} of {tokens} would have been refused"


def parsed(text: str) -> Leniency:
    """A rule by its name, with its numbers after a colon where they are not the usual ones."""
    name, _, rest = text.strip().lower().partition(":")
    if name not in _RULES:
        raise RequestError(
            f"{text!r} is no lenient rule. Choose exact, or one of: {', '.join(_RULES)}; "
            "numbers follow a colon, as in threshold:0.75 or factor:2.",
            "leniency",
        )
    try:
        numbers = [float(number) for number in rest.split(",")] if rest else []
        return _RULES[name](*numbers)
    except (TypeError, ValueError):  # too many, too few, or no number
        numbers_of = ",".join(each.name.upper() for each in fields(_RULES[name]))
        sentence = f"{text!r} cannot be read. Write {name}:{numbers_of}."
        raise RequestError(sentence, "leniency") from None


def _require(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        sentence = f"{name} is {value}, but it must lie between {low:g} and {high:g}."
        raise RequestError(sentence, "leniency")
