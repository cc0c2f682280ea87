"""Model profiles: families of models that are known without their files, one TOML file each, and
the heads that were published for them.

An unknown key, a missing one or a value of the wrong kind is a ConfigError that names the file, the
table and the nearest key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localspec.core.config import (
    PROJECT_FOLDER,
    by_name,
    check_table,
    nearest,
    read_toml,
    suggestion,
)
from localspec.core.errors import ConfigError, ModelError
from localspec.drafters.registry import published_heads
from localspec.formats.native import SIZED
from localspec.machine.folder_shapes import shape_of_config
from localspec.machine.head_shapes import HeadShape
from localspec.machine.model import Model, page_of
from localspec.machine.shapes import Counted, ModelShape

AWQ_GROUP = 128  # weights with one scale, in the copies that profiles name
AWQ = f"AWQ, 4-bit, groups of {AWQ_GROUP}"
SIZES = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
    "vocab_size", "context_length",
)  # fmt: skip
# extra_params: weights beside the decoder that are fetched with it (a vision tower).
OPTIONAL_SIZES = (
    "num_experts", "num_experts_per_token", "expert_intermediate_size", "extra_params", "window",
    "window_kv_width",
)  # fmt: skip
# num_params: of all weights, as the headers of the published files count them. config: what the
# published config.json says of sizes, for families whose weights are listed in
# formats.published_tensors; it takes the place of all sizes.
# What a value must be, by key: of a model's shape, of a profile, and of the table of a model.
SHAPE_KINDS: Mapping[str, type] = {
    "family": str,
    **dict.fromkeys((*SIZES, *OPTIONAL_SIZES), int),
    "is_tied": bool,
}
PROFILE_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("title", "family", "default"), str),
    "current": bool,
    **dict.fromkeys(("models", "heads"), dict),
}
MODEL_KINDS: Mapping[str, type] = {
    **SHAPE_KINDS,
    "num_params": int,
    "config": dict,
    **dict.fromkeys(("license", "folder", "accepted", "terms", "note", "awq"), str),
    **dict.fromkeys(("drafts", "foreign", "heads"), list),
    "gated": bool,
}
# Numbers of a published head, as HeadShape has them, and what else its table holds.
HEAD_SIZES = (
    "num_params", "num_copied", "state_width", "kv_width", "window_kv_width", "window",
    "block_length",
)  # fmt: skip
HEAD_KINDS: Mapping[str, type] = {
    **dict.fromkeys(HEAD_SIZES, int),
    **dict.fromkeys(("kind", "license", "terms", "note"), str),
    "gated": bool,
}


@dataclass(frozen=True)
class Profile:
    """One family. name: the file's name without `.toml`. models: by id; a model that they name is
    known by its id alone, a published head with its shape, and the shape of a model in a folder is
    read when it is needed. default: id of the model to load when only the profile is named. heads:
    the published heads that the models name, by id."""

    name: str
    title: str
    models: Mapping[str, Model]
    default: str
    heads: Mapping[str, Model] = field(default_factory=dict)


def load_profile(path: Path) -> Profile:
    """The profile in `path`. Raises ConfigError for whatever is wrong with it."""
    table = read_toml(path)
    check_table(table, PROFILE_KINDS, path.name)
    family, default = table.get("family"), table.get("default", "")
    is_current = bool(table.get("current"))
    heads = {
        head_id: _head(head_id, entry, path) for head_id, entry in table.get("heads", {}).items()
    }
    models = {
        model_id: replace(_model(model_id, entry, family, path, heads), is_current=is_current)
        for model_id, entry in table.get("models", {}).items()
    }
    if default not in models:
        raise ConfigError(
            f"{path.name}: 'default' is '{default}', but must be one of its models. "
            f"Did you mean '{nearest(default, models)}'?"
        )
    return Profile(path.stem, table.get("title", path.stem), models, default, heads)


def load_profiles(folders: Iterable[Path]) -> dict[str, Profile]:
    return by_name(folders, load_profile)


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


def offered_ids(profiles: Iterable[Profile]) -> list[str]:
    """Models to offer as targets. What ships in a folder only to draft for another is none."""
    models = [model for profile in profiles for model in profile.models.values()]
    helpers = {other.id for each in models if each.path for other in (*each.drafts, *each.foreign)}
    return [model.id for model in models if model.id not in helpers]


def _head(head_id: str, table: Any, path: Path) -> Model:
    """Return a published head. Raises ConfigError."""
    where = f'{path.name} [heads."{head_id}"]'
    check_table({"heads": table}, PROFILE_KINDS, where)
    check_table(table, HEAD_KINDS, where)
    for key in ("kind", "num_params"):
        if key not in table:
            raise ConfigError(f"{where} has no '{key}'. Add it, or leave the head out.")
    kind = table["kind"]
    if kind not in published_heads():
        raise ConfigError(
            f"{where}: there is no kind '{kind}' of published heads."
            f"{suggestion(kind, published_heads())} Known: {', '.join(published_heads())}."
        )
    sizes = {key: table[key] for key in HEAD_SIZES if key in table}
    return Model(
        id=head_id,
        page=page_of(head_id),
        license=table.get("license"),
        terms=table.get("terms"),
        is_gated=table.get("gated"),
        note=table.get("note", ""),
        head=HeadShape(kind, **sizes),
    )


def _model(
    model_id: str, table: Any, family: str | None, path: Path, heads: Mapping[str, Model]
) -> Model:
    where = f'{path.name} [models."{model_id}"]'
    check_table({"models": table}, PROFILE_KINDS, where)
    check_table(table, MODEL_KINDS, where)
    values = {**table, "family": table.get("family", family)}
    has_sizes = "folder" not in table and "config" not in table
    needed = ("family", *SIZES, "is_tied") if has_sizes else ()
    for key in ("license", "drafts", *needed):
        if values.get(key) is None:
            raise ConfigError(f"{where} has no '{key}'. Add it, or give the model's folder.")
    model = Model(
        id=model_id,
        path=_in_project(table["folder"]) if "folder" in table else None,
        page=None if "folder" in table else page_of(model_id),
        license=table["license"],
        terms=table.get("terms"),
        is_gated=table.get("gated"),
        note=table.get("note", ""),
        drafts=tuple(heads.get(str(name)) or Model(str(name)) for name in table["drafts"]),
        foreign=tuple(Model(str(name)) for name in table.get("foreign", ())),
        heads=tuple(map(_in_project, table.get("heads", ()))),
        accepted=_in_project(table["accepted"]) if "accepted" in table else None,
    )
    if "config" in table:
        model = _with_config(model, {"model_type": values["family"], **table["config"]}, where)
    elif "folder" not in table:
        sizes = {key: values[key] for key in SHAPE_KINDS if key in values}
        model = _with_shape(model, sizes, table.get("num_params"))
    shape, awq_id = model.known_shape, table.get("awq")
    packed = _packed(model, shape, awq_id) if shape is not None and awq_id is not None else None
    return replace(model, packed=packed)


def _with_shape(model: Model, sizes: Mapping[str, Any], num_params: int | None) -> Model:
    """A family that cannot be counted is a fault of the model, and none of its profile.
    num_params: None in a profile that does not carry it; its sizes give an estimate."""
    family = sizes["family"]
    if family in SIZED:
        shape = ModelShape(**sizes)
        if num_params is not None:
            shape = replace(
                shape, counted=Counted(num_params, shape.linear_params, shape.expert_params)
            )
        return replace(model, known_shape=shape)
    return replace(
        model,
        fault=f"The profile of {model.id} names the family '{family}', which is not known."
        f"{suggestion(family, SIZED)}",
    )


def _with_config(model: Model, config: Mapping[str, Any], where: str) -> Model:
    """Raises ConfigError for a size that is lacking or is none."""
    try:
        return replace(model, known_shape=shape_of_config(config, model.id))
    except (ModelError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where}: its config lacks a size or holds a wrong one ({error}). Copy it from the "
            "model's config.json."
        ) from error


def _packed(model: Model, shape: ModelShape, awq_id: str) -> Model:
    """The model's copy in 4 bits, in groups of AWQ_GROUP."""
    return replace(
        model,
        id=awq_id,
        copy_of=model.id,
        page=page_of(awq_id),
        known_shape=replace(shape, stored_as=AWQ, group_size=AWQ_GROUP),
        accepted=None,
    )


def _in_project(place: object) -> Path:
    """The path of a folder or file that a profile names; a relative one lies in the project."""
    return PROJECT_FOLDER / Path(str(place)).expanduser()
