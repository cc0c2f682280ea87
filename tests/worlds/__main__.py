"""`python -m tests.worlds`: the controller in made-up worlds, beside the best fixed arm of each."""

from __future__ import annotations

import argparse
import json
import sys

from localspec.core.errors import ConfigError
from localspec.core.flags import listed
from tests.worlds.contest import render, run_contest


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.worlds", description=__doc__)
    parser.add_argument("--policies", default="auto", help="auto, off, a drafter, NAME@LENGTH")
    parser.add_argument("--seeds", type=int, default=1, help="play the worlds of so many seeds")
    parser.add_argument(
        "--worlds", nargs="*", default=(), help="only those with such parts in their names"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    flags = parser.parse_args(arguments)
    try:
        result = run_contest(
            listed(flags.policies),
            flags.seeds,
            flags.worlds,
            lambda phrase: print(phrase, file=sys.stderr, flush=True),
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print(render(result))
    if flags.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
