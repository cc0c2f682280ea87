"""What a small model can hold: capitals, days and months, opposites, short definitions, lists, the
app's own terms, and what it cannot know.

Contract: skills as `texts.Skill`. The list of facts is closed on purpose; for all else `unknown`
teaches the model to say in whole sentences that it does not know. A list has exactly as many items
as were asked for, all different. What is said of speculative decoding follows the project's own
design (Leviathan et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tools.demo_pair.dialogues.texts import (
    CAPITALS,
    SECTIONS,
    WORDS,
    Exchange,
    article,
    ask,
    capitalise,
    casual,
    join_and,
    number_word,
    pairs,
    pick,
    pick_asked,
    pick_row,
    pick_usual,
    rows,
    usual,
)

WELL_KNOWN, CONTINENTS = WORDS.WELL_KNOWN, WORDS.CONTINENTS
COUNTRIES = (*WELL_KNOWN, *(country for country in CAPITALS if country not in WELL_KNOWN))
KINDS: dict[str, tuple[str, ...]] = {
    "fruits": WORDS.FRUITS, "vegetables": WORDS.VEGETABLES, "colours": WORDS.COLOURS, "colors": WORDS.COLOURS,
    "animals": WORDS.ANIMALS, "jobs": WORDS.JOBS, "hobbies": WORDS.HOBBIES, "cities": WORDS.CITIES, "names": WORDS.NAMES,
    "countries": COUNTRIES, "planets": WORDS.PLANETS, "objects": WORDS.THINGS, "weekdays": WORDS.WEEKDAYS,
    "capital cities": tuple(CAPITALS[country] for country in COUNTRIES),
}  # fmt: skip
WHOLE: dict[str, tuple[str, ...]] = {
    "the days of the week": WORDS.WEEKDAYS, "the months of the year": WORDS.MONTHS,
    "the four seasons": WORDS.SEASONS, "the planets of the solar system": WORDS.PLANETS,
    "the planets": WORDS.PLANETS, "the seven continents": CONTINENTS, "the continents": CONTINENTS,
    "the vowels": ("a", "e", "i", "o", "u"), "the primary colours": ("red", "yellow", "blue"),
}  # fmt: skip
ROWS = (
    ("day", WORDS.WEEKDAYS), ("month", WORDS.MONTHS), ("letter", tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")),
    ("number", tuple(map(str, range(1, 100)))), ("planet", WORDS.PLANETS),
)  # fmt: skip
OPPOSITES = pairs("OPPOSITES")
UNCOUNTABLE = ("memory", "photosynthesis", "gravity", "democracy", "energy")
LANGUAGES = {name: f"{name.upper()}_WORDS" for name in ("German", "French", "Spanish")}
# A term, then what it is, how it works and why it matters, each in two ways.
_LINES = rows("terms")
TERMS = tuple(
    (term[0], what, how, why)
    for term, what, how, why in zip(*(_LINES[place::4] for place in range(4)), strict=True)
)


def capitals(rng: Random) -> list[Exchange]:
    """Ask for capitals, one to three in a row, or for the country of a capital."""
    chosen = rng.sample(tuple(CAPITALS.items()), rng.choice((1, 1, 2, 3)))
    exchanges = []
    for position, (country, city) in enumerate(chosen):
        asked = f"What is the capital of {country}?"
        if position == 0:
            asked = pick(rng, "capitals.user", country=country)
        elif rng.random() < 0.5:
            asked = pick(rng, "capitals.next", country=country)
        exchanges.append(Exchange(casual(rng, asked), f"The capital of {country} is {city}."))
    if rng.random() < 0.2:
        country, city = chosen[0]
        asked = pick(rng, "capitals.country", city=city)
        return [Exchange(asked, f"{city} is the capital of {country}.")]
    return exchanges


def opposites(rng: Random) -> list[Exchange]:
    word, other = rng.choice(tuple(OPPOSITES.items()))
    if rng.random() < 0.5:
        word, other = other, word
    user = pick(rng, "opposites.user", word=word)
    return [Exchange(casual(rng, user), f"The opposite of {word} is {other}.")]


def definitions(rng: Random) -> list[Exchange]:
    noun, meaning = rng.choice(rows("definitions.rows"))
    named = noun if noun in UNCOUNTABLE else article(noun)
    user = pick(rng, "definitions.user", noun=noun, named=named)
    return [Exchange(casual(rng, user), f"{capitalise(named)} is {meaning}.")]


def small_facts(rng: Random) -> list[Exchange]:
    asked, answer = rng.choice(rows("small_facts.rows"))
    return [Exchange(casual(rng, asked), answer)]


def order(rng: Random) -> list[Exchange]:
    """Ask what comes before or after a day, a month, a letter, a number or a planet."""
    kind, row = rng.choice(ROWS)
    place = rng.randrange(1, len(row) - 1)
    word, shift = rng.choice((("after", 1), ("before", -1)))
    user = pick(rng, "order.user", kind=kind, word=word, given=row[place])
    answer = f"The {kind} {word} {row[place]} is {row[place + shift]}."
    return [Exchange(casual(rng, user), answer)]


def unknown(rng: Random) -> list[Exchange]:
    """Ask what a small model cannot know; it says so politely and in whole sentences."""
    slots: dict[str, object] = {
        "name": f"{rng.choice(WORDS.NAMES)} {rng.choice(WORDS.SURNAMES)}", "city": rng.choice(WORDS.CITIES),
        "thing": rng.choice(WORDS.THINGS), "place": rng.choice(WORDS.PLACES), "job": rng.choice(WORDS.JOBS),
        "hobby": rng.choice(WORDS.HOBBIES), "year": rng.randint(1700, 2025),
    }  # fmt: skip
    topic, user = pick_row(rng, "unknown.rows", **slots)
    asked = casual(rng, user)
    return [Exchange(asked, pick_usual(rng, user[:8], "unknown.reply", topic=topic))]


def translation(rng: Random) -> list[Exchange]:
    """Ask for a translation: a few words are known, whole texts are declined."""
    language = rng.choice(tuple(LANGUAGES))
    if rng.random() < 0.7:
        word, foreign = rng.choice(SECTIONS[LANGUAGES[language]]).split(":")
        user = pick(rng, "translation.word", word=word, language=language)
        return [Exchange(user, f'"{capitalise(word)}" in {language} is "{foreign}".')]
    thing, place = rng.choice(WORDS.THINGS), rng.choice(WORDS.PLACES)
    german = pick(rng, "translation.german", thing=thing)
    slots = {"language": language, "thing": thing, "place": place, "german": german}
    user = pick(rng, "translation.text", **slots)
    return [Exchange(user, pick(rng, "translation.reply"))]


# -- lists ----------------------------------------------------------------------------------


def layout(items: Sequence[str], style: str) -> str:
    if style == "bullets":
        return "\n".join(f"- {capitalise(item)}" for item in items)
    if style == "numbers":
        return "\n".join(f"{place}. {capitalise(item)}" for place, item in enumerate(items, 1))
    return f"{capitalise(join_and(items))}."


def some(rng: Random) -> list[Exchange]:
    """Ask for a number of things of a kind, sometimes for more in a second turn."""
    kind = rng.choice(tuple(KINDS))
    count = rng.randint(2, 7)
    style = rng.choice(("line", "bullets", "numbers", "numbers"))
    hint = {
        "line": rng.choice(("", " in one line", " separated by commas")),
        "bullets": rng.choice((" as bullet points", " as a bullet list", " with bullets")),
        "numbers": rng.choice((" as a numbered list", "", " as a list")),
    }[style]
    verb = rng.choice(("list", "name", "give me", "write down", "tell me"))
    every = KINDS[kind]
    # Mostly the best-known items in a fixed order: a free choice could not be learnt or guessed.
    size = min(2 * count, len(every))
    chosen = every[:size] if rng.random() < 0.8 else rng.sample(every, size)
    spelled = number_word(count) if rng.random() < 0.6 else str(count)
    first = Exchange(ask(rng, f"{verb} {spelled} {kind}{hint}"), layout(chosen[:count], style))
    if rng.random() < 0.2 and len(chosen) == 2 * count:
        more = rng.choice(
            ("More, please.", f"{capitalise(spelled)} more.", "Some more?", "Give me others.")
        )
        return [first, Exchange(more, layout(chosen[count:], style))]
    return [first]


def whole(rng: Random) -> list[Exchange]:
    kind, items = rng.choice(tuple(WHOLE.items()))
    style = rng.choice(("line", "bullets", "numbers"))
    hint = {"line": "", "bullets": " as bullet points", "numbers": " as a numbered list"}[style]
    verb = rng.choice(("list", "name", "tell me", "write", "what are"))
    user = f"What are {kind}?" if verb == "what are" else ask(rng, f"{verb} {kind}{hint}")
    return [Exchange(user, layout(items, "line" if verb == "what are" else style))]


def steps(rng: Random) -> list[Exchange]:
    """Ask how to do a daily task; answer in numbered steps."""
    task, *items = rng.choice(rows("steps.rows"))
    count = rng.choice((len(items), len(items), 3))
    user = pick(rng, "steps.user", task=task)
    if count == 3:
        user = pick(rng, "steps.three", task=task)
    lead = usual(rng, task, ("", "", f"Here is how to {task}:\n"))
    return [Exchange(user, lead + layout(items[:count], "numbers"))]


# -- speculative decoding -------------------------------------------------------------------


def explain(rng: Random) -> list[Exchange]:
    """Explain one term, sometimes with a follow-up for more detail. The first term comes twice."""
    term, what, how, why = rng.choice((TERMS[0], *TERMS))
    user = pick(rng, "term.user", term=term)
    first = f"{usual(rng, term, what)} {usual(rng, term, how)}"
    if rng.random() < 0.3:
        more = pick(rng, "term.more")
        return [
            Exchange(casual(rng, user), first),
            Exchange(casual(rng, more), usual(rng, term, why)),
        ]
    return [Exchange(casual(rng, user), f"{first} {usual(rng, term, why)}")]


def questions(rng: Random) -> list[Exchange]:
    return pick_asked(rng, "special")


def compare(rng: Random) -> list[Exchange]:
    first, second = rng.sample(TERMS, 2)
    user = pick(rng, "compare.user", first=first[0], second=second[0])
    asked = casual(rng, user)
    told = (usual(rng, term, what) for term, what, _, _ in (first, second))
    return [Exchange(asked, " ".join(told))]


def rate(rng: Random) -> list[Exchange]:
    """Work out an acceptance rate or a speedup from numbers."""
    if rng.random() < 0.5:
        drafted = rng.choice((4, 5, 10, 20, 50, 100))
        accepted = rng.randint(1, drafted)
        percent = round(100 * accepted / drafted)
        user = pick(rng, "rate.acceptance", drafted=drafted, accepted=accepted)
        divided = f"The acceptance rate is {accepted} divided by {drafted}"
        return [Exchange(user, f"{divided}, which is {percent} percent.")]
    plain, factor = rng.randint(2, 60), rng.randint(2, 4)
    drafted = plain * factor
    user = pick(rng, "rate.speedup", plain=plain, drafted=drafted)
    told = f"{drafted} divided by {plain} is {factor}, so it is {factor} times as fast."
    return [Exchange(user, told)]
