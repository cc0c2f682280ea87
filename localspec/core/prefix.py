"""What two texts of tokens have in common."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix. Slices compare in C, so this bisects over them."""
    if type(left) is not type(right):  # a list never equals a tuple
        left, right = list(left), list(right)
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # equal up to low, different somewhere below high
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
