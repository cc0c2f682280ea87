"""ruff and mypy find nothing; pyproject.toml says what they check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", [("ruff", "check", "."), ("mypy",)], ids=lambda words: words[0])
def test_a_checker_finds_nothing(root: Path, command: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", *command], cwd=root, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
