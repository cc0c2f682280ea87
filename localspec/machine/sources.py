"""Where models come from: the profiles, a folder, the hub's cache, the hub.

Contract: `find_model` gives the shape, the folder if it is here and the known drafts of what a
person named, and fetches nothing. `resolve` turns LoadOptions into a model on this disk: a hub id
is looked for in the hub's cache first and fetched only when it is not whole there. What was trained
for these very weights comes before the drafts and heads of a profile, and after those that were
named. Errors say what to do and name the nearest known model.

Not here: opening the folders (forward.load), downloads of the page (downloads).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from localspec.core.config import settings_for, suggestion
from localspec.core.errors import ConfigError, ModelError
from localspec.core.options import NO_DRAFT, LoadOptions
from localspec.formats.folder_files import name_of, require_whole, weight_files
from localspec.formats.gguf_file import parts_of
from localspec.formats.head_folder import is_head, is_published
from localspec.machine.compatibility import UNKNOWN, Compatibility, compare_folders
from localspec.machine.download_faults import DownloadError, fault_of
from localspec.machine.fetch import fetch
from localspec.machine.folder_shapes import shape_from_folder, shape_of_gguf, shape_to_load
from localspec.machine.gguf_models import gguf_of, opened_gguf, title_of
from localspec.machine.head_shapes import head_shape_in
from localspec.machine.hub_files import survey_model
from localspec.machine.model import Model
from localspec.machine.profiles import Profile, find_profile, load_profiles
from localspec.machine.trained import DRAFT, offered_results, trained_drafts

DEMO = "localspec/demo"
UNKNOWN_MODEL = (
    " Fetch it in the Models tab or name its folder; `plan` without --model lists what is known."
)

Say = Callable[[str], None]


# -- what the profiles know -----------------------------------------------------------------


def named_path(name: str) -> Path:
    """What a person named: for a file in a model folder that folder, for a model in the hub's cache
    its newest snapshot. Raises ModelError for what the disk cannot look up."""
    path = Path(name).expanduser()
    newest = path / "refs" / "main"
    try:
        if newest.is_file():
            return path / "snapshots" / newest.read_text(encoding="utf-8").strip()
        is_part = path.suffix in (".safetensors", ".json") and path.is_file()
        return path.parent if is_part and (path.parent / "config.json").is_file() else path
    except OSError as error:
        shown = name if len(name) < 80 else f"{name[:40]}…"
        raise ModelError(
            f"{shown} cannot be looked up on this disk: {error.strerror}. Name a folder that can "
            "be read, or a model of the hub."
        ) from error


def in_profiles(name: str, profiles: Mapping[str, Profile]) -> Model | None:
    """A profile's model, its copy in 4 bits or a published head, named by its id, by its folder or
    by the id's last part."""
    models = [model for profile in profiles.values() for model in profile.models.values()]
    models += [model.packed for model in models if model.packed is not None]
    models += [head for profile in profiles.values() for head in profile.heads.values()]
    exact = next((model for model in models if model.id == name), None)
    folder = named_path(name)
    if exact is not None:
        return exact
    if folder.is_dir():
        place = folder.resolve()
        return next((each for each in models if each.path and each.path.resolve() == place), None)
    wanted = name.lower()
    spelt = ((model, model.id.lower()) for model in models)
    return next((model for model, id in spelt if wanted in (id, id.rpartition("/")[2])), None)


def find_model(name: str, profiles: Mapping[str, Profile]) -> Model:
    """The model of a folder or an id, with its shape. Raises ConfigError for an unknown name,
    ModelError for a folder that cannot be read."""
    model = in_profiles(name, profiles)
    if model is not None:
        here = model.path or cached_folder(model.id)
        packed = None if here else model.packed
        return replace(with_shape(model), path=here, packed=packed)
    path = named_path(name)
    if path.is_dir() or gguf_of(path) is not None:
        return model_at(path)
    cached = cached_folder(name)
    if cached is not None:
        return _cached_as(name, cached)
    known = [id for profile in profiles.values() for id in profile.models]
    raise ConfigError(
        f"'{name}' is neither a model folder nor a model the profiles know, so its size is not "
        f"known.{suggestion(name, known) or UNKNOWN_MODEL}"
    )


def model_at(path: Path) -> Model:
    """Return the model in a folder or a GGUF file, with its shape and the bytes of its files.
    Raises ModelError for a model that cannot be loaded."""
    file = gguf_of(path)
    if file is None and is_head(path):
        return head_at(path)
    if file is None:
        title, shape, files = name_of(path), shape_to_load(path), weight_files(path)
    else:
        title, files = title_of(file), parts_of(file)
        shape = shape_of_gguf(file, title)
    num_bytes = sum(each.stat().st_size for each in files)
    place = file or path
    return Model(str(place), title, path=place, known_shape=shape, num_bytes=num_bytes)


def head_at(path: Path) -> Model:
    """Return the published head in a folder. Raises ModelError."""
    if not is_published(path):
        raise ModelError(
            f"{path} holds a head that was trained here, which is loaded with --heads {path} and "
            "not planned. Name a draft model or a published head with --draft."
        )
    num_bytes = sum(each.stat().st_size for each in weight_files(path))
    return Model(str(path), name_of(path), path, head=head_shape_in(path), num_bytes=num_bytes)


def _cached_as(name: str, folder: Path) -> Model:
    """Return what the hub's cache has in a folder. Raises ModelError."""
    if is_head(folder):
        return replace(head_at(folder), id=name, title="")
    return Model(name, path=folder, known_shape=shape_from_folder(folder, name))


def with_shape(model: Model) -> Model:
    """Return the model with its shape, read from its folder where its profile does not say it.
    Raises ModelError."""
    if model.head is not None:
        return model
    if model.known_shape is None and model.path is not None:
        return replace(model, known_shape=shape_from_folder(model.path, model.id))
    return replace(model, known_shape=model.shape)


def compatibility_of(target: Model, draft: Model) -> Compatibility:
    """The full comparison when both tokenizers are on this machine, else unknown."""
    if target.path is None or draft.path is None:
        return UNKNOWN
    try:
        return compare_folders(target.path, draft.path)
    except ModelError as error:
        return Compatibility(False, str(error).rstrip("."))


# -- the hub's cache ------------------------------------------------------------------------


def cached_models() -> list[Model]:
    """Models of which everything is here, by name, without their shapes. An absent or unreadable
    cache is empty."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError):
        return []
    models = []
    for repo in found.repos:
        if repo.repo_type != "model":
            continue
        main = [each for each in repo.revisions if "main" in each.refs]
        newest = max(main or repo.revisions, key=lambda each: each.last_modified, default=None)
        if newest is not None and is_whole(newest.snapshot_path):
            path, num_bytes = newest.snapshot_path, newest.size_on_disk
            models.append(Model(repo.repo_id, path=path, num_bytes=num_bytes))
    return sorted(models, key=lambda model: model.id.lower())


def cached_folder(hub_id: str) -> Path | None:
    """The folder of a model in the hub's cache, complete or not; None without one. Uses no
    network."""
    from huggingface_hub import try_to_load_from_cache

    if not may_be_hub_id(hub_id):
        return None
    found = try_to_load_from_cache(hub_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def may_be_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def is_whole(folder: Path) -> bool:
    """Whether it lacks no part of a model. The hub's client itself knows this only of what it
    fetched whole: other programs leave single files in the same cache."""
    try:
        _require_whole(folder)
    except ModelError:
        return False
    return True


def _require_whole(folder: Path) -> None:
    """Raise ModelError for a folder that lacks a part. A head needs no tokenizer."""
    if is_head(folder):
        weight_files(folder)
    else:
        require_whole(folder)


# -- what to load ---------------------------------------------------------------------------


def resolve(options: LoadOptions, say: Say = lambda phrase: None) -> Model:
    """Return the target with its files on this disk, and what is to be loaded with it: one draft
    model, one foreign draft that needs no download, and heads. A draft or a published head that
    cannot be had stays among the drafts, and its fault says why.

    say: called with a phrase on what is being fetched. Raises ModelError, ConfigError."""
    options = with_head_as_draft(options, say)
    settings = settings_for(options.home)
    profiles = load_profiles(settings.profile_folders)
    name = options.model or DEMO
    if options.model is None and options.profile is not None:
        name = find_profile(options.profile, profiles).default
    entry = in_profiles(name, profiles)
    if name == DEMO and (entry is None or not _is_there(entry.path)):
        raise ModelError(
            "The demo pair is missing from assets/demo. Restore the folder from the project, or "
            "name a model with --model."
        )
    own = tuple(_own_head(folder) for folder in options.heads)
    target = _on_disk(name, entry, options, say)
    results = offered_results(settings.home, target.folder)
    trained = [draft.id for draft in trained_drafts(settings.home, target.path)]
    target = replace(target, heads=(*own, *(results[kind] for kind in results if kind != DRAFT)))
    draft = next(iter((*filter(None, [options.draft]), *trained)), None)
    if entry is not None:
        usual = [each.id for each in usual_drafts(entry)]
        is_as_measured = not target.heads and draft in (None, *usual)
        target = replace(
            target,
            foreign=_first_here(entry.foreign, profiles),
            heads=(*target.heads, *entry.heads),
            accepted=entry.accepted if is_as_measured else None,
        )
        draft = draft or next(iter(usual), None)
    if draft in (None, NO_DRAFT):
        return target
    try:
        chosen = _on_disk(draft, in_profiles(draft, profiles), options, say)
        if not _is_there(chosen.path):
            raise ModelError(f"{chosen.path} holds no draft model: it has no config.json.")
    except ModelError as error:
        if options.draft is not None:
            raise  # it was named
        known = in_profiles(draft, profiles)
        chosen = Model(draft, head=known.head if known else None, fault=str(error))
    if chosen.path is not None and is_head(chosen.path):
        return replace(target, heads=(*target.heads, chosen.path))
    return replace(target, drafts=(chosen,))


def usual_drafts(entry: Model) -> tuple[Model, ...]:
    """Return the draft that is loaded unasked with a profile's model. A published head is not
    fetched for a target that ships a module of its own."""
    first = entry.drafts[:1]
    shape = entry.known_shape
    if not first or first[0].head is None or shape is None or shape.mtp is None:
        return first
    cached = cached_folder(first[0].id)
    return first if cached is not None and is_whole(cached) else ()


def with_head_as_draft(options: LoadOptions, say: Say = lambda phrase: None) -> LoadOptions:
    """Return the options with the draft among the heads where it names a head, in place of a draft
    model: people take what drafts for a draft model. Raises ModelError."""
    if options.draft in (None, NO_DRAFT):
        return options
    profiles = load_profiles(settings_for(options.home).profile_folders)
    path = _on_disk(options.draft, in_profiles(options.draft, profiles), options, say).path
    if path is None or not is_head(path):
        return options
    return replace(options, draft=NO_DRAFT, heads=(*options.heads, str(path)))


def _own_head(place: str) -> Path:
    """The folder of a head that was named. Raises ModelError where it is not there."""
    folder = named_path(place)
    if not folder.is_dir():
        raise ModelError(f"There is no folder of a head at {place}. Check the path of --heads.")
    return folder


def _is_there(folder: Path | None) -> bool:
    return folder is not None and (folder / "config.json").is_file()


def _first_here(models: tuple[Model, ...], profiles: Mapping[str, Profile]) -> tuple[Model, ...]:
    """The first of these models that needs no download: nothing is fetched unasked."""
    for model in models:
        entry = in_profiles(model.id, profiles)
        path = entry.path if entry is not None else named_path(model.id)
        if path is not None and _is_there(path):
            return (replace(model, path=path),)
    return ()


def _on_disk(name: str, entry: Model | None, options: LoadOptions, say: Say) -> Model:
    """Return the model that was named, with the folder to load it from. entry: of a profile."""
    path = named_path(name)
    file, hub_id = gguf_of(path), name if entry is None else entry.id
    title = title_of(file) if file else name_of(path) if path.is_dir() else hub_id
    if entry is not None and entry.path is not None:
        folder = entry.path
    elif file is not None:
        folder = opened_gguf(file, settings_for(options.home).home)
    else:
        folder = path.resolve() if path.is_dir() else _of_hub(hub_id, options, say)
    return Model(hub_id, title, folder)


def _of_hub(hub_id: str, options: LoadOptions, say: Say) -> Path:
    """Return the folder of a model in the hub's cache; fetch it where it is not whole there."""
    if not may_be_hub_id(hub_id):
        raise ModelError(f"There is no model folder at {hub_id}. Check the path, or name a hub id.")
    cached = cached_folder(hub_id)
    if cached is not None and is_whole(cached):
        return cached
    if not options.fetches:
        raise ModelError(
            f"{hub_id} is not whole on this machine. Download it in the Models tab, or give a "
            "folder."
        )
    return _fetched(hub_id, say)


def _fetched(hub_id: str, say: Say) -> Path:
    import httpx2
    from huggingface_hub import constants

    named = set[str]()

    def report(name: str | None, num_bytes: int) -> None:
        if name is not None and name not in named:  # once a file: some callers print a line each
            named.add(name)
            say(f"fetching {name} of {hub_id}")

    # The page keeps the hub's client offline, so that nothing calls out unasked. Naming a hub id
    # is asking.
    was_offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        folder = fetch(survey_model(hub_id), report)
    except (OSError, ValueError, httpx2.HTTPError, ConfigError, DownloadError) as error:
        raise ModelError(
            f"{hub_id} is not on this machine and could not be fetched. {fault_of(error, hub_id)}"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline
    try:
        _require_whole(folder)
    except ModelError as error:
        raise ModelError(f"What the hub has of {hub_id} cannot be loaded. {error}") from error
    return folder
