"""The key of a home folder is kept for its owner alone, and another key is another door."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from localspec.web.guard.page_key import KEY_FILE, page_key

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")


def is_same_key(folder: Path, signed: str) -> bool:
    return page_key(folder).is_signed(signed, "p", 60.0)


@posix_only
def test_key_stays_with_its_folder_and_its_owner_alone_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    signed = page_key(folder).signed("p")
    assert is_same_key(folder, signed) and not is_same_key(tmp_path, signed)
    assert stat.S_IMODE((folder / KEY_FILE).stat().st_mode) == 0o600
    assert sorted(file.name for file in folder.iterdir()) == [KEY_FILE], "written in one step"
    (folder / KEY_FILE).unlink()
    assert not is_same_key(folder, signed), "this is how a person shuts every browser out"


@posix_only
@pytest.mark.parametrize(
    ("content", "mode"), [(None, 0o644), ("zz" * 32, 0o600), ("ab", 0o600), ("ä", 0o600)]
)
def test_key_that_others_could_read_or_that_is_damaged_is_replaced(
    tmp_path: Path, content: str | None, mode: int
) -> None:
    signed, file = page_key(tmp_path).signed("p"), tmp_path / KEY_FILE
    if content is not None:
        file.write_text(content, encoding="utf-8")
    file.chmod(mode)
    assert not is_same_key(tmp_path, signed)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert is_same_key(tmp_path, page_key(tmp_path).signed("p"))


def test_key_that_cannot_be_kept_is_of_this_launch(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", None):
        key = page_key(folder)
        signed = key.signed("p")
        assert key.is_signed(signed, "p", 60.0) and not page_key(folder).is_signed(signed, "p", 60)


@pytest.mark.parametrize("value", ["", ".", "1.a.b", "x.y", "٣.a.b", "\ud800", "9" * 5000])
def test_what_the_key_did_not_sign_is_refused(tmp_path: Path, value: str) -> None:
    key = page_key(tmp_path)
    assert not key.is_signed(value, "p", 1e12)
    signed = key.signed("p")
    assert not key.is_signed(signed, "q", 60.0) and not key.is_signed(signed, "p", -1.0)
    assert not key.is_signed(f"9{signed}", "p", 1e12), "its time is signed, too"
