"""What a draft model reads of a text that exceeds its cache: the first tokens and the latest.

The positions of what is read follow each other without a gap, as in StreamingLLM (arXiv
2309.17453). A draft is a guess, so no reply depends on what it did not read.
"""

from __future__ import annotations

from collections.abc import Sequence

# Tokens of a text that a draft model has room for. Of a longer text it reads the first tokens and
# the latest, at least 1,400. On texts of 3,900 tokens the demo's draft, which was trained on
# shorter texts, names the target's likeliest token in .55 of places with the latest 2,048, 1,024 or
# 512 tokens, and in .49 with all.
DRAFT_CONTEXT = 3072
# First tokens that are always read: attention leaves much of its weight there (arXiv 2309.17453).
NUM_SINKS = 4
# Tokens of the cache that stay free for a draft.
MOST_ROOM = 64
# Tokens of a cache below which a text that exceeds it is not drafted for: too little would be read.
LEAST_CAPACITY = 48


def draft_context(context_length: int, longest: int | None = None) -> int:
    """Return how many tokens a draft model has room for at the target's context. longest: that the
    draft model was made for, None where that is not known."""
    return min(context_length, DRAFT_CONTEXT, longest or DRAFT_CONTEXT)


def start_of(length: int, capacity: int) -> int:
    """Return from which token on a text of this length is read behind its first tokens; 0 where all
    of it is read.

    The start moves by half a cache at a time, so that few rounds read anything again."""
    excess = length + NUM_SINKS + room_for(capacity) - capacity
    if excess <= NUM_SINKS or capacity < LEAST_CAPACITY:
        return 0
    step = capacity // 2
    return -(-excess // step) * step


def read_part(tokens: Sequence[int], capacity: int) -> Sequence[int]:
    """Return the tokens that are read of a text: all of them while they fit."""
    start = start_of(len(tokens), capacity)
    return tokens if start == 0 else [*tokens[:NUM_SINKS], *tokens[start:]]


def num_read(length: int, capacity: int) -> int:
    """Return how many tokens are read of a text of this length."""
    start = start_of(length, capacity)
    return length if start == 0 else NUM_SINKS + length - start


def room_for(capacity: int) -> int:
    """Return how many tokens of a cache stay free for a draft."""
    return min(MOST_ROOM, capacity // 4)
