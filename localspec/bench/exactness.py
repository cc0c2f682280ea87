"""Whether a greedy output is that of plain decoding, and if not, whether the tokens were tied.

Contract: outputs are compared with `off` token by token, end of text included. One forward of n
tokens and n forwards of one token round differently, so where the target's two best tokens are
tied to within rounding either may come first. Only the first difference is judged: after it the
texts are different texts. There the target's logits are computed again one token at a time along
the plain output; it is a near-tie when the arm's token lies within NEAR_TIE of the best.

The threshold is for fp32. In bf16 and fp16 the same rule counts more differences as real; their
gaps are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from localspec.engine.engine import Engine
from localspec.forward.model import prefill

NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Difference:
    """The first difference of an output from plain decoding. gap: how far the logit of the arm's
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


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which they differ; the end of the shorter one counts as one."""
    shared = min(len(plain), len(other))
    found = next((index for index in range(shared) if plain[index] != other[index]), shared)
    return None if found == len(plain) == len(other) else found


def judge(
    engine: Engine,
    prompt_id: str,
    arm: str,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
) -> Difference | None:
    """The first difference and its gap; None when there is none.

    plain, other: all decided tokens, end of text included. Uses the target's cache.
    """
    position = first_difference(plain, other)
    if position is None:
        return None
    logits = plain_logits(engine, prompt, plain[:position])  # [V]
    best, second = logits.topk(2).values.tolist()
    gap = best - float(logits[other[position]]) if position < len(other) else None
    return Difference(prompt_id, arm, position, gap, best - second)


def plain_logits(engine: Engine, prompt: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """The target's logits after `prompt` and `path`, as plain decoding computes them: [V] fp32."""
    tokens = [*prompt, *path]
    engine.target.cache.rollback(0)
    prefill(engine.target, tokens[: len(prompt) - 1])
    for token in tokens[len(prompt) - 1 : -1]:
        engine.target.forward([token], num_logits=1)
    logits = engine.target.forward(tokens[-1:], num_logits=1)[0]
    engine.target.cache.rollback(0)
    return logits
