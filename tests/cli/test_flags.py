"""How the words of a command line are read, and how a command ends, also where its output has no
place to go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest

from localspec.core.errors import ConfigError
from localspec.core.flags import Flag, only, require_threads
from tests.kit.command_line import Ended, invoke

FULL = Path("/dev/full")
PRINT = "from localspec.cli.output import finish; finish({'a': 1}, 'the text', True)"
RUN = "from localspec.cli.output import finish, run; run(lambda: finish({'a': 1}, 'text', True))"


@dataclass(frozen=True)
class Sizes:
    """All fields but `unseen` are flags."""

    width: Annotated[int | None, Flag(least=1, most=9)] = None
    height: Annotated[float, Flag("Half of it: 50%.")] = 2.5
    unseen: str = "as it was"


given = list[dict[str, Any]]()


def paint(
    sizes: Annotated[Sizes, only("width")],
    text: Annotated[str | None, Flag("The words.", is_positional=True)] = None,
    stop: Annotated[tuple[str, ...], Flag("Repeatable.")] = (),
    folder: Annotated[Path | None, Flag()] = None,
    form: Annotated[str, Flag(choices=("round", "square"), name="format")] = "round",
    is_bold: Annotated[bool, Flag(name="bold")] = False,
    old: Annotated[str | None, Flag(gone="--old was removed. Use --format.")] = None,
) -> None:
    """Paint words."""
    given.append(locals())


def ruler(sizes: Sizes, needed: Annotated[int, Flag()]) -> None:
    """Print a ruler."""


TOOL = {"": paint}
GROUPS = {"paint": paint, "line ruler": ruler, "line pen": "`line pen` was removed. Use paint."}
USUAL = {"sizes": Sizes(), "text": None, "stop": (), "folder": None, "form": "round",
         "is_bold": False, "old": None}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ((), {}),
        (("--width", "9", "hi"), {"sizes": Sizes(width=9), "text": "hi"}),
        (("hi there", "--bold", "--format=square"),
         {"text": "hi there", "is_bold": True, "form": "square"}),
        (("--stop", "---", "--stop", "-1e-3"), {"stop": ("---", "-1e-3")}),
        (("--stop=--bold",), {"stop": ("--bold",)}),
        (("--folder", "a b"), {"folder": Path("a b")}),
        (("--", "--bold"), {"text": "--bold"}),
    ],
)  # fmt: skip
def test_words_become_the_values_of_parameters(
    words: tuple[str, ...], changes: dict[str, Any]
) -> None:
    given.clear()
    assert invoke(*words, commands=TOOL) == Ended(0, "", "")
    assert given == [USUAL | changes]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--widht", "1"), "There is no flag --widht. Did you mean '--width'?"),
        (("--height", "1"), "There is no flag --height."),
        (("--unseen", "1"), "There is no flag --unseen."),
        (("--wid", "1"), "There is no flag --wid."),
        (("--width", "0"), "--width: 0 is not between 1 and 9."),
        (("--width", "-3"), "--width: -3 is not between 1 and 9."),
        (("--width", "2.5"), "--width: '2.5' is no whole number."),
        (("--width", "--bold"), "--width: expected one argument."),
        (("--format", "oval"), "--format: invalid choice: 'oval'"),
        (("two", "words"), "'words' is one word too many. Put a text between quotation marks."),
    ],
)
def test_a_mistake_is_one_sentence_with_the_way_to_the_help(
    words: tuple[str, ...], sentence: str
) -> None:
    ended = invoke(*words, commands=TOOL)
    assert (ended.exit_code, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1)
    assert ended.stderr.startswith(sentence), ended.stderr
    assert ended.stderr.endswith("For help: python -m localspec --help\n")


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("--old", "x"), 1, "--old was removed. Use --format."),
        (("line", "pen", "--any", "thing"), 1, "`line pen` was removed. Use paint."),
        (("pain",), 2, "There is no command 'pain'. Did you mean 'paint'?"),
        (("line", "rulers"), 2, "There is no command 'line rulers'. Did you mean 'line ruler'?"),
        (("line", "ruler"), 2, "The following arguments are required: --needed."),
    ],
)
def test_what_is_gone_or_unknown_names_what_to_use(
    words: tuple[str, ...], code: int, sentence: str
) -> None:
    ended = invoke(*words, commands=TOOL if words[0] == "--old" else GROUPS)
    assert ended.exit_code == code and ended.stderr.startswith(sentence), ended


def test_help_lists_commands_and_flags_with_their_defaults() -> None:
    listed = invoke(commands=GROUPS)
    assert listed == replace(invoke("--help", commands=GROUPS), exit_code=2)
    assert listed.lines[2:] == ["  paint       Paint words.", "  line ruler  Print a ruler."]
    assert invoke("line", "--help", commands=GROUPS).lines[2:] == ["  line ruler  Print a ruler."]
    shown = invoke("line", "ruler", "--help", commands=GROUPS).stdout
    assert "Print a ruler." in shown and "Half of it: 50%. Default: 2.5." in shown
    assert "--old" not in invoke("paint", "--help", commands=GROUPS).stdout


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other pipes")
def test_a_reader_that_has_read_enough_ends_the_command_without_a_word(root: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        command = [sys.executable, "-c", RUN]
        ended = subprocess.run(command, cwd=root, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")


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
        "from localspec.cli.output import *; run(lambda: finish({'a': 'γ\udcff'}, 'γ\udcff', True))"
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
