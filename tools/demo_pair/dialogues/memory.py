"""Dialogues in which a later question needs an earlier turn or the system message.

Contract: `recall` is a skill as `shape.Skill`; `system_rules` gives a system message together with
exchanges that obey it.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.shape import Exchange, article, casual
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


def facts_told(rng: Random) -> list[tuple[str, str, str, str]]:
    """Draw (statement, reply, question, answer) of things a person tells about themselves."""
    name, city, colour = rng.choice(NAMES), rng.choice(CITIES), rng.choice(COLOURS)
    job, hobby, animal = rng.choice(JOBS), rng.choice(HOBBIES), rng.choice(ANIMALS)
    pet_name, fruit, thing, age = (
        rng.choice(NAMES),
        rng.choice(FRUITS),
        rng.choice(THINGS),
        rng.randint(6, 80),
    )
    every = [
        (f"My name is {name}.", f"Nice to meet you, {name}!", "What is my name?", f"Your name is {name}."),
        (f"I live in {city}.", f"{city} sounds like a nice place to live.", "Where do I live?", f"You live in {city}."),
        (f"My favourite colour is {colour}.", f"{colour.capitalize()} is a nice colour.",
         "What is my favourite colour?", f"Your favourite colour is {colour}."),
        (f"I work as {article(job)}.", f"Being {article(job)} must be interesting.", "What is my job?",
         f"You work as {article(job)}."),
        (f"I like {hobby}.", f"{hobby.capitalize()} sounds like fun!", "What do I like?", f"You like {hobby}."),
        (f"I have {article(animal)} called {pet_name}.", f"{pet_name} is a lovely name for {article(animal)}.",
         f"What is my {animal} called?", f"Your {animal} is called {pet_name}."),
        (f"My favourite fruit is the {fruit}.", "That is a good choice.", "What is my favourite fruit?",
         f"Your favourite fruit is the {fruit}."),
        (f"I am {age} years old.", "Thank you for telling me.", "How old am I?", f"You are {age} years old."),
        (f"Remember the word {thing}.", f"I will remember the word {thing}.",
         "Which word should you remember?", f"The word is {thing}."),
    ]  # fmt: skip
    return rng.sample(every, rng.randint(1, 3))


def recall(rng: Random) -> list[Exchange]:
    """Tell one to three facts, then ask for some of them."""
    told = facts_told(rng)
    if rng.random() < 0.4:
        together = " ".join(statement for statement, _, _, _ in told)
        reply = told[0][1] if len(told) == 1 else "Thank you for telling me about yourself."
        exchanges = [Exchange(together, reply)]
    else:
        exchanges = [Exchange(statement, reply) for statement, reply, _, _ in told]
    asked = rng.sample(told, rng.randint(1, len(told)))
    exchanges += [Exchange(casual(rng, question), answer) for _, _, question, answer in asked]
    return exchanges


def previous(rng: Random) -> list[Exchange]:
    """Ask what was said before."""
    thing, colour = rng.choice(THINGS), rng.choice(COLOURS)
    statement = f"I bought {article(colour)} {thing} today."
    reply = rng.choice((f"A {colour} {thing} sounds nice.", "That sounds nice. Do you like it?"))
    question, answer = rng.choice((
        ("What did I buy?", f"You bought {article(colour)} {thing}."),
        (f"What colour is my {thing}?", f"Your {thing} is {colour}."),
        ("What did I say first?", f"You said: {statement}"),
        ("Repeat my first message.", statement),
    ))  # fmt: skip
    return [Exchange(statement, reply), Exchange(question, answer)]


def system_rules(rng: Random) -> tuple[str, list[Exchange]]:
    """Draw a system message with a name or a role, and exchanges that follow it."""
    name, job, city = rng.choice(NAMES), rng.choice(JOBS), rng.choice(CITIES)
    if rng.random() < 0.6:
        system = rng.choice(
            (
                f"You are {name}, a helpful assistant.",
                f"Your name is {name}.",
                f"You are an assistant called {name}.",
            )
        )
        asked = rng.choice(
            ("Who are you?", "What is your name?", "What's your name?", "Introduce yourself.")
        )
        return system, [Exchange(casual(rng, asked), f"I am {name}. How can I help you?")]
    system = rng.choice(
        (f"You are {article(job)} in {city}.", f"Act as {article(job)} from {city}.")
    )
    asked, answer = rng.choice(
        (
            ("What is your job?", f"I am {article(job)}."),
            ("Where are you from?", f"I am from {city}."),
            ("Who are you?", f"I am {article(job)} in {city}."),
        )
    )
    return system, [Exchange(casual(rng, asked), answer)]
