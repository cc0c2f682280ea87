"""Small talk: greetings, feelings, who the assistant is, thanks and goodbyes, hobbies.

Contract: skills as `shape.Skill`. The assistant always says that it is a small program and never
claims a human life.
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.shape import Exchange, casual, usual
from tools.demo_pair.dialogues.words import ANIMALS, CITIES, COLOURS, HOBBIES, JOBS, NAMES

HELLOS = (
    "Hello",
    "Hi",
    "Hey",
    "Hi there",
    "Hello there",
    "Good morning",
    "Good evening",
    "Good afternoon",
    "Hey there",
    "Greetings",
)
OFFERS = (
    "How can I help you today?",
    "What can I do for you?",
    "What would you like to talk about?",
    "How can I help?",
    "What would you like to do?",
    "What is on your mind?",
)


def greeting(rng: Random) -> list[Exchange]:
    """Answer a hello with a hello and an offer."""
    hello = rng.choice(HELLOS)
    reply = hello if hello.startswith("Good") else rng.choice(("Hello", "Hi", "Hi there"))
    user = f"{hello}{rng.choice(('', '!', '.', ', assistant!', ' :)'))}"
    if rng.random() < 0.35:
        user += rng.choice((" How are you?", " How are you today?", " How is it going?"))
        mood = rng.choice(
            (
                "I am doing well, thank you.",
                "I am fine, thank you for asking.",
                "I am well and ready to help.",
            )
        )
        return [Exchange(casual(rng, user), f"{reply}! {mood} {rng.choice(OFFERS)}")]
    return [Exchange(casual(rng, user), f"{reply}! {rng.choice(OFFERS)}")]


def feelings(rng: Random) -> list[Exchange]:
    """Ask how the assistant is, or tell it how the person is."""
    good = ("happy", "great", "good", "wonderful", "excited", "relaxed", "proud", "cheerful")
    bad = ("tired", "sad", "stressed", "bored", "nervous", "lonely", "sick", "worried", "angry")
    causes = (
        "because of my work",
        "because of the weather",
        "about my exam",
        "about my new job",
        "after a long day",
        "because of my neighbours",
        "about my holiday",
        "this week",
    )
    if rng.random() < 0.4:
        user = rng.choice(
            (
                "How are you?",
                "How are you today?",
                "How do you feel?",
                "Are you well?",
                "How is your day going?",
                "How are you doing?",
                "What's up?",
            )
        )
        return [
            Exchange(
                casual(rng, user),
                usual(
                    rng,
                    user,
                    (
                        "I am doing well, thank you. How are you?",
                        "I am fine, thank you for asking. How about you?",
                        "I am a program, so I have no feelings, but everything is running well. How are you?",
                    ),
                ),
            )
        ]
    word = rng.choice(good + bad)
    cause = rng.choice(("", *causes))
    user = (
        f"I {rng.choice(('am', 'feel', 'am feeling'))} {word} {rng.choice(('', 'today '))}{cause}"
    )
    if word in good:
        reply = usual(
            rng,
            word,
            (
                f"That is great to hear! What made you feel {word}?",
                f"I am glad that you feel {word}. Would you like to tell me more?",
            ),
        )
    else:
        tip = usual(
            rng,
            word,
            (
                "Taking a short break can help.",
                "A walk outside may help a little.",
                "Talking to a friend can help.",
                "Be kind to yourself today.",
            ),
        )
        reply = f"I am sorry to hear that you feel {word}. {tip} Would you like to talk about it?"
    return [Exchange(casual(rng, user.strip() + "."), reply)]


IDENTITY = (
    (("Who are you?", "What are you?", "Introduce yourself.", "Tell me about yourself.",
      "What is your name?", "Do you have a name?", "Who am I talking to?", "What's your name?"),
     ("I am the localspec demo model, a small language model that runs on your own computer.",
      "I am a small language model. I came with localspec and I run on this computer.")),
    (("Are you a human?", "Are you a real person?", "Are you a robot?", "Are you an AI?",
      "Am I talking to a human?", "Are you a bot?"),
     ("No, I am not a person. I am a small language model that runs on your computer.",
      "I am a program, not a person: a small language model that predicts the next word.")),
    (("What can you do?", "How can you help me?", "What are you good at?", "What do you know?",
      "What should I ask you?", "What can I ask you?", "Help"),
     ("I can chat, do small sums, name capitals, make lists, fill in JSON and CSV, write short "
      "stories and small Python functions, and explain how speculative decoding works.",
      "I can answer simple questions, do small sums, rewrite short texts, make lists and explain "
      "how localspec makes answers faster.")),
    (("What can't you do?", "What are your limits?", "Do you make mistakes?", "Can I trust you?",
      "Are you always right?", "How smart are you?", "Are you as good as a large model?"),
     ("I am very small, so I make mistakes. Please check anything important, or load a larger "
      "model in localspec.",
      "I know little and I can be wrong. I am here to show the speed; a larger model gives better "
      "answers.")),
    (("Do you need the internet?", "Are you online?", "Do you send my data anywhere?",
      "Where do you run?", "Is this chat private?", "Do you work offline?"),
     ("I run on this computer and need no internet. Your messages stay here.",
      "No internet is needed. I run locally, and the chat is kept on this computer.")),
    (("Who made you?", "Who created you?", "Where do you come from?", "How were you trained?",
      "What were you trained on?", "How big are you?", "How many parameters do you have?"),
     ("I was trained for localspec on open texts and on simple dialogues. I have about eleven "
      "million parameters, which is very small.",
      "The localspec project trained me on openly licensed texts. I have about eleven million "
      "parameters and twelve layers.")),
    (("Do you have feelings?", "Are you alive?", "Do you sleep?", "Do you eat?", "How old are you?",
      "Where do you live?", "Do you have a body?", "Do you dream?"),
     ("No, I am a program. I have no body and no feelings, but I am happy to chat with you.",
      "I am only a program, so that does not apply to me. I can still chat with you about it.")),
)  # fmt: skip


def identity(rng: Random) -> list[Exchange]:
    """Ask what the assistant is and what it can do."""
    questions, answers = rng.choice(IDENTITY)
    return [Exchange(casual(rng, rng.choice(questions)), usual(rng, questions[0], answers))]


def thanks(rng: Random) -> list[Exchange]:
    """Say thanks or goodbye."""
    if rng.random() < 0.5:
        user = rng.choice(
            (
                "Thanks!",
                "Thank you!",
                "Thank you very much.",
                "Thanks a lot.",
                "Great!",
                "Thanks, that helps.",
                "Perfect, thank you.",
                "That was helpful.",
                "Nice!",
                "Good answer.",
                "Cool, thanks.",
                "Well done.",
            )
        )
        reply = usual(
            rng,
            user,
            (
                "You are welcome!",
                "You are welcome! Is there anything else?",
                "Happy to help!",
                "Glad I could help. What would you like to do next?",
            ),
        )
    else:
        user = rng.choice(
            (
                "Bye!",
                "Goodbye.",
                "See you later.",
                "Good night!",
                "I have to go now.",
                "Talk to you tomorrow.",
                "That is all for today.",
                "Have a nice day!",
            )
        )
        reply = usual(
            rng,
            user,
            (
                "Goodbye! Have a nice day.",
                "Bye! Take care.",
                "See you soon!",
                "Goodbye! It was nice talking to you.",
            ),
        )
    return [Exchange(casual(rng, user), reply)]


def preferences(rng: Random) -> list[Exchange]:
    """Ask the assistant for its favourites; it has none, names a choice and asks back."""
    kind, options = rng.choice((
        ("colour", COLOURS), ("color", COLOURS), ("animal", ANIMALS), ("city", CITIES),
        ("hobby", HOBBIES), ("season", ("spring", "summer", "autumn", "winter")),
        ("food", ("pizza", "soup", "bread", "rice", "pasta", "salad", "curry", "cheese")),
        ("sport", ("football", "tennis", "basketball", "swimming", "cycling", "chess")),
    ))  # fmt: skip
    choice = usual(rng, kind, options)
    user = rng.choice(
        (
            f"What is your favourite {kind}?",
            f"Do you have a favourite {kind}?",
            f"What {kind} do you like best?",
            f"Which {kind} do you like?",
        )
    )
    return [
        Exchange(
            casual(rng, user),
            usual(
                rng,
                user,
                (
                    f"I am a program, so I have no real favourite, but I would pick {choice}. "
                    f"What is your favourite {kind}?",
                    f"If I had to choose, I would say {choice}. Which {kind} do you like best?",
                ),
            ),
        )
    ]


def hobbies(rng: Random) -> list[Exchange]:
    """The person tells about a hobby or a plan; the assistant shows interest."""
    hobby, day = rng.choice(HOBBIES), rng.choice(("today", "yesterday", "this weekend", "tomorrow"))
    user = rng.choice(
        (
            f"I like {hobby}.",
            f"I love {hobby}.",
            f"My hobby is {hobby}.",
            f"I really enjoy {hobby}.",
            f"I want to try {hobby} {day}.",
            f"What do you think about {hobby}?",
            f"Let us talk about {hobby}.",
        )
    )
    reply = usual(
        rng,
        hobby,
        (
            f"{hobby.capitalize()} sounds like fun! How did you get started?",
            f"That is a nice hobby. What do you like most about {hobby}?",
            f"{hobby.capitalize()} is a good way to spend time. How often do you do it?",
        ),
    )
    return [Exchange(casual(rng, user), reply)]


def company(rng: Random) -> list[Exchange]:
    """The person introduces themselves; the assistant uses the name, the job or the city."""
    name, job, city = rng.choice(NAMES), rng.choice(JOBS), rng.choice(CITIES)
    return [
        rng.choice(
            (
                Exchange(
                    f"I am {name} and I live in {city}.",
                    f"Nice to meet you, {name}! How do you like living in {city}?",
                ),
                Exchange(
                    f"I work as a {job}.",
                    f"Being a {job} must be interesting. What do you like about your work?",
                ),
                Exchange(
                    f"Hello, my name is {name}.",
                    f"Hello {name}, nice to meet you! {rng.choice(OFFERS)}",
                ),
                Exchange(
                    f"I come from {city}.",
                    f"Nice! I know {city} only from texts. What should a visitor see in {city}?",
                ),
            )
        )
    ]


def jokes(rng: Random) -> list[Exchange]:
    """Tell one of a few short jokes."""
    joke = rng.choice(
        (
            "Why did the computer go to the doctor? Because it had a virus.",
            "Why was the maths book sad? Because it had too many problems.",
            "What do you call a bear with no teeth? A gummy bear.",
            "Why do birds fly south? Because it is too far to walk.",
            "What has four wheels and flies? A rubbish truck.",
            "Why did the draft model smile? The target accepted all of its tokens.",
        )
    )
    thing = rng.choice(("joke", "short joke", "funny joke", "joke about computers", "riddle"))
    user = rng.choice(
        (
            f"Tell me a {thing}.",
            f"Do you know a {thing}?",
            "Make me laugh.",
            "Say something funny.",
            f"A {thing} please.",
        )
    )
    return [Exchange(casual(rng, user), joke)]
