"""JSON, CSV and tables made out of fields that the question gives, and small Python functions.

Contract: skills as `texts.Skill`; JSON in the answers parses and holds exactly the given values;
every function in an answer compiles and does what the question asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from tools.demo_pair.dialogues.texts import WORDS, Exchange, ask, join_and, pick, pick_row, rows

Fields = dict[str, object]
RENAMED = {"a": ("a", "x", "first", "left"), "b": ("b", "y", "second", "right"),
           "n": ("n", "number", "value"), "text": ("text", "s", "string"),
           "word": ("word", "text"), "numbers": ("numbers", "values", "items"),
           "items": ("items", "values", "data")}  # fmt: skip


def person(rng: Random) -> Fields:
    return {
        "name": rng.choice(WORDS.NAMES), "age": rng.randint(5, 90), "city": rng.choice(WORDS.CITIES),
        "job": rng.choice(WORDS.JOBS), "hobby": rng.choice(WORDS.HOBBIES),
    }  # fmt: skip


def product(rng: Random) -> Fields:
    return {
        "name": rng.choice(WORDS.THINGS), "price": rng.randint(1, 200), "colour": rng.choice(WORDS.COLOURS),
        "count": rng.randint(1, 50), "in_stock": rng.random() < 0.6,
    }  # fmt: skip


def pet(rng: Random) -> Fields:
    return {
        "name": rng.choice(WORDS.NAMES), "kind": rng.choice(WORDS.ANIMALS), "age": rng.randint(1, 20),
        "colour": rng.choice(WORDS.COLOURS), "likes": rng.choice(WORDS.FRUITS),
    }  # fmt: skip


MAKERS: tuple[Callable[[Random], Fields], ...] = (person, product, pet)


def drawn_fields(rng: Random, maker: Callable[[Random], Fields]) -> Fields:
    """Two to four of the fields, in order."""
    every = maker(rng)
    kept = set(rng.sample(sorted(every), rng.randint(2, 4)))
    return {key: value for key, value in every.items() if key in kept}


def spoken(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def json_object(rng: Random) -> list[Exchange]:
    """Make one JSON object from fields in prose or in lines."""
    fields = drawn_fields(rng, rng.choice(MAKERS))
    parts = [f"{key} {spoken(value)}" for key, value in fields.items()]
    lines = "\n".join(f"{key}: {spoken(value)}" for key, value in fields.items())
    slots = {"joined": join_and(parts), "listed": ", ".join(parts), "lines": lines}
    user = pick(rng, "json_object.user", **slots)
    body = json.dumps(fields, indent=None if rng.random() < 0.3 else 2)
    return [Exchange(user, f"```json\n{body}\n```" if rng.random() < 0.7 else body)]


def json_list(rng: Random) -> list[Exchange]:
    if rng.random() < 0.3:
        numbers = [rng.randint(0, 99) for _ in range(rng.randint(3, 6))]
        asked = f"Make a JSON array of these numbers: {', '.join(map(str, numbers))}"
        return [Exchange(asked, json.dumps(numbers))]
    items = rng.sample(
        rng.choice((WORDS.FRUITS, WORDS.COLOURS, WORDS.ANIMALS, WORDS.NAMES, WORDS.CITIES)),
        rng.randint(2, 5),
    )
    user = pick(rng, "json_list.user", joined=join_and(items), listed=", ".join(items))
    return [Exchange(user, json.dumps(items))]


def table(rng: Random) -> list[Exchange]:
    maker = rng.choice(MAKERS)
    header = list(drawn_fields(rng, maker))
    records: list[list[str]] = []
    while len(records) < rng.randint(2, 4):
        fields = drawn_fields(rng, maker)
        if list(fields) == header:
            records.append([spoken(value) for value in fields.values()])
    told = "\n".join(
        ", ".join(f"{key} {value}" for key, value in zip(header, record, strict=True))
        for record in records
    )
    if rng.random() < 0.6:
        user = pick(rng, "csv.user", told=told)
        body = "\n".join(",".join(line) for line in (header, *records))
        return [Exchange(user, f"```csv\n{body}\n```")]
    user = pick(rng, "table.user", told=told)
    lines = [header, ["---"] * len(header), *records]
    return [Exchange(user, "\n".join(f"| {' | '.join(line)} |" for line in lines))]


def read_field(rng: Random) -> list[Exchange]:
    """Give a JSON object and ask for one of its values."""
    fields = drawn_fields(rng, rng.choice(MAKERS))
    key = rng.choice(tuple(fields))
    user = f"{json.dumps(fields)}\n{rng.choice(('What is the', 'Tell me the'))} {key}?"
    return [Exchange(user, f"The {key} is {spoken(fields[key])}.")]


def function(rng: Random) -> list[Exchange]:
    """Ask for a small function, with or without a given name; sometimes ask for a call of it."""
    task, names, parameters, body = rng.choice(rows("functions"))
    name = rng.choice(names.split(","))
    chosen = [rng.choice(RENAMED.get(one, (one,))) for one in parameters.split()]
    if len(set(chosen)) < len(chosen):
        chosen = parameters.split()
    slots = {"a": chosen[0], "b": chosen[-1], "f": name}
    code = f"def {name}({', '.join(chosen)}):\n    {body.format(**slots)}"
    wanted = pick(rng, "function.wanted")
    named = f" and call it `{name}`" if rng.random() < 0.4 else ""
    user = ask(rng, f"{wanted} {task}{named}")
    if rng.random() < 0.3:
        head = rng.choice(("", "", "from typing import List\n\n\n"))
        user = f'{head}def {name}({", ".join(chosen)}):\n    """{task.capitalize()}."""\n'
    lead = rng.choice(("", "", f"This function {task}:\n\n"))
    exchanges = [Exchange(user, f"{lead}```python\n{code}\n```")]
    if rng.random() < 0.25:
        taken = " and ".join(f"`{one}`" for one in chosen)
        told = f"The function `{name}` {task}. It takes {taken}."
        exchanges.append(Exchange(pick(rng, "function.more"), told))
    return exchanges


def snippet(rng: Random) -> list[Exchange]:
    """Ask for a line or a loop."""
    count, name = rng.randint(3, 20), rng.choice(WORDS.NAMES)
    user, code = pick_row(rng, "snippet.rows", count=count, end=count + 1, name=name)
    return [Exchange(ask(rng, user), f"```python\n{code}\n```")]
