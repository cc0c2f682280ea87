"""`python -m tests`: make the environment if needed, then run ruff, mypy and the test suite.

`--quick` leaves out the tests that start a browser, train, or start child processes. Any other
arguments go to pytest, which then runs with them alone. The exit code is 0 only if ruff, mypy and
pytest pass. pytest runs last, so its closing line is the last line printed.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "The tests need Python 3.11 or newer, but this is Python %d.%d. Install a newer one "
        "and run them with it, for example: python3.12 -m tests" % sys.version_info[:2]
    )

import subprocess
from pathlib import Path

from localspec.bootstrap import ensure_environment
from localspec.errors import LocalspecError

ROOT = Path(__file__).resolve().parent.parent
CHECKS = (("ruff", "check", "."), ("mypy",))
# tests/conftest.py gives each worker one thread. A file stays with one worker, so that what its
# tests share (a server, a browser, a trained head) is made once. Two cores serve three workers
# where nothing is timed; the page's speed is measured beside one other worker.
FILE_BY_FILE = ("--dist", "loadfile", "-n")
WHOLE = (*FILE_BY_FILE, "2")
QUICK = (*FILE_BY_FILE, "3", "-m", "not browser and not slow")


def main(arguments: list[str]) -> int:
    """Run everything; 0 only when all of it passes."""
    try:
        ensure_environment("requirements-dev.txt", ["-m", "tests", *arguments])
    except LocalspecError as error:
        sys.exit(str(error))
    failed = [check[0] for check in CHECKS if run(*check)]
    if failed:
        print(f"{' and '.join(failed)} failed: see above. The tests run all the same.", flush=True)
    return run("pytest", *pytest_arguments(arguments)) or int(bool(failed))


def pytest_arguments(arguments: list[str]) -> tuple[str, ...]:
    if "--quick" in arguments:
        return (*QUICK, *(word for word in arguments if word != "--quick"))
    return tuple(arguments) or WHOLE


def run(module: str, *arguments: str) -> int:
    """The exit code of a tool of this environment, its output shown."""
    print(f"{module} ...", flush=True)
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
