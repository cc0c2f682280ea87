"""Find a model by what a person calls it: a folder, an id of the profiles, or a cached download.

Contract: a name becomes its shape, its folder if it is on this machine, and the drafts known for
it. A name nobody knows is a ConfigError that names the nearest known one. Nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.config import SHAPE_KEYS, ModelEntry, Profile, nearest
from localspec.errors import ConfigError, ModelError
from localspec.machine.compatibility import UNKNOWN, Compatibility, compare_folders
from localspec.machine.shapes import FAMILIES, ModelShape, shape_from_folder


@dataclass(frozen=True)
class KnownModel:
    """folder: where its files are, None when only the shape is known. drafts: ids."""

    shape: ModelShape
    folder: Path | None
    license: str | None
    drafts: tuple[str, ...]


def find_model(name: str, profiles: Mapping[str, Profile]) -> KnownModel:
    """The model a folder, an id or the last part of an id stands for."""
    entries = {key: entry for each in profiles.values() for key, entry in each.models.items()}
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return _in_folder(folder, entries)
    entry = _entry(name, entries)
    if entry is not None:
        return _from_entry(entry)
    cached = cached_folder(name)
    if cached is not None:
        return KnownModel(shape_from_folder(cached, name), cached, None, ())
    if folder.is_dir():
        shape_from_folder(folder)  # raises, saying what the folder lacks
    raise ConfigError(
        f"'{name}' is neither a model folder nor a model the profiles know. "
        f"Did you mean '{nearest(name, entries)}'?"
    )


def compatibility_of(target: KnownModel, draft: KnownModel) -> Compatibility:
    """The full comparison when both tokenizers are on this machine, else unknown."""
    if target.folder is None or draft.folder is None:
        return UNKNOWN
    try:
        return compare_folders(target.folder, draft.folder)
    except ModelError as error:
        return Compatibility(False, str(error).rstrip("."))


def cached_folder(hub_id: str) -> Path | None:
    """The folder of an earlier download, from the hub's local cache only."""
    if hub_id.count("/") != 1 or hub_id.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError:  # not spelt as a hub id can be
        return None
    return Path(found).parent if isinstance(found, str) else None


def shape_from_entry(entry: ModelEntry) -> ModelShape:
    if entry.folder is not None:
        return shape_from_folder(entry.folder, entry.id)
    family = str(entry.family)
    if family not in FAMILIES:
        raise ConfigError(
            f"The profile of {entry.id} names the family '{family}'. "
            f"Did you mean '{nearest(family, FAMILIES)}'?"
        )
    has_qkv_bias, has_qk_norm = FAMILIES[family]
    written: dict[str, Any] = {key: vars(entry)[key] for key in SHAPE_KEYS}
    return ModelShape(
        name=entry.id,
        **written,
        has_qkv_bias=has_qkv_bias,
        has_qk_norm=has_qk_norm,
        num_experts=entry.num_experts,
        num_experts_per_token=entry.num_experts_per_token,
        expert_intermediate_size=entry.expert_intermediate_size,
        extra_params=entry.extra_params,
    )


def _in_folder(folder: Path, entries: Mapping[str, ModelEntry]) -> KnownModel:
    """A folder given by path; if a profile describes this very folder, with its drafts."""
    for entry in entries.values():
        if entry.folder is not None and entry.folder.resolve() == folder.resolve():
            return _from_entry(entry)
    return KnownModel(shape_from_folder(folder), folder, None, ())


def _entry(name: str, entries: Mapping[str, ModelEntry]) -> ModelEntry | None:
    wanted = name.lower()
    for key, entry in entries.items():
        if wanted in (key.lower(), key.lower().rpartition("/")[2]):
            return entry
    return None


def _from_entry(entry: ModelEntry) -> KnownModel:
    folder = entry.folder or cached_folder(entry.id)
    return KnownModel(shape_from_entry(entry), folder, entry.license, entry.drafts)
