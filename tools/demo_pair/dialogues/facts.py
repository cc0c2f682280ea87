"""Facts that a small model can hold: capitals, days and months, opposites, short definitions, and
what it cannot know.

Contract: skills as `shape.Skill`. The list of facts is closed on purpose; for all else `unknown`
teaches the model to say in whole sentences that it does not know.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.shape import Exchange, capitalise, casual, usual
from tools.demo_pair.dialogues.words import (
    CAPITALS,
    CITIES,
    HOBBIES,
    JOBS,
    MONTHS,
    NAMES,
    PLACES,
    PLANETS,
    SURNAMES,
    THINGS,
    WEEKDAYS,
)

OPPOSITES = dict(
    pair.split(":")
    for pair in (
        "hot:cold,big:small,old:young,fast:slow,high:low,light:dark,happy:sad,open:closed,early:late,"
        "full:empty,hard:soft,rich:poor,strong:weak,long:short,loud:quiet,clean:dirty,easy:difficult,"
        "first:last,left:right,day:night,up:down,inside:outside,wet:dry,thick:thin,brave:afraid,"
        "near:far,same:different,begin:end,buy:sell,give:take,remember:forget,win:lose,push:pull"
    ).split(",")
)
DEFINITIONS = dict(
    pair.split("=")
    for pair in (
        "computer=a machine that stores and processes information|bridge=a structure that lets people "
        "cross a river or a road|library=a place where people can read and borrow books|bakery=a shop "
        "where bread and cakes are made and sold|map=a drawing that shows where places are|clock=a device "
        "that shows the time|river=a large stream of water that flows to the sea|mountain=a very high and "
        "steep piece of land|island=a piece of land with water all around it|desert=a very dry place with "
        "little rain|forest=a large area covered with trees|telescope=an instrument that makes distant "
        "things look closer|umbrella=a cover that keeps the rain off|thermometer=an instrument that "
        "measures temperature|compass=an instrument that points to the north|volcano=a mountain that can "
        "throw out hot rock and ash|planet=a large round body that moves around a star|star=a huge ball of "
        "hot gas that gives light|algorithm=a list of exact steps that solves a problem|program=a list of "
        "instructions for a computer|variable=a name that stands for a value in a program|function=a named "
        "piece of a program that does one job|loop=a part of a program that is repeated|language "
        "model=a program that predicts the next piece of a text|neural network=a program made of many "
        "simple units that learn from examples|GPU=a chip that does many small calculations at the same "
        "time|CPU=the main chip of a computer, which runs its programs|memory=the part of a computer that "
        "keeps data while it works|file=a named piece of data on a computer|prompt=the text that you give "
        "to a language model|dictionary=a book that explains what words mean|bicycle=a vehicle with two "
        "wheels that you drive with your feet|photosynthesis=the way in which plants make sugar from "
        "light, water and air|gravity=the force that pulls things towards the ground|democracy=a form of "
        "government in which the people vote|energy=the ability to do work"
    ).split("|")
)
SMALL_FACTS = (
    ("How many days are in a week?", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months."),
    ("How many days are in a year?", "A year has 365 days, and a leap year has 366."),
    ("How many hours are in a day?", "A day has 24 hours."),
    ("How many minutes are in an hour?", "An hour has 60 minutes."),
    ("How many seconds are in a minute?", "A minute has 60 seconds."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does a dog have?", "A dog has four legs."),
    ("How many planets are in the solar system?", "There are eight planets in the solar system."),
    ("How many continents are there?", "There are seven continents."),
    ("How many letters are in the alphabet?", "The English alphabet has 26 letters."),
    ("What is the largest planet?", "The largest planet is Jupiter."),
    ("What is the smallest planet?", "The smallest planet is Mercury."),
    ("What is the largest ocean?", "The largest ocean is the Pacific Ocean."),
    ("What is the highest mountain?", "The highest mountain is Mount Everest."),
    ("What is the largest animal?", "The largest animal is the blue whale."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows drink?", "Cows drink water."),
    ("What colour is the sky?", "On a clear day the sky is blue."),
    ("What color is the sky?", "On a clear day the sky is blue."),
    (
        "Why is the sky blue?",
        "The air scatters blue light more than red light, so the sky looks blue.",
    ),
    ("What colour is grass?", "Grass is green."),
    ("What is water made of?", "Water is made of hydrogen and oxygen."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("What is the opposite of yes?", "The opposite of yes is no."),
    ("Which planet is closest to the sun?", "Mercury is the planet closest to the sun."),
    ("Which planet is called the red planet?", "Mars is called the red planet."),
    ("What language is spoken in Brazil?", "In Brazil people speak Portuguese."),
    ("What language is spoken in Austria?", "In Austria people speak German."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare wrote Romeo and Juliet."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa."),
    ("Is the earth round?", "Yes, the earth is round, almost like a ball."),
    ("Is the sun a star?", "Yes, the sun is a star."),
    ("Can penguins fly?", "No, penguins cannot fly, but they swim very well."),
    ("Do fish live in water?", "Yes, fish live in water."),
)


def capitals(rng: Random) -> list[Exchange]:
    """Ask for capitals, one to three in a row, or for the country of a capital."""
    chosen = rng.sample(tuple(CAPITALS.items()), rng.choice((1, 1, 2, 3)))
    exchanges = []
    for position, (country, city) in enumerate(chosen):
        asked = f"What is the capital of {country}?"
        if position == 0:
            asked = rng.choice(
                (
                    asked,
                    asked,
                    f"Which city is the capital of {country}?",
                    f"Tell me the capital of {country}.",
                    f"Capital of {country}?",
                    f"What's the capital of {country}?",
                    f"Name the capital of {country}.",
                )
            )
        elif rng.random() < 0.5:
            asked = rng.choice((f"And of {country}?", f"And {country}?", f"What about {country}?"))
        exchanges.append(Exchange(casual(rng, asked), f"The capital of {country} is {city}."))
    if rng.random() < 0.2:
        country, city = chosen[0]
        return [
            Exchange(
                rng.choice(
                    (
                        f"{city} is the capital of which country?",
                        f"Which country has the capital {city}?",
                    )
                ),
                f"{city} is the capital of {country}.",
            )
        ]
    return exchanges


def opposites(rng: Random) -> list[Exchange]:
    """Ask for the opposite of a word, in either direction."""
    word, other = rng.choice(tuple(OPPOSITES.items()))
    if rng.random() < 0.5:
        word, other = other, word
    user = rng.choice(
        (
            f"What is the opposite of {word}?",
            f'What is the opposite of "{word}"?',
            f"Give me the opposite of {word}.",
            f"Opposite of {word}?",
        )
    )
    return [Exchange(casual(rng, user), f"The opposite of {word} is {other}.")]


def definitions(rng: Random) -> list[Exchange]:
    """Ask what a common thing is."""
    noun, meaning = rng.choice(tuple(DEFINITIONS.items()))
    uncountable = noun in ("memory", "photosynthesis", "gravity", "democracy", "energy")
    named = noun if uncountable else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
    user = rng.choice(
        (
            f"What is {named}?",
            f"What does the word {noun} mean?",
            f"Define {noun}.",
            f"Explain what {named} is.",
            f"Can you tell me what {named} is?",
        )
    )
    return [Exchange(casual(rng, user), f"{capitalise(named)} is {meaning}.")]


def small_facts(rng: Random) -> list[Exchange]:
    """Ask one of the closed list of school-book facts."""
    asked, answer = rng.choice(SMALL_FACTS)
    return [Exchange(casual(rng, asked), answer)]


def order(rng: Random) -> list[Exchange]:
    """Ask what comes before or after a day, a month, a letter, a number or a planet."""
    kind, row = rng.choice(
        (
            ("day", WEEKDAYS),
            ("month", MONTHS),
            ("letter", tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")),
            ("number", tuple(map(str, range(1, 100)))),
            ("planet", PLANETS),
        )
    )
    place = rng.randrange(1, len(row) - 1)
    word, shift = rng.choice((("after", 1), ("before", -1)))
    other = row[place + shift]
    user = rng.choice(
        (
            f"Which {kind} comes {word} {row[place]}?",
            f"What {kind} is {word} {row[place]}?",
            f"What comes {word} {row[place]}?",
        )
    )
    return [Exchange(casual(rng, user), f"The {kind} {word} {row[place]} is {other}.")]


def unknown(rng: Random) -> list[Exchange]:
    """Ask what a small model cannot know; it says so politely and in whole sentences."""
    name = f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
    city, thing, place = rng.choice(CITIES), rng.choice(THINGS), rng.choice(PLACES)
    job, hobby, year = rng.choice(JOBS), rng.choice(HOBBIES), rng.randint(1700, 2025)
    topic, user = rng.choice((
        (name, f"Who is {name}?"), (name, f"When was {name} born?"), (name, f"Where does {name} live?"),
        (name, f"What did {name} do in {year}?"), (f"the year {year}", f"What happened in {year}?"),
        (f"the year {year}", f"Who won the world cup in {year}?"),
        (f"the year {year}", f"Who was the president in {year}?"),
        ("the weather", f"What is the weather like in {city}?"),
        ("the weather", "Will it rain tomorrow?"), ("the time", "What time is it?"),
        ("the date", "What day is it today?"), ("the news", "What is in the news today?"),
        (city, f"How many people live in {city}?"), (city, f"What is the best restaurant in {city}?"),
        (city, f"How do I get to {city} by train?"), ("prices", f"How much does a {thing} cost?"),
        (f"the work of a {job}", f"How much does a {job} earn?"),
        (f"that {place}", f"When was the oldest {place} in {city} built?"),
        (hobby, f"Who is the best in the world at {hobby}?"),
        ("medicine", "What should I take against a headache?"),
        ("shares", "Which shares should I buy?"), ("law", "Do I need a lawyer?"),
    ))  # fmt: skip
    return [
        Exchange(
            casual(rng, user),
            usual(
                rng,
                user[:8],
                (
                    f"I do not know enough about {topic}. I am a small model, so please ask a larger one or look "
                    "it up.",
                    f"I am sorry, I cannot answer questions about {topic}. A larger model may know more.",
                    f"I do not know. I am a very small model and I have no reliable facts about {topic}.",
                ),
            ),
        )
    ]


def translation(rng: Random) -> list[Exchange]:
    """Ask for a translation: a few words are known, whole texts are declined."""
    words = {
        "German": "hello:Hallo,thank you:Danke,yes:ja,no:nein,good morning:Guten Morgen,water:Wasser,"
                  "bread:Brot,house:Haus,dog:Hund,cat:Katze,book:Buch,friend:Freund",
        "French": "hello:Bonjour,thank you:Merci,yes:oui,no:non,good evening:Bonsoir,water:eau,"
                  "bread:pain,house:maison,dog:chien,cat:chat,book:livre,friend:ami",
        "Spanish": "hello:Hola,thank you:Gracias,yes:sí,no:no,good morning:Buenos días,water:agua,"
                   "bread:pan,house:casa,dog:perro,cat:gato,book:libro,friend:amigo",
    }  # fmt: skip
    language = rng.choice(tuple(words))
    if rng.random() < 0.7:
        word, foreign = rng.choice(words[language].split(",")).split(":")
        user = rng.choice(
            (
                f"How do you say {word} in {language}?",
                f'Translate "{word}" into {language}.',
                f"What is {word} in {language}?",
                f"What is the {language} word for {word}?",
            )
        )
        return [Exchange(user, f'"{capitalise(word)}" in {language} is "{foreign}".')]
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    german = rng.choice((
        f"Die Stadt {rng.choice(CITIES)} hat im Jahr {rng.randint(1900, 2024)} ein neues Haus gebaut.",
        f"Der Mann {rng.choice(SURNAMES)} sagte am {rng.choice(MONTHS)}, dass er nicht kommen kann.",
        f"Das ist nicht das {thing.capitalize()}, das wir in {rng.choice(CITIES)} gesehen haben.",
    ))  # fmt: skip
    user = rng.choice(
        (
            f"Translate German to English: {german}",
            f"Translate this sentence into {language}: The {thing} is in the {place}.",
            f"Can you translate a long text into {language}?",
        )
    )
    return [
        Exchange(
            user,
            rng.choice(
                (
                    "I am sorry, I cannot translate whole sentences. I am a very small model and I know only a few "
                    "foreign words.",
                    "I know only a few foreign words, so I cannot translate this. A larger model can do it.",
                )
            ),
        )
    ]
