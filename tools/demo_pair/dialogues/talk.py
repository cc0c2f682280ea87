"""Small talk, who the assistant is, and questions that need an earlier turn or the system message.

Contract: skills as `texts.Skill`. The assistant always says that it is a small program and never
claims a human life. `system_rules` gives a system message with exchanges that obey it.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.texts import (
    SECTIONS,
    WORDS,
    Exchange,
    article,
    casual,
    filled,
    pick,
    pick_asked,
    pick_row,
    pick_usual,
    usual,
)


def greeting(rng: Random) -> list[Exchange]:
    """Answer a hello with a hello and an offer."""
    hello = rng.choice(WORDS.HELLOS)
    reply = hello if hello.startswith("Good") else rng.choice(("Hello", "Hi", "Hi there"))
    user, mood = f"{hello}{rng.choice(('', '!', '.', ', assistant!', ' :)'))}", ""
    if rng.random() < 0.35:
        user += rng.choice((" How are you?", " How are you today?", " How is it going?"))
        mood = f"{pick(rng, 'greeting.mood')} "
    return [Exchange(casual(rng, user), f"{reply}! {mood}{pick(rng, 'greeting.offer')}")]


def feelings(rng: Random) -> list[Exchange]:
    """Ask how the assistant is, or tell it how the person is."""
    if rng.random() < 0.4:
        user = pick(rng, "feelings.asked")
        return [Exchange(casual(rng, user), pick_usual(rng, user, "feelings.answer"))]
    good = WORDS.GOOD_FEELINGS
    word = rng.choice(good + WORDS.BAD_FEELINGS)
    cause = rng.choice(("", *SECTIONS["feelings.cause"]))
    user = (
        f"I {rng.choice(('am', 'feel', 'am feeling'))} {word} {rng.choice(('', 'today '))}{cause}"
    )
    if word in good:
        reply = pick_usual(rng, word, "feelings.good", word=word)
    else:
        tip = pick_usual(rng, word, "feelings.tip")
        reply = f"I am sorry to hear that you feel {word}. {tip} Would you like to talk about it?"
    return [Exchange(casual(rng, user.strip() + "."), reply)]


def identity(rng: Random) -> list[Exchange]:
    return pick_asked(rng, "identity.rows")


def thanks(rng: Random) -> list[Exchange]:
    kind = "thanks" if rng.random() < 0.5 else "goodbye"
    user = pick(rng, f"{kind}.user")
    reply = pick_usual(rng, user, f"{kind}.reply")
    return [Exchange(casual(rng, user), reply)]


def preferences(rng: Random) -> list[Exchange]:
    """Ask the assistant for its favourites; it has none, names a choice and asks back."""
    kind, options = rng.choice((
        ("colour", WORDS.COLOURS), ("color", WORDS.COLOURS), ("animal", WORDS.ANIMALS), ("city", WORDS.CITIES),
        ("hobby", WORDS.HOBBIES), ("season", WORDS.SEASONS), ("food", WORDS.FOODS),
        ("sport", WORDS.SPORTS),
    ))  # fmt: skip
    choice = usual(rng, kind, options)
    user = pick(rng, "preferences.user", kind=kind)
    asked = casual(rng, user)
    return [Exchange(asked, pick_usual(rng, user, "preferences.reply", kind=kind, choice=choice))]


def hobbies(rng: Random) -> list[Exchange]:
    """The person tells about a hobby or a plan; the assistant shows interest."""
    hobby, day = (
        rng.choice(WORDS.HOBBIES),
        rng.choice(("today", "yesterday", "this weekend", "tomorrow")),
    )
    user = pick(rng, "hobbies.user", hobby=hobby, day=day)
    reply = pick_usual(rng, hobby, "hobbies.reply", hobby=hobby)
    return [Exchange(casual(rng, user), reply)]


def company(rng: Random) -> list[Exchange]:
    """The person introduces themselves; the assistant uses the name, the job or the city."""
    name, job, city = rng.choice(WORDS.NAMES), rng.choice(WORDS.JOBS), rng.choice(WORDS.CITIES)
    return [Exchange(*pick_row(rng, "company.rows", name=name, job=job, city=city))]


def jokes(rng: Random) -> list[Exchange]:
    joke = pick(rng, "jokes.joke")
    thing = rng.choice(("joke", "short joke", "funny joke", "joke about computers", "riddle"))
    return [Exchange(casual(rng, pick(rng, "jokes.user", thing=thing)), joke)]


def recall(rng: Random) -> list[Exchange]:
    """Tell one to three facts, then ask for some of them."""
    slots: dict[str, object] = {
        "name": rng.choice(WORDS.NAMES), "city": rng.choice(WORDS.CITIES), "colour": rng.choice(WORDS.COLOURS),
        "job": rng.choice(WORDS.JOBS), "hobby": rng.choice(WORDS.HOBBIES), "animal": rng.choice(WORDS.ANIMALS),
        "pet": rng.choice(WORDS.NAMES), "fruit": rng.choice(WORDS.FRUITS), "thing": rng.choice(WORDS.THINGS),
        "age": rng.randint(6, 80),
    }  # fmt: skip
    told = [
        line.split(" | ")
        for line in rng.sample(filled(rng, "recall.rows", **slots), rng.randint(1, 3))
    ]
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
    thing, colour = rng.choice(WORDS.THINGS), rng.choice(WORDS.COLOURS)
    statement = f"I bought {article(colour)} {thing} today."
    slots = {"thing": thing, "colour": colour, "statement": statement}
    reply = pick(rng, "previous.reply", **slots)
    return [Exchange(statement, reply), Exchange(*pick_row(rng, "previous.rows", **slots))]


def system_rules(rng: Random) -> tuple[str, list[Exchange]]:
    """Draw a system message with a name or a role, and exchanges that follow it."""
    name, job, city = rng.choice(WORDS.NAMES), rng.choice(WORDS.JOBS), rng.choice(WORDS.CITIES)
    if rng.random() < 0.6:
        system = pick(rng, "name.system", name=name)
        asked, answer = pick(rng, "name.asked"), f"I am {name}. How can I help you?"
    else:
        system = rng.choice(
            (f"You are {article(job)} in {city}.", f"Act as {article(job)} from {city}.")
        )
        asked, answer = pick_row(rng, "role.asked", job=job, city=city)
    return system, [Exchange(casual(rng, asked), answer)]
