"""What two texts of tokens have in common."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix. Slices compare in C, so this bisects over them. A text
    that is a prefix of the other is not copied."""
    if type(left) is not type(right):  # a list never equals a tuple
        left, right = list(left), list(right)
    low, high = 0, min(len(left), len(right))
    whole = [text if len(text) == high else text[:high] for text in (left, right)]
    if whole[0] == whole[1]:
        return high
    while high - low > 1:  # equal up to low, different somewhere below high
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
