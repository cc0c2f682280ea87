"""A result is offered unless it would not help; what is said names the folder and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.machine.trained import Artifact
from localspec.training.artifact import slug
from localspec.training.judging import Judgement, Rival
from localspec.training.offering import summary, why_not_offered
from localspec.training.run import TrainResult

OLD = Path("old")


def result(folder: Path, *rivals: Rival, acceptance: tuple[float, ...] = (0.3,)) -> TrainResult:
    judgement = Judgement(acceptance, 1.0)
    refusal = why_not_offered(judgement, None, rivals)
    note = Artifact("medusa", "t", "mark", acceptance, None, 1, 1, 0.1, refusal=refusal)
    return TrainResult(note, folder, judgement, rivals)


def test_names_become_folders_that_every_system_takes() -> None:
    assert slug("Qwen/Qwen3-8B") == "Qwen-Qwen3-8B"
    assert slug("..") == "model"


@pytest.mark.parametrize("acceptance", [(0.0, 0.0), (0.004, 1.0), ()])
def test_a_head_that_accepts_nothing_is_kept_and_not_offered(
    acceptance: tuple[float, ...], tmp_path: Path
) -> None:
    words = summary(result(tmp_path / "a head", acceptance=acceptance))
    assert "accepted 0 %" in words and f'with --heads "{tmp_path / "a head"}"' in words
    assert "from now on" not in words


def test_a_head_that_helps_is_offered(tmp_path: Path) -> None:
    words = summary(result(tmp_path / "m", Rival(OLD, Judgement((0.2,), 1.0))))
    assert "loaded with t from now on" in words and "gets 1.20 tokens a round" in words
    assert f"bench --heads {tmp_path / 'm'}" in words


@pytest.mark.parametrize(
    ("rival", "before", "reason"),
    [
        (Judgement((0.9,), 1.0), None, "gets 1.90 tokens a round on the same held-out rows"),
        (None, None, "could not be compared with it (no memory)"),
        (Judgement((0.1,), 1.0), (0.3,), "got no better than the draft it began with"),
    ],
)
def test_what_is_no_improvement_is_not_offered(
    rival: Judgement | None, before: tuple[float, ...] | None, reason: str
) -> None:
    rivals = (Rival(OLD, rival, "no memory."),)
    assert reason in why_not_offered(Judgement((0.3,), 1.0), before, rivals)
    assert why_not_offered(Judgement((0.95,), 1.0), before, rivals[1:]) == ""


def test_a_result_is_not_compared_with_itself(tmp_path: Path) -> None:
    """The training that is repeated meets its own result as what is in use."""
    words = summary(result(tmp_path / "m", Rival(tmp_path / "m", Judgement((0.3,), 1.0))))
    assert "same held-out rows" not in words and "from now on" in words
