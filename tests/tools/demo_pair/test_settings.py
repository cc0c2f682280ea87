"""Settings of a pair that no training could follow are refused when they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localspec.errors import ConfigError
from tools.demo_pair.settings import PairSettings


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_minutes": float("nan")}, "Target minutes is nan"),
        ({"target_minutes": 0.0}, "Target minutes is 0"),
        ({"target_minutes": -1.0}, "Target minutes is -1"),
        ({"draft_minutes": float("inf")}, "Draft minutes is inf"),
        ({"target_layers": 0}, "Target layers is 0"),
        ({"hidden_size": 0}, "Hidden size is 0"),
        ({"hidden_size": 12}, "Choose a multiple of 8"),
        ({"device": "quantum"}, "'quantum' is not here"),
        ({"dtype": "float8"}, "not known here"),
    ],
)
def test_what_cannot_be_trained_is_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        PairSettings((), (), Path("out"), Path("work"), **changes)


def test_the_defaults_stand() -> None:
    assert PairSettings((), (), Path("out"), Path("work")).target_shape().num_layers == 12
