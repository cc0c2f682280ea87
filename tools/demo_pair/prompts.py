"""The prompts that the target answers for distillation and evaluation.

Contract: a mix of generated questions, first turns of corpus chats, reading tasks on long
passages, and foreign requests made of corpus sentences. Returns token ids ready to be answered;
knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from tools.demo_pair import dialogues
from tools.demo_pair.corpus import SHORT_SHARES, Row, make_passages, row_text
from tools.demo_pair.dialogues.passages import sentences
from tools.demo_pair.tokenizer import Message, encode_prompt

FOREIGN_FRAMES = (
    "Explain this: {text}", "Translate this to German: {text}",
    "What do you think about this? {text}",
    "Write an email about the following. {text}", "{text}", "Is this true? {text}",
    "Give three arguments for this. {text}", "Rewrite this in a friendly tone: {text}",
    "How would you solve this? {text}", "Write a blog post about this: {text}",
)  # fmt: skip


@dataclass(frozen=True)
class PromptPlan:
    """How many prompts to draw, the most tokens of one, the characters of passages.

    passage_share: share of reading tasks among the generated ones.
    """

    count: int
    max_length: int
    passage_chars: tuple[int, int]
    passage_share: float


def corpus_question(rng: Random, chats: Mapping[str, Sequence[Row]]) -> list[Message]:
    """Take the first turn of a corpus chat; sources come as often as in training."""
    source = rng.choices(list(chats), weights=[SHORT_SHARES[one] for one in chats])[0]
    return [next(m for m in rng.choice(chats[source])["messages"] if m["role"] == "user")]


def _is_asked(row: Row) -> bool:
    return any(message["role"] == "user" for message in row.get("messages", ()))


def foreign_request(rng: Random, texts: Sequence[str]) -> list[Message]:
    """Ask something the templates do not know, about one or two sentences of a text."""
    parts = sentences(rng.choice(texts))
    start = rng.randrange(len(parts))
    text = " ".join(parts[start : start + rng.choice((1, 1, 2, 3))])[:600]
    return [{"role": "user", "content": rng.choice(FOREIGN_FRAMES).format(text=text)}]


def chat_prompts(
    tokenizer: Tokenizer, rows: Mapping[str, Sequence[Row]], plan: PromptPlan, rng: Random
) -> Iterator[list[int]]:
    """Yield the prompts of a plan; 55 % are generated, the rest comes from the corpus."""
    passages = make_passages(rows, plan.passage_chars, 400, rng)
    chats = {
        source: chosen
        for source, one in rows.items()
        if source in SHORT_SHARES and (chosen := [row for row in one if _is_asked(row)])
    }
    texts = [
        row_text(row)
        for source, one in rows.items()
        if source in SHORT_SHARES
        for row in one
        if row.get("text", "").strip()
    ]
    for _ in range(plan.count):
        kind = rng.random()
        if kind < 0.55 or not chats or not texts:
            messages = dialogues.asked(rng, passages, plan.passage_share)
        elif kind < 0.8:
            messages = corpus_question(rng, chats)
        else:
            messages = foreign_request(rng, texts)
        prompt = encode_prompt(tokenizer, messages)
        if len(prompt) <= plan.max_length:
            yield prompt
