"""The folders of a run, and what all profiles share: TOML whose tables are checked key by key.

Contract: an unknown key or a value of the wrong kind is a ConfigError that names the file, the
table and the nearest key. Nothing is read from the environment but the operating system's place for
application data and the key of a server.

Not here: profiles of models (machine.profiles) and of workloads, flags of the command line.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from localspec.core.errors import ConfigError
from localspec.core.files import place_of
from localspec.core.flags import option
from localspec.core.options import LoadOptions, RemoteFlags, RemoteServer

PROJECT_FOLDER = Path(__file__).resolve().parents[2]
SHIPPED_PROFILES = PROJECT_FOLDER / "profiles" / "models"
KEY_VARIABLE = "LOCALSPEC_REMOTE_KEY"
# The options that have an effect with --remote.
OF_A_SERVER = ("model", "drafter", "parallel", "home")

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


def with_server(
    options: LoadOptions, flags: RemoteFlags, environment: Mapping[str, str] = os.environ
) -> LoadOptions:
    """Return the options with the server of the flags, if they name one; its key is in the file or
    in KEY_VARIABLE. Raise ConfigError, also for an option that has no effect with a server."""
    if flags.remote is None:
        if flags.remote_key_file is not None or flags.remote_key_unencrypted:
            raise ConfigError("A key for a server has no effect without --remote. Leave it out.")
        return options
    key = _server_key(flags.remote_key_file, environment)
    server = RemoteServer(flags.remote, options.model, key, flags.remote_key_unencrypted)
    for choice in fields(options):
        value = getattr(options, choice.name)
        if value and value != choice.default and choice.name not in OF_A_SERVER:
            raise ConfigError(f"{option(choice.name)} has no effect with --remote. Leave it out.")
    return replace(options, remote=server)


def _server_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """Return the key in the file, or else in the environment. Raise ConfigError."""
    if file is None:
        key = environment.get(KEY_VARIABLE, "")
    else:
        try:
            key = file.expanduser().read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The key cannot be read from {file}. Name a text file that holds it and nothing "
                "else."
            ) from error
    return key.strip() or None


# -- profiles and their TOML ----------------------------------------------------------------


NUMBERS = re.compile(r"\d+(?:\.\d+)?")  # in a name: of a generation, or a size
# What a value must be, in words.
IN_WORDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
}


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
