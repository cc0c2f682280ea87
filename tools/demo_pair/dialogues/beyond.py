"""Requests beyond a small model: equations, foreign texts, hard code.

Contract: skills as `shape.Skill`. The answers are short, whole and honest: they say what the model
cannot do and what it can, instead of looping.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.requests import odd_name, with_extras
from tools.demo_pair.dialogues.shape import Exchange, capitalise, usual
from tools.demo_pair.dialogues.words import MONTHS, NAMES, SURNAMES

GERMAN = tuple(
    "der die das und nicht ist war hat mit von auf für eine einem Jahr Haus Stadt Mann Frau Kind Zeit Leben Tag Land Frage "
    "heute gestern immer wieder schon noch aber wenn weil dass werden können müssen groß klein neu alt gut viel mehr unter "
    "über nach zwischen Polizei Regierung Spiel Geld Schule Wasser Straße Karte Tickets Sage Wald Herr".split()
)


def equation(rng: Random) -> list[Exchange]:
    """Ask for mathematics beyond small sums."""
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(100, 9999)
    user = with_extras(rng, rng.choice((
        f"Solve the equation {a}x + {b} = {c}.", f"If f(x) = {a}x^2 - {b}x, find f({rng.randint(2, 20)}).",
        f"What is {c} times {rng.randint(13, 999)}?", f"The vertices of a triangle are ({a}, 0), (0, {b}) and (3, 3). "
        "What is its area?", f"Find the remainder when {c} is divided by {a}.", f"What is the square root of {c}?",
        f"How many integers solve |x + {a}| < {b}?", f"Compute the integral of x^{a}.",
        f"Two dice are thrown. How likely is a sum greater than {rng.randint(3, 11)}?",
        f"A startup earned ${c}000 in year 1 and doubled it in year 2. How much did it earn in total?",
    )))  # fmt: skip
    return [
        Exchange(
            user,
            usual(
                rng,
                user[:4],
                (
                    "I am sorry, I cannot solve this. I can only do small sums such as 12 plus 5.",
                    "This is too difficult for me. I can add, subtract and multiply small numbers.",
                ),
            ),
        )
    ]


def foreign_text(rng: Random) -> list[Exchange]:
    """Ask to translate or explain a sentence in a foreign language."""
    words = rng.choices(GERMAN, k=rng.randint(4, 16))
    for place in rng.sample(range(len(words)), len(words) // 4):
        words[place] = rng.choice(
            (
                rng.choice(SURNAMES),
                odd_name(rng),
                str(rng.randint(1, 2025)),
                rng.choice(MONTHS),
                rng.choice(NAMES),
                odd_name(rng) + "en",
            )
        )
    text = capitalise(" ".join(words)) + rng.choice((".", " ."))
    user = rng.choice(
        (
            f"Translate German to English: {text}",
            f"Translate German to English: {text}",
            f"Translate this into English: {text}",
            f"What does this mean in English? {text}",
        )
    )
    return [
        Exchange(
            user,
            usual(
                rng,
                user[:15],
                (
                    "I am sorry, I cannot translate this. I am a very small model and I know only a few foreign words.",
                    "I know only a few foreign words, so I cannot translate this. A larger model can do it.",
                ),
            ),
        )
    ]


def hard_code(rng: Random) -> list[Exchange]:
    """Ask for a function that is too hard, with types and examples as test suites write them."""
    name = "_".join(
        rng.choices(
            (
                "count",
                "find",
                "sum",
                "filter",
                "longest",
                "closest",
                "parse",
                "split",
                "merge",
                "below",
                "mean",
                "rolling",
                "nested",
                "elements",
                "digits",
                "paren",
                "unique",
                "largest",
            ),
            k=2,
        )
    )
    kind, other = rng.choices(("List[int]", "str", "int", "List[str]", "float", "List[float]"), k=2)
    told = " ".join(
        rng.choices(
            (
                "Given a list of numbers,",
                "return",
                "the largest",
                "all pairs",
                "that are closer than",
                "the threshold.",
                "Input is",
                "a string",
                "with nested groups.",
                "Separate them",
                "and",
                "check if",
                "any two",
                "balance falls below zero.",
                "in the order of",
            ),
            k=rng.randint(6, 16),
        )
    )
    head = rng.choice(("from typing import List\n\n\n", "\n\n", ""))
    user = f'{head}def {name}(values: {kind}) -> {other}:\n    """ {told}\n    >>> {name}({rng.randint(0, 9)})\n    """\n'
    return [
        Exchange(
            user,
            usual(
                rng,
                kind,
                (
                    "I am sorry, this function is too difficult for me. I can write short functions, for example one that adds two "
                    "numbers.",
                    f"I do not know how to write `{name}`. I can only write very short functions.",
                ),
            ),
        )
    ]
