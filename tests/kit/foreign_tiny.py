"""A draft of another vocabulary for the tiny models: the target's words under other ids, some words
said twice as one token, and one word that it lacks.

Every token of the target is a space and a letter, so its text is a row of words and any row of
words is one sequence of tokens. The draft's weights are those of `agreeing_draft`, moved to its own
ids, so it often names the target's next word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from localspec.drafters.vocabularies import Foreign, Vocabulary
from tests.kit.tiny import agreeing_draft, tiny_llama, with_cache

FIRST_LETTER = 0x1200  # letters of three bytes
DOUBLED = (3, 5, 6)  # words that are one token of the draft when they stand twice


def word(index: int) -> str:
    return " " + chr(FIRST_LETTER + index)


class WordVocabulary(Vocabulary):
    """Words by id; the longest that fits is taken first. special: texts that stand for nothing."""

    def __init__(self, words: Mapping[str, int], special: Mapping[str, int] | None = None) -> None:
        self._words = dict(words)
        self.specials = dict(special or {})
        self.opening = list[int]()
        ids = [*self._words.values(), *self.specials.values()]
        self.token_bytes: list[bytes | None] = [None] * (1 + max(ids))
        for text, index in self._words.items():
            self.token_bytes[index] = text.encode()
        self._longest = max(map(len, self._words))

    def encode(self, text: str) -> list[int]:
        ids, place = list[int](), 0
        while place < len(text):
            sizes = range(min(self._longest, len(text) - place), 0, -1)
            size = next((n for n in sizes if text[place : place + n] in self._words), None)
            if size is not None:  # a word that it lacks is left out, as some tokenizers do
                ids.append(self._words[text[place : place + size]])
            place += size or 1
        return ids


def foreign_to(target: Any, capacity: int = 256) -> Foreign:
    """A foreign draft for a tiny llama. Its ids run the other way, after those of the doubles; the
    target's last word it lacks."""
    size = target.config.vocab_size
    own = {word(index) * 2: place for place, index in enumerate(DOUBLED)}
    own |= {word(index): len(own) + size - 2 - index for index in range(size - 1)}
    model = with_cache(_moved(agreeing_draft(target), own), capacity)
    targets = {word(index): index for index in range(size)}
    return Foreign(model, WordVocabulary(own), WordVocabulary(targets))


def _moved(draft: Any, own: Mapping[str, int]) -> Any:
    """The weights of a draft of the target's ids under its own; doubles are as they come."""
    size = draft.config.vocab_size
    moved = tiny_llama(1, num_layers=1, vocab_size=len(own))
    moved.model.layers[0].load_state_dict(draft.model.layers[0].state_dict())
    moved.model.norm.load_state_dict(draft.model.norm.state_dict())
    there = torch.tensor([own[word(index)] for index in range(size - 1)])
    with torch.no_grad():
        moved.lm_head.weight.mul_(0.2)  # a double is seldom what it means to say
        moved.model.embed_tokens.weight[there] = draft.model.embed_tokens.weight[:-1]
        moved.lm_head.weight[there] = draft.lm_head.weight[:-1]
    return moved
