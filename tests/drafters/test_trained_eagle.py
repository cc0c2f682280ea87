"""The EAGLE head of the demo models drafts in the app what its target says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.through_app import RunningApp, check_head, states_one_off, through_app

# How much more often the right inputs must be accepted, as a share of the drafted tokens.
MARGIN = 0.15
QUESTIONS = ("What is the capital of France?",)


@pytest.mark.slow  # loads the demo models
def test_the_demo_head_that_is_named_drafts_in_the_app(root: Path, tmp_path: Path) -> None:
    demo = root / "assets" / "demo"
    if not (demo / "heads" / "eagle").is_dir():
        pytest.skip("the demo models are not in this checkout")

    def use(running: RunningApp) -> None:
        check_head(running, "eagle", QUESTIONS, [states_one_off], MARGIN)

    flags = ["--model", str(demo / "target"), "--heads", str(demo / "heads" / "eagle")]
    through_app(tmp_path, [*flags, "--context", "256", "--dtype", "float32"], use)
