"""The words and templates of texts.txt, and the small tools that every skill uses.

Contract: a section of texts.txt is a list of words, separated by commas, if its name is in
capitals; otherwise each line is one option. In a template `{name}` is a slot that the skill fills,
`{NAMES}` draws from that section, `{2-12}` draws a number and `{a|b}` one of the words; `!a` puts
an article before it, `!c` starts it with a capital, `!n` spells a number. A line of several parts
separates them by " | ". All options of a section draw before one is chosen, so that a seed gives
the same text whatever is chosen.

A skill is a function of a seeded `random.Random` alone and returns the exchanges of one topic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import Formatter
from types import SimpleNamespace
from typing import Any, TypeVar
from zlib import crc32


@dataclass(frozen=True)
class Exchange:
    """One question of the person and the answer to it."""

    user: str
    assistant: str


T = TypeVar("T")
Skill = Callable[[Random], list[Exchange]]
PARTS = " | "
FREE_SHARE = 0.12  # of the answers that do not follow from their question
POLITE_OPENINGS = ("", "", "", "", "Please ", "Can you ", "Could you ", "I want you to ",
                   "Help me: ", "Could you please ")  # fmt: skip
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
                "ten", "eleven", "twelve")  # fmt: skip


def _read(path: Path) -> dict[str, tuple[str, ...]]:
    found, name = dict[str, tuple[str, ...]](), ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            name = line[1:-1]
            found[name] = ()
        elif line and not line.startswith("#"):
            options = line.rstrip(",").split(", ") if name.isupper() else [line]
            found[name] += tuple(option.replace("\\n", "\n") for option in options)
    return found


SECTIONS = _read(Path(__file__).with_name("texts.txt"))
# The lists of words, by their names.
WORDS = SimpleNamespace(**{name: SECTIONS[name] for name in SECTIONS if name.isupper()})


def rows(section: str) -> tuple[tuple[str, ...], ...]:
    """The parts of each line."""
    return tuple(tuple(line.split(PARTS)) for line in SECTIONS[section])


def pairs(section: str) -> dict[str, str]:
    """A list of words written as key:value."""
    return dict(word.split(":") for word in SECTIONS[section])


class _Filler(Formatter):
    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        if field_name in kwargs:
            return kwargs[field_name], field_name
        if field_name in SECTIONS:
            return self.rng.choice(SECTIONS[field_name]), field_name
        if "|" in field_name:
            return self.rng.choice(field_name.split("|")), field_name
        first, last = field_name.split("-")
        return self.rng.randint(int(first), int(last)), field_name

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        kinds: dict[str, Callable[[Any], str]] = {
            "a": article,
            "c": capitalise,
            "n": number_word,
        }
        return value if conversion is None else kinds[conversion](value)


def filled(rng: Random, section: str, **slots: object) -> list[str]:
    """Every option of a section with its slots filled."""
    fill = _Filler(rng)
    return [fill.vformat(option, (), slots) for option in SECTIONS[section]]


def pick(rng: Random, section: str, **slots: object) -> str:
    return rng.choice(filled(rng, section, **slots))


def pick_row(rng: Random, section: str, **slots: object) -> list[str]:
    """The parts of one line of a section."""
    return pick(rng, section, **slots).split(PARTS)


def pick_usual(rng: Random, key: str, section: str, **slots: object) -> str:
    """As `usual`, of a section."""
    return usual(rng, key, filled(rng, section, **slots))


def pick_asked(rng: Random, section: str) -> list[Exchange]:
    """A section of two lines each: ways to ask, and their answers."""
    lines = rows(section)
    asked, answers = rng.choice(tuple(zip(lines[::2], lines[1::2], strict=True)))
    return [Exchange(casual(rng, rng.choice(asked)), usual(rng, asked[0], answers))]


def usual(rng: Random, key: str, options: Sequence[T]) -> T:
    """Mostly take the option that belongs to `key`, sometimes any other.

    An answer that follows from its question is easier to learn, and easier for a draft to guess, than
    one drawn freely; the rest keeps some variety at higher temperatures.
    """
    if rng.random() < FREE_SHARE:
        return rng.choice(options)
    return options[crc32(key.encode()) % len(options)]


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


def capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def join_and(items: Sequence[str]) -> str:
    """Join items as prose: "a, b and c"."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def article(noun: str) -> str:
    """Put "a" or "an" before a noun, by its first letter."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def number_word(value: int) -> str:
    """Spell a small count, as prose does."""
    return NUMBER_WORDS[value] if value < len(NUMBER_WORDS) else str(value)


CAPITALS = pairs("CAPITALS")
