"""First replies of fresh starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from localspec.bench.cold_starts import (
    FirstReply,
    in_fresh_process,
    render_cold_starts,
    run_cold_starts,
)
from localspec.bench.settings import BenchSettings
from localspec.errors import ConfigError
from localspec.options import LoadOptions

SETTINGS = BenchSettings(temperatures=(0.7,), max_tokens=8)


def started(rates: dict[str, list[float | None]]) -> tuple[Any, list[tuple[str, Any]]]:
    """A start that answers at these rates, one start after another, and what it was asked."""
    asked = list[tuple[str, Any]]()

    def start(
        options: LoadOptions, drafter: str, prompts: Sequence[str], temperature: float, most: int
    ) -> list[FirstReply]:
        asked.append((drafter, options.home))
        rate = rates[drafter].pop(0)
        return [FirstReply(prompt, most, rate, 1.0, "why") for prompt in prompts]

    return start, asked


def test_starts_alternate_and_the_ratio_is_the_median_of_the_pairs(tmp_path: Path) -> None:
    start, asked = started({"auto": [90.0, 100.0, 120.0], "off": [100.0, 100.0, 100.0]})
    said = list[str]()
    result = run_cold_starts(LoadOptions(home=tmp_path), SETTINGS, 3, said.append, start)
    assert [arm for arm, _ in asked] == ["auto", "off", "off", "auto", "auto", "off"]
    assert {home for _, home in asked} == {None}, "nothing learnt earlier is taken up"
    short, usual = result["rows"]
    assert (short["prompt"], short["num_starts"], short["auto_ratio"]) == ("hi", 3, 1.0)
    assert usual["prompt"] != "hi" and usual["temperature"] == 0.7
    assert len(result["starts"]) == 6 and len(said) == 3
    assert "0.7  hi" in render_cold_starts(result)
    json.dumps(result, allow_nan=False)


def test_replies_without_a_rate_are_a_dash() -> None:
    start, _ = started({"auto": [None], "off": [100.0]})
    result = run_cold_starts(LoadOptions(), SETTINGS, 1, lambda _: None, start)
    assert result["rows"][0]["auto_ratio"] is None
    assert render_cold_starts(result).splitlines()[1].split()[-2:] == ["-", "-"]


def test_no_start_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="--cold-starts"):
        run_cold_starts(LoadOptions(), SETTINGS, 0, lambda _: None)


@pytest.mark.slow
@pytest.mark.model
def test_a_fresh_process_answers_with_the_shipped_pair() -> None:
    (reply,) = in_fresh_process(LoadOptions(context=512), "off", ["hi"], 0.0, 4)
    assert reply.prompt == "hi" and 0 < reply.num_tokens <= 4
    assert reply.tokens_per_second is not None and reply.tokens_per_second > 0.0
