"""Very short stories and poems out of slots, so that a story is a chain of whole sentences.

Contract: skills as `shape.Skill`. A story uses the hero, place or thing that the question names.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.shape import Exchange, article, ask, capitalise
from tools.demo_pair.dialogues.words import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    JOBS,
    NAMES,
    PLACES,
    THINGS,
)

TRAITS = (
    "small",
    "brave",
    "shy",
    "clever",
    "kind",
    "curious",
    "lazy",
    "proud",
    "friendly",
    "hungry",
)
MORALS = (
    "From that day on they were friends.", "It was the best day of the year.",
    "And that evening everyone went home happy.", "Since then nobody has been afraid of the dark.",
    "They promised to meet again the next day.", "It had been a long day, but a good one.",
)  # fmt: skip


def story(rng: Random) -> list[Exchange]:
    """Tell a short story about the hero of the question."""
    trait, animal, name = rng.choice(TRAITS), rng.choice(ANIMALS), rng.choice(NAMES)
    job = rng.choice(JOBS)
    place = rng.choice(PLACES)
    hero, called = rng.choice(
        (
            (f"{article(trait)} {animal}", f"the {animal}"),
            (f"{article(animal)}", f"the {animal}"),
            (f"{article(trait)} {job} named {name}", name),
            (f"{article(animal)} named {name}", name),
        )
    )
    setting = rng.choice(("", f" in {article(place)}"))
    user = ask(
        rng,
        f"{rng.choice(('tell me', 'write'))} a {rng.choice(('short ', ''))}story about {hero}{setting}",
    )
    # Mostly one story per hero: what follows from the question can be learnt and guessed.
    told = Random(called) if rng.random() < 0.85 else rng
    place = place if setting else told.choice(PLACES)
    body = " ".join(
        (
            opening(told, hero, called, place),
            problem(told, called, place),
            turn(told, called),
            told.choice(MORALS),
        )
    )
    exchanges = [Exchange(user, body)]
    if rng.random() < 0.15:
        more = rng.choice(("What happened next?", "And then?", "Continue the story."))
        later = f"The next morning {called} went back to the {place}. {rng.choice(MORALS)}"
        exchanges.append(Exchange(more, later))
    return exchanges


def opening(rng: Random, hero: str, called: str, place: str) -> str:
    """Introduce hero and place."""
    start = rng.choice(
        ("Once upon a time there was", "Once there was", "Long ago there lived", "There was once")
    )
    home = rng.choice(
        (
            f"who lived near {article(place)}",
            f"who lived in {article(place)}",
            f"at the edge of {article(place)}",
        )
    )
    habit = rng.choice(
        (
            "looked at the clouds",
            "walked along the path",
            "listened to the birds",
            "sang a quiet song",
            "counted the stars",
            "told stories to the wind",
        )
    )
    return f"{start} {hero} {home}. Every {rng.choice(('morning', 'evening', 'day'))} {called} {habit}."


def problem(rng: Random, called: str, place: str) -> str:
    """Something happens."""
    thing, adjective, other = rng.choice(THINGS), rng.choice(ADJECTIVES), rng.choice(ANIMALS)
    return rng.choice((
        f"One day {called} found {article(adjective)} {thing} under a tree. Nobody knew whose {thing} it was.",
        f"One day it rained so much that the {place} was full of water. {capitalise(called)} did not know what to do.",
        f"One day {article(other)} came by and said, \"I have lost my {thing}.\" {capitalise(called)} wanted to help.",
        f"One night there was a strange light in the {place}. {capitalise(called)} was afraid, but went to look.",
        f"One morning {called} could not find the {rng.choice(COLOURS)} {thing}. It had been there the day before.",
    ))  # fmt: skip


def turn(rng: Random, called: str) -> str:
    """It gets solved."""
    helper, friend = rng.choice(ANIMALS), rng.choice(NAMES)
    return rng.choice((
        f"An old {helper} heard about it and said, \"Do not worry, we will find a way.\" Together they looked everywhere.",
        f"{capitalise(called)} thought for a long time and then had an idea. It worked better than anyone had hoped.",
        f"Then a child called {friend} came along and helped. In the end everything was all right.",
        f"So {called} asked all the neighbours, and everybody helped. Before sunset the work was done.",
    ))  # fmt: skip


def poem(rng: Random) -> list[Exchange]:
    """Write four plain rhymed lines about a thing of the question."""
    topic = rng.choice(
        (
            "rain",
            "the sea",
            "the night",
            "spring",
            "winter",
            "a cat",
            "a tree",
            "the moon",
            "a friend",
            "the sun",
            "a river",
            "the wind",
            "summer",
            "snow",
            "love",
            "a computer",
        )
    )
    pairs = rng.sample((
        ("The day is long, the sky is wide,", "and I walk on with you at my side."),
        ("The light is soft, the air is clear,", "and all I love is very near."),
        ("A little song comes from the tree,", "it sings of you, it sings of me."),
        ("The stars look down on field and town,", "the night has put its dark coat on and gown."),
        ("The morning comes with gold and blue,", "and everything is fresh and new."),
        ("The clouds go by, the hours too,", "and still I think of me and you."),
    ), 2)  # fmt: skip
    lines = [f"{capitalise(topic)}, {topic}, I think of you,", "in all I say and all I do."]
    lines += list(pairs[0])
    if rng.random() < 0.5:
        lines += list(pairs[1])
    return [
        Exchange(
            ask(rng, f"write a {rng.choice(('short ', ''))}poem about {topic}"), "\n".join(lines)
        )
    ]
