"""Whether a reply is that of plain decoding, and if not, whether the two tokens were tied.

Contract: replies to one prompt, temperature and seed are compared with `off` token by token, end of
text included. Where one forward of n tokens and n forwards of one token round differently, either
of two tied tokens may come first. Only the first difference is judged: after it the texts are
different texts. There the target's scores (its logits, and the turn's noise above temperature 0)
are computed again one token at a time along the plain reply; it is a near-tie when the arm's token
lies within NEAR_TIE of the best.

The threshold is for fp32. In bf16 and fp16 the same rule counts more differences as real; their
gaps are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from localspec.bench.cases import Case
from localspec.chat.audit import first_difference
from localspec.engine.engine import Engine
from localspec.engine.sampling import scores
from localspec.forward.model import prefill

NEAR_TIE = 1e-4


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of a reply from plain decoding. gap: how far the score of the arm's
    token lies below the best, None when the arm merely stopped there. top_two_gap: how far that
    of the second best does."""

    prompt: str
    arm: str
    position: int
    gap: float | None
    top_two_gap: float

    @property
    def is_near_tie(self) -> bool:
        return self.gap is not None and self.gap < NEAR_TIE


def judge(
    engine: Engine,
    case: Case,
    temperature: float,
    arm: str,
    plain: Sequence[int],
    other: Sequence[int],
) -> FirstDifference | None:
    """The first difference and its gap; None when there is none.

    plain, other: all decided tokens, end of text included. Uses the target's cache.
    """
    position = first_difference(plain, other)
    if position is None:
        return None
    found = plain_scores(engine, case, temperature, plain[:position])  # [V]
    best, second = found.topk(2).values.tolist()
    gap = best - float(found[other[position]]) if position < len(other) else None
    return FirstDifference(case.id, arm, position, gap, best - second)


def plain_scores(
    engine: Engine, case: Case, temperature: float, path: Sequence[int]
) -> torch.Tensor:
    """The target's scores after the prompt and `path`, as plain decoding computes them: [V]."""
    turn = engine.start(case.prompt, case.sampling(temperature), len(path) + 1, frozenset())
    turn.append(list(path))
    root = len(case.prompt) - 1
    engine.target.cache.rollback(0)
    prefill(engine.target, turn.tokens[:root])
    for token in turn.tokens[root:-1]:
        engine.target.forward([token], num_logits=1)
    logits = engine.target.forward(turn.tokens[-1:], num_logits=1)  # [1, V]
    engine.target.cache.rollback(0)
    return scores(logits, turn, [()])[0]
