"""Tasks about a passage from a corpus: summarise it, quote from it, name who is in it.

Contract: `about(rng, passage)` gives exchanges on a text of several sentences that the caller
supplies. Summaries are extractive (first sentences in a frame), which a small model can learn and
which never invents facts.
"""

from __future__ import annotations

import re
from collections import Counter
from random import Random

from tools.demo_pair.dialogues.texts import Exchange, pick

SENTENCE_END = re.compile(r"(?<=[.!?])[\"”]?\s+(?=[A-Z\"“])")


def sentences(passage: str) -> list[str]:
    """Split a passage into sentences, well enough for prose."""
    flat = " ".join(passage.split())
    return [part.strip() for part in SENTENCE_END.split(flat) if part.strip()]


def about(rng: Random, passage: str) -> list[Exchange]:
    parts = sentences(passage)
    if len(parts) < 3:
        return [Exchange(f"Repeat this text:\n\n{passage}", passage)]
    task = rng.random()
    if task < 0.45:
        return [summary(rng, passage, parts)]
    if task < 0.7:
        start = rng.randrange(len(parts) - 1)
        text = " ".join(parts[start : start + rng.choice((1, 2))])
        asked = rng.choice(("Repeat this text", "Copy this", "Say this again"))
        return [Exchange(f"{asked}: {text}", text)]
    if task < 0.8:
        asked, answer = "What is the first sentence of this text?", clipped(parts[0])
    elif task < 0.93:
        asked, answer = pick(rng, "not_told.asked"), ""
    elif task < 0.96:
        asked, answer = "What is the last sentence of this text?", clipped(parts[-1])
    else:
        names = frequent_names(parts)
        asked = pick(rng, "who.asked")
        told = f"The text names {' and '.join(names)}."
        answer = told if names else "The text does not name anyone."
    user = frame(rng, passage, asked)
    return [Exchange(user, answer or pick(rng, "not_told.reply"))]


def frame(rng: Random, passage: str, asked: str) -> str:
    return f"{asked}\n\n{passage}" if rng.random() < 0.6 else f"{passage}\n\n{asked}"


def summary(rng: Random, passage: str, parts: list[str]) -> Exchange:
    """Summarise by the names in the passage, or by its first words."""
    asked = pick(rng, "summary.ask") + rng.choice((".", ":", ""))
    begins = clipped(parts[0])
    names = frequent_names(parts)
    answer = f"In short: {begins}"
    if names and rng.random() < 0.6:
        answer = f"The text is about {' and '.join(names)}."
        if rng.random() < 0.5:
            answer += f" It begins like this: {begins}"
    return Exchange(frame(rng, passage, asked), answer)


def clipped(sentence: str, longest: int = 90) -> str:
    """Cut a long sentence after a clause or a word, and end it."""
    if len(sentence) <= longest:
        return sentence
    cut = sentence[:longest]
    place = max(cut.rfind(", "), cut.rfind("; "))
    return cut[: place if place > 30 else cut.rfind(" ")].rstrip(",;: ") + "."


def frequent_names(parts: list[str]) -> list[str]:
    """Return the two capitalised words that come most often inside sentences."""
    inner = [word for part in parts for word in re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}", part)]
    return [word for word, _ in Counter(inner).most_common(2)]
