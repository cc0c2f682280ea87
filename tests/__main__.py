"""`python -m tests`: make the environment if needed, then ruff, mypy and the whole test suite.

Arguments go to pytest, which then runs once, with them alone. Without any, tests of the page that
failed run a second time, and that is said. The exit code is not 0 if any of the three fails;
pytest runs last, so that its closing line is the last one printed.
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

TESTS_FAILED = 1  # pytest's exit code for that, and for nothing else
ROOT = Path(__file__).resolve().parent.parent
CHECKS = (("ruff", "check", "."), ("mypy",))
# Most tests two at a time (tests/conftest.py gives each one thread); then, alone on the machine,
# those of the page, which hold it to times. One after another they would all take 20 minutes.
PAGE = tuple(sorted(f"tests/web/{file.name}" for file in (ROOT / "tests/web").glob("test_*.py")))
REST = ("-n", "2", *(f"--ignore={file}" for file in PAGE))


def main(arguments: list[str]) -> int:
    """Run everything; 0 only when all of it passes."""
    try:
        ensure_environment("requirements-dev.txt", ["-m", "tests", *arguments])
    except LocalspecError as error:
        sys.exit(str(error))
    failed = [check[0] for check in CHECKS if run(*check)]
    if failed:
        print(f"{' and '.join(failed)} failed: see above. The tests run all the same.", flush=True)
    codes = [run("pytest", *arguments)] if arguments else [run("pytest", *REST), run_page()]
    return max(codes) or int(bool(failed))


def run_page() -> int:
    """Once, and what fails once more: a browser, a server and an engine share the cores with
    whatever else the machine does. What then passes is named above as having failed, which is a
    fault of the page or of its test to be found; what is simply broken fails twice."""
    code = run("pytest", *PAGE)
    if code != TESTS_FAILED:
        return code
    print("The tests of the page named above failed; they alone run once more.", flush=True)
    return run("pytest", "--last-failed", "--last-failed-no-failures", "none", *PAGE)


def run(module: str, *arguments: str) -> int:
    """The exit code of a tool of this environment, its output shown."""
    print(f"{module} ...", flush=True)
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
