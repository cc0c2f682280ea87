"""Generates assistant dialogues from templates, for a model too small to learn them from raw text.

Contract: `generate(rng, passages)` returns one `Dialogue`; the same seeded `Random` gives the same
dialogues. Skills live in their own files, one topic each, and enter the mix by one line in
`SKILLS`. No model, no tokens, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from tools.demo_pair.dialogues import (
    facts,
    forms,
    numbers,
    passages,
    requests,
    rewrite,
    stories,
    talk,
)
from tools.demo_pair.dialogues.texts import SECTIONS, Exchange, Skill

SKILLS: tuple[tuple[Skill, float], ...] = (
    (talk.greeting, 3), (talk.feelings, 2), (talk.identity, 4), (talk.preferences, 2), (talk.hobbies, 2),
    (talk.company, 2), (talk.jokes, 1), (talk.thanks, 1),
    (facts.explain, 6), (facts.questions, 3), (facts.compare, 2), (facts.rate, 1.5),
    (numbers.sums, 24), (numbers.word_problem, 8), (numbers.counting, 2), (numbers.comparing, 2),
    (facts.capitals, 11), (facts.opposites, 1.5), (facts.definitions, 3), (facts.small_facts, 3),
    (facts.order, 2), (facts.unknown, 6), (facts.translation, 3),
    (facts.some, 6), (facts.whole, 2), (facts.steps, 4),
    (forms.json_object, 7), (forms.json_list, 2), (forms.table, 3), (forms.read_field, 4),
    (forms.function, 7), (forms.snippet, 2),
    (rewrite.repeat, 5), (rewrite.repeat_words, 7), (rewrite.change_case, 4), (rewrite.bullets, 2), (rewrite.fix, 5), (rewrite.shorten, 2),
    (rewrite.replace, 3), (rewrite.sort_words, 2), (rewrite.find_word, 6), (rewrite.message, 4),
    (stories.story, 5), (stories.poem, 2),
    (requests.essay, 4), (requests.letter, 3), (requests.explain, 7), (requests.plan, 4), (requests.pros, 2),
    (requests.equation, 3), (requests.foreign_text, 4), (requests.hard_code, 3),
    (talk.recall, 9), (talk.previous, 2),
)  # fmt: skip
_TOTALS = tuple(accumulate(weight for _, weight in SKILLS))


@dataclass(frozen=True)
class Dialogue:
    """A whole chat: an optional system message and the exchanges in order."""

    system: str | None
    exchanges: tuple[Exchange, ...]

    def messages(self) -> list[dict[str, str]]:
        """Return the chat as role and content, the form that chat templates take."""
        rows = [] if self.system is None else [{"role": "system", "content": self.system}]
        for exchange in self.exchanges:
            rows.append({"role": "user", "content": exchange.user})
            rows.append({"role": "assistant", "content": exchange.assistant})
        return rows


def generate(rng: Random, texts: Sequence[str] = (), passage_share: float = 0.0) -> Dialogue:
    """Draw one dialogue. texts: passages for reading tasks. passage_share: share of such dialogues."""
    system = rng.choice(SECTIONS["systems"]) if rng.random() < 0.2 else None
    if texts and rng.random() < passage_share:
        return Dialogue(system, tuple(passages.about(rng, rng.choice(texts))))
    if rng.random() < 0.03:
        system, opening = talk.system_rules(rng)
        return Dialogue(system, (*opening, *topics(rng, rng.choice((0, 0, 1)))))
    exchanges: list[Exchange] = []
    if rng.random() < 0.1:
        exchanges += talk.greeting(rng)
    exchanges += topics(rng, rng.choice((1, 1, 1, 1, 2, 2, 3)))
    if rng.random() < 0.1:
        exchanges += talk.thanks(rng)
    return Dialogue(system, tuple(exchanges))


def asked(
    rng: Random, texts: Sequence[str] = (), passage_share: float = 0.0
) -> list[dict[str, str]]:
    """The messages of one dialogue up to one of its questions."""
    messages = generate(rng, texts, passage_share).messages()
    questions = [place for place, message in enumerate(messages) if message["role"] == "user"]
    return messages[: rng.choice(questions) + 1]


def topics(rng: Random, count: int) -> list[Exchange]:
    skills = rng.choices([skill for skill, _ in SKILLS], cum_weights=_TOTALS, k=count)
    return [exchange for skill in skills for exchange in skill(rng)]
