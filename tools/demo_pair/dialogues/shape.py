"""The shape of a generated dialogue, and the small tools every skill uses.

Contract: a skill is a function of a seeded `random.Random` alone and returns the exchanges of one
topic; the same seed gives the same text. Nothing here reads files, tokens or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar
from zlib import crc32


@dataclass(frozen=True)
class Exchange:
    """One question of the person and the answer to it."""

    user: str
    assistant: str


T = TypeVar("T")
Skill = Callable[[Random], list[Exchange]]

POLITE_OPENINGS = (
    "",
    "",
    "",
    "",
    "Please ",
    "Can you ",
    "Could you ",
    "I want you to ",
    "Help me: ",
    "Could you please ",
)


def ask(rng: Random, task: str) -> str:
    """Turn an imperative ("list three fruits") into one of the ways people ask for it."""
    opening = rng.choice(POLITE_OPENINGS)
    if not opening:
        return f"{capitalise(task)}{rng.choice(('.', '.', '', ', please.'))}"
    return f"{opening}{task}{'?' if opening.startswith(('Can', 'Could')) else '.'}"


def casual(rng: Random, text: str) -> str:
    """Write a question the way people type: sometimes lower case, sometimes without its mark."""
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.!")
    return text


def usual(rng: Random, key: str, options: Sequence[T]) -> T:
    """Mostly take the option that belongs to `key`, sometimes any other.

    An answer that follows from its question is easier to learn, and easier for a draft to guess, than
    one drawn freely; the rest keeps some variety at higher temperatures.
    """
    return (
        rng.choice(options) if rng.random() < 0.12 else options[crc32(key.encode()) % len(options)]
    )


def capitalise(text: str) -> str:
    """Upper-case the first letter and leave the rest alone."""
    return text[:1].upper() + text[1:]


def join_and(items: Sequence[str]) -> str:
    """Join items as prose: "a, b and c"."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def article(noun: str) -> str:
    """Put "a" or "an" before a noun, by its first letter."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


def number_word(value: int) -> str:
    """Spell a small count, as prose does."""
    return NUMBER_WORDS[value] if value < len(NUMBER_WORDS) else str(value)
