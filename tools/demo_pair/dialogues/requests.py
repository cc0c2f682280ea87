"""Requests that are too large for a small model: essays, plans, comparisons, equations, foreign texts, hard code.

Contract: skills as `shape.Skill`. The answers are short, whole and honest: a frame that fits the kind of request, not
knowledge. They teach the model to stay on its feet where it knows nothing, instead of looping.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.shape import Exchange, capitalise, casual, usual
from tools.demo_pair.dialogues.words import (
    CITIES,
    HOBBIES,
    JOBS,
    PLACES,
    THINGS,
)

TOPICS = tuple(
    "climate change,quantum physics,the stock market,machine learning,ancient Rome,the French Revolution,healthy food,"
    "public transport,solar energy,electric cars,social media,remote work,space travel,black holes,the brain,evolution,"
    "inflation,democracy in ancient Greece,the history of music,modern art,renewable energy,online shopping,city life,"
    "school uniforms,artificial intelligence,video games,the water cycle,vaccines,the human heart,world trade,poverty,"
    "the internet,privacy,cloud computing,databases,cooking at home,pets,tourism,deep sea fish,dinosaurs,the moon landing,"
    "medieval castles,the Industrial Revolution,economics,psychology,philosophy,chemistry,genetics,statistics,probability,"
    "the supply chain,customer feedback,the quarterly report,a team meeting,a job interview,leadership,time management,"
    "stress,sleep,sports,rugby,the Olympic Games,the Lion King,a famous movie,a new novel,poetry,opera,jazz,photography".split(
        ","
    )
)
SYLLABLES = tuple(
    "ka ro mi ver ta lin do san bel gor na tri fe lu mar zen po ri quo shi hal dan ster wick ford".split()
)
EXTRAS = (
    "Keep it short and to the point.", "Use simple language.", "Include at least three examples.", "Be creative.",
    "Use about 200 words.", "Explain your reasoning step by step.", "Answer in one paragraph.", "Give your opinion.",
    "Use a friendly tone.", "Mention the advantages and the disadvantages.", "Start with a strong first sentence.",
    "Make it easy to read.", "Write it for children.", "Add a title.", "Do not use difficult words.",
)  # fmt: skip


def odd_name(rng: Random) -> str:
    """Make up a name that no one knows."""
    return "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3)))).capitalize()


def topic(rng: Random) -> str:
    """Draw a topic: a large one, a thing, or a name that does not exist."""
    return rng.choice(
        (
            rng.choice(TOPICS),
            rng.choice(TOPICS),
            rng.choice(HOBBIES),
            f"the {rng.choice(THINGS)}",
            odd_name(rng),
            f"the {odd_name(rng)} {rng.choice(('effect', 'war', 'river', 'method', 'company'))}",
            f"the {rng.choice(PLACES)} of {odd_name(rng)}",
            f"a trip to {rng.choice(CITIES)}",
        )
    )


def with_extras(rng: Random, task: str) -> str:
    """Add wishes to a task, as long prompts do."""
    return " ".join([task, *rng.sample(EXTRAS, rng.choice((0, 0, 1, 2, 3)))])


def essay(rng: Random) -> list[Exchange]:
    """Ask for a blog post, an essay, a review or a description."""
    about = topic(rng)
    kind = rng.choice(
        (
            "blog post",
            "essay",
            "short text",
            "speech",
            "review",
            "newspaper article",
            "paragraph",
            "product description",
            "travel blog post",
            "headline and a text",
        )
    )
    verb = rng.choice(("Write", "Compose", "Draft", "Create", "Please write", "Can you write"))
    user = with_extras(rng, f"{verb} a {kind} about {about}.")
    view = usual(
        rng,
        kind,
        (
            "Some people like it very much, others do not.",
            "It can be useful, and it can be difficult.",
            "There is a lot to see and to learn.",
        ),
    )
    end = usual(
        rng,
        kind,
        (
            "It is worth reading more about it.",
            "Everyone should think about it.",
            "I am a small model, so a larger one can say more.",
        ),
    )
    text = f"{capitalise(about)} is something that many people talk about. {view} {end}"
    lead = usual(rng, kind, ("", f"Here is a short {kind}:\n\n", f"Here is a short {kind}:\n\n"))
    return [Exchange(user, lead + text)]


def letter(rng: Random) -> list[Exchange]:
    """Ask for an e-mail about something large."""
    about = topic(rng)
    kind = rng.choice(
        ("professional email", "persuasive email", "formal letter", "polite message", "short email")
    )
    to = rng.choice(
        (
            "my supervisor",
            "a friend",
            "a customer",
            "my landlord",
            "my team",
            "a company",
            "my teacher",
        )
    )
    user = with_extras(
        rng, f"{rng.choice(('Write', 'Draft', 'Compose'))} a {kind} to {to} about {about}."
    )
    body = usual(
        rng,
        kind,
        (
            "I am writing to you about {t}. I would like to hear what you think. Please let me know when "
            "we can talk.",
            "I hope you are well. I would like to talk with you about {t}. Your answer "
            "would help me a lot.",
            "I have a question about {t}. Could you please tell me what you think?",
        ),
    )
    return [Exchange(user, f"Hello,\n\n{body.format(t=about)}\n\nKind regards")]


def explain(rng: Random) -> list[Exchange]:
    """Ask to explain, compare or judge something large."""
    about, other = topic(rng), topic(rng)
    user = with_extras(rng, rng.choice((
        f"Explain {about}.", f"How does {about} work?", f"What is {about}?", f"Why is {about} important?",
        f"Describe {about} in detail.", f"Compare {about} and {other}.", f"What causes {about}?",
        f"What is the difference between {about} and {other}?", f"How does {about} affect {other}?",
        f"What are the main ideas of {about}?", f"Who invented {about}?", f"When did {about} begin?",
        f"What happened in {about}?", f"Where was {about} first seen?", f"Who is the author of {about}?",
        f"Who won {about} in {rng.randint(1900, 2025)}?", f"What kind of people like {about}?",
    )))  # fmt: skip
    return [
        Exchange(
            casual(rng, user),
            usual(
                rng,
                user[:6],
                (
                    f"I know too little about {about}. I am a small model, so please ask a larger one.",
                    f"That is a large question for a small model. I am sorry, I cannot explain {about}.",
                    f"I am sorry, I do not know enough about {about} to answer that.",
                ),
            ),
        )
    ]


def plan(rng: Random) -> list[Exchange]:
    """Ask for ideas, a plan, arguments or advice."""
    about = topic(rng)
    user = with_extras(rng, rng.choice((
        f"Give me five ideas for {about}.", f"Make a plan for {about}.", f"Develop a plan to learn more about {about}.",
        f"How can I get better at {about}?", f"What should I do about {about}?", f"Give me tips for {about}.",
        f"Design a project about {about}.", f"Help me to prepare a talk about {about}.",
        f"Imagine you are {rng.choice(('a', 'an experienced'))} {rng.choice(JOBS)}. What is your advice on {about}?",
    )))  # fmt: skip
    steps = rng.sample((
        "Think about what you want.", "Make a list of what you need.", "Ask someone who knows more.",
        "Begin with a small step.", "Read a good book about it.", "Take your time.", "Write down what you learn.",
        "Look at what went well.", "Talk about it with your friends.", "Check how much it costs.",
    ), rng.randint(3, 5))  # fmt: skip
    lines = "\n".join(f"{place}. {step}" for place, step in enumerate(steps, 1))
    return [Exchange(user, rng.choice(("", "Here are some ideas:\n\n")) + lines)]


def pros(rng: Random) -> list[Exchange]:
    """Ask for advantages and disadvantages."""
    about = topic(rng)
    user = with_extras(
        rng,
        rng.choice(
            (
                f"What are the advantages and disadvantages of {about}?",
                f"List the pros and cons of {about}.",
                f"What speaks for and against {about}?",
                f"Argue for and against {about}.",
            )
        ),
    )
    good = rng.sample(
        ("It can save time.", "It can be fun.", "Many people like it.", "It is easy to begin."), 2
    )
    bad = rng.sample(
        ("It may cost money.", "It takes time.", "It is not for everyone.", "It can be difficult."),
        2,
    )
    return [
        Exchange(
            user, f"Advantages:\n- {good[0]}\n- {good[1]}\n\nDisadvantages:\n- {bad[0]}\n- {bad[1]}"
        )
    ]
