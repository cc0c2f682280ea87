"""How a command ends, also where its output has no place to go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.core.errors import ConfigError
from localspec.core.flag_values import require_threads

FULL = Path("/dev/full")
PRINT = "from localspec.cli.flags import finish; finish({'a': 1}, 'the text', True)"


def test_text_and_result_are_lines_of_their_own(root: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", PRINT], cwd=root, capture_output=True, text=True)
    assert ended.stdout == 'the text\n{"a": 1}\n'


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_an_output_that_lacks_characters_gets_question_marks_and_the_whole_result(
    root: Path, encoding: str
) -> None:
    """As a Windows pipe, or a name of a file that is no UTF-8."""
    told = (
        "from localspec.cli.flags import *; "
        "run_app(lambda: finish({'a': 'γ\udcff'}, 'γ\udcff', True))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", told.encode("unicode_escape").decode()],
        cwd=root,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    shown, result = ended.stdout.splitlines()
    assert shown.endswith(b"?") and json.loads(result) == {"a": "γ\udcff"}, ended.stderr


@pytest.mark.skipif(not FULL.exists(), reason="this system has no full device")
def test_a_full_disk_is_one_sentence(root: Path) -> None:
    caught = f"""
from localspec.core.errors import StoreError
try:
    {PRINT}
except StoreError as error:
    import sys; sys.exit(str(error))
"""
    with FULL.open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", caught], cwd=root, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith("The output cannot be written: No space left"), ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("count", [0, -1, 100_000_000])
def test_threads_that_cannot_be_started_are_refused_by_their_flag(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--threads is {count}, but must lie between 1 and"):
        require_threads("--threads", count)
    assert require_threads("--threads", 1) == 1
