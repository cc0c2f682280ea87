"""Where the log keeps what the controller learnt, and how a command reads it.

Contract: one key for the page, the commands and the comparisons, so that each takes up what the
others measured. Reading makes no log where there is none.

Not here: the form of the state (engine.controller, chat.local).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localspec.config import settings_for
from localspec.record.store import Store

STATE_KEY = "controller"


def learnt_states(home: Path | None) -> dict[str, Any]:
    """The learnt states of a home by combination; none without a home or a log in it."""
    if home is None or not settings_for(home).database.is_file():
        return {}
    store = Store.open(settings_for(home).database)
    try:
        return store.load_state(STATE_KEY) or {}
    finally:
        store.close()
