"""The models a person can load: of the profiles, the hub's cache and a folder; which to choose.

Contract: `Catalogue.read` reads the machine, the profiles, the cache and the disk, and recommends;
it takes some tenths of a second and never raises for what it finds. `smaller_offer` names what to
load when memory is short. Nothing is fetched but by `downloads`, and torch is never imported.

Not here: the reasoning (recommend), the page (web), loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from localspec.core.config import Profile, Settings, load_profiles
from localspec.core.errors import ConfigError, LocalspecError, ModelError
from localspec.core.files import free_disk
from localspec.core.options import LoadOptions, Offer
from localspec.core.speculation import Measurement
from localspec.formats.folder_files import weight_files
from localspec.formats.gguf_file import parts_of
from localspec.machine.download_faults import DownloadFault
from localspec.machine.downloads import Downloads
from localspec.machine.folder_shapes import shape_of_gguf, shape_to_load
from localspec.machine.gguf_models import gguf_of
from localspec.machine.hardware import Device, Hardware, on_device, probe
from localspec.machine.hub_files import Survey
from localspec.machine.memory import Room, full_precision, other_device, room_for
from localspec.machine.other_programs import OtherModel, found_models
from localspec.machine.plan_report import offered_ids
from localspec.machine.plans import DraftCandidate, PlanRequest
from localspec.machine.recommend import AvailableModel, Recommendation, Snapshot, recommend
from localspec.machine.shapes import ModelShape
from localspec.machine.sources import (
    CachedModel,
    KnownModel,
    cached_folder,
    cached_models,
    find_model,
    named_path,
    shape_from_entry,
)
from localspec.machine.trained import trained_drafts


@dataclass(frozen=True)
class CatalogueState:
    """What was found at one moment. folder: the model folder that was named, if any, and what is
    wrong with it. others: what other programs keep that cannot be loaded, with the reason.
    free_bytes: of the memory for models."""

    hardware: Hardware
    recommendation: Recommendation
    cache_folder: str
    disk_free_bytes: int | None
    context_length: int
    notices: tuple[str, ...] = ()
    folder: str | None = None
    folder_fault: str | None = None
    others: tuple[OtherModel, ...] = ()
    free_bytes: int | None = None


@dataclass(eq=False)
class Catalogue:
    """settings: where profiles and the list of downloads are. probe: reads the machine. measured:
    what earlier runs measured, at a context length. asked: what the program was started with, of
    which the devices count."""

    settings: Settings
    probe: Callable[[], Hardware] = probe
    measured: Callable[[int], Sequence[Measurement]] = lambda context_length: ()
    asked: LoadOptions = field(default_factory=LoadOptions)

    def __post_init__(self) -> None:
        self.downloads = Downloads(self.settings.home / "downloads.json")
        self._exact = dict[str, int]()

    def read(
        self, context_length: int, freed_bytes: int = 0, folder: str | None = None
    ) -> CatalogueState:
        """freed_bytes: what the loaded model would give back."""
        hardware = on_device(self.probe(), self.asked.device)
        cached, disk = cached_models(), free_disk(cache_folder())
        models, notices = self._models(cached)
        more, others = of_other_programs(self.settings.home)
        models += more
        fault = None
        if folder:
            try:
                models.append(folder_model(named_path(folder), home=self.settings.home))
            except ModelError as error:
                fault = str(error)
        known = hardware
        if hardware.free_bytes is None:
            notices.append(
                "How much memory the GPU has free is not known, so no model is said to fit it. "
                "Load anyway tries: what really fits is checked when a model is loaded."
            )
            known = _without_memory(hardware)
        room = room_for(known)
        snapshot = Snapshot(
            room=replace(room, free_bytes=room.free_bytes + freed_bytes),
            full=full_precision(None, hardware),
            disk_free_bytes=disk,
            cached={each.id: each.num_bytes for each in cached},
            exact=dict(self._exact),
            measurements=tuple(self.measured(context_length)),
            other=other_device(known, self.asked.draft_device),
        )
        return CatalogueState(
            hardware=hardware,
            recommendation=recommend(snapshot, models, context_length),
            cache_folder=str(cache_folder()),
            disk_free_bytes=disk,
            context_length=context_length,
            notices=(*hardware.notices, *notices),
            folder=folder,
            folder_fault=fault,
            others=tuple(others),
            free_bytes=None if hardware.free_bytes is None else snapshot.room.free_bytes,
        )

    def ask_size(self, model_id: str) -> Survey | DownloadFault:
        """What the hub says of one model; its exact size is remembered while the app runs."""
        found = self.downloads.survey(model_id)
        if isinstance(found, Survey):
            self._exact[model_id] = found.num_bytes
        return found

    def close(self) -> None:
        self.downloads.close()

    def _models(self, cached: Sequence[CachedModel]) -> tuple[list[AvailableModel], list[str]]:
        """What the profiles know, then what else is in the cache; and what is wrong with either."""
        try:
            profiles = load_profiles(self.settings.profile_folders)
        except ConfigError as error:  # one of the person's own; the message names it
            return [], [str(error)]
        wrong = list[str]()
        models = profile_models(profiles, wrong, self.settings.home)
        known = {model.id for model in models}
        for each in cached:
            if each.id not in known:
                try:
                    models.append(cached_model(each, self.settings.home))
                except ModelError as error:
                    wrong.append(str(error))
        return models, wrong


def _without_memory(hardware: Hardware) -> Hardware:
    """For a GPU whose driver hides its memory. torch knows it, but must not be imported here."""
    assert hardware.gpu is not None, "the free RAM is always known"
    return replace(hardware, gpu=replace(hardware.gpu, free_bytes=0))


def profile_models(
    profiles: Mapping[str, Profile], wrong: list[str], home: Path | None = None
) -> list[AvailableModel]:
    """The models to offer as targets; sentences about entries that cannot be used go to `wrong`.
    home: where drafts that were trained for them lie, None for none."""
    shapes = dict[str, ModelShape]()
    listed = [entry for profile in profiles.values() for entry in profile.models.values()]
    for entry in listed:
        try:
            shapes[entry.id] = shape_from_entry(entry)
        except (ConfigError, ModelError) as error:
            wrong.append(str(error))
    offered = shapes.keys() & offered_ids(profiles.values())
    return [
        AvailableModel(
            shape=shapes[entry.id],
            license=entry.license,
            drafts=(
                *_trained(home, entry.folder or cached_folder(entry.id)),
                *(DraftCandidate(shapes[d]) for d in entry.drafts if d in shapes),
            ),
            gated=entry.gated,
            terms=entry.terms,
            page=None if entry.folder is not None else entry.page,
            note=entry.note,
            packed=shape_from_entry(entry.packed) if entry.packed else None,
        )
        for entry in listed
        if entry.id in offered
    ]


def _trained(home: Path | None, target: Path | None) -> tuple[DraftCandidate, ...]:
    """The draft that was trained for the model in a folder, under the path to load it by."""
    drafts = () if home is None else trained_drafts(home, target)
    with suppress(ModelError):
        return tuple(DraftCandidate(shape_to_load(Path(each), each)) for each in drafts)
    return ()


def cached_model(cached: CachedModel, home: Path | None = None) -> AvailableModel:
    """A model of the cache that no profile knows: its page states its licence."""
    return AvailableModel(
        shape=shape_to_load(cached.folder, cached.id),
        license=None,
        drafts=_trained(home, cached.folder),
        origin="from the cache",
        page=f"https://huggingface.co/{cached.id}",
        note="No profile knows this model: no draft model is known for it.",
    )


def folder_model(folder: Path, name: str | None = None, home: Path | None = None) -> AvailableModel:
    """A folder or GGUF file that was named. name: to show, None for the path. Raises ModelError for
    one that cannot be loaded."""
    file, shown = gguf_of(folder), name or str(folder)
    shape = shape_to_load(folder, shown) if file is None else shape_of_gguf(file, shown)
    note = f"Its weights are kept as {shape.stored_as}." if shape.stored_as else ""
    files = weight_files(folder) if file is None else parts_of(file)
    return AvailableModel(
        shape=shape,
        license=None,
        drafts=_trained(home, folder),
        note=note,
        place=str(file or folder),
        num_bytes=sum(each.stat().st_size for each in files),
    )


def of_other_programs(home: Path) -> tuple[list[AvailableModel], list[OtherModel]]:
    """What other programs keep: what can be loaded, and the rest with its reason."""
    models, rest = [], []
    for each in found_models():
        if not each.place.exists():
            gone = f"Its file is not there any more. Fetch it again with {each.program}."
            rest.append(replace(each, reason=gone))
            continue
        try:
            found = folder_model(each.place, each.name, home)
            models.append(replace(found, origin=f"from {each.program}"))
        except ModelError as error:
            rest.append(replace(each, reason=str(error)))
    return models, rest


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


# -- when memory is short -------------------------------------------------------------------


def smaller_offer(
    options: LoadOptions,
    target: str,
    precision: str,
    profiles: Mapping[str, Profile],
    device: Device,
) -> Offer | None:
    """What to load instead: fewer bits where the device and the model have them, then a smaller
    model. It is smaller for certain; whether it fits is checked when it is loaded.

    target, precision: of what is loaded, as a description names them. None where nothing smaller
    is known that is on this machine.
    """
    named, found = options.model or target, dict[str, KnownModel]()
    for each in (named, *offered_ids(profiles.values())):
        with suppress(LocalspecError):  # a folder that is gone
            found[each] = find_model(each, profiles)
    if named not in found:  # nothing is known to be smaller
        return None
    shape = found[named].shape
    planned = PlanRequest(shape, Room(device, free_bytes=0)).precisions
    if "4-bit" in planned and not precision.startswith("4-bit"):
        text = f"{target} in 4-bit weights takes far less memory; answers change a little."
        return Offer(text, replace(options, dtype="4-bit"))
    smaller = _next_smaller(shape, found.values())
    if smaller is None:
        return None
    text = f"{smaller} is smaller and already on this machine."
    less = LoadOptions(
        model=smaller, context=options.context, home=options.home, device=options.device
    )
    return Offer(text, less)


def _next_smaller(than: ModelShape, models: Iterable[KnownModel]) -> str | None:
    """The largest of those on this machine with fewer parameters."""
    here = [known.shape for known in models if known.folder is not None]
    smaller = [shape for shape in here if shape.num_params < than.num_params]
    return max(smaller, key=lambda shape: shape.num_params).name if smaller else None
