"""Offer what was trained: a profile of the person's own that names the draft or the head.

Contract: the profile that describes the target is copied to HOME/profiles/models, where it comes
before the shipped one of its name, and extended; a target that no profile describes gets one of
its own. Two folders of one name are two targets. What was accepted of the models before is not
known of the new one, so its entry names no such file any more. The new file is read back by
config.load_profile before it replaces an old one, and the old one is kept beside it as .bak.
Deleting the file takes everything back.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.config import PROJECT_FOLDER, ModelEntry, Settings, load_profile, load_profiles
from localspec.errors import ModelError, StoreError
from localspec.files import replacing
from localspec.forward.fingerprint import fingerprint
from localspec.forward.heads.files import head_kind

MARK_LENGTH = 8  # of a fingerprint, behind a name that another target has
HEADER = (
    "# Written by `python -m localspec train`. It comes before the shipped profile of the same\n"
    "# name; delete it to go back to that one.\n"
)


@dataclass(frozen=True)
class Described:
    """A target as profiles know it. profile: the file's stem. file: None for a new one."""

    model_id: str
    profile: str
    file: Path | None


def slug(name: str) -> str:
    """A name that is fit for a folder everywhere."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def describe(settings: Settings, name: str, folder: Path) -> Described:
    """Where the target called `name`, loaded from `folder`, is described. Where another target has
    that name, a piece of this one's fingerprint stands behind it. Raises ModelError."""
    profiles = load_profiles(settings.profile_folders)
    entries = [(each.name, entry) for each in profiles.values() for entry in each.models.values()]
    found = [each for each in entries if _is_of(each[1], name, folder)]
    if not found and slug(name) not in {*profiles, *(slug(entry.id) for _, entry in entries)}:
        return Described(name, slug(name), None)
    if not found:
        name = f"{name}-{fingerprint(folder)[:MARK_LENGTH]}"
        found = [each for each in entries if each[1].id == name]  # a copy of this one
    if not found:
        return Described(name, slug(name), None)
    profile, entry = found[0]
    places = (each / f"{profile}.toml" for each in settings.profile_folders)
    return Described(entry.id, profile, next(place for place in places if place.is_file()))


def _is_of(entry: ModelEntry, name: str, folder: Path) -> bool:
    """Whether an entry is of the target: by its folder, and without one by its hub id."""
    return entry.id == name if entry.folder is None else entry.folder.resolve() == folder.resolve()


def register_head(settings: Settings, name: str, target: Path, head: Path) -> Path:
    """Name a head in the target's entry, in place of another of its kind; returns the profile."""
    described = describe(settings, name, target)
    table = _table(described, target)
    entry = table["models"][described.model_id]
    entry.pop("accepted", None)
    others = [one for one in entry.get("heads", []) if not _is_replaced(str(one), head)]
    entry["heads"] = [*others, str(head.resolve())]
    return _write(settings, described.profile, table)


def register_draft(
    settings: Settings, name: str, target: Path, draft: Path, license: str = "unknown"
) -> Path:
    """Make a draft the first of the target's; returns the profile."""
    described = describe(settings, name, target)
    table = _table(described, target)
    draft_id = f"{described.model_id}-{draft.name}"
    table["models"][draft_id] = {"license": license, "folder": str(draft.resolve()), "drafts": []}
    entry = table["models"][described.model_id]
    entry.pop("accepted", None)
    entry["drafts"] = [draft_id, *(one for one in entry["drafts"] if one != draft_id)]
    return _write(settings, described.profile, table)


def _table(described: Described, target: Path) -> dict[str, Any]:
    if described.file is not None:
        return tomllib.loads(described.file.read_text(encoding="utf-8"))
    entry = {"license": "unknown", "folder": str(target.resolve()), "drafts": []}
    return {
        "title": described.model_id,
        "default": described.model_id,
        "models": {described.model_id: entry},
    }


def _is_replaced(folder: str, head: Path) -> bool:
    """Whether a head that is named already is this one, of its kind, or gone."""
    path = PROJECT_FOLDER / Path(folder).expanduser()
    if path.resolve() == head.resolve():
        return True
    try:
        return head_kind(path) == head_kind(head)
    except ModelError:
        return True


def _write(settings: Settings, name: str, table: dict[str, Any]) -> Path:
    path = settings.home / "profiles" / "models" / f"{name}.toml"
    try:
        with replacing(path) as part:
            part.write_text(HEADER + toml(table), encoding="utf-8")
            load_profile(part)  # what the app could not read must not take an old one's place
            if path.is_file():
                shutil.copyfile(path, path.with_suffix(".toml.bak"))
    except OSError as error:
        raise StoreError(
            f"The profile {path} cannot be written ({error.strerror}). What was trained is kept; "
            "free some space and run the command again."
        ) from error
    return path


def toml(table: dict[str, Any]) -> str:
    """A profile's table as TOML: plain values, then one table a model."""
    lines = [f"{key} = {_value(value)}" for key, value in table.items() if key != "models"]
    for model_id, entry in table["models"].items():
        lines += ["", f"[models.{_value(model_id)}]"]
        lines += [f"{key} = {_value(value)}" for key, value in entry.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    # A basic string of TOML is a string of JSON, but for the one control that JSON leaves bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
