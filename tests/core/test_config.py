"""Settings and flags: what is accepted, and how a mistake is answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.core.config import nearest, settings_for, with_server
from localspec.core.errors import ConfigError
from localspec.core.options import LoadOptions, RemoteFlags


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
    [("draft", "DIR"), ("heads", ("DIR",)), ("device", "cpu"), ("dtype", "4-bit"), ("context", 9)],
)
def test_a_flag_without_effect_beside_a_server_is_refused(flag: str, value: Any) -> None:
    options, server = LoadOptions(model="its", parallel=2), RemoteFlags("http://127.0.0.1:1")
    assert with_server(replace(options, home=Path("h")), server).model == "its"
    changed = replace(options, **{flag: value})
    with pytest.raises(ConfigError, match=f"--{flag} has no effect with --remote"):
        with_server(changed, server)
    assert with_server(changed, RemoteFlags()) == changed
