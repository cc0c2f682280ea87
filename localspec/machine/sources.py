"""Where the target and the draft come from: a folder, the demo pair, a profile, a hub id.

Contract: `resolve` turns LoadOptions into folders on this disk. A hub id is looked for in the
local hub cache first and fetched only when it is not wholly there (safetensors, tokenizer and
configs; never pickle or code, and nothing of a repository's sub-folders). Errors say what to do.

Not here: opening the folders (forward.weights).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.config import ModelEntry, Profile, find_profile, load_profiles, settings_for
from localspec.errors import ModelError
from localspec.options import LoadOptions

DEMO = "localspec/demo"
WANTED_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja",
    "merges.txt", "vocab.txt", "tokenizer.model",
)  # fmt: skip
# Copies in other formats, often as large as the model itself.
UNWANTED_FILES = ("*/*", "consolidated*.safetensors")


@dataclass(frozen=True)
class Source:
    """Folders to load, with the names to show. draft_refusal: why there is no draft. foreign: a
    draft with a vocabulary of its own. heads: folders of heads for the target. accepted: the
    file of what drafts of just these models were accepted elsewhere."""

    target: Path
    target_name: str
    draft: Path | None
    draft_name: str | None
    draft_refusal: str = "no draft model was chosen for this target; --draft names one."
    foreign: Path | None = None
    heads: tuple[Path, ...] = ()
    accepted: Path | None = None


def resolve(options: LoadOptions) -> Source:
    """Raises ModelError, ConfigError."""
    profiles = load_profiles(settings_for(options.home).profile_folders)
    target = options.model
    if options.profile is not None and target is None:
        target = find_profile(options.profile, profiles).default
    target = DEMO if target is None else target
    entry = _entry(target, profiles)
    if target == DEMO and (entry is None or not _is_there(entry.folder)):
        raise ModelError(
            "The demo pair is missing from assets/demo. Restore the folder from the project, or "
            "name a model with --model."
        )
    source = Source(_folder(target, entry, options.fetches), _name(target), None, None)
    own = tuple(_own_head(folder) for folder in options.heads)
    if entry is not None:
        source = replace(source, foreign=_first_here(entry.foreign, profiles))
    heads = (*own, *(entry.heads if entry is not None else ()))
    if entry is not None and not own and options.draft in (None, *entry.drafts[:1]):
        source = replace(source, accepted=entry.accepted)
    return _with_draft(replace(source, heads=heads), options, entry, profiles)


def _own_head(place: str) -> Path:
    """Asked for by name, so its absence is the person's to know at once."""
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise ModelError(f"There is no folder of a head at {place}. Check the path of --heads.")
    return folder


def _with_draft(
    source: Source, options: LoadOptions, entry: ModelEntry | None, profiles: dict[str, Profile]
) -> Source:
    draft = options.draft or (entry.drafts[0] if entry and entry.drafts else None)
    if draft is None:
        return source
    draft_entry = _entry(draft, profiles)
    try:
        folder = _folder(draft, draft_entry, options.fetches)
        if draft_entry is not None and not _is_there(folder):
            raise ModelError(f"{folder.parent.name}/{folder.name} is missing.")
    except ModelError as error:
        if options.draft is not None:
            raise  # asked for by name, so its absence is the person's to know at once
        return replace(source, draft_refusal=str(error))
    return replace(source, draft=folder, draft_name=_name(draft))


def _is_there(folder: Path | None) -> bool:
    return folder is not None and (folder / "config.json").is_file()


def _first_here(places: tuple[str, ...], profiles: dict[str, Profile]) -> Path | None:
    """The first of these models that needs no download: nothing is fetched unasked."""
    for place in places:
        entry = _entry(place, profiles)
        folder = entry.folder if entry is not None else Path(place).expanduser()
        if folder is not None and _is_there(folder):
            return folder
    return None


def _entry(place: str, profiles: dict[str, Profile]) -> ModelEntry | None:
    """What the profiles know of a model, named by its id or by the folder it lies in."""
    entries = [entry for profile in profiles.values() for entry in profile.models.values()]
    named = next((entry for entry in entries if entry.id == place), None)
    if named is not None:
        return named
    folder = Path(place).expanduser().resolve()
    return next((e for e in entries if e.folder is not None and e.folder.resolve() == folder), None)


def _name(place: str) -> str:
    return Path(place).name if Path(place).is_dir() else place


def _folder(place: str, entry: ModelEntry | None, fetches: bool) -> Path:
    if entry is not None and entry.folder is not None:
        return entry.folder
    path = Path(place).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or place.startswith(".") or place.count("/") != 1:
        raise _no_folder(place)
    cached = _cached(place)
    if cached is None and not fetches:
        raise ModelError(
            f"{place} is not whole on this machine. Download it in the Models tab, or give a "
            "folder."
        )
    return cached or _fetched(place)


def _no_folder(place: str) -> ModelError:
    return ModelError(f"There is no model folder at {place}. Check the path, or name a hub id.")


def _cached(hub_id: str) -> Path | None:
    """The model's folder in the hub cache; None when it is not, or not wholly, there."""
    from huggingface_hub.errors import HFValidationError

    try:
        folder = _snapshot(hub_id, is_local=True)
    except HFValidationError:  # a path, then: the hub allows no such name
        raise _no_folder(hub_id) from None
    except OSError:  # not there, or not readable: fetching says which
        return None
    return folder if missing_part(folder) is None else None


def _fetched(hub_id: str) -> Path:
    from huggingface_hub import constants

    # The page keeps the hub's client offline, so that nothing calls out unasked. Naming a hub id
    # is asking.
    was_offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        folder = _snapshot(hub_id, is_local=False)
    except Exception as error:  # the client raises many types: its own, of HTTP, of files, of Xet
        raise ModelError(
            f"{hub_id} is not on this machine and could not be fetched: {_reason(error)}"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline
    missing = missing_part(folder)  # without a connection the client hands out what it has
    if missing is not None:
        raise ModelError(
            f"What could be had of {hub_id} lacks {missing}. Choose a model that is published "
            "with .safetensors weights and a tokenizer.json, or check the connection and try again."
        )
    return folder


def _snapshot(hub_id: str, is_local: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            hub_id,
            allow_patterns=list(WANTED_FILES),
            ignore_patterns=list(UNWANTED_FILES),
            local_files_only=is_local,
        )
    )


def missing_part(folder: Path) -> str | None:
    """What the folder lacks of a model. The hub's client itself knows this only of what it
    fetched whole: other programs leave single files in the same cache."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return "a tokenizer"
    if (folder / "model.safetensors").is_file():
        return None
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        files = {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "weights in .safetensors files"
    absent = sorted(name for name in files if not (folder / name).is_file())
    return f"{len(absent)} of {len(files)} weight files" if absent else None


def _reason(error: Exception) -> str:
    """Why a fetch failed, and the remedy."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return (
            "its owner gives it only to those who agree to the licence. Agree to it on the "
            "model's page, set HF_TOKEN to your token of the hub and start again."
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "the hub has no model of this name, or shows it to some people only. Check the "
            "spelling, or set HF_TOKEN to your token of the hub and start again."
        )
    first_line = str(error).strip().split("\n")[0] or type(error).__name__
    return (
        f"{first_line.rstrip('.:')}. Check the connection and the free space on the disk and try "
        "again, or give a folder."
    )
