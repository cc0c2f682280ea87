"""Tasks that copy from the question: repeat, upper case, bullets, fix, shorten, replace, sort, find.

Contract: skills as `texts.Skill`; answers are computed from the drawn sentence, never written by
hand.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.texts import (
    WORDS,
    Exchange,
    article,
    capitalise,
    join_and,
    pick,
    pick_row,
)

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
PRESENT = {"found": "find", "lost": "lose", "hid": "hide", "left": "leave", "bought": "buy",
           "painted": "paint"}  # fmt: skip


def sentence(rng: Random) -> str:
    """Draw a plain sentence out of slots."""
    name, other = rng.sample(WORDS.NAMES, 2)
    slots: dict[str, object] = {
        "name": name, "other": other, "thing": rng.choice(WORDS.THINGS), "place": rng.choice(WORDS.PLACES),
        "adjective": rng.choice(WORDS.ADJECTIVES), "animal": rng.choice(WORDS.ANIMALS),
        "verb": rng.choice(WORDS.VERBS_PAST), "day": rng.choice(WORDS.WEEKDAYS),
    }  # fmt: skip
    return pick(rng, "sentence.reply", **slots)


def repeat(rng: Random) -> list[Exchange]:
    text = " ".join(sentence(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return [Exchange(pick(rng, "repeat.user", text=text), text)]


def repeat_words(rng: Random) -> list[Exchange]:
    """Repeat words, codes or numbers that have no order to guess: only copying helps."""
    pool = (
        *WORDS.NAMES,
        *WORDS.THINGS,
        *WORDS.ANIMALS,
        *WORDS.PLACES,
        *WORDS.CITIES,
        *WORDS.COLOURS,
        *WORDS.ADJECTIVES,
        *WORDS.JOBS,
        *WORDS.FRUITS,
    )
    kind = rng.random()
    if kind < 0.7:
        items = [rng.choice(pool) for _ in range(rng.randint(3, 12))]
    elif kind < 0.85:
        items = [
            "".join(rng.choices(LETTERS, k=rng.randint(3, 6))) for _ in range(rng.randint(1, 3))
        ]
    else:
        items = [str(rng.randint(0, 999)) for _ in range(rng.randint(3, 8))]
    text = rng.choice((" ", " ", ", ")).join(items)
    asked = pick(rng, "repeat_words.asked")
    if rng.random() < 0.2 and len(items) > 2:
        place, word = rng.choice(((0, "first"), (1, "second"), (-1, "last")))
        asked = f"What is the {word} word here? {text}"
        return [Exchange(asked, f"The {word} word is {items[place]}.")]
    return [Exchange(f"{asked}: {text}", text)]


def change_case(rng: Random) -> list[Exchange]:
    text = sentence(rng) if rng.random() < 0.4 else pick(rng, "short_phrase.reply")
    if rng.random() < 0.7:
        way = rng.choice(("in upper case", "in capital letters", "in uppercase"))
        return [Exchange(f"Write this {way}: {text}", text.upper())]
    way = rng.choice(("lower case", "lowercase"))
    return [Exchange(f"Write this in {way}: {text}", text.lower())]


def bullets(rng: Random) -> list[Exchange]:
    """Turn a sentence with a list, or several sentences, into bullet points."""
    if rng.random() < 0.6:
        items = rng.sample(
            rng.choice((WORDS.FRUITS, WORDS.THINGS, WORDS.ANIMALS, WORDS.COLOURS)),
            rng.randint(3, 5),
        )
        text = pick(rng, "bullets.text", joined=join_and(list(map(article, items))))
        lines = [capitalise(item) for item in items]
    else:
        lines = [sentence(rng) for _ in range(rng.randint(2, 4))]
        text = " ".join(lines)
    answer = "\n".join(f"- {line}" for line in lines)
    return [Exchange(pick(rng, "bullets.user", text=text), answer)]


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
    return [Exchange(pick(rng, "fix.user", wrong=wrong), right)]


def shorten(rng: Random) -> list[Exchange]:
    lines = [sentence(rng) for _ in range(rng.randint(2, 4))]
    return [Exchange(pick(rng, "shorten.user", text=" ".join(lines)), lines[0])]


def replace(rng: Random) -> list[Exchange]:
    name, thing, place = rng.choice(WORDS.NAMES), rng.choice(WORDS.THINGS), rng.choice(WORDS.PLACES)
    text = pick(rng, "replace.text", name=name, thing=thing, place=place)
    old, new = rng.choice(((name, rng.choice(WORDS.NAMES)), (thing, rng.choice(WORDS.THINGS))))
    user = pick(rng, "replace.user", old=old, new=new, text=text)
    return [Exchange(user, text.replace(old, new))]


def sort_words(rng: Random) -> list[Exchange]:
    items = rng.sample(
        rng.choice((WORDS.FRUITS, WORDS.ANIMALS, WORDS.NAMES, WORDS.THINGS)), rng.randint(3, 5)
    )
    text = ", ".join(items)
    if rng.random() < 0.7:
        return [Exchange(pick(rng, "sort_words.user", text=text), ", ".join(sorted(items)))]
    return [Exchange(f"Reverse the order of these words: {text}", ", ".join(reversed(items)))]


def find_word(rng: Random) -> list[Exchange]:
    """Ask who, where or what about a sentence just given."""
    name, thing, place = rng.choice(WORDS.NAMES), rng.choice(WORDS.THINGS), rng.choice(WORDS.PLACES)
    day, verb = rng.choice(WORDS.WEEKDAYS), rng.choice(tuple(PRESENT))
    slots = {"name": name, "thing": thing, "place": place, "day": day, "verb": verb}
    text = f"On {day} {name} {verb} the {thing} in the {place}."
    asked, reply = pick_row(rng, "find_word.rows", base=PRESENT[verb], **slots)
    more = " ".join(sentence(rng) for _ in range(rng.choice((0, 0, 1, 2))))
    gap = rng.choice((" ", "\n", "\n\n"))
    return [Exchange(f"{f'{text} {more}'.strip()}{gap}{asked}", reply)]


def message(rng: Random) -> list[Exchange]:
    """Write a short e-mail, invitation or note from given facts."""
    name, sender = rng.sample(WORDS.NAMES, 2)
    place, day, hour = rng.choice(WORDS.PLACES), rng.choice(WORDS.WEEKDAYS), rng.randint(8, 20)
    slots = {"name": name, "place": place, "day": day, "hour": hour}
    kind, purpose, lines = pick_row(rng, "message.rows", **slots)
    signed = f"\n\n{rng.choice(('Kind regards', 'Best wishes', 'Yours'))},\n{sender}"
    user = pick(rng, "message.user", kind=kind, purpose=purpose, sender=sender)
    return [Exchange(user, f"Dear {name},\n\n{lines}{signed}")]
