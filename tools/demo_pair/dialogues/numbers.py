"""Arithmetic with small numbers, counting and comparing, in plain answer sentences.

Contract: skills as `texts.Skill`; every result is computed.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.texts import WORDS, Exchange, casual, pick

SYMBOLS = {"plus": "+", "minus": "-", "times": "*"}


def operands(rng: Random) -> tuple[int, str, int, int]:
    """Draw left, operation word, right and the result (never negative)."""
    word = rng.choice(tuple(SYMBOLS))
    if word == "times":
        left, right = rng.randint(0, 10), rng.randint(0, 10)
        return left, word, right, left * right
    top = rng.choice((10, 10, 10, 10, 20, 20, 20, 50))
    left, right = rng.randint(0, top), rng.randint(0, top)
    if word == "minus":
        left, right = max(left, right), min(left, right)
        return left, word, right, left - right
    return left, word, right, left + right


def sums(rng: Random) -> list[Exchange]:
    """Ask one to three sums in words or in signs."""
    return [one_sum(rng) for _ in range(rng.choice((1, 1, 2, 3)))]


def one_sum(rng: Random) -> Exchange:
    """Ask one sum; the answer repeats the question's numbers."""
    left, word, right, result = operands(rng)
    symbol = SYMBOLS[word]
    sign = rng.choice((symbol, symbol, "x" if word == "times" else symbol))
    reply = f"{left} {word} {right} is {result}."
    if rng.random() < 0.5:
        apart = f"{left} {sign} {right}"
        spaced = rng.choice((apart, apart, f"{left}{sign}{right}"))
        user = pick(rng, "sum.signs", spaced=spaced)
        reply = rng.choice((f"{left} {symbol} {right} = {result}", reply))
    else:
        user = pick(rng, "sum.words", left=left, word=word, right=right)
    return Exchange(casual(rng, user) if "=" not in user else user, reply)


def word_problem(rng: Random) -> list[Exchange]:
    """Tell a two-sentence story with a sum in it and answer with the working."""
    name, thing = rng.choice(WORDS.NAMES), rng.choice(WORDS.FRUITS + WORDS.THINGS)
    plural = plural_of(thing)
    left, right = rng.randint(2, 20), rng.randint(2, 12)
    kind = rng.choice(("add", "take", "times"))
    if kind == "add":
        user = f"{name} has {left} {plural} and gets {right} more. How many {plural} does {name} have now?"
        reply = f"{name} has {left} + {right} = {left + right} {plural} now."
    elif kind == "take":
        left, right = max(left, right), min(left, right)
        user = f"{name} has {left} {plural} and gives away {right}. How many {plural} are left?"
        reply = f"{name} has {left} - {right} = {left - right} {plural} left."
    else:
        left = rng.randint(2, 12)
        user = f"{name} buys {left} boxes with {right} {plural} in each box. How many {plural} is that?"
        reply = f"There are {left} * {right} = {left * right} {plural} in total."
    return [Exchange(user, reply)]


def plural_of(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun.endswith("lf"):
        return noun[:-1] + "ves"
    return noun + "s"


def counting(rng: Random) -> list[Exchange]:
    """Count up or down, even or odd numbers, or a times table."""
    kind = rng.choice(("up", "down", "even", "odd", "table"))
    if kind == "table":
        base = rng.randint(2, 10)
        row = "\n".join(f"{n} x {base} = {n * base}" for n in range(1, 11))
        return [Exchange(f"Write the times table of {base}.", row)]
    start, length = rng.randint(1, 15), rng.randint(4, 12)
    if kind in ("even", "odd"):
        start = 2 * start + (kind == "odd")
    step = 2 if kind in ("even", "odd") else 1
    values = list(range(start, start + step * length, step))
    last = values[-1]
    user = f"Write the {kind} numbers from {start} to {last}."
    if kind == "down":
        values.reverse()
        user = f"Count down from {last} to {start}."
    elif kind == "up":
        user = f"Count from {start} to {last}."
    return [Exchange(user, ", ".join(map(str, values)))]


def comparing(rng: Random) -> list[Exchange]:
    if rng.random() < 0.5:
        left, right = rng.sample(range(1, 100), 2)
        word = rng.choice(("larger", "bigger", "smaller"))
        best = min(left, right) if word == "smaller" else max(left, right)
        asked = casual(rng, f"Which number is {word}, {left} or {right}?")
        return [Exchange(asked, f"{best} is {word} than {left + right - best}.")]
    values = rng.sample(range(1, 100), rng.randint(3, 6))
    down = rng.random() < 0.3
    order = "from largest to smallest" if down else "from smallest to largest"
    asked = f"Sort these numbers {order}: {', '.join(map(str, values))}"
    return [Exchange(asked, ", ".join(map(str, sorted(values, reverse=down))))]
