"""Lenient rules as values: their bounds, and the short form that flags and pages use."""

from __future__ import annotations

import json

import pytest

from localspec.core.decoding import SamplingParams
from localspec.core.errors import RequestError
from localspec.core.leniency import Factor, Threshold, Typical, as_data, label, parsed

RULES = {
    "threshold:0.75": Threshold(0.75),
    "threshold:0": Threshold(0.0),
    "typical:0.5,0.1": Typical(0.5, 0.1),
    "factor:1": Factor(1.0),
    " FACTOR:8 ": Factor(8),
}


@pytest.mark.parametrize("text", RULES)
def test_the_short_form_is_read_and_logged_as_plain_data(text: str) -> None:
    rule = parsed(text)
    assert rule == RULES[text]
    assert hash(SamplingParams(leniency=rule)) != hash(SamplingParams())
    data = json.loads(json.dumps(as_data(rule)))
    assert data.pop("rule") == text.strip().lower().partition(":")[0]
    assert type(rule)(**data) == rule


def test_names_alone_take_the_usual_numbers() -> None:
    assert parsed("typical") == Typical(0.3, 0.09)
    assert parsed("factor") == Factor(2.0)
    assert parsed("threshold:0.6") == Threshold(0.6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loose", "exact, or one of: threshold, typical, factor"),
        ("", "no lenient rule"),
        ("threshold", "Write threshold:THRESHOLD."),
        ("threshold:a", "Write threshold:THRESHOLD."),
        ("typical:1,1,1", "Write typical:EPSILON,DELTA"),
        ("factor:2,3", "Write factor:FACTOR"),
        ("factor:0.5", "factor is 0.5, but must"),
        ("factor:nan", "but it must lie"),
        ("threshold:1.5", "threshold is 1.5"),
        ("threshold:0.3,0.2", "Write threshold:THRESHOLD."),
        ("typical:2", "epsilon is 2.0"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_can(text: str, said: str) -> None:
    with pytest.raises(RequestError) as raised:
        parsed(text)
    assert said.replace("but must", "but it must lie") in str(raised.value)


def test_the_label_counts() -> None:
    assert label(3, 41) == "lenient: 3 of 41 tokens would have been refused"
    assert label(0, 1) == "lenient: 0 of 1 token would have been refused"
