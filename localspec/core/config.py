"""The folders of a run, and the model profiles: TOML read once into frozen dataclasses.

Contract: an unknown key, a missing one or a value of the wrong kind is a ConfigError that names
the file, the table and the nearest key. Nothing is read from the environment but the operating
system's place for application data and the key of a server.

Not here: what a profile's shape means (machine.shapes), flags of the command line.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from localspec.core.errors import ConfigError
from localspec.core.files import place_of
from localspec.core.options import LOAD_FLAGS, LoadOptions, RemoteServer

PROJECT_FOLDER = Path(__file__).resolve().parents[2]
SHIPPED_PROFILES = PROJECT_FOLDER / "profiles" / "models"
KEY_VARIABLE = "LOCALSPEC_REMOTE_KEY"
OF_A_SERVER = ("model", "drafter", "parallel", "home")  # flags that have an effect with --remote

Entry = TypeVar("Entry")


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


def remote_server(
    url: str | None,
    model: str | None,
    key_file: Path | None,
    sends_key_openly: bool,
    environment: Mapping[str, str] = os.environ,
) -> RemoteServer | None:
    """The server of the flags, None without one; its key from the file or KEY_VARIABLE. Raises
    ConfigError."""
    if url is None:
        if key_file is not None or sends_key_openly:
            raise ConfigError("A key for a server has no effect without --remote. Leave it out.")
        return None
    key = environment.get(KEY_VARIABLE)
    if key_file is not None:
        try:
            key = key_file.expanduser().read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The key cannot be read from {key_file}. Name a text file that holds it and "
                "nothing else."
            ) from error
    return RemoteServer(url, model, (key or "").strip() or None, sends_key_openly)


def load_options(flags: Mapping[str, Any]) -> LoadOptions:
    """Of the values of LOAD_FLAGS, of which some may be left out. Raises ConfigError."""
    named = {name: value for name, value in flags.items() if not name.startswith("remote")}
    server = remote_server(
        flags.get("remote"),
        flags.get("model"),
        flags.get("remote_key_file"),
        flags.get("remote_key_unencrypted", False),
    )
    for name, value in named.items():
        if server is not None and value and name not in OF_A_SERVER:
            option = LOAD_FLAGS[name].option
            raise ConfigError(f"{option} has no effect with --remote. Leave it out.")
    heads = tuple(named.pop("heads", None) or ())
    return LoadOptions(**named, heads=heads, remote=server)


# -- model profiles -------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelEntry:
    """One model of a profile. Its shape is in the config.json of `folder`, or else in `shape`: the
    fields of machine.shapes.ModelShape that the profile writes out.

    drafts: ids of models that may draft for it, best first; foreign: of such with a vocabulary of
    their own. heads: folders of heads trained on it, one a kind. accepted: a file of what drafts of
    these very models were accepted (train accepted). gated: whether the hub hands it out only to
    those who agreed to its terms, None when that is not known. terms: the page of the licence.
    note: a sentence a person should know before choosing it. awq: id of the same model published
    in 4 bits, as AWQ in groups of 128. copy_of: of the entry of such a copy, the model's id."""

    id: str
    license: str
    drafts: tuple[str, ...]
    folder: Path | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    heads: tuple[Path, ...] = ()
    accepted: Path | None = None
    gated: bool | None = None
    terms: str | None = None
    note: str = ""
    awq: str | None = None
    copy_of: str = ""

    @property
    def packed(self) -> ModelEntry | None:
        """The entry of the model's copy in 4 bits; None where none is known."""
        if self.awq is None:
            return None
        return replace(self, id=self.awq, awq=None, copy_of=self.id, accepted=None)

    @property
    def page(self) -> str:
        """The model's page on the hub: its terms are read and accepted there."""
        return f"https://huggingface.co/{self.id}"


NUMBERS = re.compile(r"\d+(?:\.\d+)?")  # in a name: of a generation, or a size
SIZES = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
    "vocab_size", "context_length",
)  # fmt: skip
# extra_params: weights beside the decoder that are loaded with it (a vision tower).
OPTIONAL_SIZES = (
    "num_experts", "num_experts_per_token", "expert_intermediate_size", "extra_params",
)  # fmt: skip
SHAPE_KINDS: Mapping[str, type] = {
    "family": str,
    **dict.fromkeys((*SIZES, *OPTIONAL_SIZES), int),
    "is_tied": bool,
}
# What a value must be, by key: of a profile, and of the table of a model.
IN_WORDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
}
PROFILE_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("title", "family", "default"), str),
    "models": dict,
}
MODEL_KINDS: Mapping[str, type] = {
    **SHAPE_KINDS,
    **dict.fromkeys(("license", "folder", "accepted", "terms", "note", "awq"), str),
    **dict.fromkeys(("drafts", "foreign", "heads"), list),
    "gated": bool,
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
    table = read_toml(path)
    check_table(table, PROFILE_KINDS, path.name)
    family, default = table.get("family"), table.get("default", "")
    entries = {
        model_id: _model_entry(model_id, entry, family, path)
        for model_id, entry in table.get("models", {}).items()
    }
    if default not in entries:
        raise ConfigError(
            f"{path.name}: 'default' is '{default}', but must be one of its models. "
            f"Did you mean '{nearest(default, entries)}'?"
        )
    return Profile(path.stem, table.get("title", path.stem), entries, default, family)


def load_profiles(folders: Iterable[Path]) -> dict[str, Profile]:
    return by_name(folders, load_profile)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(place_of(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no profile file {path}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}. Correct it.") from None


def by_name(folders: Iterable[Path], load: Callable[[Path], Entry]) -> dict[str, Entry]:
    """What the .toml files of the folders hold; a folder given first wins over a later one. Missing
    folders are empty."""
    found = dict[str, Entry]()
    for path in (path for folder in folders for path in sorted(folder.glob("*.toml"))):
        if path.stem not in found:
            found[path.stem] = load(path)
    return found


def find_profile(name: str, profiles: Mapping[str, Profile]) -> Profile:
    """The profile called `name`, or the one in a .toml file given by its path."""
    if name in profiles:
        return profiles[name]
    if name.endswith(".toml"):
        return load_profile(Path(name).expanduser())
    raise ConfigError(
        f"There is no profile '{name}'.{suggestion(name, profiles)} "
        f"Known: {', '.join(sorted(profiles))}."
    )


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'X'?" with the known name that looks most like this one, or "" without
    a close one. A name with other numbers is another generation or size, and no slip of the pen."""
    numbers = NUMBERS.findall(word)
    same = [name for name in known if NUMBERS.findall(name) == numbers]
    spelt = {name.lower(): name for name in sorted(same)}
    close = difflib.get_close_matches(word.lower(), spelt, n=1)
    return f" Did you mean '{spelt[close[0]]}'?" if close else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that looks most like this one."""
    options = sorted(known)
    return difflib.get_close_matches(word, options, n=1, cutoff=0.0)[0] if options else ""


def _model_entry(model_id: str, table: Any, family: str | None, path: Path) -> ModelEntry:
    where = f'{path.name} [models."{model_id}"]'
    _require_kind(table, dict, "models", where)
    check_table(table, MODEL_KINDS, where)
    values = {**table, "family": table.get("family", family)}
    needed = () if "folder" in table else ("family", *SIZES, "is_tied")
    for key in ("license", "drafts", *needed):
        if values.get(key) is None:
            raise ConfigError(f"{where} has no '{key}'. Add it, or give the model's folder.")
    return ModelEntry(
        id=model_id,
        license=table["license"],
        drafts=tuple(map(str, table["drafts"])),
        folder=_in_project(table["folder"]) if "folder" in table else None,
        shape={key: values[key] for key in SHAPE_KINDS if needed and key in values},
        foreign=tuple(map(str, table.get("foreign", ()))),
        heads=tuple(map(_in_project, table.get("heads", ()))),
        accepted=_in_project(table["accepted"]) if "accepted" in table else None,
        gated=table.get("gated"),
        terms=table.get("terms"),
        awq=table.get("awq"),
        note=table.get("note", ""),
    )


def _in_project(place: object) -> Path:
    """The path of a folder or file that a profile names; a relative one lies in the project."""
    return PROJECT_FOLDER / Path(str(place)).expanduser()


def check_table(table: Mapping[str, Any], kinds: Mapping[str, type], where: str) -> None:
    """Raise ConfigError for a key that is none of these, and for a value of another kind."""
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(
                f"{where} has the unknown key '{key}'. Did you mean '{nearest(key, kinds)}'?"
            )
        _require_kind(value, kinds[key], key, where)


def _require_kind(value: Any, kind: type, key: str, where: str) -> None:
    is_right = isinstance(value, int | float if kind is float else kind)
    is_bool_for_number = kind in (int, float) and isinstance(value, bool)
    is_negative = kind is int and isinstance(value, int) and value < 0
    if not is_right or is_bool_for_number or is_negative:
        raise ConfigError(
            f"{where}: '{key}' is {value!r}, but must be {IN_WORDS.get(kind, 'a table')}."
        )
