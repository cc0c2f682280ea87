"""What may be asked of sampling, and what is refused in a sentence."""

from __future__ import annotations

import math

import pytest

from localspec.core.decoding import SamplingParams
from localspec.core.errors import RequestError


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 9.0}, "between 0 and 5"),
        ({"temperature": 1e-320}, "too small to divide by. Use 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"seed": 2**63}, r"smaller than 2\^63"),
        ({"seed": -(2**70)}, r"smaller than 2\^63"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_the_ends_of_the_ranges_are_allowed() -> None:
    assert SamplingParams(0.0).seed is None
    assert SamplingParams(1e-40, seed=2**63 - 1).seed == 2**63 - 1
