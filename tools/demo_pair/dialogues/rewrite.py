"""Tasks that copy from the question: repeat, upper case, bullets, fix, shorten, replace, sort,
count.

Contract: skills as `shape.Skill`; answers are computed from the drawn sentence, never written by
hand.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.shape import Exchange, article, capitalise, join_and, number_word
from tools.demo_pair.dialogues.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    FRUITS,
    HOBBIES,
    JOBS,
    NAMES,
    PLACES,
    THINGS,
    VERBS_PAST,
    WEEKDAYS,
)


def sentence(rng: Random) -> str:
    """Draw a plain sentence out of slots."""
    name, other = rng.sample(NAMES, 2)
    thing, place, adjective = rng.choice(THINGS), rng.choice(PLACES), rng.choice(ADJECTIVES)
    animal, verb, day = rng.choice(ANIMALS), rng.choice(VERBS_PAST), rng.choice(WEEKDAYS)
    return rng.choice((
        f"{name} {verb} the {adjective} {thing} in the {place}.",
        f"The {adjective} {animal} slept near the {place}.",
        f"On {day} {name} and {other} went to the {place}.",
        f"{name} lives in {rng.choice(CITIES)} and works as {article(rng.choice(JOBS))}.",
        f"The {thing} on the {rng.choice(('table', 'shelf', 'floor', 'desk'))} is {rng.choice(COLOURS)}.",
        f"We saw {article(adjective)} {animal} behind the {place} on {day}.",
        f"My friend {name} likes {rng.choice(HOBBIES)} and {rng.choice(HOBBIES)}.",
        f"There are {number_word(rng.randint(2, 12))} {rng.choice(COLOURS)} {rng.choice(THINGS)}s in the {place}.",
        f"{name} gave {other} {article(thing)} and {article(rng.choice(FRUITS))}.",
        f"The {adjective} {rng.choice(JOBS)} {verb} the {thing} before {day}.",
    ))  # fmt: skip


def short_phrase(rng: Random) -> str:
    """Draw two to four words."""
    return rng.choice(
        (
            f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}",
            f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} sleeps.",
            f"hello {rng.choice(NAMES)}",
            f"{rng.choice(FRUITS)} and {rng.choice(FRUITS)}",
        )
    )


def repeat(rng: Random) -> list[Exchange]:
    """Repeat a sentence word for word."""
    text = " ".join(sentence(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    user = rng.choice(
        (
            f"Repeat this sentence: {text}",
            f"Repeat after me: {text}",
            f"Copy this text: {text}",
            f"Say this again: {text}",
            f"Write this exactly as it is: {text}",
            f'Repeat the following text:\n\n"{text}"',
        )
    )
    return [Exchange(user, text)]


def repeat_words(rng: Random) -> list[Exchange]:
    """Repeat words, codes or numbers that have no order to guess: only copying helps."""
    pool = (*NAMES, *THINGS, *ANIMALS, *PLACES, *CITIES, *COLOURS, *ADJECTIVES, *JOBS, *FRUITS)
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
    kind = rng.random()
    if kind < 0.7:
        items = [rng.choice(pool) for _ in range(rng.randint(3, 12))]
    elif kind < 0.85:
        items = [
            "".join(rng.choices(letters, k=rng.randint(3, 6))) for _ in range(rng.randint(1, 3))
        ]
    else:
        items = [str(rng.randint(0, 999)) for _ in range(rng.randint(3, 8))]
    text = rng.choice((" ", " ", ", ")).join(items)
    asked = rng.choice(
        (
            "Repeat these words",
            "Repeat",
            "Say this again",
            "Copy this",
            "Repeat after me",
            "Write exactly",
        )
    )
    if rng.random() < 0.2 and len(items) > 2:
        place, word = rng.choice(((0, "first"), (1, "second"), (-1, "last")))
        return [
            Exchange(f"What is the {word} word here? {text}", f"The {word} word is {items[place]}.")
        ]
    return [Exchange(f"{asked}: {text}", text)]


def change_case(rng: Random) -> list[Exchange]:
    """Write a sentence in upper or lower case."""
    text = sentence(rng) if rng.random() < 0.4 else short_phrase(rng)
    if rng.random() < 0.7:
        way = rng.choice(("in upper case", "in capital letters", "in uppercase"))
        return [Exchange(f"Write this {way}: {text}", text.upper())]
    return [
        Exchange(f"Write this in {rng.choice(('lower case', 'lowercase'))}: {text}", text.lower())
    ]


def bullets(rng: Random) -> list[Exchange]:
    """Turn a sentence with a list, or several sentences, into bullet points."""
    if rng.random() < 0.6:
        items = rng.sample(rng.choice((FRUITS, THINGS, ANIMALS, COLOURS)), rng.randint(3, 5))
        text = rng.choice(
            (
                f"I need to buy {join_and([article(i) for i in items])}.",
                f"The box holds {join_and([article(i) for i in items])}.",
                f"{rng.choice(NAMES)} packed {join_and([article(i) for i in items])}.",
            )
        )
        lines = [capitalise(item) for item in items]
    else:
        lines = [sentence(rng) for _ in range(rng.randint(2, 4))]
        text = " ".join(lines)
    user = rng.choice(
        (
            f"Turn this into bullet points: {text}",
            f"Make bullet points from this text: {text}",
            f"Write this as a bullet list:\n{text}",
        )
    )
    return [Exchange(user, "\n".join(f"- {line}" for line in lines))]


def fix(rng: Random) -> list[Exchange]:
    """Repair a sentence that lost its capitals, its full stop or two letters."""
    right = sentence(rng)
    wrong = right.lower().rstrip(".")
    if rng.random() < 0.5:
        words = right.split(" ")
        place = rng.choice([n for n, word in enumerate(words) if len(word) > 3])
        word = words[place]
        cut = rng.randrange(1, len(word) - 2)
        words[place] = word[:cut] + word[cut + 1] + word[cut] + word[cut + 2 :]
        wrong = " ".join(words)
    user = rng.choice(
        (
            f"Fix this sentence: {wrong}",
            f"Correct the mistakes: {wrong}",
            f"Correct the spelling: {wrong}",
            f"Fix the grammar and spelling: {wrong}",
            f"Please correct this: {wrong}",
        )
    )
    return [Exchange(user, right)]


def shorten(rng: Random) -> list[Exchange]:
    """Shorten or summarise two or three sentences to the first one."""
    lines = [sentence(rng) for _ in range(rng.randint(2, 4))]
    text = " ".join(lines)
    user = rng.choice(
        (
            f"Shorten this text: {text}",
            f"Summarise this in one sentence: {text}",
            f"Give me a short summary: {text}",
            f"Make this shorter: {text}",
            f"Summarize the following text.\n\n{text}",
        )
    )
    return [Exchange(user, lines[0])]


def replace(rng: Random) -> list[Exchange]:
    """Replace one word of a sentence by another."""
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    text = rng.choice(
        (
            f"{name} lost the {thing} in the {place}.",
            f"The {thing} belongs to {name}.",
            f"{name} took the {thing} to the {place}.",
        )
    )
    old, new = rng.choice(((name, rng.choice(NAMES)), (thing, rng.choice(THINGS))))
    user = rng.choice(
        (
            f"Replace {old} by {new}: {text}",
            f'Replace "{old}" with "{new}" in this sentence: {text}',
            f"Change {old} to {new}: {text}",
        )
    )
    return [Exchange(user, text.replace(old, new))]


def sort_words(rng: Random) -> list[Exchange]:
    """Sort words by the alphabet, or put them in reverse order."""
    items = rng.sample(rng.choice((FRUITS, ANIMALS, NAMES, THINGS)), rng.randint(3, 5))
    text = ", ".join(items)
    if rng.random() < 0.7:
        user = rng.choice(
            (f"Sort these words alphabetically: {text}", f"Put these in alphabetical order: {text}")
        )
        return [Exchange(user, ", ".join(sorted(items)))]
    return [Exchange(f"Reverse the order of these words: {text}", ", ".join(reversed(items)))]


def find_word(rng: Random) -> list[Exchange]:
    """Ask who, where or what about a sentence just given."""
    name, thing, place, day = (
        rng.choice(NAMES),
        rng.choice(THINGS),
        rng.choice(PLACES),
        rng.choice(WEEKDAYS),
    )
    verb = rng.choice(("found", "lost", "hid", "left", "bought", "painted"))
    text = f"On {day} {name} {verb} the {thing} in the {place}."
    base = {
        "found": "find",
        "lost": "lose",
        "hid": "hide",
        "left": "leave",
        "bought": "buy",
        "painted": "paint",
    }[verb]
    asked, reply = rng.choice((
        (f"Who {verb} the {thing}?", f"{name} {verb} the {thing}."),
        (f"Where did {name} {base} the {thing}?", f"{name} {verb} the {thing} in the {place}."),
        (f"What did {name} {base}?", f"{name} {verb} the {thing}."),
        (f"When did {name} {base} the {thing}?", f"{name} {verb} the {thing} on {day}."),
    ))  # fmt: skip
    more = " ".join(sentence(rng) for _ in range(rng.choice((0, 0, 1, 2))))
    return [
        Exchange(
            f"{text} {more}".strip() + f"{rng.choice((' ', chr(10), chr(10) * 2))}{asked}", reply
        )
    ]


def message(rng: Random) -> list[Exchange]:
    """Write a short e-mail, invitation or note from given facts."""
    name, sender = rng.sample(NAMES, 2)
    place, day, hour = rng.choice(PLACES), rng.choice(WEEKDAYS), rng.randint(8, 20)
    kind, purpose, lines = rng.choice((
        ("invitation", f"to invite {name} to a party on {day}",
         f"I would like to invite you to my party on {day}. It starts at {hour} o'clock. I hope you can come!"),
        ("email", f"to tell {name} that I am sick on {day}",
         f"I am sorry to tell you that I am sick and cannot come on {day}. I hope to be back soon."),
        ("email", f"to thank {name} for the help", "Thank you very much for your help. It was kind of you."),
        ("message", f"to ask {name} to meet me at the {place} on {day}",
         f"Would you like to meet me at the {place} on {day}? Please let me know if {hour} o'clock suits you."),
        ("email", f"asking {name} for feedback on my report",
         "I have finished the report. Could you please read it and tell me what you think? Your feedback would "
         "help me a lot."),
        ("note", f"to remind {name} of the meeting on {day}",
         f"This is a short reminder of our meeting on {day} at {hour} o'clock. See you there!"),
    ))  # fmt: skip
    signed = f"\n\n{rng.choice(('Kind regards', 'Best wishes', 'Yours'))},\n{sender}"
    user = rng.choice(
        (
            f"Write a short {kind} {purpose}. My name is {sender}.",
            f"Write {article(kind)} {purpose}. Sign it with {sender}.",
            f"My name is {sender}. Help me write a short {kind} {purpose}.",
        )
    )
    return [Exchange(user, f"Dear {name},\n\n{lines}{signed}")]
