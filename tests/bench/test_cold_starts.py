"""First replies of fresh starts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from localspec.bench.cold_starts import (
    first_replies,
    in_fresh_process,
    render_cold_starts,
    run_cold_starts,
)
from localspec.bench.kept import KeptFile
from localspec.bench.settings import BenchSettings
from localspec.chat.template import ChatTemplate
from localspec.core.errors import ConfigError
from localspec.core.options import LoadOptions
from localspec.drafters.ngram import NgramDrafter
from tests.chat.test_continuation import backend_of
from tests.chat.test_template import tiny_tokenizer
from tests.kit.tiny import tiny_llama, with_cache

SETTINGS = BenchSettings(temperatures=(0.7,), max_tokens=8)
MACHINE = {"target": "t", "dtype": "float32", "device": "cpu", "num_threads": 2}
NOWHERE = KeptFile(None, print)


def started(rates: dict[str, list[float | None]]) -> tuple[Any, list[tuple[str, Any]]]:
    """A start that answers at these rates, one start after another, and what it was asked; Ctrl-C
    when they end."""
    asked = list[tuple[str, Any]]()

    def start(
        options: LoadOptions, drafter: str, prompts: Sequence[str], temperature: float, most: int
    ) -> dict[str, Any]:
        if not rates[drafter]:
            raise KeyboardInterrupt
        asked.append((drafter, options.home))
        rate = rates[drafter].pop(0)
        reply = {"num_tokens": int(rate or 0) // 10, "tokens_per_second": rate}
        return {"machine": MACHINE, "replies": [{"prompt": each, **reply} for each in prompts]}

    return start, asked


def test_starts_alternate_and_the_ratio_is_the_median_of_the_pairs(tmp_path: Path) -> None:
    start, asked = started({"auto": [90.0, 100.0, 120.0], "off": [100.0, 100.0, 100.0]})
    said, options = list[str](), LoadOptions(home=tmp_path)
    result = run_cold_starts(options, SETTINGS, 3, said.append, NOWHERE, start)
    assert [arm for arm, _ in asked] == ["auto", "off", "off", "auto", "auto", "off"]
    assert {home for _, home in asked} == {None}, "nothing learnt earlier is taken up"
    short, usual = result["rows"]
    assert (short["prompt"], short["num_starts"], short["auto_ratio"]) == ("hi", 3, 1.0)
    assert (short["auto_ratio_low"], short["auto_ratio_high"]) == (0.9, 1.2)
    assert (short["off_tokens_per_second"], short["num_tokens"]) == (100.0, 10)
    assert usual["prompt"] != "hi" and usual["temperature"] == 0.7
    assert len(result["starts"]) == 6 and len(said) == 3 and result["ending"] is None
    told = render_cold_starts(result).splitlines()
    assert told[0] == "t, float32, on cpu, 2 threads, at most 8 tokens a reply"
    assert "new process with nothing learnt" in told[1] and told[-2].startswith("0.7  hi")
    json.dumps(result, allow_nan=False)


def test_replies_without_a_rate_are_a_dash() -> None:
    start, _ = started({"auto": [None], "off": [100.0]})
    result = run_cold_starts(LoadOptions(), SETTINGS, 1, print, NOWHERE, start)
    assert result["rows"][0]["auto_ratio"] is None
    assert render_cold_starts(result).splitlines()[-1].split()[-2:] == ["-", "-"]


def test_pairs_are_kept_as_they_come_and_shown_after_ctrl_c(tmp_path: Path) -> None:
    start, _ = started({"auto": [90.0], "off": [100.0]})
    out = tmp_path / "out.json"
    result = run_cold_starts(LoadOptions(), SETTINGS, 9, print, KeptFile(out, print), start)
    kept = json.loads(out.read_text())
    assert kept["rows"] == result["rows"] and kept["ending"] == "it is not finished."
    assert result["rows"][0]["num_starts"] == 1
    assert "Incomplete: stopped by hand" in render_cold_starts(result)
    nothing = run_cold_starts(LoadOptions(), SETTINGS, 1, print, NOWHERE, start)
    assert render_cold_starts(nothing).startswith("Incomplete")


def test_no_start_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="--cold-starts"):
        run_cold_starts(LoadOptions(), SETTINGS, 0, print, NOWHERE)


@pytest.mark.slow
def test_first_replies_are_those_of_a_backend_that_has_measured_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafters = {"ngram": NgramDrafter()}
    backend = backend_of(
        with_cache(tiny_llama(vocab_size=700), 1024), ChatTemplate(tiny_tokenizer()), drafters
    )
    monkeypatch.setattr("localspec.loading.local_backend.open_local_backend", lambda *_: backend)
    started = first_replies(LoadOptions(), "auto", ["hi", "and then?"], 0.0, 9)
    assert [reply["prompt"] for reply in started["replies"]] == ["hi", "and then?"]
    assert all(0 < reply["num_tokens"] <= 9 for reply in started["replies"])
    assert all(reply["tokens_per_second"] > 0.0 for reply in started["replies"])
    assert backend.describe().calibration is not None
    assert (started["machine"]["target"], started["machine"]["dtype"]) == ("tiny", "float32")


@pytest.mark.slow
def test_a_fresh_process_is_another_one() -> None:
    assert in_fresh_process(os.getpid) != os.getpid()
