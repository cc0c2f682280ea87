"""`bench --remote` against our own server: several replies at the same time."""

from __future__ import annotations

import pytest

from localspec.bench import remote
from localspec.bench.cases import Prompt
from localspec.core.decoding import AUTO, OFF
from localspec.core.options import RemoteServer
from tests.api.doors import Doors

PROMPTS = [Prompt(f"p{number}", "qa", f"echo of question {number}") for number in range(4)]


@pytest.mark.slow
def test_our_server_drafts_and_does_not_and_writes_the_same(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LOOK_S", 0.0)
    server = RemoteServer(doors.url, key=doors.key)
    result = remote.run_remote([server], PROMPTS, [1, 4], 16, 0.7, lambda phrase: None, repeats=2)
    rows = result["rows"]
    assert [(row["server"], row["concurrency"]) for row in rows] == [
        ("speculative", 1), ("plain", 1), ("speculative", 4), ("plain", 4),
    ]  # fmt: skip
    for row in rows:
        assert (row["num_requests"], row["num_failed"]) == (8, 0), row["faults"]
        assert row["num_differing"] == 0
        assert row["of_one_at_a_time_low"] <= row["of_one_at_a_time_high"]
    assert [row["num_draft_tokens"] > 0 for row in rows] == [True, False, True, False]
    assert {request.drafter for request in doors.fake.requests} == {AUTO, OFF}
    assert ["speculation is" in advice for advice in result["advice"]] == [True, True]
