"""Requests that are too large for a small model: essays, plans, comparisons, equations, foreign
texts, hard code.

Contract: skills as `texts.Skill`. The answers are short, whole and honest: a frame that fits the
kind of request, or what the model cannot do and what it can. They teach the model to answer where
it knows nothing, instead of looping.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.texts import (
    SECTIONS,
    WORDS,
    Exchange,
    capitalise,
    casual,
    pick,
    pick_usual,
    usual,
)

TOPICS, SYLLABLES, GERMAN = WORDS.TOPICS, WORDS.SYLLABLES, WORDS.GERMAN


def odd_name(rng: Random) -> str:
    """Make up a name that no one knows."""
    return "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3)))).capitalize()


def topic(rng: Random) -> str:
    """Draw a topic: a large one, a thing, or a name that does not exist."""
    return rng.choice((
        rng.choice(TOPICS), rng.choice(TOPICS), rng.choice(WORDS.HOBBIES), f"the {rng.choice(WORDS.THINGS)}",
        odd_name(rng),
        f"the {odd_name(rng)} {rng.choice(('effect', 'war', 'river', 'method', 'company'))}",
        f"the {rng.choice(WORDS.PLACES)} of {odd_name(rng)}", f"a trip to {rng.choice(WORDS.CITIES)}",
    ))  # fmt: skip


def with_extras(rng: Random, task: str) -> str:
    """Add wishes to a task, as long prompts do."""
    return " ".join([task, *rng.sample(SECTIONS["extras"], rng.choice((0, 0, 1, 2, 3)))])


def essay(rng: Random) -> list[Exchange]:
    about, kind = topic(rng), pick(rng, "essay.kind")
    verb = rng.choice(("Write", "Compose", "Draft", "Create", "Please write", "Can you write"))
    user = with_extras(rng, f"{verb} a {kind} about {about}.")
    view, end = pick_usual(rng, kind, "essay.view"), pick_usual(rng, kind, "essay.end")
    text = f"{capitalise(about)} is something that many people talk about. {view} {end}"
    here = f"Here is a short {kind}:\n\n"
    return [Exchange(user, usual(rng, kind, ("", here, here)) + text)]


def letter(rng: Random) -> list[Exchange]:
    about, kind, to = topic(rng), pick(rng, "letter.kind"), pick(rng, "letter.to")
    verb = rng.choice(("Write", "Draft", "Compose"))
    user = with_extras(rng, f"{verb} a {kind} to {to} about {about}.")
    body = pick_usual(rng, kind, "letter.body", about=about)
    return [Exchange(user, f"Hello,\n\n{body}\n\nKind regards")]


def explain(rng: Random) -> list[Exchange]:
    """Ask to explain, compare or judge something large."""
    about, other = topic(rng), topic(rng)
    user = with_extras(rng, pick(rng, "explain.user", about=about, other=other))
    asked = casual(rng, user)
    return [Exchange(asked, pick_usual(rng, user[:6], "explain.reply", about=about))]


def plan(rng: Random) -> list[Exchange]:
    user = with_extras(rng, pick(rng, "plan.user", about=topic(rng)))
    steps = rng.sample(SECTIONS["plan.steps"], rng.randint(3, 5))
    lines = "\n".join(f"{place}. {step}" for place, step in enumerate(steps, 1))
    return [Exchange(user, rng.choice(("", "Here are some ideas:\n\n")) + lines)]


def pros(rng: Random) -> list[Exchange]:
    user = with_extras(rng, pick(rng, "pros.user", about=topic(rng)))
    good, bad = (rng.sample(SECTIONS[f"pros.{kind}"], 2) for kind in ("good", "bad"))
    answer = "\n".join(("Advantages:", *(f"- {one}" for one in good), "", "Disadvantages:",
                        *(f"- {one}" for one in bad)))  # fmt: skip
    return [Exchange(user, answer)]


def equation(rng: Random) -> list[Exchange]:
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(100, 9999)
    user = with_extras(rng, pick(rng, "equation.user", a=a, b=b, c=c))
    return [Exchange(user, pick_usual(rng, user[:4], "equation.reply"))]


def foreign_text(rng: Random) -> list[Exchange]:
    """Ask to translate or explain a sentence in a foreign language."""
    words = rng.choices(GERMAN, k=rng.randint(4, 16))
    for place in rng.sample(range(len(words)), len(words) // 4):
        words[place] = rng.choice((
            rng.choice(WORDS.SURNAMES), odd_name(rng), str(rng.randint(1, 2025)), rng.choice(WORDS.MONTHS),
            rng.choice(WORDS.NAMES), odd_name(rng) + "en",
        ))  # fmt: skip
    text = capitalise(" ".join(words)) + rng.choice((".", " ."))
    user = pick(rng, "foreign_text.user", text=text)
    return [Exchange(user, pick_usual(rng, user[:15], "foreign_text.reply"))]


def hard_code(rng: Random) -> list[Exchange]:
    """Ask for a function that is too hard, with types and examples as test suites write them."""
    name = "_".join(rng.choices(WORDS.HARD_NAMES, k=2))
    kind, other = rng.choices(("List[int]", "str", "int", "List[str]", "float", "List[float]"), k=2)
    told = " ".join(rng.choices(SECTIONS["hard_code.words"], k=rng.randint(6, 16)))
    head = rng.choice(("from typing import List\n\n\n", "\n\n", ""))
    example = f"{name}({rng.randint(0, 9)})"
    user = f'{head}def {name}(values: {kind}) -> {other}:\n    """ {told}\n    >>> {example}\n    """\n'
    return [Exchange(user, pick_usual(rng, kind, "hard_code.reply", name=name))]
