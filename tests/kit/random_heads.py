"""Random heads of every kind for a tiny target; each kind's own file says what they are."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.kit import random_block, random_eagle, random_medusa, random_mtp
from tests.kit.assistants import save_assistant
from tests.kit.tiny import with_cache

KINDS = {"medusa": random_medusa, "mtp": random_mtp, "eagle": random_eagle, "block": random_block}


@lru_cache
def head_for(kind: str, module: Callable[[], Any]) -> Path:
    """The folder of a head for targets with the weights of `module`; made once a run."""
    folder = Path(tempfile.mkdtemp(prefix=f"localspec-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if kind == "assistant":
        save_assistant(folder, module())
    else:
        KINDS[kind].write_random(folder, with_cache(module()))
    return folder
