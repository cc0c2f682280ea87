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

from localspec.core.config import Settings
from localspec.core.errors import ConfigError, LocalspecError, ModelError
from localspec.core.files import free_disk
from localspec.core.options import AUTO_EXPERTS, LoadOptions, Offer
from localspec.core.speculation import Measurement
from localspec.formats.head_folder import is_head, read_head_object, target_named
from localspec.machine.downloads import Downloads
from localspec.machine.folder_shapes import shape_to_load
from localspec.machine.hardware import Device, Hardware, on_device, probe
from localspec.machine.memory import Room, full_precision, other_device, room_for
from localspec.machine.model import Model, on_this_machine, page_of
from localspec.machine.other_programs import found_models
from localspec.machine.plans import PlanRequest
from localspec.machine.profiles import Profile, load_profiles, offered_ids
from localspec.machine.recommend import Recommendation, Snapshot, recommend
from localspec.machine.shapes import ModelShape
from localspec.machine.sources import (
    cached_folder,
    cached_models,
    find_model,
    head_at,
    model_at,
    named_path,
    with_shape,
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
    others: tuple[Model, ...] = ()
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

    def read(
        self, context_length: int, freed_bytes: int = 0, folder: str | None = None
    ) -> CatalogueState:
        """freed_bytes: what the loaded model would give back."""
        hardware = on_device(self.probe(), self.asked.device)
        cached, disk = cached_models(), free_disk(cache_folder())
        models, notices = self._models({model.id: model for model in cached})
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
        models = with_heads_of_originals(models)
        snapshot = Snapshot(
            room=replace(room, free_bytes=room.free_bytes + freed_bytes),
            full=full_precision(None, hardware),
            disk_free_bytes=disk,
            measurements=tuple(self.measured(context_length)),
            other=other_device(known, self.asked.draft_device),
            experts=self.asked.experts or AUTO_EXPERTS,
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

    def close(self) -> None:
        self.downloads.close()

    def _models(self, cached: Mapping[str, Model]) -> tuple[list[Model], list[str]]:
        """What the profiles know, then what else is in the cache; and what is wrong with either."""
        try:
            profiles = load_profiles(self.settings.profile_folders)
        except ConfigError as error:  # one of the person's own; the message names it
            return [], [str(error)]
        wrong = list[str]()
        listed = profile_models(profiles, wrong, self.settings.home)
        exact = {id: survey.num_bytes for id, survey in self.downloads.surveys.items()}
        known = {each.id for model in listed for each in (model, *model.drafts)}
        models, heads = list[Model](), list[Model]()
        for model in (each for each in cached.values() if each.id not in known):
            try:
                if is_head(model.folder):
                    heads.append(cached_head(model))
                else:
                    models.append(cached_model(model, self.settings.home))
            except ModelError as error:
                wrong.append(str(error))
        here = [on_this_machine(model, cached, exact) for model in listed]
        return with_own_heads([*here, *models], heads), wrong


def _without_memory(hardware: Hardware) -> Hardware:
    """For a GPU whose driver hides its memory. torch knows it, but must not be imported here."""
    assert hardware.gpu is not None, "the free RAM is always known"
    return replace(hardware, gpu=replace(hardware.gpu, free_bytes=0))


def profile_models(
    profiles: Mapping[str, Profile], wrong: list[str], home: Path | None = None
) -> list[Model]:
    """The models to offer as targets, with the shapes of their drafts; sentences about those that
    cannot be used go to `wrong`. home: where drafts that were trained for them lie, None for
    none."""
    known = dict[str, Model]()
    for model in (model for profile in profiles.values() for model in profile.models.values()):
        try:
            known.setdefault(model.id, with_shape(model))
        except ModelError as error:
            wrong.append(str(error))
    listed = dict.fromkeys(offered_ids(profiles.values()))  # one id may stand in two profiles
    offered = [known[id] for id in listed if id in known]
    return [
        replace(
            model,
            drafts=(
                *_trained(home, model.path or cached_folder(model.id)),
                *(
                    known.get(draft.id, draft)
                    for draft in model.drafts
                    if draft.id in known or draft.head is not None
                ),
            ),
        )
        for model in offered
    ]


def _trained(home: Path | None, target: Path | None) -> tuple[Model, ...]:
    """The draft that was trained for the model in a folder."""
    drafts = () if home is None else trained_drafts(home, target)
    with suppress(ModelError):
        return tuple(model_at(draft.folder) for draft in drafts)
    return ()


def cached_model(model: Model, home: Path | None = None) -> Model:
    """A model of the cache that no profile knows: its page states its licence."""
    return replace(
        model,
        known_shape=shape_to_load(model.folder, model.id),
        drafts=_trained(home, model.path),
        origin="from the cache",
        page=page_of(model.id),
        note="No profile knows this model: no draft model is known for it.",
    )


def cached_head(head: Model) -> Model:
    """Return a published head of the cache that no profile knows. Raises ModelError."""
    return replace(head, head=head_at(head.folder).head, page=page_of(head.id))


def with_own_heads(models: Iterable[Model], heads: Sequence[Model]) -> list[Model]:
    """Return the models with the heads that name them as their target among the drafts."""
    names = {head.id: target_named(read_head_object(head.folder / "config.json")) for head in heads}
    return [
        replace(model, drafts=(*model.drafts, *(h for h in heads if _is_named(model, names[h.id]))))
        for model in models
    ]


def _is_named(model: Model, name: str | None) -> bool:
    """True if a name that a head gives is a model's: its id, or the last part of a path."""
    if not name:
        return False
    return name.lower() == model.id.lower() or _last_part(name) == _last_part(model.id)


def with_heads_of_originals(models: Sequence[Model]) -> list[Model]:
    """Return the models, and those that no profile knows with the published heads of the profile's
    model that they are a copy of, by name and sizes."""
    known = [model for model in models if model.license is not None]
    return [model if model.license is not None else _as_copy(model, known) for model in models]


def _as_copy(model: Model, known: Iterable[Model]) -> Model:
    """Return a model with the heads of the known model whose name its own name begins with. A name
    that goes on, as that of a quantised copy does, may begin with several: the longest counts."""
    originals = {_last_part(each.id): each for each in known if _is_alike(model, each)}
    name = _last_part(model.title or model.id)
    originals = {begin: each for begin, each in originals.items() if name.startswith(begin)}
    if not originals:
        return model
    original = originals[max(originals, key=len)]
    heads = [draft for draft in original.drafts if draft.head is not None]
    more = tuple(each for each in heads if each.id not in {draft.id for draft in model.drafts})
    if not more:
        return model
    note = f"Its name and sizes are those of {original.id}, whose published drafters are offered."
    return replace(model, drafts=(*model.drafts, *more), note=note)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _is_alike(model: Model, other: Model) -> bool:
    """True if both are known to have the same number of layers, width and tokens."""
    if model.known_shape is None or other.known_shape is None:
        return False
    sizes = [(s.num_layers, s.hidden_size, s.vocab_size) for s in (model.shape, other.shape)]
    return sizes[0] == sizes[1]


def folder_model(folder: Path, title: str = "", home: Path | None = None) -> Model:
    """A folder or GGUF file that was named. title: to show, "" for the path. Raises ModelError for
    one that cannot be loaded."""
    model = model_at(folder)
    kept = model.shape.stored_as
    return replace(
        model,
        title=title or str(folder),
        drafts=_trained(home, folder),
        note=f"Its weights are kept as {kept}." if kept else "",
    )


def of_other_programs(home: Path) -> tuple[list[Model], list[Model]]:
    """What other programs keep: what can be loaded, and what cannot, with the fault."""
    models, faulty = list[Model](), list[Model]()
    for model in found_models():
        if not model.folder.exists():
            gone = f"Its file is not there any more. Fetch it again with {model.origin}."
            faulty.append(replace(model, fault=gone))
            continue
        try:
            found = folder_model(model.folder, model.name, home)
            models.append(replace(found, origin=f"from {model.origin}"))
        except ModelError as error:
            faulty.append(replace(model, fault=str(error)))
    return models, faulty


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
    named, found = options.model or target, dict[str, Model]()
    for each in (named, *offered_ids(profiles.values())):
        with suppress(LocalspecError):  # a folder that is gone
            found[each] = find_model(each, profiles)
    if named not in found:  # nothing is known to be smaller
        return None
    shape = found[named].shape
    planned = PlanRequest(found[named], Room(device, free_bytes=0)).precisions
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


def _next_smaller(than: ModelShape, models: Iterable[Model]) -> str | None:
    """The largest of those on this machine with fewer parameters."""
    smaller = [m for m in models if m.is_here and m.shape.num_params < than.num_params]
    largest = max(smaller, key=lambda model: model.shape.num_params, default=None)
    return None if largest is None else largest.id
