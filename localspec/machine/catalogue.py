"""The models a person can have: profiles, cache and downloads, and this machine to hold them.

Contract: the front room of everything the Models tab shows. `look` reads the machine, the profiles,
the hub's cache and the disk, and recommends; it takes some tenths of a second and never raises for
what it finds. Nothing is fetched but by `downloads`, and torch is never imported.

Not here: the reasoning (recommend), the page (web), loading (load).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localspec.config import ModelEntry, Profile, Settings, load_profiles
from localspec.errors import ConfigError, ModelError
from localspec.machine.cache import CachedModel, cached_models
from localspec.machine.compatibility import UNKNOWN
from localspec.machine.downloads.download_queue import Downloads
from localspec.machine.downloads.faults import Fault
from localspec.machine.downloads.listing import Survey
from localspec.machine.hardware import Hardware, probe
from localspec.machine.hardware_summary import found_line
from localspec.machine.models import shape_from_entry
from localspec.machine.planning import full_precision, room_for
from localspec.machine.plans import DraftCandidate
from localspec.machine.recommend import Offer, Recommendation, Snapshot, recommend
from localspec.machine.remembered import measurements
from localspec.machine.shapes import ModelShape, shape_from_folder
from localspec.machine.sources import missing_part


@dataclass(frozen=True)
class Look:
    """What was found at one moment. folder: the model folder that was named, if any, and what is
    wrong with it."""

    found: str
    hardware: Hardware
    recommendation: Recommendation
    cached: tuple[CachedModel, ...]
    cache_folder: str
    disk_free_bytes: int | None
    context_length: int
    notices: tuple[str, ...] = ()
    folder: str | None = None
    folder_fault: str | None = None


@dataclass
class Shelf:
    """settings: where profiles and the list of downloads are. probe: reads the machine. learnt:
    what earlier runs measured, as the log keeps it."""

    settings: Settings
    probe: Callable[[], Hardware] = probe
    learnt: Callable[[], Mapping[str, Any]] = dict
    environment: Mapping[str, str] | None = None  # added to that of the process that fetches
    exact: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.downloads = Downloads(self.settings.home / "downloads.json", self.environment)

    def look(self, context_length: int, freed_bytes: int = 0, folder: str | None = None) -> Look:
        """freed_bytes: what the loaded model would give back."""
        hardware = self.probe()
        cached = cached_models()
        disk = disk_free()
        offers, wrong = self._offers(cached)
        fault = None
        if folder:
            try:
                offers.append(folder_offer(Path(folder).expanduser()))
            except ModelError as error:
                fault = str(error)
        snapshot = self._snapshot(hardware, cached, disk, freed_bytes, context_length)
        return Look(
            found=found_line(hardware),
            hardware=hardware,
            recommendation=recommend(snapshot, offers, context_length),
            cached=tuple(cached),
            cache_folder=str(cache_folder()),
            disk_free_bytes=disk,
            context_length=context_length,
            notices=(*hardware.notices, *wrong, *_unknown(hardware)),
            folder=folder,
            folder_fault=fault,
        )

    def ask_size(self, model_id: str) -> Survey | Fault:
        """The dry run of one model; its exact size is remembered while the app runs."""
        found = self.downloads.survey(model_id)
        if isinstance(found, Survey):
            self.exact[model_id] = found.num_bytes
        return found

    def close(self) -> None:
        self.downloads.close()

    def _snapshot(
        self,
        hardware: Hardware,
        cached: list[CachedModel],
        disk: int | None,
        freed_bytes: int,
        context_length: int,
    ) -> Snapshot:
        if (
            hardware.free_bytes is None and hardware.gpu is not None
        ):  # room_for would ask torch, which is not here
            total = hardware.gpu.total_bytes
            hardware = replace(hardware, gpu=replace(hardware.gpu, free_bytes=total or 0))
        room = room_for(hardware)
        return Snapshot(
            room=replace(room, free_bytes=room.free_bytes + freed_bytes),
            full=full_precision(None, hardware),
            disk_free_bytes=disk,
            cached={each.id: each.num_bytes for each in cached},
            exact=dict(self.exact),
            measurements=measurements(self.learnt(), context_length),
        )

    def _offers(self, cached: list[CachedModel]) -> tuple[list[Offer], list[str]]:
        """What the profiles know, then what else is in the cache; and what is wrong with either."""
        wrong: list[str] = []
        try:
            profiles = load_profiles(self.settings.profile_folders)
        except ConfigError as error:  # one of the person's own; the message names it
            return [], [str(error)]
        offers = profile_offers(profiles, wrong)
        known = {offer.id for offer in offers}
        for each in cached:
            if each.id not in known:
                try:
                    offers.append(cached_offer(each))
                except ModelError as error:
                    wrong.append(str(error))
        return offers, wrong


def _unknown(hardware: Hardware) -> tuple[str, ...]:
    if hardware.free_bytes is not None:
        return ()
    return (
        "How much memory is free is not known, so all of it is planned for. What really fits is "
        "checked when a model is loaded.",
    )


def profile_offers(profiles: Mapping[str, Profile], wrong: list[str]) -> list[Offer]:
    entries = [entry for profile in profiles.values() for entry in profile.models.values()]
    shapes: dict[str, ModelShape] = {}
    for entry in entries:
        try:
            shapes[entry.id] = shape_from_entry(entry)
        except (ConfigError, ModelError) as error:
            wrong.append(str(error))
    # What ships in a folder only to draft for another is not offered as a target.
    helpers = {
        name for entry in entries if entry.folder for name in (*entry.drafts, *entry.foreign)
    }
    family = {
        entry.id: profile.title
        for profile in profiles.values()
        for entry in profile.models.values()
    }
    return [
        _offer(entry, family[entry.id], shapes)
        for entry in entries
        if entry.id in shapes and entry.id not in helpers
    ]


def _offer(entry: ModelEntry, family: str, shapes: Mapping[str, ModelShape]) -> Offer:
    return Offer(
        shape=shapes[entry.id],
        license=entry.license,
        family=family,
        drafts=tuple(
            DraftCandidate(shapes[draft], UNKNOWN) for draft in entry.drafts if draft in shapes
        ),
        gated=entry.gated,
        terms=entry.terms,
        page=None if entry.folder is not None else entry.page,
        note=entry.note,
    )


def cached_offer(cached: CachedModel) -> Offer:
    """A model of the cache that no profile knows: its licence stands on its page."""
    return Offer(
        shape=shape_from_folder(cached.folder, cached.id),
        license=None,
        family="from the cache",
        page=f"https://huggingface.co/{cached.id}",
        note="No profile knows this model: no draft model is known for it.",
    )


def folder_offer(folder: Path) -> Offer:
    """A folder that was named. Raises ModelError for one that cannot be loaded."""
    shape = shape_from_folder(folder, str(folder))
    missing = missing_part(folder)
    if missing is not None:
        raise ModelError(f"{folder} lacks {missing}. Name a folder that holds a whole model.")
    return Offer(shape=shape, license=None, family="a folder of yours")


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def disk_free() -> int | None:
    folder = cache_folder()
    existing = next((each for each in (folder, *folder.parents) if each.is_dir()), None)
    try:
        return None if existing is None else shutil.disk_usage(existing).free
    except OSError:
        return None
