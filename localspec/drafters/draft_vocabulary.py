"""Which tokens drafts are made of: those of the replies that a person had before.

A large vocabulary is mostly tokens that one person's replies never hold, and their rows of the
output head are read at every draft step all the same. The likeliest tokens are counted over the
replies that stand in the log. They serve if those of the earlier replies cover the latest ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from math import ceil

from localspec.forward.output_head import TOGETHER

MOST_COUNTED = 40_000  # Tokens that are taken by their count; more add hardly any coverage.
LEAST_COVERAGE = 0.97  # Of the tokens of the latest replies.
HELD_OUT = 0.1  # Share of the replies, the latest, by which coverage is measured.
FEWEST_HELD_OUT = 1_000  # Tokens of these replies; fewer say little of a share near one.
SMALLEST = 32_768  # Tokens of a model; the output head of a smaller one takes little of a step.
LARGEST_SHARE = 0.5  # Of all tokens that may be in use; more would save too little.


@dataclass(frozen=True)
class Choice:
    """ids: of the tokens, ascending; () for all. reason: why all, as a clause."""

    ids: tuple[int, ...] = ()
    reason: str = ""


def chosen(
    replies: Sequence[Sequence[int]],
    always: Collection[int],
    vocab_size: int,
) -> Choice:
    """Return the tokens that drafts are made of.

    replies: token ids, the oldest first. always: ids that belong to every vocabulary, such as
    control tokens."""
    num_held_out = ceil(HELD_OUT * len(replies))
    earlier, latest = replies[: len(replies) - num_held_out], replies[len(replies) - num_held_out :]
    num_tokens = sum(map(len, latest))
    if num_tokens < FEWEST_HELD_OUT:
        return Choice(reason="the log holds too few replies to choose by")
    known = _likeliest(earlier, always, vocab_size)
    coverage = sum(token in known for token in chain.from_iterable(latest)) / num_tokens
    if coverage < LEAST_COVERAGE:
        return Choice(
            reason=f"those of earlier replies cover {_floored(coverage)} of the latest ones, and "
            f"{LEAST_COVERAGE:.0%} are needed"
        )
    ids = _whole_blocks(_likeliest(replies, always, vocab_size))
    if len(ids) > LARGEST_SHARE * vocab_size:
        return Choice(reason=f"replies are made of {len(ids):,} of {vocab_size:,}")
    return Choice(tuple(sorted(ids)))


def refusal_of_size(vocab_size: int) -> str:
    """Return why a model of so many tokens drafts from all of them; "" where it need not."""
    return f"{vocab_size:,} are few" if vocab_size < SMALLEST else ""


def _likeliest(
    replies: Iterable[Sequence[int]], always: Collection[int], vocab_size: int
) -> set[int]:
    """Return the tokens with the largest counts, and those that always belong to them."""
    counts = Counter(chain.from_iterable(replies))
    largest = [token for token, _ in counts.most_common(MOST_COUNTED)]
    return {token for token in chain(largest, always) if 0 <= token < vocab_size}


def _whole_blocks(ids: set[int]) -> set[int]:
    """Return the ids and as many of the lowest others as make whole blocks of a kernel."""
    missing = -len(ids) % TOGETHER
    return ids.union(islice((token for token in count() if token not in ids), missing))


def _floored(share: float) -> str:
    """Return a share in words that never reads as more than it is."""
    return f"{int(1000 * share) / 10:.1f} %"
