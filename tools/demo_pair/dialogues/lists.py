"""Lists: things of a kind, steps of a task, pros and cons, in bullets, numbers or one line.

Contract: skills as `shape.Skill`; a list has exactly as many items as were asked for, all
different.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tools.demo_pair.dialogues.shape import (
    Exchange,
    ask,
    capitalise,
    join_and,
    number_word,
    usual,
)
from tools.demo_pair.dialogues.words import (
    ANIMALS,
    CAPITALS,
    CITIES,
    COLOURS,
    CONTINENTS,
    FRUITS,
    HOBBIES,
    JOBS,
    MONTHS,
    NAMES,
    PLANETS,
    SEASONS,
    THINGS,
    VEGETABLES,
    WEEKDAYS,
)

WELL_KNOWN = (
    "France", "Germany", "Italy", "Spain", "Japan", "China", "India", "Brazil", "Canada", "Egypt",
    "Mexico", "Norway", "Poland", "Kenya",
)  # fmt: skip
COUNTRIES = (*WELL_KNOWN, *(country for country in CAPITALS if country not in WELL_KNOWN))
KINDS: dict[str, tuple[str, ...]] = {
    "fruits": FRUITS, "vegetables": VEGETABLES, "colours": COLOURS, "colors": COLOURS,
    "animals": ANIMALS, "jobs": JOBS, "hobbies": HOBBIES, "cities": CITIES, "names": NAMES,
    "countries": COUNTRIES, "planets": PLANETS, "objects": THINGS, "weekdays": WEEKDAYS,
    "capital cities": tuple(CAPITALS[country] for country in COUNTRIES),
}  # fmt: skip
WHOLE: dict[str, tuple[str, ...]] = {
    "the days of the week": WEEKDAYS, "the months of the year": MONTHS, "the four seasons": SEASONS,
    "the planets of the solar system": PLANETS, "the planets": PLANETS, "the seven continents": CONTINENTS,
    "the continents": CONTINENTS, "the vowels": ("a", "e", "i", "o", "u"),
    "the primary colours": ("red", "yellow", "blue"),
}  # fmt: skip
STEPS: dict[str, str] = {
    "make tea": "Boil some water.|Put a tea bag into a cup.|Pour the hot water into the cup.|Wait three minutes.|"
                "Take out the tea bag and enjoy your tea.",
    "make coffee": "Boil some water.|Put ground coffee into a filter.|Pour the water over the coffee.|"
                   "Wait until it has run through.|Pour the coffee into a cup.",
    "boil an egg": "Fill a pot with water.|Bring the water to the boil.|Put the egg into the water.|"
                   "Wait seven minutes.|Cool the egg in cold water.",
    "cook pasta": "Bring a pot of water to the boil.|Add some salt.|Put in the pasta.|Cook it for ten minutes.|"
                  "Drain the pasta and serve it.",
    "plant a tree": "Choose a sunny place.|Dig a deep hole.|Put the tree into the hole.|Fill the hole with earth.|"
                    "Water the tree well.",
    "wash your hands": "Wet your hands with water.|Take some soap.|Rub your hands for twenty seconds.|"
                       "Rinse the soap off.|Dry your hands with a towel.",
    "clean a room": "Open the window.|Pick up everything from the floor.|Dust the shelves.|Sweep the floor.|"
                    "Take out the rubbish.",
    "write a letter": "Write the date at the top.|Begin with a greeting.|Say what you want to tell.|"
                      "End with kind regards.|Sign it with your name.",
    "learn a language": "Choose a good book or course.|Learn ten new words every day.|Listen to the language often.|"
                        "Speak with other people.|Repeat what you have learnt.",
    "start the day": "Get up early.|Drink a glass of water.|Wash and get dressed.|Eat a good breakfast.|"
                     "Make a short plan for the day.",
    "make a sandwich": "Take two slices of bread.|Spread some butter on them.|Add cheese and a slice of tomato.|"
                       "Put the slices together.|Cut the sandwich in half.",
    "save energy": "Switch off lights that you do not need.|Turn down the heating.|Close the windows in winter.|"
                   "Take short showers.|Unplug chargers.",
    "prepare for an exam": "Find out what will be asked.|Make a plan for each day.|Read your notes.|"
                           "Practise with old questions.|Sleep well the night before.",
    "sleep better": "Go to bed at the same time every day.|Keep the room dark and cool.|"
                    "Put away your phone.|Avoid coffee in the evening.|Read a calm book.",
    "stay healthy": "Eat fruit and vegetables.|Drink enough water.|Move every day.|Sleep eight hours.|Take breaks.",
    "use a faster draft": "Open the model settings.|Choose a smaller draft model.|Check that it fits into memory.|"
                          "Send a message and look at the speedup.|Keep the draft if it is faster.",
}  # fmt: skip


def layout(rng: Random, items: Sequence[str], style: str) -> str:
    """Write items as bullets, numbers or one line."""
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
    first = Exchange(ask(rng, f"{verb} {spelled} {kind}{hint}"), layout(rng, chosen[:count], style))
    if rng.random() < 0.2 and len(chosen) == 2 * count:
        more = rng.choice(
            ("More, please.", f"{capitalise(spelled)} more.", "Some more?", "Give me others.")
        )
        return [first, Exchange(more, layout(rng, chosen[count:], style))]
    return [first]


def whole(rng: Random) -> list[Exchange]:
    """Ask for a complete known list."""
    kind, items = rng.choice(tuple(WHOLE.items()))
    style = rng.choice(("line", "bullets", "numbers"))
    hint = {"line": "", "bullets": " as bullet points", "numbers": " as a numbered list"}[style]
    verb = rng.choice(("list", "name", "tell me", "write", "what are"))
    user = f"What are {kind}?" if verb == "what are" else ask(rng, f"{verb} {kind}{hint}")
    return [Exchange(user, layout(rng, items, "line" if verb == "what are" else style))]


def steps(rng: Random) -> list[Exchange]:
    """Ask how to do a daily task; answer in numbered steps."""
    task, text = rng.choice(tuple(STEPS.items()))
    items = text.split("|")
    count = rng.choice((len(items), len(items), 3))
    user = rng.choice(
        (
            f"How do I {task}?",
            f"How can I {task}?",
            f"Explain how to {task}.",
            f"Give me the steps to {task}.",
            f"Tell me step by step how to {task}.",
        )
    )
    if count == 3:
        user = rng.choice((f"Give me three tips to {task}.", f"How do I {task}? Give three steps."))
    lead = usual(rng, task, ("", "", f"Here is how to {task}:\n"))
    return [Exchange(user, lead + layout(rng, items[:count], "numbers"))]
