"""A command of `python -m localspec` inside the test's own process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass

from localspec.cli.flags import Command, call
from localspec.cli.main import COMMANDS
from localspec.cli.output import run
from localspec.core.errors import LocalspecError


@dataclass(frozen=True)
class Ended:
    """How a command ended. error: the error whose sentence is the last line of stderr."""

    exit_code: int
    stdout: str
    stderr: str
    error: LocalspecError | None = None

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()


def invoke(*words: str, commands: Mapping[str, Command] = COMMANDS) -> Ended:
    """Run the command that the words name to its end, as a process would. A fault of ours is
    raised."""
    errors = list[LocalspecError]()
    output, progress = io.StringIO(), io.StringIO()

    def work() -> None:
        try:
            call(commands, words, "python -m localspec")
        except LocalspecError as error:
            errors.append(error)
            raise

    code: int | str | None = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(progress):
        try:
            run(work)
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int), code
    return Ended(code, output.getvalue(), progress.getvalue(), *errors)
