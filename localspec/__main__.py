"""`python -m localspec COMMAND`: make the environment if this Python lacks it, then run.

Contract: only the standard library until the packages are there, like app.py. An environment of
your own that has them is used unchanged.
"""

from localspec.core.interrupts import INTERRUPTED, end_at_once, raise_again

if __name__ == "__main__":
    end_at_once()

import sys
from importlib.util import find_spec

from localspec.core.bootstrap import ensure_environment, prefer_large_pages
from localspec.core.errors import LocalspecError


def prepare(command: list[str]) -> None:
    """Return with the packages present; otherwise set up and run `command` (arguments of Python) in
    the environment, or exit saying why."""
    if find_spec("sqlite_utils") is not None:  # few environments but ours have it
        return
    try:
        raise_again()  # pip, or the process in the environment, ends first
        ensure_environment("requirements.txt", command)
    except LocalspecError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    prepare(["-m", "localspec", *sys.argv[1:]])
    prefer_large_pages()
    from localspec.cli.main import main

    main()
