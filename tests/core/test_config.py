"""Settings and flags: what is accepted, and how a mistake is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.core.config import load_options, nearest, settings_for
from localspec.core.errors import ConfigError


def test_the_database_lies_in_the_home(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    assert settings.database == tmp_path / "localspec.db"
    assert settings.profile_folders[0] == tmp_path / "profiles" / "models"
    assert settings_for().home.name == "localspec"


def test_something_is_always_nearest() -> None:
    assert nearest("zzz", ("alpha", "beta")) in ("alpha", "beta")
    assert nearest("alpah", ("alpha", "beta")) == "alpha"


@pytest.mark.parametrize(
    ("flag", "value"),
    [("draft", "DIR"), ("heads", ["DIR"]), ("device", "cpu"), ("dtype", "4-bit"), ("context", 9)],
)
def test_a_flag_without_effect_beside_a_server_is_refused(flag: str, value: object) -> None:
    server = {"remote": "http://127.0.0.1:1", "model": "its", "parallel": 2, "heads": None}
    assert load_options({**server, "home": Path("h")}).model == "its"
    with pytest.raises(ConfigError, match=f"--{flag} has no effect with --remote"):
        load_options({**server, flag: value})
    assert getattr(load_options({flag: value}), flag) in (value, ("DIR",))
