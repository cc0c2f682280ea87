"""Offers what was trained: a profile of the person's own that names the draft or the head.

Contract: a result goes into the target's profile unless it accepts nothing, or something that
drafts there already is better on the same held-out rows or could not be measured. Otherwise it is
kept where it lies, and the sentence says why and how to load it all the same. The profile that
describes the target is copied to HOME/profiles/models, where it comes before the shipped one of
its name, and extended; a target without a profile gets one. Two folders of one name are two
targets. Measured acceptance of the drafters before does not hold for the new one, so the entry no
longer names that file. The new profile is read back by config.load_profile before it replaces an
old one, which is kept beside it as .bak. Deleting the file undoes everything.

Not here: measuring (judging).
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.core.config import PROJECT_FOLDER, ModelEntry, Settings, load_profile, load_profiles
from localspec.core.errors import LocalspecError, ModelError, StoreError
from localspec.core.files import replacing
from localspec.forward.fingerprint import fingerprint
from localspec.forward.heads.files import head_kind
from localspec.training.judging import Judgement, Rival
from localspec.training.run import TrainResult

MIN_ACCEPTANCE = 0.005  # of the first draft token; below it the figure reads 0 %
MARK_LENGTH = 8  # hex digits of the fingerprint behind a name that another target has
HEADER = (
    "# Written by `python -m localspec train`. It comes before the shipped profile of the same\n"
    "# name; delete it to go back to that one.\n"
)


def register(
    settings: Settings, name: str, target: Path, result: TrainResult
) -> tuple[str | None, str | None]:
    """The profile that offers the result, or the reason why none does."""
    artifact, better = result.artifact, _better_rival(result)
    if (artifact.acceptance or (0.0,))[0] < MIN_ACCEPTANCE:
        return None, (
            "It is kept and not offered: the target accepted 0 % of its draft tokens on held-out "
            "answers, so drafting with it would only cost time. Run the same command with more "
            f"--minutes or more prompts, or load it all the same with {_flag(result)}."
        )
    tokens = result.judgement.expected_tokens
    if better is not None:
        return None, (
            f"It is kept and not offered: {_compared(better)}, this one {tokens:.2f}. So that one "
            f"stays in use; load this one all the same with {_flag(result)}."
        )
    if artifact.before is not None and tokens <= _tokens(artifact.before):
        return None, "It got no better than the draft it began with, so that one stays in use."
    try:
        return str(offer(settings, name, target, artifact.kind, result.folder)), None
    except LocalspecError as error:
        return None, f"It is not offered by a profile yet: {error}"


def summary(result: TrainResult, profile: str | None, notice: str | None) -> str:
    artifact, better = result.artifact, _better_rival(result)
    rates = ", ".join(f"{rate:.0%}" for rate in artifact.acceptance)
    tokens = result.judgement.expected_tokens
    lines = [
        f"The {artifact.kind}{' head' * (artifact.kind != 'draft')} is in {result.folder}.",
        f"Held out, accepted by position: {rates}; {tokens:.2f} tokens a round.",
    ]
    if artifact.before is not None:
        lines.append(f"Before this training: {_tokens(artifact.before):.2f} tokens a round.")
    lines += [f"{_compared(rival)}." for rival in result.rivals if rival is not better]
    if profile is not None:
        lines.append(
            f"The profile {Path(profile).stem} offers it from now on ({profile}). "
            "`python -m localspec train report` says what it gains here."
        )
    return "\n".join([*lines, *([] if notice is None else [notice])])


def _tokens(acceptance: tuple[float, ...]) -> float:
    return Judgement(acceptance, 0.0).expected_tokens


def _flag(result: TrainResult) -> str:
    """As it can be pasted into the shells of all systems."""
    flag, folder = "--draft" if result.artifact.kind == "draft" else "--heads", str(result.folder)
    return f'{flag} "{folder}"' if " " in folder else f"{flag} {folder}"


def _better_rival(result: TrainResult) -> Rival | None:
    """The best of the rivals that stay before the result; unmeasured ones come last."""

    def tokens(rival: Rival) -> float:
        return 0.0 if rival.judgement is None else rival.judgement.expected_tokens

    found = [rival for rival in result.rivals if rival.stays_before(result.judgement)]
    return max(found, key=tokens, default=None)


def _compared(rival: Rival) -> str:
    if rival.judgement is None:
        return f"{rival.folder} could not be compared with it ({rival.reason.rstrip('.')})"
    tokens = rival.judgement.expected_tokens
    return f"{rival.folder} gets {tokens:.2f} tokens a round on the same held-out rows"


@dataclass(frozen=True)
class Described:
    """A target as profiles know it. profile: the file's stem. file: None for a new one."""

    model_id: str
    profile: str
    file: Path | None


def slug(name: str) -> str:
    """A name that is fit for a folder on every system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def describe(settings: Settings, name: str, folder: Path) -> Described:
    """The profile of the target called `name`, loaded from `folder`. Where another target has that
    name, part of this one's fingerprint is appended. Raises ModelError."""
    profiles = load_profiles(settings.profile_folders)
    entries = [(each.name, entry) for each in profiles.values() for entry in each.models.values()]
    found = [each for each in entries if _is_of(each[1], name, folder)]
    if not found and slug(name) in {*profiles, *(slug(entry.id) for _, entry in entries)}:
        name = f"{name}-{fingerprint(folder)[:MARK_LENGTH]}"
        found = [each for each in entries if each[1].id == name]  # a copy of this one
    if not found:
        return Described(name, slug(name), None)
    profile, entry = found[0]
    places = (each / f"{profile}.toml" for each in settings.profile_folders)
    return Described(entry.id, profile, next(place for place in places if place.is_file()))


def _is_of(entry: ModelEntry, name: str, folder: Path) -> bool:
    """Whether an entry is the target's: by its folder, or by its hub id where it has none."""
    return entry.id == name if entry.folder is None else entry.folder.resolve() == folder.resolve()


def offer(settings: Settings, name: str, target: Path, kind: str, folder: Path) -> Path:
    """Name a result in the target's entry and return the profile. A draft becomes the first one; a
    head takes the place of another of its kind."""
    described = describe(settings, name, target)
    table = _table(described, target)
    entry = table["models"][described.model_id]
    entry.pop("accepted", None)
    if kind == "draft":
        draft_id = f"{described.model_id}-{folder.name}"
        own = {"license": "unknown", "folder": str(folder.resolve()), "drafts": []}
        table["models"][draft_id] = own
        entry["drafts"] = [draft_id, *(one for one in entry["drafts"] if one != draft_id)]
    else:
        others = [one for one in entry.get("heads", []) if not _is_replaced(str(one), folder)]
        entry["heads"] = [*others, str(folder.resolve())]
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
            load_profile(part)  # a file that cannot be read must not replace the old one
            if path.is_file():
                shutil.copyfile(path, path.with_suffix(".toml.bak"))
    except OSError as error:
        raise StoreError(
            f"The profile {path} cannot be written ({error.strerror}). What was trained is kept; "
            "free disk space and run the command again."
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
    # A TOML basic string is a JSON string, except for the one control that JSON leaves bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
