"""`python -m tests.worlds`: the controller in made-up worlds, beside the best fixed arm of each.

`--json` prints the result on the last line; kept in a file, `--against` compares a later version of
the controller with it, and exits with 1 where a world lost too much.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from localspec.core.errors import ConfigError
from localspec.core.flags import listed
from tests.worlds.contest import compared, render, render_comparison, run_contest


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.worlds", description=__doc__)
    parser.add_argument("--policies", default="auto", help="auto, off, a drafter, NAME@LENGTH")
    parser.add_argument("--seeds", type=int, default=1, help="play the worlds of so many seeds")
    parser.add_argument(
        "--worlds", nargs="*", default=(), help="only those with such parts in their names"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument(
        "--against", metavar="FILE", help="compare with the output of an earlier run with --json"
    )
    parser.add_argument(
        "--reviews",
        action="store_true",
        help="judge the drafters by each turn once it is over, as the app does in idle time",
    )
    flags = parser.parse_args(arguments)
    try:
        before = None if flags.against is None else read_result(flags.against)
        result = run_contest(
            listed(flags.policies),
            flags.seeds,
            flags.worlds,
            lambda phrase: print(phrase, file=sys.stderr, flush=True),
            flags.reviews,
        )
        comparison = [] if before is None else compared(before, result)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print(render(result) if before is None else render_comparison(comparison))
    if flags.json:
        print(json.dumps(result))
    return int(any(row["broken"] for row in comparison))


def read_result(path: str) -> dict[str, Any]:
    """Return the result on the last line of a file. Raises ConfigError."""
    try:
        result: dict[str, Any] = json.loads(Path(path).read_text().splitlines()[-1])
        result["num_seeds"], result["worlds"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no result ({type(error).__name__}: {error}). "
            "Keep the output of `python -m tests.worlds --json` in it."
        ) from error
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
