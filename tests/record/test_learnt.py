"""What was learnt is found again by whoever asks, and asking makes nothing."""

from __future__ import annotations

from pathlib import Path

from localspec.config import settings_for
from localspec.record.log_file import learnt_states
from localspec.record.store import STATE_KEY, Store


def test_what_was_kept_is_read_back(tmp_path: Path) -> None:
    store = Store.open(settings_for(tmp_path).database)
    store.save_state(STATE_KEY, {"a | b": {"version": 1}})
    store.close()
    assert learnt_states(tmp_path) == {"a | b": {"version": 1}}


def test_asking_a_home_without_a_log_makes_none(tmp_path: Path) -> None:
    assert learnt_states(tmp_path) == {} == learnt_states(None)
    assert list(tmp_path.iterdir()) == []
