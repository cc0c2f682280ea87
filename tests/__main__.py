"""`python -m tests`: make the environment if needed, then run all tests; ruff and mypy are two of
them.

`--quick` leaves out the tests that start a browser, train, start child processes, or take long.
`--endurance` runs those alone that count losses, with all of their cases (docs/endurance.md). Any
other arguments go to pytest, which then runs with them alone.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "The tests need Python 3.11 or newer, but this is Python %d.%d. Install a newer one "
        "and run them with it, for example: python3.12 -m tests" % sys.version_info[:2]
    )

import os
import subprocess
from pathlib import Path

from localspec.core.bootstrap import ensure_environment
from localspec.core.errors import LocalspecError

ROOT = Path(__file__).resolve().parent.parent
# tests/conftest.py gives each worker one thread, all tests with a browser to one worker, and every
# other file to one, so that what tests share (a server, a browser, a trained head) is made once.
# A page waits for half of its time, services and connections wait as well: three workers fill two
# cores.
WHOLE = ("--dist", "loadfile", "--no-loadscope-reorder", "-n", "3")
QUICK = (*WHOLE, "-m", "not browser and not slow")


def main(arguments: list[str]) -> int:
    """Run pytest; 0 only when every test passes."""
    try:
        ensure_environment("requirements-dev.txt", ["-m", "tests", *arguments])
    except LocalspecError as error:
        sys.exit(str(error))
    # Without kept bytecode each worker and each child process would compile all sources again.
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "pytest", *pytest_arguments(arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def pytest_arguments(arguments: list[str]) -> tuple[str, ...]:
    if "--quick" in arguments:
        return (*QUICK, *(word for word in arguments if word != "--quick"))
    return tuple(arguments) or WHOLE


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
