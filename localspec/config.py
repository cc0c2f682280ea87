"""The folders of a run, and the model profiles: TOML read once into frozen dataclasses.

Contract: an unknown key, a missing one or a value of the wrong kind is a ConfigError that names
the file, the table and the nearest key. Nothing is read from the environment but the operating
system's place for application data.

Not here: what a profile's shape means (machine.shapes), flags of the command line.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from localspec.errors import ConfigError

PROJECT_FOLDER = Path(__file__).resolve().parent.parent
SHIPPED_PROFILES = PROJECT_FOLDER / "profiles" / "models"


@dataclass(frozen=True)
class Settings:
    """The folders of one run. home: the log and what the person adds; it may not exist yet."""

    home: Path
    profile_folders: tuple[Path, ...]

    @property
    def database(self) -> Path:
        return self.home / "localspec.db"


def default_home() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("localspec", appauthor=False))


def settings_for(home: Path | None = None) -> Settings:
    """Settings with the given home, or the operating system's place for application data.
    A person's own profiles are in HOME/profiles/models and come before the shipped ones."""
    chosen = (home or default_home()).expanduser()
    return Settings(chosen, (chosen / "profiles" / "models", SHIPPED_PROFILES))


# -- model profiles -------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelEntry:
    """One model of a profile. Either `folder` is given, and its config.json holds the shape, or
    the shape is written out. drafts: ids of models that may draft for it, best first; foreign: of
    such with a vocabulary of their own. heads: folders of heads trained on it, one a kind.
    accepted: a file of what drafts of these very models were accepted (train accepted).
    gated: whether the hub hands it out only to those who agreed to its terms, None when that is not
    known. terms: the page of the licence. note: a sentence a person should know before choosing it.
    extra_params: weights beside the decoder that are loaded with it (a vision tower)."""

    id: str
    license: str
    drafts: tuple[str, ...]
    folder: Path | None = None
    family: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    context_length: int | None = None
    is_tied: bool | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    foreign: tuple[str, ...] = ()
    heads: tuple[Path, ...] = ()
    accepted: Path | None = None
    gated: bool | None = None
    terms: str | None = None
    note: str = ""
    extra_params: int = 0

    @property
    def page(self) -> str:
        """The model's page on the hub: its terms are read and accepted there."""
        return f"https://huggingface.co/{self.id}"


SHAPE_KEYS = (
    "family",
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "context_length",
    "is_tied",
)
# What a value must be, by field; a bool is an int to Python but not to a profile.
KINDS: Mapping[str, type] = {
    **{each.name: int for each in fields(ModelEntry)},
    "license": str,
    "drafts": list,
    "foreign": list,
    "heads": list,
    "accepted": str,
    "folder": str,
    "family": str,
    "is_tied": bool,
    "gated": bool,
    "terms": str,
    "note": str,
}


@dataclass(frozen=True)
class Profile:
    """One family. name: the file's name without `.toml`. default: id of the model to load when
    only the profile is named. family: for models that name none."""

    name: str
    title: str
    models: Mapping[str, ModelEntry]
    default: str
    family: str | None = None


def load_profile(path: Path) -> Profile:
    """The profile in `path`. Raises ConfigError for whatever is wrong with it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no profile file {path}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}. Correct it.") from None
    _refuse_unknown(table, ("title", "family", "default", "models"), path.name)
    title, family = table.get("title", path.stem), table.get("family")
    models = table.get("models", {})
    _require_kind(title, str, "title", path.name)
    _require_kind(models, dict, "models", path.name)
    if family is not None:
        _require_kind(family, str, "family", path.name)
    entries = {
        model_id: _model_entry(model_id, entry, family, path) for model_id, entry in models.items()
    }
    default = str(table.get("default"))
    if default not in entries:
        raise ConfigError(
            f"{path.name}: 'default' is '{default}', but must be one of its models. "
            f"Did you mean '{nearest(default, entries)}'?"
        )
    return Profile(path.stem, title, entries, default, family)


def load_profiles(folders: Iterable[Path]) -> dict[str, Profile]:
    """All profiles by name; a folder given first wins over a later one. Missing folders are
    empty."""
    found: dict[str, Profile] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.toml")):
            if path.stem not in found:
                found[path.stem] = load_profile(path)
    return found


def find_profile(name: str, profiles: Mapping[str, Profile] | None = None) -> Profile:
    """The profile called `name`, or the one in a .toml file given by its path. profiles: None
    looks among the shipped ones."""
    if profiles is None:
        profiles = load_profiles((SHIPPED_PROFILES,))
    if name in profiles:
        return profiles[name]
    if name.endswith(".toml"):
        return load_profile(Path(name).expanduser())
    raise ConfigError(
        f"There is no profile '{name}'. Did you mean '{nearest(name, profiles)}'? "
        f"Known: {', '.join(sorted(profiles))}."
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that looks most like this one."""
    options = sorted(known)
    return difflib.get_close_matches(word, options, n=1, cutoff=0.0)[0] if options else ""


def _model_entry(model_id: str, table: Any, family: str | None, path: Path) -> ModelEntry:
    where = f'{path.name} [models."{model_id}"]'
    _require_kind(table, dict, "models", where)
    known = tuple(each.name for each in fields(ModelEntry) if each.name != "id")
    _refuse_unknown(table, known, where)
    for key, value in table.items():
        _require_kind(value, KINDS[key], key, where)
    values = {"family": family, **table}
    required = [
        each.name for each in fields(ModelEntry) if each.default is MISSING and each.name != "id"
    ]
    for key in (*required, *(() if "folder" in table else SHAPE_KEYS)):
        if values.get(key) is None:
            raise ConfigError(f"{where} has no '{key}'. Add it, or give the model's folder.")
    values["drafts"] = tuple(str(draft) for draft in table["drafts"])
    values["foreign"] = tuple(str(draft) for draft in table.get("foreign", ()))
    heads = (Path(str(folder)).expanduser() for folder in table.get("heads", ()))
    values["heads"] = tuple(PROJECT_FOLDER / folder for folder in heads)
    if "accepted" in table:
        values["accepted"] = PROJECT_FOLDER / Path(table["accepted"]).expanduser()
    if "folder" in table:
        values["folder"] = PROJECT_FOLDER / Path(table["folder"]).expanduser()
    return ModelEntry(id=model_id, **values)


def _refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(
                f"{where} has the unknown key '{key}'. Did you mean '{nearest(key, known)}'?"
            )


def _require_kind(value: Any, kind: type, key: str, where: str) -> None:
    is_bool_for_int = kind is int and isinstance(value, bool)
    is_negative = kind is int and isinstance(value, int) and value < 0
    if not isinstance(value, kind) or is_bool_for_int or is_negative:
        word = {int: "a whole number", str: "text", bool: "true or false", list: "a list"}
        raise ConfigError(
            f"{where}: '{key}' is {value!r}, but must be {word.get(kind, 'a table')}."
        )
