"""Very short stories and poems out of slots, so that a story is a chain of whole sentences.

Contract: skills as `texts.Skill`. A story uses the hero, place or thing that the question names.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.texts import WORDS, Exchange, article, ask, capitalise, pick, rows


def story(rng: Random) -> list[Exchange]:
    """Tell a short story about the hero of the question."""
    trait, animal, name = (
        rng.choice(WORDS.TRAITS),
        rng.choice(WORDS.ANIMALS),
        rng.choice(WORDS.NAMES),
    )
    job = rng.choice(WORDS.JOBS)
    place = rng.choice(WORDS.PLACES)
    hero, called = rng.choice((
        (f"{article(trait)} {animal}", f"the {animal}"), (f"{article(animal)}", f"the {animal}"),
        (f"{article(trait)} {job} named {name}", name), (f"{article(animal)} named {name}", name),
    ))  # fmt: skip
    setting = rng.choice(("", f" in {article(place)}"))
    verb, length = rng.choice(("tell me", "write")), rng.choice(("short ", ""))
    user = ask(rng, f"{verb} a {length}story about {hero}{setting}")
    # Mostly one story per hero: what follows from the question can be learnt and guessed.
    told = Random(called) if rng.random() < 0.85 else rng
    place = place if setting else told.choice(WORDS.PLACES)
    body = (
        opening(told, hero, called, place),
        problem(told, called, place),
        turn(told, called),
        pick(told, "story.moral"),
    )
    exchanges = [Exchange(user, " ".join(body))]
    if rng.random() < 0.15:
        more = rng.choice(("What happened next?", "And then?", "Continue the story."))
        later = f"The next morning {called} went back to the {place}. {pick(rng, 'story.moral')}"
        exchanges.append(Exchange(more, later))
    return exchanges


def opening(rng: Random, hero: str, called: str, place: str) -> str:
    start = pick(rng, "opening.start")
    home, habit = pick(rng, "opening.home", place=place), pick(rng, "opening.habit")
    when = rng.choice(("morning", "evening", "day"))
    return f"{start} {hero} {home}. Every {when} {called} {habit}."


def problem(rng: Random, called: str, place: str) -> str:
    slots = {"thing": rng.choice(WORDS.THINGS), "adjective": rng.choice(WORDS.ADJECTIVES)}
    other = rng.choice(WORDS.ANIMALS)
    return pick(rng, "problem.reply", other=other, called=called, place=place, **slots)


def turn(rng: Random, called: str) -> str:
    helper, friend = rng.choice(WORDS.ANIMALS), rng.choice(WORDS.NAMES)
    return pick(rng, "turn.reply", helper=helper, friend=friend, called=called)


def poem(rng: Random) -> list[Exchange]:
    """Write four or six plain rhymed lines about a thing of the question."""
    topic = pick(rng, "poem.topic")
    first, second = rng.sample(rows("poem.rows"), 2)
    lines = [f"{capitalise(topic)}, {topic}, I think of you,", "in all I say and all I do.", *first]
    if rng.random() < 0.5:
        lines += second
    length = rng.choice(("short ", ""))
    return [Exchange(ask(rng, f"write a {length}poem about {topic}"), "\n".join(lines))]
