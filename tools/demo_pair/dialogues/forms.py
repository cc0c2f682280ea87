"""JSON, CSV and tables made out of fields that the question gives.

Contract: skills as `shape.Skill`; JSON in the answers parses and holds exactly the given values.
"""

from __future__ import annotations

import json
from random import Random

from tools.demo_pair.dialogues.shape import Exchange, join_and
from tools.demo_pair.dialogues.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    FRUITS,
    HOBBIES,
    JOBS,
    NAMES,
    THINGS,
)

Fields = dict[str, object]


def person(rng: Random) -> Fields:
    """Draw a person's fields."""
    every: Fields = {
        "name": rng.choice(NAMES),
        "age": rng.randint(5, 90),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
        "hobby": rng.choice(HOBBIES),
    }
    return pick_fields(rng, every)


def product(rng: Random) -> Fields:
    """Draw the fields of a thing on sale."""
    every: Fields = {
        "name": rng.choice(THINGS),
        "price": rng.randint(1, 200),
        "colour": rng.choice(COLOURS),
        "count": rng.randint(1, 50),
        "in_stock": rng.random() < 0.6,
    }
    return pick_fields(rng, every)


def pet(rng: Random) -> Fields:
    """Draw a pet's fields."""
    every: Fields = {
        "name": rng.choice(NAMES),
        "kind": rng.choice(ANIMALS),
        "age": rng.randint(1, 20),
        "colour": rng.choice(COLOURS),
        "likes": rng.choice(FRUITS),
    }
    return pick_fields(rng, every)


def pick_fields(rng: Random, every: Fields) -> Fields:
    """Keep two to four fields, in order."""
    kept = set(rng.sample(sorted(every), rng.randint(2, 4)))
    return {key: value for key, value in every.items() if key in kept}


def spoken(value: object) -> str:
    """Write a value as a question would."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def json_object(rng: Random) -> list[Exchange]:
    """Make one JSON object from fields in prose or in lines."""
    fields = rng.choice((person, product, pet))(rng)
    parts = [f"{key} {spoken(value)}" for key, value in fields.items()]
    lines = "\n".join(f"{key}: {spoken(value)}" for key, value in fields.items())
    user = rng.choice((
        f"Make a JSON object with {join_and(parts)}.", f"Write this as JSON: {', '.join(parts)}",
        f"Turn this into JSON:\n{lines}", f"Convert to JSON.\n{lines}",
        f"Create a JSON object for a record with {join_and(parts)}.",
        f"Give me JSON with the fields {join_and(parts)}.",
    ))  # fmt: skip
    indent = None if rng.random() < 0.3 else 2
    body = json.dumps(fields, indent=indent)
    return [Exchange(user, f"```json\n{body}\n```" if rng.random() < 0.7 else body)]


def json_list(rng: Random) -> list[Exchange]:
    """Make a JSON array of words or numbers."""
    if rng.random() < 0.3:
        numbers = [rng.randint(0, 99) for _ in range(rng.randint(3, 6))]
        return [
            Exchange(
                f"Make a JSON array of these numbers: {', '.join(map(str, numbers))}",
                json.dumps(numbers),
            )
        ]
    items = rng.sample(rng.choice((FRUITS, COLOURS, ANIMALS, NAMES, CITIES)), rng.randint(2, 5))
    user = rng.choice(
        (
            f"Make a JSON list of {join_and(items)}.",
            f"Write these words as a JSON array: {', '.join(items)}",
        )
    )
    return [Exchange(user, json.dumps(items))]


def table(rng: Random) -> list[Exchange]:
    """Make CSV or a Markdown table from two to four records."""
    maker = rng.choice((person, product, pet))
    header = list(maker(rng))
    rows: list[list[str]] = []
    while len(rows) < rng.randint(2, 4):
        fields = maker(rng)
        if list(fields) == header:
            rows.append([spoken(value) for value in fields.values()])
    told = "\n".join(
        ", ".join(f"{key} {value}" for key, value in zip(header, row, strict=True)) for row in rows
    )
    if rng.random() < 0.6:
        user = rng.choice(
            (
                f"Write this as CSV:\n{told}",
                f"Make a CSV file from these records:\n{told}",
                f"Convert to CSV.\n{told}",
            )
        )
        body = "\n".join([",".join(header), *(",".join(row) for row in rows)])
        return [Exchange(user, f"```csv\n{body}\n```")]
    user = rng.choice(
        (f"Make a table from these records:\n{told}", f"Write this as a Markdown table:\n{told}")
    )
    lines = [header, ["---"] * len(header), *rows]
    return [Exchange(user, "\n".join(f"| {' | '.join(line)} |" for line in lines))]


def read_field(rng: Random) -> list[Exchange]:
    """Give a JSON object and ask for one of its values."""
    fields = rng.choice((person, product, pet))(rng)
    key = rng.choice(tuple(fields))
    user = f"{json.dumps(fields)}\n{rng.choice(('What is the', 'Tell me the'))} {key}?"
    return [Exchange(user, f"The {key} is {spoken(fields[key])}.")]
