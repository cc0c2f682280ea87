"""`python -m tests.endurance.failing_serve`: `python -m localspec` whose n-gram drafter fails now
and then, in the engine's process."""

from __future__ import annotations

import itertools
from typing import Any

from localspec.cli.main import main
from localspec.core.backend import Backend
from localspec.loading import service as open_service

FAILS_EVERY = 150  # drafts
FAULT = "the n-gram drafter was told to fail"


def open_failing_backend(**keywords: Any) -> Backend:
    """What the engine's process opens."""
    from localspec.drafters.ngram import NgramDrafter
    from localspec.loading.local_backend import open_local_backend

    propose, drafts = NgramDrafter.propose, itertools.count(1)

    def failing(self: NgramDrafter, *arguments: Any) -> Any:
        if next(drafts) % FAILS_EVERY == 0:
            raise RuntimeError(FAULT)
        return propose(self, *arguments)

    NgramDrafter.propose = failing  # type: ignore[method-assign]
    return open_local_backend(**keywords)


if __name__ == "__main__":
    open_service.ENGINE = "tests.endurance.failing_serve:open_failing_backend"
    main()
