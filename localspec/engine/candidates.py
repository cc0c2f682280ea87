"""The target's likeliest next tokens after a text, to compare two that stood close together.

Contract: raw logits, before penalties, temperature and cuts; the target's cache is left as it is
after a turn. What the cache already holds of the text is used as it stands: after a plain replay
these are the very numbers that the replay chose by, but for the last token's own forward.

Not here: choosing a token (sampling), deciding what a difference means (chat.audit).
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from localspec.core import SamplingParams
from localspec.engine.engine import Engine
from localspec.errors import NumericsError


class Likely(NamedTuple):
    """One next token."""

    token: int
    logit: float
    probability: float


def best_next(engine: Engine, tokens: tuple[int, ...], count: int) -> tuple[Likely, ...]:
    """The `count` likeliest tokens after `tokens`, best first. Raises NumericsError."""
    sequence = engine.start(tokens, SamplingParams(), 1, frozenset())
    engine.prefill(sequence, threading.Event())
    cache = engine.target.cache
    logits = engine.target.forward([tokens[-1]])[0].float()  # [V]
    probs = logits.softmax(dim=-1)
    best = logits.topk(min(count, logits.shape[-1]))
    found = zip(
        best.indices.tolist(), best.values.tolist(), probs[best.indices].tolist(), strict=True
    )
    cache.reuse(list(tokens[:-1]))
    likely = tuple(Likely(token, logit, chance) for token, logit, chance in found)
    if any(one.logit != one.logit for one in likely):
        raise NumericsError(
            "The model returned values that are not numbers here, so its candidates cannot be "
            "compared. Load it with --dtype float32."
        )
    return likely
